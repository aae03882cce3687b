"""The native backward pass against gradients in float64, on every instruction set that this machine runs."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import regard as rg
from fuzz.build import Unplanned
from kernel_checks import check, frames
from needed import needs_kernels
from regard import testing
from regard.backends.native.lower_mask import lower_mask
from regard.call.problem import Problem

pytestmark = needs_kernels

FRAMES = frames(few=151)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# one of each kind of mask that reaches the kernels: intervals, booleans, a map of tiles, nothing to see
MASKS = ["Causal", "Lengths", "Dense", "Or", "nothing"]


def gradients(case: testing.Case, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {k: t for k, t in testing.answers(case, Unplanned(), dtype).items() if k.startswith("gradient")}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", ["blocks", "few rows", "small"])
@pytest.mark.parametrize("mask", MASKS)
def test_every_instruction_set(isa: str, dtype: torch.dtype, size: str, mask: str) -> None:
    at = FRAMES[size]
    slopes = torch.linspace(0.01, 0.1, at.heads, dtype=torch.float64)
    capped = rg.ScaledDot() >> rg.SoftCap(5.0) >> rg.Alibi(slopes)
    biased = rg.ScaledDot() >> testing.scores(at)["RelativeBias"].parts[1] >> testing.scores(at)["Bias 2"].parts[1]
    seen = testing.masks(at)[mask]
    case = testing.draw(at, dk=32, dv=19, score=capped, mask=seen, sink=True)
    check(case, dtype)
    case = testing.draw(at, dk=33, dv=16, score=biased, mask=seen, dropout=rg.Dropout(0.3, seed=11))
    check(case, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(2, 6, 83, 149), (1, 1, 83, 149), (2, 1, 1, 149), (6, 83, 1), (2, 1, 83, 149), (83, 149), (1,)], ids=str
)
def test_a_bias_of_every_broadcast(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    bias = rg.Bias(torch.randn(shape, dtype=torch.float64))
    for heads in (2, 6):
        case = testing.draw(FRAMES["blocks"], key_heads=heads, score=rg.ScaledDot() >> bias, mask=rg.Causal())
        check(case, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [4, 83], ids=["few rows", "blocks"])
def test_weights_of_the_backward_sum_to_1_where_scores_are_large(isa: str, n: int, dtype: torch.dtype) -> None:
    """Scores of 400,000, whose last digit is 1/32: forward and backward must round them alike."""
    x, v = (100 * torch.randn(n, 48)).to(dtype), torch.randn(n, 8).to(dtype).requires_grad_()
    out = rg.attention(x, x, v, score=rg.Dot(), backend=rg.Native())
    (g,) = torch.autograd.grad(out[:, 0].float().sum(), v)
    assert float(g[:, 0].double().sum()) == pytest.approx(n, rel=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 24, 25, 63, 64, 65, 127, 128, 129, 257])
def test_lengths_at_every_edge(isa: str, n: int) -> None:
    at = testing.frame(nq=n, nk=n, batch=(2,), heads=2)
    testing.check(testing.draw(at, dk=5, dv=7, mask=rg.Causal()), rg.Native(), torch.float32)
    testing.check(
        testing.draw(testing.frame(nq=n, nk=131, batch=(1,), heads=2), dk=5, dv=7), rg.Native(), torch.float32
    )


@pytest.mark.parametrize("width", [1, 3, 8, 16, 24, 67, 128])
def test_widths(isa: str, width: int) -> None:
    at = testing.frame(nq=70, nk=150, batch=(1,), heads=2)
    testing.check(testing.draw(at, dk=width, dv=width + 1), rg.Native(), torch.float32)


@pytest.mark.parametrize("factor", [1.0, 5.0, 20.0])
@pytest.mark.parametrize("mask", MASKS)
def test_scores_of_every_size(factor: float, mask: str) -> None:
    at = FRAMES["blocks"]
    case = testing.draw(at, mask=testing.masks(at)[mask], sink=True, score=rg.Dot() >> rg.Bias(torch.randn(83, 149)))
    testing.check(replace(case, q=case.q * factor), rg.Native(), torch.float32)
    assert case.sink is not None
    testing.check(replace(case, sink=case.sink + min(factor, 8)), rg.Native(), torch.float32)


@pytest.mark.parametrize("keys", [2, 6])
@pytest.mark.parametrize("mask", ["Causal", "Or"])
@pytest.mark.parametrize(
    "size", [(130, 1300), (1300, 130), pytest.param((1100, 1100), marks=pytest.mark.full)], ids=str
)
def test_calls_that_are_split_into_parts(size: tuple[int, int], mask: str, keys: int) -> None:
    """Few heads and many keys, or queries: sums of several parts."""
    at = testing.frame(nq=size[0], nk=size[1], batch=(1,), heads=6)
    table = testing.scores(at)["RelativeBias"].parts[1]
    score = rg.ScaledDot() >> rg.Alibi(torch.rand(6, dtype=torch.float64)) >> table
    case = testing.draw(at, key_heads=keys, dk=9, dv=12, score=score, mask=testing.masks(at)[mask], sink=True)
    check(case)


@pytest.mark.parametrize("size", [(130, 1300), (1300, 130)], ids=str)
def test_learned_log_distances_of_long_rows(size: tuple[int, int]) -> None:
    """Rates so small that the gradients of rates sum distances; sums of several parts."""
    at = testing.frame(nq=size[0], nk=size[1], batch=(1,), heads=6)
    rates = 1e-3 * torch.rand(6, dtype=torch.float64)
    score = rg.ScaledDot() >> rg.LogDistance(torch.ones(6, dtype=torch.float64), rates)
    check(testing.draw(at, dk=9, dv=12, score=score, mask=rg.Window(1000, 0), sink=True))


def test_the_weights_of_a_row_sum_to_one_in_the_gradient_too() -> None:
    """Σ_j dS_ij = g_i, the cotangent of the row's lse: seen as the gradient of a bias of one number a query."""
    q, k, v = (torch.randn(2, 3, n, 16) for n in (150, 300, 300))
    bias = torch.zeros(2, 3, 150, 1, requires_grad=True)
    score = rg.ScaledDot() >> rg.Bias(bias)
    mask, at = rg.Window(before=60, after=0), rg.tail(150, 300)
    out, lse = rg.attention_state(q, k, v, score=score, mask=mask, positions=at, backend=rg.Native()).finish()
    g_out, g_lse = torch.randn_like(out), torch.randn_like(lse)
    (found,) = torch.autograd.grad((out, lse), bias, (g_out, g_lse))
    torch.testing.assert_close(found[..., 0], g_lse, rtol=0, atol=5e-6)


