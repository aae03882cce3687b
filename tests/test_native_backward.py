"""The native backward pass against gradients in float64, on every instruction set that this machine runs."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

import regard as rg
from native_cases import redrawn
from regard import testing
from regard.backends.library import runnable
from regard.backends.training import why_not_backward

pytestmark = pytest.mark.skipif(not runnable(), reason="needs the native kernels: no C++ compiler was found")

FRAMES = {
    "blocks": testing.frame(nq=97, nk=211, batch=(2,), heads=6),
    "few rows": testing.frame(nq=2, nk=151, batch=(3,), heads=6),
    "small": testing.frame(),
    "headless": testing.frame(nq=19, nk=23, batch=(5,), heads=1, headed=False),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = [f"{size}: {name}" for size, at in FRAMES.items() for name, _ in testing.calls(at)]
# one of each kind of mask that reaches the kernels: intervals, booleans, a map of tiles, nothing to see
MASKS = ["Causal", "Lengths", "Dense", "Or", "nothing"]


@cache
def drawn(size: str) -> dict[str, testing.Case]:
    torch.manual_seed(0)
    return dict(testing.calls(FRAMES[size]))


@pytest.fixture(params=runnable())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("REGARD_ISA", request.param)
    return request.param


def gradients(case: testing.Case, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {k: t for k, t in testing.answers(case, rg.Native(), dtype).items() if k.startswith("gradient")}


@pytest.mark.parametrize("name", NAMES)
def test_every_mask_and_score(name: str) -> None:
    size, _, name = name.partition(": ")
    case = drawn(size)[name]
    if isinstance(case.score.stages[0], rg.Additive):
        return  # kernels and tests of its own: test_native_additive.py
    if any(t.numel() == 1 for t in case.score.tensors()):
        pytest.skip("how far one number is off is chance: see the other sizes")
    problem = case.leaves(torch.float32).problem
    if rg.Native().why_not(problem, lse=True) is None and why_not_backward(problem) is None:
        testing.check(case, rg.Native(), torch.float32, again=redrawn(case))


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
    testing.check(case, rg.Native(), dtype, again=redrawn(case))
    case = testing.draw(at, dk=33, dv=16, score=biased, mask=seen, dropout=rg.Dropout(0.3, seed=11))
    testing.check(case, rg.Native(), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(2, 6, 97, 211), (1, 1, 97, 211), (2, 1, 1, 211), (6, 97, 1), (2, 1, 97, 211), (97, 211), (1,)], ids=str
)
def test_a_bias_of_every_broadcast(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    bias = rg.Bias(torch.randn(shape, dtype=torch.float64))
    for heads in (2, 6):
        case = testing.draw(FRAMES["blocks"], key_heads=heads, score=rg.ScaledDot() >> bias, mask=rg.Causal())
        testing.check(case, rg.Native(), dtype)


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
    case = testing.draw(at, mask=testing.masks(at)[mask], sink=True, score=rg.Dot() >> rg.Bias(torch.randn(97, 211)))
    testing.check(replace(case, q=case.q * factor), rg.Native(), torch.float32)
    assert case.sink is not None
    testing.check(replace(case, sink=case.sink + min(factor, 8)), rg.Native(), torch.float32)


@pytest.mark.parametrize("keys", [2, 6])
@pytest.mark.parametrize("mask", ["Causal", "Or"])
def test_calls_that_are_split_into_parts(keys: int, mask: str) -> None:
    """Few heads and many keys, or queries: sums of several parts."""
    for nq, nk in ((130, 1300), (1300, 130), (1100, 1100)):
        at = testing.frame(nq=nq, nk=nk, batch=(1,), heads=6)
        score = (
            rg.ScaledDot()
            >> rg.Alibi(torch.rand(6, dtype=torch.float64))
            >> testing.scores(at)["RelativeBias"].parts[1]
        )
        case = testing.draw(at, key_heads=keys, dk=9, dv=12, score=score, mask=testing.masks(at)[mask], sink=True)
        testing.check(case, rg.Native(), torch.float32)


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
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "mask", [rg.Lengths(keys=torch.tensor([100])), rg.Dense(torch.arange(130) < 100)], ids=["interval", "booleans"]
)
def test_what_is_hidden_leaks_nowhere(isa: str, dtype: torch.dtype, bad: float, mask: rg.Mask) -> None:
    """Hidden keys and values, and the queries and cotangents of rows that see nothing."""
    rows = rg.Dense((torch.arange(70) < 60)[:, None])
    at = testing.frame(nq=70, nk=130, batch=(1,), heads=2)
    score = rg.ScaledDot() >> rg.SoftCap(3.0)

    def run(spoil: bool) -> list[Tensor]:
        torch.manual_seed(0)
        case = testing.draw(at, dk=16, dv=8, score=score)
        q, k, v = (t.detach().to(dtype) for t in (case.q, case.k, case.v))
        g = torch.randn(1, 2, 70, 8).to(dtype)
        if spoil:
            q[..., 60:, :], g[..., 60:, :], k[..., 100:, :], v[..., 100:, :] = bad, bad, bad, bad
        q, k, v = (t.requires_grad_() for t in (q, k, v))
        out = rg.attention(q, k, v, score=score, mask=mask & rows, backend=rg.Native())
        return [out, *torch.autograd.grad(out, (q, k, v), g)]

    near = 4 * torch.finfo(dtype).eps  # products that leave pairs out round in another order
    for clean, spoiled in zip(run(False), run(True), strict=True):
        assert clean.isfinite().all()
        torch.testing.assert_close(spoiled, clean, rtol=near, atol=near)
    _, g_q, g_k, g_v = run(True)
    assert not g_q[..., 60:, :].any() and not g_k[..., 100:, :].any() and not g_v[..., 100:, :].any()
    assert g_q[..., :60, :].any() and g_k[..., :100, :].any()


@pytest.mark.parametrize("what", ["q", "k", "v", "g"])
def test_what_is_seen_and_no_number_stays_visible(isa: str, what: str) -> None:
    torch.manual_seed(0)
    given = {name: torch.randn(1, 1, 130, 16) for name in ("q", "k", "v", "g")}
    given[what][..., 70, 3] = torch.nan
    q, k, v = (given[name].requires_grad_() for name in ("q", "k", "v"))
    out = rg.attention(q, k, v, mask=rg.Causal(), backend=rg.Native())
    g_q, g_k, g_v = (g[0, 0] for g in torch.autograd.grad(out, (q, k, v), given["g"]))
    if what in ("q", "g"):  # one row is lost, and every key that it sees
        assert g_q[70].isnan().any() and g_k[:71].isnan().any(-1).all() and g_v[:71].isnan().any(-1).all()
        assert g_q[:70].isfinite().all() and g_q[71:].isfinite().all()
        assert g_k[71:].isfinite().all() and g_v[71:].isfinite().all()
    else:  # every row that sees the key
        assert g_q[:70].isfinite().all() and g_q[70:].isnan().any(-1).all()


def test_keys_that_nobody_sees_get_nothing(isa: str) -> None:
    q, k, v = (torch.randn(2, 2, n, 16, requires_grad=True) for n in (40, 300, 300))
    mask = rg.Window(before=20, after=0)
    out, lse = rg.attention_state(q, k, v, mask=mask, positions=rg.tail(40, 300), backend=rg.Native()).finish()
    _, g_k, g_v = torch.autograd.grad((out, lse), (q, k, v), (torch.ones_like(out), torch.ones_like(lse)))
    assert not g_k[..., :240, :].any() and not g_v[..., :240, :].any() and g_k[..., 240:, :].any()


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
        for mine, right in zip(run(*given), run(*(t.contiguous() for t in given)), strict=True):
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
    testing.check(case, rg.Native(), torch.float32)


def test_each_gradient_alone_has_the_same_bits() -> None:
    at = FRAMES["blocks"]
    score = (
        rg.ScaledDot(torch.ones(6)) >> rg.SoftCap(9.0) >> rg.Alibi(torch.rand(6)) >> rg.Bias(torch.randn(6, 97, 211))
    )
    case = testing.draw(at, score=score, mask=rg.Causal(), sink=True).leaves(torch.float32)
    given = {"score": case.score, "mask": case.mask, "positions": case.positions, "sink": case.sink}

    def run(wanted: list[Tensor]) -> tuple[Tensor, ...]:
        for t in case.differentiable.values():
            t.requires_grad_(any(t is w for w in wanted))
        out = rg.attention(case.q, case.k, case.v, **given, backend=rg.Native())
        return torch.autograd.grad(out.sin().sum(), wanted)

    every = list(case.differentiable.values())
    for t, right in zip(every, run(every), strict=True):
        assert torch.equal(run([t])[0], right)


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
