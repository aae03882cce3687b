"""A number and its noun agree: what is shown of one text, one query, one key."""

from __future__ import annotations

import re
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard as rg
from regard.inspect.heads.token_table import TokenTable
from regard.inspect.report.texts import TextReports
from regard.sources.files import StoredArray
from sample_reports import report


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape)


def booleans(rows: str) -> rg.Dense:
    """Rows of 0 and 1 as a mask: "10 11"."""
    return rg.Dense(torch.tensor([[bool(int(c)) for c in row] for row in rows.split()]))


def said(found: Any) -> str:
    """The sentences of lint, without line breaks."""
    return " ".join(defect.said for defect in found)


def linted(mask: rg.Mask = rg.Everything(), batch: int = 1, n: int = 5, **options: Any) -> str:
    """What lint says of random numbers."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, 1, n, 4) for _ in range(3))
    return said(rg.lint(q, k, v, mask=mask, **options))


def padded_in_front() -> str:
    """The first of three keys is 0, and the mask hides the last."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, 3, 4) for _ in range(3))
    k[..., 0, :] = v[..., 0, :] = 0
    return said(rg.lint(q, k, v, mask=rg.Lengths(keys=[2])))


def saturated() -> str:
    """One head of two rows, one of which gives all weight to one key."""
    x = torch.eye(2).reshape(1, 1, 2, 2)
    return said(rg.lint(x * torch.tensor([[1e3], [0.0]]), x, x))


def lost() -> str:
    return said(
        rg.lint(zeros(1, 1, 1, 2), zeros(1, 1, 1, 2), zeros(1, 1, 1, 2), score=rg.Custom(lambda q, k: q @ k.mT / 0))
    )


def one_row_sees_the_first_key() -> str:
    """A query of its own for every key but the last query, which sees all."""
    mask = torch.eye(4).bool()
    mask[0, 0], mask[3, 0], mask[0, 1] = False, True, True
    return str(report(n=4, mask=rg.Dense(mask)))


def one_table() -> str:
    ids = torch.tensor([[3, 4]])
    table = TokenTable(
        "L0H0 reads", "and raises", torch.tensor([1]), ids, zeros(1, 2), torch.tensor([0]), ["a"], [["b", "c"]]
    )
    return repr(table)


def named_tensors() -> str:
    with pytest.raises(ValueError, match="Safetensors") as raised:
        rg.sources.Safetensors("none.safetensors", k=["k"], v=["v", "w"])
    return str(raised.value)


def one_thing() -> str:
    with pytest.raises(TypeError) as raised:
        rg.attention_over(zeros(2, 3), [(zeros(2, 3),)])
    return str(raised.value)


def one_byte(path: Path) -> str:
    """A file of 8 bytes, cut to 1 after the source was made."""
    path.write_bytes(b"12345678")
    stored = StoredArray(str(path), b"1", "its array", 4, (4, 1), 0, 1)
    path.write_bytes(b"1")
    with FileIO(str(path)) as file, pytest.raises(EOFError) as raised:
        stored._fill(file, memoryview(bytearray(4)))
    return str(raised.value)


def one_position() -> str:
    class One(nn.Module):
        config = type("Config", (), {"max_position_embeddings": 1})()

    from regard.inspect.heads.probe import _length

    with pytest.raises(ValueError, match="positions") as raised:
        _length(One(), None, 64, 0)
    return str(raised.value)


SAID: dict[str, tuple[Callable[[], Any], str]] = {
    "texts, repr": (lambda: repr(TextReports((report(),))), "TextReports(1 text, "),
    "texts": (lambda: str(TextReports((report(),))), "mean over 1 text\n"),
    "texts, notebook": (lambda: TextReports((report(),))._repr_html_(), "mean over 1 text<"),
    "facts": (lambda: str(report(n=1, layers=1, heads=1)), "1 × 1 head "),
    "table": (one_table, "reads 1 token and raises 2 each"),
    "rows that see a key": (one_row_sees_the_first_key, "of the mass of the 1 row that sees it"),
    "queries": (lambda: linted(booleans("0"), n=1), "1 of 1 query sees no key"),
    "queries of several": (lambda: linted(booleans("11111 00000 11111 11111 11111")), "1 of 5 queries sees no key"),
    "sequences": (lambda: linted(rg.Lengths(keys=[3, 0, 3]), batch=3), "1 of 3 sequences or heads sees nothing at all"),
    "padding": (
        lambda: linted(rg.Dense(torch.tensor([1, 1, 0, 0, 0, 0, 0, 0, 0, 0]).bool().reshape(2, 1, 1, 5)), batch=2),
        "1 of 2 sequences sees no key, and the other one sees",
    ),
    "hidden queries": (lambda: linted(booleans("11111 11111 11111 11111 00000")), "1 of 5 queries sees nothing, all"),
    "leak": (
        lambda: linted(booleans("1000000 1110000 1110000 1111000 1111100 1111110 1111111"), n=7),
        "1 pair looks ahead",
    ),
    "beyond": (
        lambda: linted(booleans("11000 11000 11100 11110 11111"), within=rg.Causal()),
        "1 pair is visible that Causal() hides",
    ),
    "zeros": (padded_in_front, "1 key of 0, with a value of 0, is seen, and 1 other is hidden"),
    "zeros of sequences": (padded_in_front, "in 1 of 1 sequence (first"),
    "saturated": (saturated, "in 1 of 1 head (first: batch 0, head 0) 1 of 2 rows gives one key more"),
    "constant": (
        lambda: said(rg.lint(zeros(1, 1, 2, 2), zeros(1, 1, 2, 2), zeros(1, 1, 2, 2))),
        "in 1 of 1 head (first",
    ),
    "lost": (lost, "1 of 1 row has a score that is NaN or infinite"),
    "tensors": (named_tensors, "names 1 tensor of keys and 2 of values"),
    "parts": (one_thing, "part 0 of Chunks is 1 thing;"),
    "positions": (one_position, "has positions for 1 token;"),
}


@pytest.mark.parametrize("name", SAID)
def test_the_noun_of_one_is_singular(name: str) -> None:
    make, expected = SAID[name]
    assert expected in make()


def test_a_file_of_one_byte(tmp_path: Path) -> None:
    assert re.search(r"has 1 byte; by its header, its array needs 8\.", one_byte(tmp_path / "a"))
