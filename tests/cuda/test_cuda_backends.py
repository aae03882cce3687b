"""Backends on a GPU: values, log-sum-exp and gradients of every mask and score against float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import regard as rg
from regard import testing
from regard.core.dtypes import FLOATING

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


def frame(*args: Any, **given: Any) -> testing.Frame:
    at = testing.frame(*args, **given)
    return replace(at, positions=rg.Positions(at.positions.q.cuda(), at.positions.k.cuda()))


# Without a GPU the names alone are wanted, of tests that are skipped.
AT = frame() if torch.cuda.is_available() else testing.frame()
MASKS, SCORES = testing.masks(AT), testing.scores(AT)
TILED = rg.Tiled(rows=4, keys=3)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_tiles_of_every_mask(mask: str, dtype: torch.dtype) -> None:
    testing.check(testing.draw(AT, mask=MASKS[mask], sink=True), TILED, dtype)


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("score", SCORES)
def test_tiles_of_every_score(score: str, dtype: torch.dtype) -> None:
    draws = [testing.draw(AT, score=SCORES[score], mask=MASKS["Or"]) for _ in range(4)]
    testing.check(draws[0], TILED, dtype, again=tuple(draws[1:]))


@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("key_heads", [6, 2])
@pytest.mark.parametrize("width", [16, 7])
def test_torch_s_own_kernels(width: int, key_heads: int, dtype: torch.dtype) -> None:
    for mask in (rg.Everything(), rg.Lengths(keys=torch.arange(3, 8, device="cuda"))):
        for scale in (None, 0.3):
            case = testing.draw(AT, key_heads=key_heads, dk=width, dv=width, mask=mask, score=rg.ScaledDot(scale))
            assert rg.Sdpa().why_not(case.problem, False) is None
            testing.check(case, rg.Sdpa(), dtype)
    square = testing.draw(frame(nq=65, nk=65), key_heads=key_heads, dk=width, dv=width, mask=rg.Causal())
    testing.check(square, rg.Sdpa(), dtype)


@pytest.fixture
def wide() -> testing.Frame:
    return frame((2,), 6, 130, 150)


FLEX_MASKS = ["Causal", "Dense", "Documents", "Window", "Lengths 2", "Prefix 2", "Where", "Or", "nothing"]
FLEX_SCORES = ["Alibi", "Bias", "SoftCap", "RelativeBias", "Pipeline", "Cosine", "Bilinear", "Dot"]


@pytest.mark.parametrize("mask", FLEX_MASKS)
def test_flex_under_masks(mask: str, wide: testing.Frame) -> None:
    call = testing.draw(wide, dk=16, dv=32, mask=testing.masks(wide)[mask], sink=True)
    for dtype in (torch.float32, torch.bfloat16):
        testing.check(call, rg.Flex(), dtype)


@pytest.mark.parametrize("score", FLEX_SCORES)
def test_flex_of_scores(score: str, wide: testing.Frame) -> None:
    whole = testing.scores(wide, 16)[score]
    constant = whole.with_tensors(iter([t.detach() for t in whole.tensors()]))
    call = testing.draw(wide, dk=16, dv=16, score=constant, mask=rg.Causal()).leaves(torch.float32)
    call = replace(call, score=constant)
    assert rg.Flex().why_not(call.problem, True) is None
    given = {"score": constant, "mask": call.mask, "positions": call.positions}
    exact = [t.detach().double().requires_grad_() for t in (call.q, call.k, call.v)]
    wanted = rg.attention(*exact, **given, backend=rg.Reference())
    got = rg.attention(call.q, call.k, call.v, **given, backend=rg.Flex())
    g = torch.randn_like(got)
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)
    pairs = zip(
        torch.autograd.grad(got, (call.q, call.k, call.v), g),
        torch.autograd.grad(wanted, exact, g.double()),
        strict=True,
    )
    for a, b in pairs:
        torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-4)


def test_flex_compiles_no_call_twice() -> None:
    """Equal structures share what was compiled, and no number of structures makes it fall back to n × n weights."""
    torch._dynamo.reset()
    counters.clear()

    def graphs(n: int, score: rg.Score, mask: rg.Mask) -> int:
        q = torch.randn(1, 2, n, 16, device="cuda")
        rg.attention(q, q, q, score=score, mask=mask, backend=rg.Flex())
        return int(counters["stats"]["unique_graphs"])

    first = graphs(256, rg.ScaledDot() >> rg.SoftCap(3.0), rg.Causal())
    assert graphs(256, rg.ScaledDot() >> rg.SoftCap(3.0), rg.Causal()) == first
    second = graphs(384, rg.ScaledDot() >> rg.SoftCap(3.0), rg.Causal())
    assert graphs(512, rg.ScaledDot() >> rg.SoftCap(3.0), rg.Causal()) == second
    n = 32768  # the weights would be 8.6 GB
    for window in range(1, 12):
        masks = [rg.Window(before=window, after=0), rg.Window(before=window, after=0) | rg.Prefix(window)]
        for mask in masks:
            q = torch.randn(1, 2, 512, 16, device="cuda")
            rg.attention(q, q, q, mask=mask, backend=rg.Flex())
    q = torch.randn(1, 2, n, 16, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rg.attention(q, q, q, mask=rg.Window(before=9, after=0) | rg.Prefix(3), backend=rg.Flex())
    assert torch.cuda.max_memory_allocated() - before < 2**30


@pytest.mark.parametrize(
    ("given", "backend"),
    [
        ({}, rg.Sdpa()),
        ({"mask": rg.Causal()}, rg.Sdpa()),
        ({"mask": rg.Window(before=3, after=0)}, rg.Flex()),
        ({"score": rg.ScaledDot() >> rg.SoftCap(3.0)}, rg.Flex()),
        ({"score": rg.Distance()}, rg.Tiled()),
        ({"dropout": rg.Dropout(0.1)}, rg.Tiled()),
    ],
    ids=str,
)
def test_which_backend_runs(given: dict[str, Any], backend: rg.Backend) -> None:
    q = torch.randn(2, 4, 64, 32, device="cuda")
    said = rg.explain(q, q, q, **given)
    assert said.backend == backend
    assert dict(said.rows)["not Native()"]


def test_memory_is_linear_in_the_keys() -> None:
    """(1, 2, 32768, 64) float32 forward and backward: the weights would be 8.6 GB, a tile of both heads is 64 MB."""
    q, k, v = (torch.randn(1, 2, 32768, 64, device="cuda", requires_grad=True) for _ in range(3))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    rg.attention(
        q, k, v, score=rg.ScaledDot() >> rg.SoftCap(3.0), mask=rg.Causal(), backend=rg.Tiled()
    ).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2**30
