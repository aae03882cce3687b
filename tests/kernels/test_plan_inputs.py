"""What a plan reads of a later call is what that call has: its lengths, its layout, its kind of tensor, its dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import regard as rg
import regard.runtime.plan_cache as plan_cache
from regard.backends.native.ffi import runnable

pytestmark = pytest.mark.skipif(not runnable(), reason="needs the native kernels")
NQ, NK, HEADS = 5, 13, 3


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    plan_cache.clear()
    yield
    plan_cache.clear()


def tensors(needs: bool = False) -> list[Tensor]:
    random = torch.Generator().manual_seed(7)
    counts = (NQ, NK, NK)
    return [torch.randn(2, HEADS, n, 8, generator=random).requires_grad_(needs) for n in counts]


def right(q: Tensor, k: Tensor, v: Tensor, **call: Any) -> Tensor:
    return rg.attention(q, k, v, backend=rg.Reference(), **call)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("place", [rg.tail, rg.head])
@pytest.mark.parametrize("reads", [True, False], ids=["positions read", "positions unread"])
@pytest.mark.parametrize("seen", [rg.Causal(), rg.Everything()])
def test_lengths_are_those_of_the_call(
    mode: Any, place: Callable[[int, int], rg.Positions], seen: rg.Mask, reads: bool
) -> None:
    q, k, v = tensors()
    with mode():
        # all at once: memory that the second took over from the first would hide an old address
        masks = [seen & rg.Lengths(keys=torch.tensor(lengths)) for lengths in ([13, 4], [7, 13], [1, 9])]
        for mask in masks:
            at = place(NQ, NK)
            if reads:
                _ = at.q, at.k
            found = rg.attention(q, k, v, mask=mask, positions=at)
            torch.testing.assert_close(found, right(q, k, v, mask=mask, positions=place(NQ, NK)))


@pytest.mark.parametrize("counts", ["keys", "queries", "both"])
@pytest.mark.parametrize("lay", [lambda t: torch.stack([t, t + 1], 1)[:, 0], lambda t: t[:1].expand(2)])
@pytest.mark.parametrize("rest", [rg.Everything(), rg.Causal(), rg.Dense(torch.ones(NK, dtype=torch.bool))])
def test_lengths_of_any_layout(counts: str, lay: Callable[[Tensor], Tensor], rest: rg.Mask) -> None:
    for lengths in ([3, 11], [9, 2]):
        named = {
            "keys": lay(torch.tensor(lengths)) if counts != "queries" else None,
            "queries": lay(torch.tensor([n % 5 + 1 for n in lengths])) if counts != "keys" else None,
        }
        found, expected = tensors(True), tensors(True)
        weight = torch.randn(2, HEADS, NQ, 8)
        call = {"mask": rg.Lengths(**named) & rest, "positions": rg.tail(NQ, NK)}
        for each, run in ((found, rg.attention), (expected, right)):
            (run(*each, **call) * weight).sum().backward()
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a.grad, b.grad)
        plain = [t.detach() for t in found]
        torch.testing.assert_close(rg.attention(*plain, **call), right(*plain, **call))
        state = rg.attention_state(*plain, **call).finish()
        torch.testing.assert_close(state, rg.attention_state(*plain, **call, backend=rg.Reference()).finish())


class Wrapped(Tensor):
    """A tensor without memory of its own, as quantised and distributed tensors are."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, strides=inner.stride())
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        bare = torch.utils._pytree.tree_map_only(Wrapped, lambda t: t.inner, (args, kwargs or {}))
        return func(*bare[0], **bare[1])


CALLS: dict[str, tuple[Tensor, Callable[[Any], dict[str, Any]]]] = {
    "bias": (torch.randn(HEADS, NQ, NK), lambda t: {"score": rg.ScaledDot() >> rg.Bias(t)}),
    "slopes": (torch.rand(HEADS), lambda t: {"score": rg.ScaledDot() >> rg.Alibi(t), "positions": rg.tail(NQ, NK)}),
    "sink": (torch.randn(HEADS), lambda t: {"sink": t}),
    "lengths": (torch.tensor([3, 11]), lambda t: {"mask": rg.Lengths(keys=t)}),
    "mask": (torch.rand(HEADS, NQ, NK) < 0.5, lambda t: {"mask": rg.Dense(t)}),
    "scale": (torch.tensor(0.3), lambda t: {"score": rg.ScaledDot(t)}),
}


def call_with_plans(t: Tensor, needs: bool, call: Callable[[Any], dict[str, Any]]) -> None:
    """Leaves a plan for a plain tensor, and what native/python/ remembers of it."""
    for _ in range(2):
        rg.attention(*tensors(needs), **call(t))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("needs", [False, True], ids=["forward", "training"])
def test_a_tensor_that_wraps_another_is_read_by_its_own_operations(name: str, needs: bool) -> None:
    t, call = CALLS[name]
    call_with_plans(t, needs, call)
    torch.testing.assert_close(rg.attention(*tensors(needs), **call(Wrapped(t))), right(*tensors(needs), **call(t)))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("needs", [False, True], ids=["forward", "training"])
def test_a_tensor_without_numbers_is_refused(name: str, needs: bool) -> None:
    t, call = CALLS[name]
    call_with_plans(t, needs, call)
    with pytest.raises(AssertionError, match="Please convert all Tensors to FakeTensors first"):
        rg.attention(*tensors(needs), **call(FakeTensorMode().from_tensor(t)))


def test_a_parameter_is_read_where_it_lies() -> None:
    slopes = torch.nn.Parameter(torch.rand(HEADS))
    calls = {"score": rg.ScaledDot() >> rg.Alibi(slopes), "positions": rg.tail(NQ, NK)}
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(rg.attention(*tensors(), **calls), right(*tensors(), **calls))
            slopes.mul_(0.5)


@pytest.mark.parametrize("which", ["q", "k", "slopes"])
def test_a_wrapper_that_outlived_its_transform_is_read_through(which: str) -> None:
    """What torch.func.grad hands to a function, kept beyond it, has no memory of its own."""
    left: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        left.append(x * 1.0)
        return x.sum()

    q, k, v = tensors(needs=True)
    given = {"q": q, "k": k, "slopes": torch.rand(HEADS)}
    torch.func.grad(keep)(given[which].detach())
    given[which] = left[0]
    call = {"score": rg.ScaledDot() >> rg.Alibi(given["slopes"]), "positions": rg.tail(NQ, NK)}
    for _ in range(2):
        out, expected = rg.attention(given["q"], given["k"], v, **call), right(given["q"], given["k"], v, **call)
        torch.testing.assert_close(out, expected)
        found, wanted = (torch.autograd.grad(o.sin().sum(), v)[0] for o in (out, expected))
        torch.testing.assert_close(found, wanted)