def test_the_weights_are_what_they_were_to_the_last_digit(isa: str) -> None:
    """The gradient of a row's lse to all its scores together is 1; from an lse of 7 in float32 it would be 3e-7 off."""
    q, k, v = (torch.randn(2, 3, 513, 64) for _ in range(3))
    bias = torch.zeros(2, 3, 513, 1, requires_grad=True)
    _, lse = rg.attention_state(q, k, v, score=rg.ScaledDot() >> rg.Bias(bias), backend=rg.Native()).finish()
    (found,) = torch.autograd.grad(lse, bias, torch.ones_like(lse))
    assert testing.error(found, torch.ones_like(found)) <= 1.5 * torch.finfo(torch.float32).eps


SPLIT = {
    "whole": testing.frame(nq=200, nk=300, batch=(3,), heads=6),
    "keys in parts": testing.frame(nq=90, nk=2100, batch=(1,), heads=2),
    "queries in parts": testing.frame(nq=2100, nk=90, batch=(1,), heads=2),
    "few rows": testing.frame(nq=3, nk=1300, batch=(2,), heads=2),
}


@pytest.mark.parametrize("size", SPLIT)
def test_the_same_bits_for_any_number_of_threads(size: str) -> None:
    at, before = SPLIT[size], torch.get_num_threads()
    shape = (at.nq, at.nk)
    score = rg.ScaledDot(torch.rand(())) >> rg.Alibi(1e-3 * torch.rand(at.heads)) >> rg.Bias(torch.randn(shape))
    table = torch.randn(32, at.heads)
    score = score >> rg.RelativeBias(table, rg.T5Buckets(32))
    case = testing.draw(at, dk=24, dv=16, score=score, mask=rg.Causal(), sink=True, dropout=rg.Dropout(0.1, seed=1))
    answers = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        answers.append(gradients(case))
    torch.set_num_threads(before)
    for other in answers[1:]:
        assert all(torch.equal(t, other[name]) for name, t in answers[0].items())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides(dtype: torch.dtype) -> None:
    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> list[Tensor]:
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        out = rg.attention(q, k, v, mask=rg.Causal(), backend=rg.Native())
        return list(torch.autograd.grad(out, (q, k, v), g))

    laid = [torch.randn(2, 150, 4, 32).to(dtype).movedim(1, 2) for _ in range(4)]
    strange = [
        laid,
        [t[..., ::2] for t in laid],
        [t.mT.contiguous().mT for t in laid],
        [*laid[:3], torch.ones((), dtype=dtype).expand(laid[3].shape)],
        [
            laid[0],
            laid[1][:, :1].expand_as(laid[1]),
            laid[2][:1].expand_as(laid[2]),
            laid[3][..., :1].expand_as(laid[3]),
        ],
    ]
    for given in strange:
        # bfloat16 pairs are read from neighbouring features alone; other layouts are multiplied in float32
        pairs = dtype == torch.bfloat16 and any(t.stride(-1) != 1 for t in given[:2])
        for mine, right in zip(run(*given), run(*(t.contiguous() for t in given)), strict=True):
            if pairs:
                torch.testing.assert_close(mine, right, rtol=2e-2, atol=2e-2)
            else:
                assert torch.equal(mine, right)


