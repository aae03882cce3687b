"""Sdpa: what it refuses, and that what it takes is right; on a CPU, where torch's operator has its paths too."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

import regard as rg
import regard.runtime.plan_cache as plan_cache
from regard import testing
from regard.backends.sdpa.fused import Cudnn, Efficient, Flash, FlashOnCpu, FusedCall

SDPA = rg.Sdpa(devices=("cpu",))
AT = testing.frame()
F64 = torch.float64


def why(case: testing.Case, lse: bool = False) -> str | None:
    return SDPA.why_not(case.problem, lse)


WRITTEN_OUT = "would have to be written out, 13 × 17"
REFUSED = [
    ({"score": rg.Dot()}, "it has only the scaled dot product, not Dot()"),
    (
        {"score": rg.ScaledDot() >> rg.SoftCap(2.0)},
        "it has only the scaled dot product, not ScaledDot() >> SoftCap(cap=2.0)",
    ),
    ({"score": rg.ScaledDot(torch.tensor(2.0))}, "its scale is a number, not a tensor"),
    ({"dropout": rg.Dropout(0.1)}, "its dropout is not a function of the seed alone"),
    ({"mask": rg.Window(3, 0)}, WRITTEN_OUT),
    ({"mask": rg.Causal() & rg.Prefix(3)}, WRITTEN_OUT),
    ({"mask": rg.Lengths(queries=torch.full((5,), 3))}, WRITTEN_OUT),
    ({"mask": rg.Causal()}, "its is_causal compares indices and needs as many keys as queries, at the same positions"),
    ({"mask": rg.Dense(torch.zeros(17, dtype=torch.bool))}, "the mask leaves a query without a key"),
    ({"mask": rg.Lengths(keys=torch.tensor([1, 2, 0, 4, 5]))}, "the mask leaves a query without a key"),
]


@pytest.mark.parametrize(("given", "said"), REFUSED)
def test_refusals(given: dict[str, object], said: str) -> None:
    assert said in (why(replace(testing.draw(AT), **given)) or "nothing")


def test_more_refusals() -> None:
    assert why(testing.draw(AT), lse=True) == "it gives no log-sum-exp, which a State or a sink needs"
    assert rg.Sdpa().why_not(testing.draw(AT).problem, False) == "it serves cuda tensors; these are on cpu"
    for size in ({"nq": 0}, {"nk": 0}, {"heads": 0}, {"batch": (0,)}):
        assert why(testing.draw(testing.frame(**size))) == "an axis is empty"
    square = replace(testing.draw(testing.frame(nk=13), mask=rg.Causal()), positions=rg.head(13, 13))
    assert why(square) is None
    for same in (rg.Positions(torch.arange(5, 18), torch.arange(5, 18)), rg.Positions(*(torch.arange(0, 26, 2),) * 2)):
        assert why(replace(square, positions=same)) is None
        testing.check(replace(square, positions=same), SDPA)
    backwards = torch.arange(13).flip(0)
    for others in ((torch.arange(1, 14), torch.arange(13)), (backwards, backwards), (torch.ones(13).long(),) * 2):
        assert "at the same positions" in (why(replace(square, positions=rg.Positions(*others))) or "")
    for name in "qkv":
        bad = getattr(square, name).clone()
        bad[1, 0, 3, 2] = math.nan
        assert why(replace(square, **{name: bad})) == "it lets what is not finite leak out of masked places"


def allowed(*shape: int) -> rg.Dense:
    seen = torch.rand(shape) < 0.6
    seen[..., 0] = True
    return rg.Dense(seen)


@pytest.mark.parametrize("batch", [(1,), (5,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("key_heads", [6, 2])
def test_what_it_takes_is_right(batch: tuple[int, ...], key_heads: int) -> None:
    at = testing.frame(batch)
    count = math.prod(batch)
    masks = [
        rg.Everything(),
        allowed(*batch, 6, 13, 17),
        allowed(1, 1, 13, 17),
        allowed(17),
        rg.Lengths(keys=torch.arange(3, 3 + count).reshape(batch)),
    ]
    for mask in masks:
        for scale in (None, 0.3):
            case = testing.draw(at, key_heads=key_heads, mask=mask, score=rg.ScaledDot(scale))
            assert why(case) is None
            testing.check(case, SDPA)
    square = testing.draw(testing.frame(batch, nk=13), key_heads=key_heads, mask=rg.Causal())
    testing.check(square, SDPA)


@pytest.mark.parametrize("axes", [(), (5,)])
def test_without_a_head_axis(axes: tuple[int, ...]) -> None:
    at = testing.frame(axes, 1, headed=False)
    for mask in (rg.Everything(), allowed(*axes, 13, 17)):
        testing.check(testing.draw(at, mask=mask), SDPA)


def test_shared_batch_axes_and_second_derivatives() -> None:
    case = testing.draw(testing.frame((2, 3)))
    testing.check(replace(case, k=case.k[:1], v=case.v[:, :1]), SDPA)
    small = testing.draw(testing.frame((1,), 2, 3, 5), dk=2, dv=2).leaves(F64)
    f = lambda *qkv: rg.attention(*qkv, backend=SDPA)  # noqa: E731
    assert torch.autograd.gradgradcheck(f, (small.q, small.k, small.v))


def test_it_prints_as_it_is_written() -> None:
    assert repr(rg.Sdpa()) == "Sdpa()" and eval(repr(SDPA), {"Sdpa": rg.Sdpa}) == SDPA


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("mask", [rg.Everything(), rg.Causal()], ids=str)
@pytest.mark.parametrize("lead", [(2, 4), (2,), (), (2, 3, 4)])
def test_calls_of_a_structure_seen_before(
    lead: tuple[int, ...], mask: rg.Mask, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan serves all lengths, looks for what is not finite each time, and needs no native kernels."""
    if not kernels:
        monkeypatch.setattr("regard.backends.native.direct.runnable", lambda: ())
    plan_cache.clear()
    q, k, v = torch.randn(3, *lead, 16, 8, dtype=F64).unbind(0)
    asked = list[rg.Mask]()
    choose = plan_cache.choose

    def counted(*args: Any, **options: Any) -> Any:
        asked.append(mask)
        return choose(*args, **options)

    monkeypatch.setattr(plan_cache, "choose", counted)
    for n in (16, 9, 1):
        given = [t[..., :n, :] for t in (q, k, v)]
        found = rg.attention(*given, mask=mask, backend=SDPA)
        torch.testing.assert_close(found, rg.attention(*given, mask=mask, backend=rg.Reference()))
    assert len(asked) == 2  # once for this structure, once for that of Reference
    v[..., 3, :] = torch.nan
    if isinstance(mask, rg.Causal):
        with pytest.raises(rg.Unsupported, match="lets what is not finite leak"):
            rg.attention(q, k, v, mask=mask, backend=SDPA)
    else:
        assert rg.attention(q, k, v, backend=SDPA).isnan().all()
    plan_cache.clear()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", [Flash, Efficient, Cudnn, FlashOnCpu])
