"""Formulas: LaTeX between dollar signs becomes MathML when the site is built, so that a page needs no script for it."""

from __future__ import annotations

import re

from latex2mathml.converter import convert

# What pymdownx.arithmatex with `generic: true` leaves of $...$ and $$...$$.
FOUND = re.compile(
    r'<(?P<tag>span|div) class="arithmatex">\\(?P<open>[(\[])(?P<latex>.*?)\\[)\]]</(?P=tag)>', re.DOTALL
)
ENTITIES = {"&amp;": "&", "&lt;": "<", "&gt;": ">"}


def to_mathml(page: str) -> str:
    """The page's HTML with each formula as MathML, and its LaTeX as the tooltip."""
    return FOUND.sub(_formula, page)


def _formula(found: re.Match[str]) -> str:
    latex = found["latex"].strip()
    for entity, character in ENTITIES.items():
        latex = latex.replace(entity, character)
    display = "block" if found["open"] == "[" else "inline"
    return convert(latex, display=display)
