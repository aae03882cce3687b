"""Rows whose scores share a large offset have the softmax of the scores without it: on every backend, dtype, fact.

Additive masks of -1e4, -1e9 and finfo.min over a whole row, as transformers makes them, are such offsets. Weights that
are taken from a rounded log-sum-exp lose their digits there: at -1e9 the last digit of a float32 is 64.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import regard as rg
from fact_checks import every
from regard import testing
from regard.inspect.dense import dense

F32, F64 = torch.float32, torch.float64
OFFSETS = [0.0, 1e2, -1e2, 1e4, -1e4, 1e9, -1e9, "min / 2", "min", "max"]
BACKENDS = [None, rg.Native(), rg.Native(invariant=True), rg.Tiled(), rg.Tiled(rows=11, keys=5), rg.Reference()]
NQ, NK, H, D, DV = 7, 13, 4, 5, 3


def number(offset: float | str, dtype: torch.dtype) -> float | None:
    """An offset as a dtype rounds it; None where the dtype does not hold it."""
    limits = torch.finfo(dtype)
    value = {"min / 2": limits.min / 2, "min": limits.min, "max": limits.max}.get(str(offset), offset)
    return float(torch.tensor(value, dtype=dtype)) if abs(float(value)) <= limits.max else None


def equal_keys(dtype: torch.dtype, nq: int = NQ) -> tuple[Tensor, Tensor, Tensor]:
    """All keys are one vector: whatever an offset rounds, a row's weights are 1 / (number of visible keys)."""
    q, k, v = torch.randn(2, H, nq, D), torch.randn(2, 2, 1, D), torch.randn(2, 2, NK, DV)
    return q.to(dtype), k.expand(2, 2, NK, D).contiguous().to(dtype), v.to(dtype)


def bias_of(value: float, dtype: torch.dtype, nq: int = NQ) -> Tensor:
    """The offset in every second row."""
    bias = torch.zeros(nq, NK, dtype=dtype)
    bias[::2] = value
    return bias


MASKS = {
    "everything": lambda nq: rg.Everything(),
    "window": lambda nq: rg.Window(before=3, after=1),
    "dense": lambda nq: rg.Dense(torch.arange(nq)[:, None] * 3 % 5 <= torch.arange(NK) % 4),
}


@pytest.mark.parametrize("backend", BACKENDS, ids=repr)
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("nq", [1, NQ, 40])
def test_equal_scores_weigh_equally_at_any_offset(backend: rg.Backend | None, offset: float | str, nq: int) -> None:
    """Output, log-sum-exp and gradients of equal scores: those of no offset, in every dtype and under every mask."""
    for dtype in (F32, F64, torch.bfloat16, torch.float16):
        value = number(offset, dtype)
        if value is None or (dtype == F64 and isinstance(backend, rg.Native)):
            continue
        q, k, v = (t.requires_grad_() for t in equal_keys(dtype, nq))
        bias, at = bias_of(value, dtype, nq).requires_grad_(), rg.tail(nq, NK)
        score, plain = rg.Dot() >> rg.Bias(bias), rg.Dot() >> rg.Bias(torch.zeros_like(bias).requires_grad_())
        for make in MASKS.values():
            mask = make(nq)
            g = torch.randn(2, H, nq, DV).to(dtype)
            seen = mask.on(nq, NK, positions=at).dense().double()
            p = (seen / seen.sum(-1, keepdim=True).clamp(min=1)).to(F64)
            values, wide = (t.detach().double().repeat_interleave(2, 1) for t in (v, k))
            out = rg.attention(q, k, v, score=score, mask=mask, positions=at, backend=backend)
            limit = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(out.double(), p @ values, rtol=limit, atol=limit)
            found = torch.autograd.grad(out, (q, k, v, bias), g)
            ds = p * (g.double() @ values.mT - ((p @ values) * g.double()).sum(-1, keepdim=True))
            expected = (
                ds @ wide,
                (ds.mT @ q.detach().double()).unflatten(1, (2, 2)).sum(2),
                (p.mT @ g.double()).unflatten(1, (2, 2)).sum(2),
                ds.sum((0, 1)),
            )
            for name, got, want in zip(("q", "k", "v", "bias"), found, expected, strict=True):
                size = max(float(want.abs().max()), 1.0) * (8 if dtype != F64 else 64)
                assert float((got.double() - want).abs().max()) <= limit * size, (name, dtype, mask)
            state = rg.attention_state(q, k, v, score=score, mask=mask, positions=at, backend=backend)
            without = rg.attention_state(q, k, v, score=plain, mask=mask, positions=at, backend=backend).finish()[1]
            lse = (without.double() + bias.detach()[:, 0].double()).to(without.dtype)
            lse = lse.nan_to_num(neginf=torch.finfo(lse.dtype).min).where(without > -math.inf, without)
            # scores in base 2 reach only ln 2 of the largest float: what is larger is told as the largest
            off = 5e-3 if abs(value) > 2.3e38 and dtype != F64 else 1e-6
            torch.testing.assert_close(state.finish()[1], lse, rtol=off, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS, ids=repr)
