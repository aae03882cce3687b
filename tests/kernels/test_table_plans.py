"""Plans of calls with a table of relative biases: other lengths and positions give the bits of the general way."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from fuzz.build import Unplanned
from needed import needs_kernels
from regard.core.positions import counted
from regard.runtime import plan_cache

pytestmark = needs_kernels

BUCKETS = {
    "clipped": rg.ClippedBuckets(4, 2),
    "T5": rg.T5Buckets(8, 20),
    "T5, causal": rg.T5CausalBuckets(8, 20),
    "grid": rg.GridBuckets(6, 5),
}


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    plan_cache.clear()


def kept() -> int:
    return len(plan_cache.plans())


def draw(nq: int, nk: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return tuple(torch.randn(2, 4, n, 16).to(dtype) for n in (nq, nk, nk))


def same(given: tuple[Tensor, ...], score: rg.Score, **how: Any) -> None:
    """The output and the gradients of everything that has one, with a plan and without, and near those in float64."""
    leaves = [t for t in (*given, *score.tensors()) if t.requires_grad]
    found: list[tuple[Tensor, ...]] = []
    for named in ({}, {"backend": Unplanned()}):
        out = rg.attention(*given, score=score, **how, **named)
        found.append((out.detach(), *(torch.autograd.grad(out.float().sin().sum(), leaves) if leaves else ())))
    for mine, exact in zip(*found, strict=True):
        assert torch.equal(mine, exact) and mine.dtype == exact.dtype
    wide = [t.detach().double() for t in given]
    exact = rg.attention(*wide, score=score.with_tensors(t.detach().double() for t in score.tensors()), **how)
    atol = 1e-5 if given[0].dtype == torch.float32 else 5e-2
    torch.testing.assert_close(found[0][0].double(), exact, atol=atol, rtol=0)


def biased(name: str, heads: int = 4, dtype: torch.dtype = torch.float32) -> rg.Score:
    buckets = BUCKETS[name]
    return rg.ScaledDot() >> rg.RelativeBias(torch.randn(buckets.count, heads).to(dtype), buckets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", BUCKETS)
def test_a_sequence_that_grows_has_one_plan(name: str, dtype: torch.dtype) -> None:
    """The steps of a decoder: the prompt, then a token at a time, in layers of one structure and several tables."""
    scores = [biased(name) for _ in range(3)]
    for nq, nk in ((9, 9), *((1, n) for n in range(10, 20)), (4, 23)):
        for score in scores:
            same(draw(nq, nk, dtype), score, mask=rg.Causal(), positions=rg.tail(nq, nk))
    assert kept() == 1


def placed(nq: int, nk: int) -> dict[str, rg.Positions]:
    """Positions of one call within 30 cells."""
    anywhere = torch.randint(0, 30, (nq,)), torch.randint(0, 30, (nk,))
    return {
        "head": rg.head(nq, nk),
        "shifted": counted((7, nq), (3, nk)),
        "a length for each sequence": rg.tail(nq, [nk, max(nk - 2, nq)]),
        "tensors that count up": rg.Positions(torch.arange(5, 5 + nq), torch.arange(nk)),
        "tensors": rg.Positions(*anywhere),
        "tensors for each sequence": rg.Positions(torch.randint(0, 30, (2, nq)), anywhere[1]),
    }


@pytest.mark.parametrize("kind", placed(3, 3))
@pytest.mark.parametrize("name", BUCKETS)
def test_positions_of_every_kind(name: str, kind: str) -> None:
    score = biased(name)
    for nq, nk in ((7, 11), (7, 11), (1, 12), (13, 13)):
        at = placed(nq, nk)[kind]
        same(draw(nq, nk), score, positions=at)
        if at.span is None:  # the same tensors with other numbers
            at.k.copy_(at.k.flip(-1))
            same(draw(nq, nk), score, positions=at)
    assert kept() == 1


@pytest.mark.parametrize("heads", [4, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", BUCKETS)
def test_gradients(name: str, dtype: torch.dtype, heads: int) -> None:
    """Of the table too, which heads may share; then of the table alone, and of everything else."""
    plans = 0
    for needs in ("q k v table", "table", "q v"):
        for nq, nk in ((7, 11), (13, 13), (1, 12)):
            score = biased(name, heads, dtype)
            score.tensors()[0].requires_grad_("table" in needs)
            given = tuple(
                t.requires_grad_(letter in needs.split()[0]) for t, letter in zip(draw(nq, nk), "qkv", strict=True)
            )
            if needs == "q v":
                given[2].requires_grad_()
            for at in (rg.tail(nq, nk), rg.Positions(torch.randint(0, 30, (nq,)), torch.arange(nk))):
                same(given, score, positions=at)
        plans += 2  # positions as numbers, and as tensors
        assert kept() == plans


def test_positions_that_changed_since_the_forward() -> None:
    """Gradients are those of the positions of the forward, as autograd says where a tensor was written."""
    score = biased("T5")
    score.tensors()[0].requires_grad_()
    q, k, v = (t.requires_grad_() for t in draw(5, 9))
    at = rg.Positions(torch.tensor([3, 1, 8, 2, 2]), torch.arange(9))
    for _ in range(2):
        out = rg.attention(q, k, v, score=score, positions=at)
        at.q.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    assert kept() == 1


def test_what_the_kernels_cannot_have_goes_the_general_way() -> None:
    """Positions too far apart for a table, and those that a grid does not have."""
    score = biased("T5")
    for far in (8, 1 << 40, 8):
        given, at = draw(5, 9), rg.Positions(torch.tensor([0, 3, 4, 6, far]), torch.arange(9))
        right = rg.attention(*given, score=score, positions=at, backend=rg.Reference())
        torch.testing.assert_close(rg.attention(*given, score=score, positions=at), right)
    assert kept() == 1
    score = biased("grid")
    same(draw(5, 9), score, positions=rg.tail(5, 9))
    for at in (rg.tail(5, 31), rg.Positions(torch.tensor([3, 1, 30, 2, 2]), torch.arange(9))):
        for _ in range(2):
            with pytest.raises(rg.ShapeError, match="has the cells 0 to 29"):
                rg.attention(*draw(5, at.k.shape[-1]), score=score, positions=at)


def test_a_call_without_positions_needs_as_many_queries_as_keys() -> None:
    score = biased("clipped")
    for n in (7, 12):
        same(draw(n, n), score)
        with pytest.raises(rg.ShapeError, match="positions are not given"):
            rg.attention(*draw(n, n + 1), score=score)
    assert kept() == 1


def test_lengths_of_other_calls() -> None:
    """Positions that are known to a plan, with other queries and keys than theirs."""
    score = biased("T5")
    for lengths in (9, [9, 7]):
        at = rg.tail(5, lengths)
        same(draw(5, 9), score, positions=at)
        for nq, nk in ((6, 9), (5, 10)):
            with pytest.raises(rg.ShapeError, match="positions"):
                rg.attention(*draw(nq, nk), score=score, positions=at)
    assert kept() == 1


def test_the_statistics_of_rows() -> None:
    score = biased("T5, causal")
    for nq, nk in ((1, 8), (1, 9), (6, 6)):
        given, how = draw(nq, nk), {"mask": rg.Causal(), "positions": rg.tail(nq, nk)}
        found, right = (
            rg.attention_state(*given, score=score, **how, **named) for named in ({}, {"backend": Unplanned()})
        )
        assert torch.equal(found.finish()[0], right.finish()[0]) and torch.equal(found.finish()[1], right.finish()[1])
    assert kept() == 1


def test_a_table_that_changes_in_place() -> None:
    """What is kept for the positions of the last call holds no number of a table."""
    score = biased("T5")
    for _ in range(3):
        score.tensors()[0].data.mul_(-1.5)
        same(draw(1, 9), score, positions=rg.tail(1, 9))
