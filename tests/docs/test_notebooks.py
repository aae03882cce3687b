"""The notebooks of docs/ run from top to bottom, and what they print and draw reaches the page and the .ipynb file."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import pytest

from generate import notebook

pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'regard[plot]'")
DOCS = Path(__file__).resolve().parents[2] / "docs"
NOTEBOOKS = [page for page in sorted(DOCS.rglob("*.md")) if notebook.is_notebook(page.read_text(encoding="utf-8"))]


@pytest.mark.full
@pytest.mark.parametrize("page", NOTEBOOKS, ids=lambda page: page.stem)
def test_a_notebook_runs(page: Path) -> None:
    if page.stem == "masks":
        pytest.importorskip("einops", reason="needs einops: pip install 'regard[test]'")
    found = notebook.execute(page.read_text(encoding="utf-8"), page)
    markdown, files = notebook.to_markdown(found, page.stem)
    pictures = [name for name in files if name.endswith(".svg")]
    assert len(pictures) >= 2 and all(f"({name})" in markdown for name in pictures)
    assert all(files[name].startswith(b"<?xml") for name in pictures)
    written = json.loads(files[f"{page.stem}.ipynb"])
    assert len(written["cells"]) == len(found)
    assert sum(len(cell.figures) for cell in found) == len(pictures)


def test_there_is_a_tutorial_for_each_note() -> None:
    told = "".join(page.read_text(encoding="utf-8") for page in NOTEBOOKS)
    notes = [path.name for path in NOTEBOOKS if "](../seeds.md#00" in path.read_text(encoding="utf-8")]
    assert len(notes) == 5
    assert [note for note in ("000", "001", "002", "003", "004") if f"../seeds.md#{note}-" not in told] == []


PAGE = """---
jupyter:
  jupytext: {}
---

# A title

Text.

```python
print("printed")
x = 1
x + 1
```

```python
import matplotlib.pyplot as plt

plt.plot([x, 2])
plt.title("A line");
```
"""


def test_outputs_stand_behind_their_code() -> None:
    found = notebook.execute(PAGE, Path("page.md"))
    assert [(cell.kind, cell.printed, cell.value, len(cell.figures)) for cell in found] == [
        ("markdown", "", "", 0),
        ("code", "printed\n", "2", 0),
        ("code", "", "", 1),
    ]
    markdown, files = notebook.to_markdown(found, "page")
    assert markdown.startswith("# A title\n\n[Download this page as a notebook](page.ipynb)")
    assert "```{ .text .output }\nprinted\n2\n```" in markdown and "![A line](page-1.svg)" in markdown
    outputs = [cell["outputs"] for cell in json.loads(files["page.ipynb"])["cells"] if cell["cell_type"] == "code"]
    assert [out["output_type"] for out in outputs[0]] == ["stream", "execute_result"]
    assert list(outputs[1][0]["data"]) == ["image/png", "text/plain"]


def test_a_failing_cell_names_its_line() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        notebook.execute(PAGE.replace("x + 1\n", "x / 0\n"), Path("page.md"))
    assert caught.traceback[-1].lineno + 1 == 13


def test_examples_of_the_builder_run() -> None:
    assert doctest.testmod(notebook).failed == 0