@pytest.mark.parametrize("offset", OFFSETS)
def test_parts_merge_by_their_numbers_of_keys_at_any_offset(backend: rg.Backend | None, offset: float | str) -> None:
    q, k, v = equal_keys(F32)
    value = number(offset, F32)
    assert value is not None
    score = rg.Dot() >> rg.Bias(torch.full((1, 1), value))
    whole = rg.attention_state(q, k, v, score=score, backend=backend).finish()
    first, second = (
        rg.attention_state(q, k[..., part, :], v[..., part, :], score=score, backend=backend)
        for part in (slice(0, 4), slice(4, NK))
    )
    merged = (first | second).finish()
    torch.testing.assert_close(merged[0], v.mean(-2, keepdim=True).repeat_interleave(2, 1).expand_as(merged[0]))
    torch.testing.assert_close(merged, whole, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("dtype", [F32, F64, torch.bfloat16])
def test_weights_and_facts_at_any_offset(dtype: torch.dtype, offset: float | str, sink: bool) -> None:
    """Every fact as of weights 1 / n; a sink with the same offset takes the part of one key."""
    value = number(offset, dtype)
    assert value is not None
    q, k, _ = equal_keys(dtype)
    q = torch.zeros_like(q) if sink else q
    mask, bias = rg.Window(before=3, after=2), torch.full((1, 1), value, dtype=dtype)
    at, wide = rg.tail(NQ, NK), torch.float64 if dtype == F64 else F32
    logit = torch.full((H,), value, dtype=wide) if sink else None
    given = {"mask": mask, "positions": at, "score": rg.Dot() >> rg.Bias(bias), "sink": logit}
    seen = mask.on(NQ, NK, positions=at).dense().double().expand(2, H, NQ, NK)
    p = seen / (seen.sum(-1, keepdim=True) + sink)
    weights = rg.attention_weights(q, k, **given)
    torch.testing.assert_close(weights.double(), p, rtol=2 * torch.finfo(dtype).eps, atol=1e-12)
    for rows in ([0, 2, 3, -1], torch.arange(NQ)):
        torch.testing.assert_close(rg.attention_weights(q, k, rows=rows, **given), weights[..., rows, :])
    facts = tuple(fact for fact in every(testing.frame((2,), H, NQ, NK)) if not _of_scores(fact))
    found = rg.look(q, k, facts=facts, **given)
    call = testing.Case(
        q.double() * 0, k.double(), k.double(), rg.Dot(), torch.zeros(H).double() if sink else None, mask, at
    )
    exact = dense(call.problem, facts)
    limit = {"rtol": 1e-5, "atol": 1e-5} if dtype != F64 else {"rtol": 1e-12, "atol": 1e-12}
    for fact in facts:
        got, want = (x.weights if isinstance(x, rg.facts.TopKeys) else x for x in (found[fact], exact[fact]))
        torch.testing.assert_close(
            got.double(), want.double(), **limit, msg=lambda text, fact=fact: f"{fact!r}: {text}"
        )


def _of_scores(fact: rg.facts.Fact[object]) -> bool:
    return isinstance(fact, (rg.facts.MaxScore, rg.facts.ScoreMap, rg.facts.Histogram))


@pytest.mark.parametrize("score", ["Bias", "Distance", "Additive"])
@pytest.mark.parametrize("offset", [0.0, 1e2, -1e2, 1e4, -1e4])
@pytest.mark.parametrize("dtype", [F32, F64, torch.bfloat16])
def test_unequal_scores_keep_the_digits_that_their_dtype_has(score: str, offset: float, dtype: torch.dtype) -> None:
    """Against float64, within twice the error of torch's own softmax of the scores in float32."""
    at = testing.frame((2,), 6, 23, 29)
    for backend in BACKENDS:
        random = torch.Generator().manual_seed(3)
        bias = torch.randn(23, 29, dtype=F64, generator=random) + offset * (torch.arange(23) % 3 == 0)[:, None]
        first = testing.scores(at)["ScaledDot" if score == "Bias" else score]
        call = testing.draw(at, score=first >> rg.Bias(bias), mask=rg.Window(before=5, after=9), sink=False)
        if backend is not None and backend.why_not(call.leaves(dtype).problem, True) is not None:
            continue
        testing.check(call, backend, dtype)


@pytest.mark.parametrize("offset", OFFSETS)
@pytest.mark.parametrize("nq", [1, NQ, 40])
def test_every_instruction_set(isa: str, offset: float | str, nq: int) -> None:
    q, k, v = (t.requires_grad_() for t in equal_keys(F32, nq))
    value = number(offset, F32)
    assert value is not None
    score, sink = rg.Dot() >> rg.Bias(bias_of(value, F32, nq)), torch.tensor([-math.inf] * H)
    for extra in ({}, {"sink": sink}, {"mask": rg.Dense(torch.ones(nq, NK, dtype=torch.bool))}):
        out = rg.attention(q, k, v, score=score, positions=rg.tail(nq, NK), backend=rg.Native(), **extra)
        torch.testing.assert_close(out, v.mean(-2, keepdim=True).repeat_interleave(2, 1).expand_as(out))
        g = torch.autograd.grad(out.sum(), v)[0]
        torch.testing.assert_close(g, torch.full_like(g, 2 * nq / NK))
    seen = rg.look(q, k, score=score, facts=(rg.facts.Entropy(), rg.facts.Received()))
    assert seen.way(rg.facts.Entropy()) == "the native kernels"
    torch.testing.assert_close(seen[rg.facts.Entropy()], torch.full((2, H, nq), math.log(NK)))
    torch.testing.assert_close(seen[rg.facts.Received()], torch.full((2, H, NK), nq / NK))


@pytest.mark.parametrize("backend", BACKENDS, ids=repr)
@pytest.mark.parametrize("nq", [1, NQ, 40])
def test_the_least_number_twice_hides_nothing(backend: rg.Backend | None, nq: int) -> None:
    """Two masks of finfo.min over a row: their sum overflows float32, but no key is told apart from another."""
    q, k, v = (t.requires_grad_() for t in equal_keys(F32, nq))
    least = torch.full((nq, NK), torch.finfo(F32).min)
    table = torch.full((4, 1), torch.finfo(F32).min)
    twice = rg.Dot() >> rg.Bias(least) >> rg.Bias(least)
    beside = rg.Dot() >> rg.RelativeBias(table, rg.ClippedBuckets(before=2, after=1)) >> rg.Bias(least)
    wide = rg.Dot() >> rg.Bias(torch.full((nq, NK), torch.finfo(F64).min, dtype=F64))
    for score in (twice, beside, wide):
        out = rg.attention(q, k, v, score=score, positions=rg.tail(nq, NK), backend=backend)
        mean = v.mean(-2, keepdim=True).repeat_interleave(2, 1).expand_as(out)
        torch.testing.assert_close(out, mean)
        g = torch.autograd.grad(out.sum(), v)[0]
        torch.testing.assert_close(g, torch.full_like(g, 2 * nq / NK))


def test_infinity_still_hides() -> None:
    """-inf is a mask whatever stands beside it; a row that has nothing else is empty."""
    q, k, v = equal_keys(F32)
    bias = torch.full((NQ, NK), torch.finfo(F32).min)
    bias[:, 3:] = -math.inf
    bias[0] = -math.inf
    for backend in BACKENDS:
        out = rg.attention(q, k, v, score=rg.Dot() >> rg.Bias(bias), backend=backend, positions=rg.head(NQ, NK))
        expected = v[..., :3, :].mean(-2, keepdim=True).repeat_interleave(2, 1).expand_as(out).clone()
        expected[..., 0, :] = 0
        torch.testing.assert_close(out, expected)
