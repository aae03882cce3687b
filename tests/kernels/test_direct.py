"""Calls that native/python/ serves alone: the same bits, and left to Python where they must be."""

from __future__ import annotations

import ctypes
import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import regard as rg
from fuzz.build import Unplanned
from needed import needs_kernels, needs_shortcut
from regard.backends.native.direct import direct
from regard.backends.native.ffi import runnable
from regard.core.deferred import written_out
from regard.core.int8_rows import Int8Rows
from regard.masks.between import Between
from regard.runtime import plan_cache

pytestmark = needs_kernels


class Looks:
    """Counts the calls whose structure Python looked at, of those that name no backend."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, structure = 0, plan_cache.structure_of

        def counted(*given: object) -> object:
            self.count += given[-1] is None  # the backend
            return structure(*given)  # pyright: ignore

        monkeypatch.setattr(plan_cache, "structure_of", counted)

    def during(self, call: Callable[[], object]) -> int:
        before = self.count
        call()
        return self.count - before


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Looks]:
    plan_cache.clear()
    yield Looks(monkeypatch)
    plan_cache.clear()


def draw(nq: int = 5, nk: int = 5, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(torch.randn(2, h, n, d).to(dtype) for h, n, d in ((4, nq, 16), (2, nk, 16), (2, nk, 8)))  # pyright: ignore


def same(q: Tensor, k: Tensor, v: Tensor, **given: object) -> None:
    assert torch.equal(rg.attention(q, k, v, **given), rg.attention(q, k, v, **given, backend=Unplanned()))  # pyright: ignore


VALUES: dict[str, Callable[[int], dict[str, object]]] = {
    "plain": lambda n: {},
    "causal": lambda n: {"mask": rg.Causal()},
    "window": lambda n: {"mask": rg.Window(3, 0) & rg.Causal()},
    "lengths": lambda n: {"mask": rg.Lengths(keys=torch.tensor([n, n - 1])) & rg.Causal()},
    "left padding": lambda n: {"mask": Between(*torch.tensor([[[1], [0]], [[n], [n - 1]]], dtype=torch.int32))},
    "soft cap": lambda n: {"score": rg.ScaledDot(0.3) >> rg.SoftCap(4.0)},
    "sink": lambda n: {"sink": torch.full((4,), 0.1 * n)},
    "number as a sink": lambda n: {"sink": 0.5},
}


@needs_shortcut
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", VALUES)
def test_values_that_are_made_anew_for_each_call(looks: Looks, name: str, dtype: torch.dtype) -> None:
    for n in range(3, 9):
        nq = 1 if name == "left padding" else 2
        given = {**VALUES[name](n), "positions": rg.tail(nq, n)}
        q, k, v = draw(nq, n, dtype)
        if n > 3:
            assert looks.during(lambda q=q, k=k, v=v, given=given: rg.attention(q, k, v, **given)) == 0
        same(q, k, v, **given)


@needs_shortcut
@pytest.mark.parametrize("axes", [2, 3, 4, 5])
def test_axes_and_strides(looks: Looks, axes: int) -> None:
    def laid(n: int, d: int, spread: bool) -> Tensor:
        t = torch.randn(*(1, 3, 2, 2 * n, d)[-axes:])
        return t[..., ::2, :] if spread else t[..., :n, :].contiguous()

    for spread in ((False, False, False), (True, False, True), (False, True, True), (True, True, False)):
        q, k, v = (laid(4, d, s) for d, s in zip((8, 8, 6), spread, strict=True))
        same(q, k, v)
        same(q, k.expand(*k.shape), v[..., :1].expand(*v.shape))
    assert looks.during(lambda: same(q, k, v)) == 0


@needs_shortcut
def test_gradients(looks: Looks) -> None:
    for n in range(4, 8):
        q, k, v = (t.requires_grad_() for t in draw(n, n))
        g = torch.randn(2, 4, n, 8)
        sink = torch.randn(4)
        given = {"mask": rg.Causal(), "score": rg.ScaledDot() >> rg.SoftCap(3.0), "sink": sink}
        seen = looks.count
        found = torch.autograd.grad(rg.attention(q, k, v, **given), (q, k, v), g)
        assert looks.count - seen == (n == 4)
        out = rg.attention(q, k, v, **given, backend=Unplanned())
        for a, b in zip(found, torch.autograd.grad(out, (q, k, v), g), strict=True):
            assert torch.equal(a, b)


@needs_shortcut
@pytest.mark.parametrize("which", range(1, 8))
def test_who_has_a_gradient_is_told_apart(looks: Looks, which: int) -> None:
    q, k, v = draw()
    same(q, k, v)
    given = [t.clone().requires_grad_(bool(which >> n & 1)) for n, t in enumerate((q, k, v))]
    for _ in range(2):
        out = rg.attention(*given)
        out.sum().backward()
    assert [t.grad is not None for t in given] == [t.requires_grad for t in given]
    with torch.no_grad():
        out = rg.attention(*given)
        assert not out.requires_grad and looks.during(lambda: rg.attention(*given)) == 0


def test_a_tensor_of_the_score_that_wants_a_gradient(looks: Looks) -> None:
    q, k, v = draw()
    for _ in range(2):
        same(q, k, v, sink=torch.zeros(4))
    sink = torch.zeros(4, requires_grad=True)
    rg.attention(q, k, v, sink=sink).sum().backward()
    assert sink.grad is not None and sink.grad.abs().sum() > 0


def test_a_mask_like_the_last_one_is_not_the_last_one(looks: Looks) -> None:
    q, k, v = draw(9, 9)
    for _ in range(2):
        for mask in (rg.Window(3, 0), rg.Window(4, 0), rg.Window(3, 1), rg.Causal(), rg.Everything()):
            same(q, k, v, mask=mask)
        for score in (rg.ScaledDot(), rg.ScaledDot(0.5), rg.ScaledDot(1), rg.ScaledDot(1.0), rg.Dot()):
            same(q, k, v, score=score)
        for sink in (None, 0.5, 0.0, torch.zeros(4)):
            same(q, k, v, sink=sink)


def test_dtypes_and_widths_are_told_apart(looks: Looks) -> None:
    for _ in range(2):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for d in (8, 16):
                same(*(torch.randn(1, 2, 5, d, dtype=dtype) for _ in range(3)))


@needs_shortcut
def test_positions(looks: Looks) -> None:
    q, k, v = draw(3, 9)
    at = rg.tail(3, 9)
    for _ in range(2):
        same(q, k, v, mask=rg.Causal(), positions=at)  # the other backend reads its tensors
    at.q.add_(1)  # a tensor of its own
    assert looks.during(lambda: rg.attention(q, k, v, mask=rg.Causal(), positions=at)) == 0
    same(q, k, v, mask=rg.Causal(), positions=at)
    same(q, k, v, mask=rg.Causal(), positions=rg.Positions(torch.tensor([1, 5, 3]), torch.arange(9)))
    same(q, k, v, mask=rg.Causal(), positions=rg.head(3, 9))
    with pytest.raises(rg.ShapeError, match="positions"):
        rg.attention(q, k, v, mask=rg.Causal())
    with pytest.raises(rg.ShapeError, match="positions"):
        rg.attention(q, k, v, mask=rg.Causal(), positions=rg.tail(3, 8))
    with pytest.raises(rg.ShapeError):
        rg.attention(q, k, v[..., 1:, :])


@needs_shortcut
def test_who_watches_sees_the_call(looks: Looks) -> None:
    q, k, v = draw()
    for _ in range(2):
        rg.attention(q, k, v)
    assert looks.during(lambda: rg.attention(q, k, v)) == 0
    seen: list[object] = []

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Dispatches(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    for mode in (Functions, Dispatches):
        seen.clear()
        with mode():
            rg.attention(q, k, v)
        assert seen, mode
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert rg.attention(q, k, v).dtype == torch.bfloat16
    assert torch.func.vmap(rg.attention)(q[None], k[None], v[None]).shape == (1, 2, 4, 5, 8)
    with forward_ad.dual_level():
        out = rg.attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v)
        assert forward_ad.unpack_dual(out).tangent is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jit.trace has some
        traced = torch.jit.trace(lambda q, k, v: rg.attention(q, k, v), (q, k, v))
    assert torch.allclose(traced(2 * q, k, v), rg.attention(2 * q, k, v), atol=1e-6)


def test_tensors_that_cannot_be_read_where_they_lie(looks: Looks) -> None:
    q, k, v = draw()
    for _ in range(2):
        same(q, k, v)
    negative = torch.complex(torch.zeros_like(q), -q).conj().imag
    assert negative.is_neg() and torch.equal(rg.attention(negative, k, v), rg.attention(q, k, v))
    assert torch.equal(rg.attention(torch.nn.Parameter(q), k, v).detach(), rg.attention(q, k, v))
    assert isinstance(rg.attention(q.numpy(), k.numpy(), v.numpy()), type(q.numpy()))
    assert rg.attention(q.to("meta"), k.to("meta"), v.to("meta")).is_meta
    with pytest.raises(TypeError):
        rg.attention(q, k, None)


def test_another_instruction_set(looks: Looks, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = draw()
    for isa in (*runnable(), *runnable()):
        monkeypatch.setenv("REGARD_ISA", isa)
        same(q, k, v)
    monkeypatch.setenv("REGARD_ISA", "z80")
    with pytest.raises(ValueError, match="z80"):
        rg.attention(q, k, v)


def test_more_structures_than_are_remembered(looks: Looks) -> None:
    for n in (*range(1, 100), *range(1, 100)):
        q = torch.randn(1, 1, 3, n)
        same(q, q, q)


def test_forgotten_and_freed(looks: Looks) -> None:
    q, k, v = draw()
    mask = rg.Lengths(keys=torch.tensor([3, 4]))
    numbers = weakref.ref(mask.keys)
    for _ in range(3):
        rg.attention(q, k, v, mask=mask)
    del mask
    gc.collect()
    assert numbers() is None  # the tensors of a call do not outlive it
    plan = weakref.ref(plan_cache.plans()[0])
    direct().forget()
    assert looks.during(lambda: rg.attention(q, k, v)) == 1
    plan_cache.clear()
    gc.collect()
    assert plan() is None


def test_references_are_counted(looks: Looks) -> None:
    q, k, v = (t.requires_grad_() for t in draw(2, 6))
    mask, positions, sink = rg.Causal(), rg.tail(2, 6), torch.zeros(4)
    held = (q, k, v, mask, positions, sink, torch.float32, rg.Causal, None)

    def counts() -> list[int]:
        return [sys.getrefcount(x) for x in held]

    def call() -> None:
        with torch.no_grad():
            rg.attention(q, k, v, mask=mask, positions=positions, sink=sink)
        rg.attention(q, k, v, mask=mask, positions=positions).sum().backward()
        with pytest.raises(rg.ShapeError):
            rg.attention(q, k, v[..., 1:, :], mask=mask, positions=positions)

    for _ in range(3):
        call()
    gc.collect()
    before = counts()
    for _ in range(300):
        call()
    gc.collect()
    assert all(b - a < 100 for a, b in zip(before, counts(), strict=True))


@needs_shortcut
@pytest.mark.parametrize("pages", [0, 4])
def test_steps_over_keys_of_int8(looks: Looks, pages: int) -> None:
    """In tensors and in pages; tensors of int8, and rows whose scales lie elsewhere, are no such steps."""
    make = partial(rg.nn.PagedCache, 2, 2, 40, pages, 16, 8) if pages else partial(rg.nn.FixedCache, 2, 2, 40, 16, 8)
    cache, given = make(dtype=torch.int8), {"mask": rg.Causal()}
    with torch.no_grad():
        for step in range(6):
            q, k, v = draw(1, 1, torch.bfloat16)
            kv = cache.append(k, v)
            assert looks.during(lambda: same(q, *kv, **given, positions=cache.positions)) == (step == 0)  # noqa: B023
    q, n = torch.randn(2, 4, 1, 16, dtype=torch.bfloat16), kv[0].shape[-2]
    at = rg.tail(1, n)
    apart = [Int8Rows(t.numbers, written_out(t.scales).clone(), t.dtype) for t in kv]
    assert looks.during(lambda: same(q, *apart, **given, positions=at)) == bool(pages)
    with pytest.raises(TypeError, match=r"k has dtype torch\.int8"):
        rg.attention(q, *(written_out(t.numbers) for t in kv), **given, positions=at)


def test_no_answer_leaves_an_error_behind() -> None:
    """Python would raise it in the middle of another call, as a SystemError."""
    q, k, v = draw()
    plan_cache.clear()
    rg.attention(q, k, v, mask=rg.Causal(), positions=rg.tail(5, 5))
    (plan,) = plan_cache.plans()
    constants, struct = ctypes.addressof(plan.constants), plan.template.copy()  # pyright: ignore
    for span in (((1 << 70, 5), (0, 5), None), (((1 << 70, 0), 5), (0, 5), None), ((0, 5), (-(1 << 70), 5), None)):
        assert direct().bind(constants, ctypes.addressof(struct), q, k, v, span) is None
    assert direct().bind(constants, ctypes.addressof(struct), q, k, v, ((0, 5), (0, 5), None)) is not None