def test_a_kernel_s_forward_fits_its_backward(kernel: type[FusedCall], causal: bool) -> None:
    """torch takes what these give its kernels, which this machine may not have: shapes alone, on the meta device."""
    q, k, v = (torch.empty(2, 4, 16, 8, dtype=torch.bfloat16, device="meta") for _ in range(3))
    call = kernel(causal, 0.3)
    out, saved = call.forward(q, k, v)
    found = call.backward(torch.empty_like(out), q, k, v, out, saved)
    assert [tuple(t.shape) for t in (out, *found)] == [tuple(q.shape)] * 4


@pytest.mark.parametrize("mask", [rg.Everything(), rg.Causal()], ids=str)
@pytest.mark.parametrize("lead", [((2,), (2,)), ((2, 4), (2, 4)), ((2, 4), (2, 2))], ids=str)
def test_a_backward_reads_what_its_forward_found(
    lead: tuple[tuple[int, ...], ...], mask: rg.Mask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's kernels run once forward and once backward, whatever the lengths. lead: the axes of q, of k and v."""
    monkeypatch.setattr(
        "regard.backends.sdpa.backend.recorded_backward", lambda *_: pytest.fail("the forward ran again")
    )
    plan_cache.clear()
    for n in (16, 9, 16):
        shapes = [(*axes, n, 8) for axes in (lead[0], lead[1], lead[1])]
        tensors = [torch.randn(shape, dtype=F64, requires_grad=True) for shape in shapes]
        cotangent = torch.randn(shapes[0], dtype=F64).mT.contiguous().mT
        for backend in (SDPA, rg.Reference()):
            out = rg.attention(*tensors, mask=mask, backend=backend)
            found = torch.autograd.grad(out, tensors, cotangent, retain_graph=True)
            twice = torch.autograd.grad(out, tensors, cotangent)
            if backend == SDPA:
                first = (out, *found, *twice)
        for got, right in zip(first, (out, *found, *twice), strict=True):
            torch.testing.assert_close(got, right)
    plan_cache.clear()


@pytest.mark.parametrize("mask", [rg.Everything(), rg.Causal()], ids=str)
def test_hooks_and_checkpoints_see_all_that_is_kept(mask: rg.Mask) -> None:
    """What the forward keeps goes through the caller's hooks, and comes back changed in no number."""
    plan_cache.clear()
    q, k, v = (torch.randn(2, 4, 16, 8, requires_grad=True) for _ in range(3))
    call = lambda *qkv: rg.attention(*qkv, mask=mask, backend=SDPA)  # noqa: E731
    right = torch.autograd.grad(call(q, k, v).square().sum(), (q, k, v))
    packed = list[int]()

    def pack(t: torch.Tensor) -> torch.Tensor:
        packed.append(t.numel())
        return t.clone()

    for _ in range(2):
        packed.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, torch.clone):
            out = call(q, k, v)
        assert sorted(packed)[-4:] == [q.numel()] * 4 and len(packed) >= 5  # the log-sum-exp among them
        for got, g in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), right, strict=True):
            torch.testing.assert_close(got, g)
        twice = torch.utils.checkpoint.checkpoint(call, q, k, v, use_reentrant=False)
        for got, g in zip(torch.autograd.grad(twice.square().sum(), (q, k, v)), right, strict=True):
            torch.testing.assert_close(got, g)
    out = call(q, k, v)
    with torch.no_grad():
        v.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    plan_cache.clear()
