"""Sums over features of a person's own function, as programs in the native kernels, against the dense definition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from kernel_checks import check, frames
from needed import needs_kernels
from regard import testing
from regard.backends.base import Backend
from regard.backends.native.programs import structure
from regard.backends.native.programs.features import program_of_features
from regard.backends.native.programs.operations import OPERATIONS

pytestmark = needs_kernels

FRAMES = frames(few=331) | {
    "five queries": testing.frame(nq=5, nk=331, batch=(2,), heads=6),
    "one query": testing.frame(nq=1, nk=1101, batch=(1,), heads=4),
}
WIDTH = 19
Drawn = Callable[[int], rg.Elementwise]  # of so many heads


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def norm(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    return -w.exp() * (q - k).abs() / 4


def gaussian(q: Tensor, k: Tensor, width: Tensor, scale: Tensor) -> Tensor:
    return -scale.abs() * ((q - k) / (1 + width.square())) ** 2 / 8


def gat(q: Tensor, k: Tensor, a: Tensor) -> Tensor:
    return a * torch.nn.functional.leaky_relu(q + k, 0.2)


def gated(q: Tensor, k: Tensor, gate: Tensor, bias: Tensor) -> Tensor:
    return q * k * torch.sigmoid(gate * q + bias) / 2


def clipped(q: Tensor, k: Tensor) -> Tensor:
    return torch.where(q > k, torch.tanh(q * k), torch.minimum(q, 0.5 - k)).clamp(-0.9, 0.9)


SCORES: dict[str, Drawn] = {
    "norm": lambda heads: rg.Elementwise(norm, (randn(WIDTH),)),
    "gaussian": lambda heads: rg.Elementwise(gaussian, (randn(WIDTH), randn(heads, 1))),
    "gat": lambda heads: rg.Elementwise(gat, (randn(heads, WIDTH),)),
    "gated": lambda heads: rg.Elementwise(gated, (randn(1, WIDTH), randn(heads, 1))),
    "clipped": lambda heads: rg.Elementwise(clipped),
    "distance": lambda heads: rg.Elementwise(lambda q, k: -(q - k).abs() / 8),
    "distance read twice": lambda heads: rg.Elementwise(lambda q, k: (q - k).abs() * (k - q) / 9),
    "two factors": lambda heads: rg.Elementwise(lambda q, k: -0.3 * (-0.7 * torch.tanh(q * k))),
    "three times the key": lambda heads: rg.Elementwise(lambda q, k: 3 * k),
    "of queries alone": lambda heads: rg.Elementwise(lambda q, k, w: (q * w).sin(), (randn(WIDTH),)),
    "of keys alone": lambda heads: rg.Elementwise(lambda q, k, w: (k * w / 4).exp() / 9, (randn(WIDTH),)),
}


def operations(score: rg.Elementwise) -> list[str]:
    """Those of a program up to its result, which are all that a forward runs."""
    at = testing.frame(nq=5, nk=7, batch=(1,), heads=2)
    rows = program_of_features(testing.draw(at, dk=WIDTH, score=score).leaves(torch.float32).problem).rows
    names = [OPERATIONS[op] for op in rows[:, 0].tolist()]
    return names[: names.index("RESULT")]


@pytest.mark.parametrize(
    ("function", "computed"),
    [
        (lambda q, k: -(q - k).abs() / 8, ["ABS_SUB"]),
        (lambda q, k: (q - k).abs() * (q - k), ["SUB", "ABS", "MUL"]),
        (lambda q, k: 0.3 * -(2.0 * q * k), ["MUL", "MUL"]),
        (lambda q, k: (q * k) / 3, ["MUL", "DIV"]),
    ],
)
def test_factors_of_terms_and_distances_are_no_instructions(function: Any, computed: list[str]) -> None:
    """But a second factor is one, and division by what is no power of two: its rounding is its own."""
    found = operations(rg.Elementwise(function))
    assert [op for op in found if op not in ("LOAD", "NUMBER")] == computed


def why_not(case: testing.Case) -> str | None:
    return rg.Native().why_not(case.leaves(torch.float32).problem, lse=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", FRAMES)
@pytest.mark.parametrize("name", SCORES)
def test_values_and_gradients(isa: str, name: str, size: str, dtype: torch.dtype) -> None:
    at = FRAMES[size]
    keys = at.heads // 2 if at.heads % 2 == 0 else None
    of = {"score": SCORES[name](at.heads), "mask": testing.masks(at)["Or"], "sink": True}
    case = testing.draw(at, key_heads=keys, dk=WIDTH, dv=21, **of)
    assert why_not(case) is None
    check(case, dtype)
    check(replace(case, mask=rg.Causal(), dropout=rg.Dropout(0.3, seed=11)), dtype)


@pytest.mark.parametrize("size", ["blocks", "few rows"])
@pytest.mark.parametrize("modifier", ["SoftCap", "Alibi", "Bias"])
def test_before_modifiers(isa: str, modifier: str, size: str) -> None:
    at = FRAMES[size]
    score = SCORES["gaussian"](at.heads) >> testing.scores(at)[modifier].stages[-1]
    check(testing.draw(at, dk=WIDTH, dv=5, score=score, mask=rg.Causal()))


@pytest.mark.parametrize("nq", [70, 3])
@pytest.mark.parametrize("width", [1, 2, 7, 64, 131])
def test_widths(isa: str, width: int, nq: int) -> None:
    """Of a tensor of one or two numbers the gradient is off by chance."""
    tensors = (randn(width) / width**0.5,) if width > 2 else ()
    score = rg.Elementwise(lambda q, k, *w: q * k / 2 if not w else q * k * w[0] / 2, tensors)
    check(testing.draw(testing.frame(nq=nq, nk=150, batch=(1,), heads=2), dk=width, dv=9, score=score))


@pytest.mark.parametrize("d", [64, 40])
@pytest.mark.parametrize("rows", ["next to each other", "far apart", "features apart"])
def test_keys_of_few_queries_in_any_layout(isa: str, d: int, rows: str) -> None:
    """Keys in place are read by strides of 16 bits, and others copied; features past the width are nobody's."""
    q, wide = torch.randn(2, 3, d), torch.full((2, 21, 33_000 if rows == "far apart" else 2 * d), torch.nan)
    k, v = wide[..., : 2 * d : 2] if rows == "features apart" else wide[..., :d], torch.randn(2, 21, 5)
    k.normal_()
    given = [t.requires_grad_() for t in (q, k if rows != "next to each other" else k.contiguous(), v)]
    score = rg.Elementwise(lambda q, k: -(q - k).abs() / (1 + k * k))
    found, right = (results(given, score, backend) for backend in (rg.Native(), rg.Reference()))
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def results(given: list[Tensor], score: rg.Score, backend: Backend) -> tuple[Tensor, ...]:
    out = rg.attention(*given, score=score, backend=backend)
    return out.detach(), *torch.autograd.grad(out.square().sum(), given)


