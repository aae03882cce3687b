"""Docstrings as Markdown: examples become code blocks, and an asterisk in a shape stays an asterisk."""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

CODE = re.compile(r"(`+[^`]*`+)")
ALIGNED = re.compile(r"\S {2,}\S")  # columns, as in a list of parameters


def to_markdown(text: str) -> str:
    """A docstring of regard as Markdown. Examples and drawings run to the next blank line, as doctest reads them.

    >>> print(to_markdown("q (*batch, n, d).\\n\\n>>> 1 + 1\\n2"))
    q (\\*batch, n, d).
    <BLANKLINE>
    ```pycon
    >>> 1 + 1
    2
    ```
    """
    blocks = re.split(r"\n\s*\n", inspect.cleandoc(text))
    return "\n\n".join(_block(block) for block in blocks)


def _block(block: str) -> str:
    """One paragraph: an example, text in columns or indented text as it stands, or prose."""
    before, example, rest = block.partition(">>> ")
    if example and (not before or before.endswith("\n")):
        shown = f"```pycon\n{example}{rest}\n```".replace("<BLANKLINE>", "")
        return f"{_prose(before.rstrip())}\n\n{shown}" if before.strip() else shown
    if ALIGNED.search(block) and not block.startswith("    "):
        return f"```text\n{block}\n```"
    return block if block.startswith("    ") else _prose(block)


def _prose(text: str) -> str:
    """Text in which an asterisk and a < are only themselves; code between backticks stays as it is."""
    parts = CODE.split(text)
    return "".join(x if x.startswith("`") else x.replace("*", "\\*").replace("<", "&lt;") for x in parts)


class Docstrings(griffe.Extension):
    """What mkdocstrings loads: each docstring passes through `to_markdown`."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
