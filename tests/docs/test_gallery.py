"""The gallery has every mask, score, bucket and activation of regard, and each entry can be drawn."""

from __future__ import annotations

import inspect

import pytest

import regard as rg
from generate import gallery
from regard.scores.activations import Activation

ENTRIES = [(group, entry) for group in gallery.GROUPS for entry in group.entries]
ABSTRACT = ("Mask", "Score", "Similarity", "Modifier", "Buckets", "DifferenceBuckets")
KINDS = (rg.Mask, rg.Score, rg.Buckets, Activation)
PUBLIC = [name for name in rg.__all__ if inspect.isclass(x := getattr(rg, name)) and issubclass(x, KINDS)]


@pytest.mark.parametrize("name", [name for name in PUBLIC if name not in ABSTRACT])
def test_every_public_class_is_drawn(name: str) -> None:
    assert any(entry.expression.startswith(f"{name}(") for _, entry in ENTRIES), name


def test_entries_differ_and_are_sentences() -> None:
    assert len({entry.expression for _, entry in ENTRIES}) == len(ENTRIES)
    assert [entry.text for _, entry in ENTRIES if not entry.text.endswith(".")] == []


@pytest.mark.parametrize(("group", "entry"), ENTRIES, ids=lambda x: getattr(x, "expression", ""))
def test_an_entry_is_drawn(group: gallery.Group, entry: gallery.Entry) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'regard[plot]'")
    assert gallery.picture(group.draw, entry).startswith(b"<?xml")