@pytest.mark.parametrize("nq", [141, 2])
def test_the_bits_do_not_depend_on_the_number_of_threads(nq: int) -> None:
    at = testing.frame(nq=nq, nk=333, batch=(2,), heads=4)
    case = testing.draw(at, key_heads=2, dk=WIDTH, score=SCORES["gated"](4), mask=rg.Causal())
    threads, found = torch.get_num_threads(), list[dict[str, Tensor]]()
    try:
        for n in (1, 3):
            torch.set_num_threads(n)
            found.append(testing.answers(case, rg.Native(), torch.float32))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())


@pytest.mark.parametrize("nq", [50, 3])
def test_an_infinite_derivative_of_a_hidden_pair_reaches_nobody(nq: int) -> None:
    """The root of 0 has an infinite slope; the pairs of equal features are all hidden."""
    q = torch.randn(1, 2, nq, WIDTH)
    k, allowed = q.clone(), ~torch.eye(nq, dtype=torch.bool)
    given = [t.requires_grad_() for t in (q, k, torch.randn(1, 2, nq, 3))]
    score = rg.Elementwise(lambda q, k: -(q - k).abs().sqrt() / 4)
    out = rg.attention(*given, score=score, mask=rg.Dense(allowed), backend=rg.Native())
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.square().sum(), given))


def test_it_is_traced_once_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    traced, trace = list[Any](), structure.trace_features
    monkeypatch.setattr(structure, "trace_features", lambda *args: traced.append(args) or trace(*args))
    score = rg.Elementwise(lambda q, k, w: -w * (q - k).abs(), (torch.ones(8),))
    for n in (5, 9, 70):
        q = torch.randn(1, 2, n, 8)
        other = score.with_tensors(iter([torch.rand(8)]))
        rg.attention(q, q, q, score=other, backend=rg.Native())
    assert len(traced) == 1


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda q, k: torch.special.i0(q * k), "no instruction for aten.i0"),
        (lambda q, k: torch.lgamma(q + k), "no instruction for aten.lgamma"),
        (lambda q, k: q * k if q.dtype == torch.float64 else (q * k).bfloat16(), "rounds what it computes"),
    ],
)
def test_what_is_no_program_goes_over_tiles_and_says_why(fn: Any, why: str) -> None:
    case = testing.draw(FRAMES["blocks"], score=rg.Elementwise(fn)).leaves(torch.float32)
    found = why_not(case)
    assert found is not None and why in found and why in str(rg.explain(case.q, case.k, case.v, score=case.score))


@pytest.mark.parametrize("nq", [8, 1])
def test_explain_tells_of_its_program(nq: int) -> None:
    q = torch.randn(1, 2, 8, 4)
    said = str(rg.explain(q[:, :, :nq], q, q, score=rg.Elementwise(gat, (torch.ones(4),))))
    assert "the sum over features of a program of" in said and "which reads 1 tensor" in said


@pytest.mark.parametrize("nq", [5, 70])
def test_a_score_of_minus_infinity_is_a_weight_of_0(isa: str, nq: int) -> None:
    """No mask hides the pair, and the values there receive nothing."""
    at = testing.frame(nq=nq, nk=130, batch=(2,), heads=2)
    for fn, one in ((lambda q, k: -(q - k).abs(), torch.inf), (lambda q, k: (q.abs() * k.abs()).log() / 8, 0.0)):
        case = testing.draw(at, dk=8, dv=5, score=rg.Elementwise(fn))
        k = case.k.clone()
        k[..., [5, 40], 1] = one
        mine, right = (
            testing.answers(replace(case, k=k), backend, torch.float32) for backend in (rg.Native(), rg.Tiled())
        )
        for name in right:
            torch.testing.assert_close(mine[name], right[name], rtol=1e-4, atol=1e-5, equal_nan=True)
        assert bool((mine["gradient of v"][..., [5, 40], :] == 0).all())


@pytest.mark.full
@pytest.mark.parametrize("width", [32_767, 32_768, 70_000])
def test_more_features_than_16_bits_count(isa: str, width: int) -> None:
    score = rg.Elementwise(lambda q, k: -(q - k).abs() / 200)
    for nq in (1, 3):
        case = testing.draw(testing.frame(nq=nq, nk=21, batch=(1,), heads=1), dk=width, dv=3, score=score)
        mine = testing.answers(case, rg.Native(), torch.float32)
        for name, right in testing.answers(case, rg.Reference(), torch.float64).items():
            assert testing.error(mine[name], right) < 1e-3