@pytest.mark.parametrize(
    "shape",
    [
        (0, 2, 5, 6, 3, 4),
        (2, 0, 5, 6, 3, 4),
        (2, 2, 0, 6, 3, 4),
        (2, 2, 5, 0, 3, 4),
        (2, 2, 5, 6, 0, 4),
        (2, 2, 5, 6, 3, 0),
    ],
    ids=str,
)
def test_sizes_of_zero(shape: tuple[int, ...]) -> None:
    b, h, nq, nk, dk, dv = shape
    bias = torch.randn(nq, nk)
    case = testing.Case(
        torch.randn(b, h, nq, dk, dtype=torch.float64),
        torch.randn(b, h, nk, dk, dtype=torch.float64),
        torch.randn(b, h, nk, dv, dtype=torch.float64),
        rg.ScaledDot(torch.ones(())) >> rg.Alibi(torch.ones(h)) >> rg.Bias(bias),
        positions=rg.tail(nq, nk) if nq <= nk else rg.head(nq, nk),
    )
    check(case)


def test_each_gradient_alone_has_the_same_bits() -> None:
    at = FRAMES["blocks"]
    score = (
        rg.ScaledDot(torch.ones(6)) >> rg.SoftCap(9.0) >> rg.Alibi(torch.rand(6)) >> rg.Bias(torch.randn(6, 83, 149))
    )
    case = testing.draw(at, score=score, mask=rg.Causal(), sink=True).leaves(torch.float32)
    given = {"score": case.score, "mask": case.mask, "positions": case.positions, "sink": case.sink}

    def run(wanted: list[Tensor]) -> tuple[Tensor, ...]:
        for t in case.differentiable.values():
            t.requires_grad_(any(t is w for w in wanted))
        out = rg.attention(case.q, case.k, case.v, **given, backend=rg.Native())
        return torch.autograd.grad(out.sin().sum(), wanted)

    slopes = next(t for t in case.score.tensors() if t.shape == (6,) and t.max() < 1)
    rest = [t for t in case.differentiable.values() if t is not slopes]
    for t, right in zip(rest, run(rest), strict=True):
        assert torch.equal(run([t])[0], right)
    # where slopes are learned, Delta is summed from the weights, for all gradients of the call alike
    *rights, right = run([*rest, slopes])
    assert torch.equal(run([slopes])[0], right)
    for t, right in zip(rest, rights, strict=True):
        assert torch.equal(run([t, slopes])[0], right)


def test_many_python_threads_at_once() -> None:
    inputs = [torch.randn(3, 1, 2, 90 + n, 16) for n in range(8)]

    def run(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(rg.attention(*x, mask=rg.Causal(), backend=rg.Native()).sin().sum(), x)[0]

    expected = [run(x) for x in inputs]
    found: list[Tensor | None] = [None] * 8

    def work(n: int) -> None:
        for _ in range(5):
            found[n] = run(inputs[n])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(one is not None and torch.equal(one, right) for one, right in zip(found, expected, strict=True))


def test_the_plan_says_who_does_it() -> None:
    x = torch.randn(1, 2, 40, 8)
    assert "the same kernels" in str(rg.explain(x, x, x))
    assert "streamed over tiles in PyTorch: its scores are distances" in str(rg.explain(x, x, x, score=rg.Distance()))


@pytest.mark.parametrize("score", [rg.ScaledDot(), rg.Additive(None, None, torch.ones(16))], ids=["dots", "additive"])
@pytest.mark.parametrize(
    "mask", [rg.Prefix(40), rg.Causal(), rg.Dense(torch.ones(150, 150).tril() > 0), ~rg.Window(9, 9)], ids=str
)
def test_the_mask_is_lowered_once(mask: rg.Mask, score: rg.Score, monkeypatch: pytest.MonkeyPatch) -> None:
    """But where a map of tiles takes more memory than queries and keys: that is not held from forward to backward."""
    lowered: list[Problem] = []
    monkeypatch.setattr(
        "regard.backends.native.backend.lower_mask",
        lambda problem, tile: lowered.append(problem) or lower_mask(problem, tile),
    )
    q, k, v = (torch.randn(2, 3, 150, 16, requires_grad=True) for _ in range(3))
    rg.attention(q, k, v, score=score, mask=mask, backend=Unplanned()).sum().backward()
    assert len(lowered) == 1
    one = [t[:1, :1, :, :1].detach().requires_grad_() for t in (q, k, v)]
    rg.attention(*one, mask=mask, backend=Unplanned()).sum().backward()
    assert len(lowered) == (3 if "tiles" in lower_mask(lowered[0], (8, 128)) else 2)
