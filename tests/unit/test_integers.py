"""Integers of every dtype, up to the ends of its range: positions, and what masks hold, are those numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard as rg

DTYPES = [
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
]
LEAST, MOST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
HUGE = torch.tensor([-2, 3]).view(torch.uint64)  # 2^64 - 2 and 3


def ends(dtype: torch.dtype) -> Tensor:
    """The last numbers of a dtype, then the first: a difference that wraps is 1."""
    most, least = min(torch.iinfo(dtype).max, MOST), torch.iinfo(dtype).min
    return torch.tensor([most - 1, most, least, least + 1]).to(dtype)


def attend(mask: rg.Mask, positions: rg.Positions | None = None, nk: int = 4) -> Tensor:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 8) for n in (4, nk, nk))
    return rg.attention(q, k, v, mask=mask, positions=positions)


def same(mask: rg.Mask, positions: rg.Positions | None, seen: list[list[bool]]) -> None:
    torch.testing.assert_close(attend(mask, positions, len(seen[0])), attend(rg.Dense(torch.tensor(seen))))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_positions(dtype: torch.dtype) -> None:
    x = ends(dtype)
    n = x.tolist()
    assert not rg.Positions(x, x).consecutive and rg.Positions(x[2:], x[2:]).consecutive
    same(rg.Causal(), rg.Positions(x, x), [[j <= i for j in n] for i in n])
    same(rg.Prefix(2), rg.Positions(x, x), [[j < 2 for j in n] for i in n])
    small = torch.tensor([3, 1, 7, 2])
    wide, narrow = (
        rg.attention_scores(
            *(torch.zeros(1, 3, 4, 2) for _ in range(2)), score=rg.ScaledDot() >> rg.Alibi(torch.ones(3)), positions=p
        )
        for p in (rg.Positions(small, small), rg.Positions(small.to(dtype), small.to(dtype)))
    )
    assert torch.equal(wide, narrow)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_masks_that_hold_integers(dtype: torch.dtype) -> None:
    x = ends(dtype)
    n = x.tolist()
    at = rg.Positions(torch.arange(4), torch.arange(4))
    same(rg.Retained(x), at, [[i < j for j in n] for i in range(4)])
    same(rg.Documents(x), None, [[i == j for j in n] for i in n])
    for last in (0, 2):
        same(rg.Prefix(x[last : last + 1].expand(2)), at, [[j < n[last] for j in range(4)] for _ in range(4)])
    few = torch.tensor([3, 2]).to(dtype)
    torch.testing.assert_close(attend(rg.Lengths(keys=few)), attend(rg.Lengths(keys=[3, 2])))
    assert rg.tail(1, few) == rg.tail(1, [3, 2])


REFUSED: dict[str, Callable[[], object]] = {
    "Positions.q": lambda: rg.Positions(HUGE, torch.arange(2)),
    "Positions.k": lambda: rg.Positions(torch.arange(2), HUGE),
    "Retained.until": lambda: rg.Retained(HUGE),
    "Lengths.keys": lambda: rg.Lengths(keys=HUGE),
    "Lengths.first": lambda: rg.Lengths(first=HUGE),
    "Prefix.n": lambda: rg.Prefix(HUGE),
    "tail: nk": lambda: rg.tail(1, HUGE),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_int64_holds_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name} holds {2**64 - 2}, a uint64; expected integers below 2\^63: pass"):
        REFUSED[name]()


def test_documents_have_any_number_of_64_bits() -> None:
    n = torch.tensor([-2, 3, -2, -1]).view(torch.uint64)
    same(rg.Documents(n), None, [[i == j for j in n.tolist()] for i in n.tolist()])


@pytest.mark.parametrize(
    "keys",
    [[0, 1, 2, 3], [0, 1, MOST, MOST], [LEAST, 0, 1, MOST], [MOST - 3, MOST - 2, MOST - 1, MOST], [MOST, 0, LEAST, 1]],
    ids=str,
)
@pytest.mark.parametrize("queries", [[0, 1, MOST, MOST], [LEAST, 0, 1, MOST], [MOST - 1, MOST, 0, 1]], ids=str)
def test_positions_that_stand_for_never_and_always(queries: list[int], keys: list[int]) -> None:
    """The ends of int64, as the positions of padding: what compares them computes no difference."""
    at = rg.Positions(torch.tensor(queries), torch.tensor(keys))
    causal = [[j <= i for j in keys] for i in queries]
    same(rg.Causal(), at, causal)
    same(rg.Causal() | rg.Prefix(1), at, [[c or j < 1 for c, j in zip(row, keys, strict=True)] for row in causal])
    for n in (LEAST, MOST):
        same(rg.Prefix(torch.tensor([n, n])), at, [[j < n for j in keys]] * 4)
    rows = rg.Causal().on(4, positions=at).rows()
    if rows is not None:
        column = torch.arange(4)
        seen = (column >= rows.start[..., None]) & (column < rows.stop[..., None])
        assert seen.tolist() == [causal]
