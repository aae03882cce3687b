"""Pages that are notebooks: Markdown whose ```python blocks run when the site is built, with what they print and draw.

Such a page begins with jupytext's header, so Jupyter opens the source itself, and diffs are those of a text. The site
shows each block with its output and offers the page as an .ipynb file, outputs included.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HEADER = re.compile(r"\A---\n(?P<meta>.*?)^---\n", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```\n", re.MULTILINE | re.DOTALL)
STYLE = {
    "figure.dpi": 110,
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "regard",  # the same picture gives the same file
}


@dataclass
class Cell:
    """A piece of a page: text, or code with what it printed, the value of its last line, and its figures."""

    kind: str  # "markdown" or "code"
    source: str
    line: int = 0
    printed: str = ""
    value: str = ""
    figures: list[Any] = field(default_factory=list)


def is_notebook(text: str) -> bool:
    """Whether a page begins with jupytext's header."""
    found = HEADER.match(text)
    return found is not None and "jupytext:" in found["meta"]


def cells(text: str) -> Iterator[Cell]:
    """The page's text and code in order, without its header.

    >>> [(cell.kind, cell.source, cell.line) for cell in cells("A text.\\n\\n```python\\nx = 1\\n```\\n")]
    [('markdown', 'A text.', 0), ('code', 'x = 1', 4)]
    """
    start = found.end() if (found := HEADER.match(text)) else 0
    for block in BLOCK.finditer(text, start):
        if text[start : block.start()].strip():
            yield Cell("markdown", text[start : block.start()].strip())
        yield Cell("code", block["code"].rstrip(), text.count("\n", 0, block.start("code")) + 1)
        start = block.end()
    if text[start:].strip():
        yield Cell("markdown", text[start:].strip())


def execute(text: str, path: Path) -> list[Cell]:
    """Runs the code of a page from top to bottom in one namespace, in a folder that is removed.

    What a cell raises names the page's own line.
    """
    import matplotlib
    import matplotlib.pyplot as plt
    import torch

    names: dict[str, Any] = {"__name__": "__main__"}
    found = list(cells(text))
    with matplotlib.rc_context(STYLE), warnings.catch_warnings(), _in_a_folder_of_its_own():
        # NumPy 2 says it of torch's tensors when matplotlib makes arrays of them
        warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
        plt.switch_backend("agg")
        torch.manual_seed(0)
        try:
            for cell in found:
                if cell.kind == "code":
                    _run(cell, names, path)
        finally:
            plt.close("all")
    return found


@contextlib.contextmanager
def _in_a_folder_of_its_own() -> Iterator[None]:
    """What a page writes does not stay."""
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(here)


def _run(cell: Cell, names: dict[str, Any], path: Path) -> None:
    """Executes one cell as Jupyter does: what the last line returns is shown, and figures are shown and closed."""
    import matplotlib.pyplot as plt

    tree = ast.parse("\n" * (cell.line - 1) + cell.source, str(path))
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, str(path), "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), str(path), "eval"), names)
    cell.printed = printed.getvalue()
    drawn = type(value).__module__.startswith("matplotlib")  # a title, say: the figure itself is shown
    cell.value = "" if value is None or drawn else repr(value)
    for number in plt.get_fignums():
        cell.figures.append(_files_of(plt.figure(number)))
    plt.close("all")


def _files_of(figure: Any) -> dict[str, bytes]:
    files = {}
    for kind in ("svg", "png"):
        out = io.BytesIO()
        figure.savefig(out, format=kind, bbox_inches="tight", metadata={"Date": None} if kind == "svg" else None)
        files[kind] = out.getvalue()
    return files


def to_markdown(found: list[Cell], name: str) -> tuple[str, dict[str, bytes]]:
    """The page with its outputs, and the files that it shows: figures `name`-1.svg, ... beside it."""
    parts, files = [], {}
    for cell in found:
        if cell.kind == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        if shown := "\n".join(x.rstrip("\n") for x in (cell.printed, cell.value) if x):
            parts.append(f"```{{ .text .output }}\n{shown}\n```")
        for figure in cell.figures:
            file = f"{name}-{len(files) + 1}.svg"
            files[file] = figure["svg"]
            parts.append(f"![{_caption(cell)}]({file}){{ .figure }}")
    files[f"{name}.ipynb"] = to_ipynb(found).encode()
    title, _, rest = "\n\n".join(parts).partition("\n")
    return f"{title}\n\n[Download this page as a notebook]({name}.ipynb){{ .download }}\n{rest}\n", files


def _caption(cell: Cell) -> str:
    """The text of a figure for those who do not see it: the title that the code gives it, or its first comment."""
    found = re.search(r'(?:suptitle|set_title|title)\("([^"]+)"', cell.source) or re.search(r"# (.+)", cell.source)
    return found[1] if found else "what the code above draws"


def to_ipynb(found: list[Cell]) -> str:
    """The notebook in Jupyter's format 4.4, with its outputs."""
    written = []
    for number, cell in enumerate(found, 1):
        if cell.kind == "markdown":
            written.append({"cell_type": "markdown", "metadata": {}, "source": cell.source})
            continue
        outputs: list[dict[str, Any]] = []
        if cell.printed:
            outputs.append({"output_type": "stream", "name": "stdout", "text": cell.printed})
        if cell.value:
            data = {"text/plain": cell.value}
            outputs.append({"output_type": "execute_result", "execution_count": number, "metadata": {}, "data": data})
        for figure in cell.figures:
            data = {"image/png": base64.b64encode(figure["png"]).decode(), "text/plain": "<Figure>"}
            outputs.append({"output_type": "display_data", "metadata": {}, "data": data})
        written.append(
            {
                "cell_type": "code",
                "execution_count": number,
                "metadata": {},
                "source": cell.source,
                "outputs": outputs,
            }
        )
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return json.dumps({"cells": written, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 4})
