"""A backward computes scores and masks again: from what their functions read when the call was made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import regard as rg
from regard.core import functions
from regard.core.functions import bound, with_bound
from regard.core.region import Region
from regard.runtime.binding import BoundCall

REACH = 5


@dataclass(frozen=True)
class Applied(rg.Modifier):
    """A modifier with a function in a field."""

    fn: Callable[[Tensor], Tensor]

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return self.fn(s)


def tensors() -> list[Tensor]:
    random = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 20, 8, generator=random) for _ in "qkv"]


@pytest.mark.parametrize("backend", [rg.Reference(), rg.Tiled(), None])
def test_a_variable_of_a_loop(backend: rg.Backend | None) -> None:
    q, k, v = tensors()
    leaves, outs = list[Tensor](), list[Tensor]()
    for w in (5, 9):
        leaves.append(q.clone().requires_grad_())
        score = rg.ScaledDot() >> Applied(lambda s: s * w)  # noqa: B023
        mask = rg.Where(lambda b, h, i, j: (i - j).abs() < w)  # noqa: B023
        outs.append(rg.attention(leaves[-1], k, v, score=score, mask=mask, backend=backend))
    for w, leaf, out in zip((5, 9), leaves, outs, strict=True):
        x = q.clone().requires_grad_()
        right = rg.attention(x, k, v, score=rg.ScaledDot(w / 8**0.5), mask=rg.Window(w - 1, w - 1))
        expected = torch.autograd.grad(right.square().sum(), x)[0]
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), leaf)[0], expected, rtol=1e-4, atol=1e-4)


def gradient(call: Callable[[Tensor], Tensor], change: Callable[[], object] = tuple) -> Tensor:
    x = tensors()[0].requires_grad_()
    out = call(x)
    change()
    return torch.autograd.grad(out.square().sum(), x)[0]


CALLS: dict[str, Callable[[Tensor, dict[str, Any]], Tensor]] = {
    "attention": lambda x, given: rg.attention(x, *tensors()[1:], **given),
    "attention, tiled": lambda x, given: rg.attention(x, *tensors()[1:], **given, backend=rg.Tiled()),
    "weights": lambda x, given: rg.attention_weights(x, tensors()[1], **given),
    "state": lambda x, given: rg.attention_state(x, *tensors()[1:], **given).finish()[1],
    "entropy": lambda x, given: rg.entropy(x, tensors()[1], **given),
    "over parts": lambda x, given: rg.attention_over(
        x, [(t, u) for t, u in zip(*(t.split(7, -2) for t in tensors()[1:]), strict=True)], **given
    ),
}
READS: dict[str, Callable[[dict[str, int], list[int]], Callable[..., Any]]] = {
    "a dictionary": lambda named, listed: lambda b, h, i, j: (i - j).abs() < named["w"],
    "a list": lambda named, listed: lambda b, h, i, j: (i - j).abs() < listed[0],
    "a global": lambda named, listed: lambda b, h, i, j: (i - j).abs() < REACH,
}


@pytest.mark.parametrize("reads", READS)
@pytest.mark.parametrize("call", CALLS)
def test_what_changes_between_forward_and_backward(call: str, reads: str, monkeypatch: pytest.MonkeyPatch) -> None:
    named, listed = {"w": 5}, [5]
    given = {"mask": rg.Where(READS[reads](named, listed))}

    def change() -> None:
        named["w"] = listed[0] = 15
        monkeypatch.setattr(f"{__name__}.REACH", 15)

    found = gradient(lambda x: CALLS[call](x, given), change)
    torch.testing.assert_close(found, gradient(lambda x: CALLS[call](x, {"mask": rg.Window(4, 4)})))


@pytest.mark.parametrize("learned", [False, True])
def test_functions_are_copied_for_a_backward_alone(learned: bool) -> None:
    q, k, v = tensors()
    w = 5
    mask = rg.Where(lambda b, h, i, j: (i - j).abs() < w)
    call = BoundCall(q.requires_grad_(learned), k, v, rg.ScaledDot(), mask, None, None, None)
    assert (call.problem.mask is mask) == (not learned)


def test_functions_that_cannot_change_stay_as_they_are() -> None:
    fixed = rg.Where(lambda b, h, i, j: torch.minimum(i, j) >= 3)
    both = rg.Causal() & fixed
    assert with_bound(both) is both
    count = 0

    def counted(x: int) -> int:
        nonlocal count
        count += 1
        return x

    assert bound(counted) is counted


def test_a_list_that_a_function_writes_into_is_the_callers() -> None:
    seen: list[int] = [0]

    def near(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen.append(i.numel())
        return (i - j).abs() < 5

    gradient(lambda x: rg.attention(x, *tensors()[1:], mask=rg.Where(near)))
    assert len(seen) > 1


def test_functions_that_read_one_another_are_copied_once() -> None:
    def even(n: int) -> bool:
        return n == 0 or odd(n - 1)

    def odd(n: int) -> bool:
        return n != 0 and even(n - 1)

    with patch.object(functions, "_reading", wraps=functions._reading) as copies:
        found = bound(even)
    assert found(4) and not found(3) and copies.call_count == 2


def test_functions_in_a_tuple() -> None:
    n = 1
    both = (lambda x: x + n, lambda x: x - n)
    found = bound(lambda x: both[0](x))
    n = 5
    assert found(10) == 11 and both[0](10) == 15


class Windows(torch.nn.Module):
    """Two calls whose masks read the variable of a loop."""

    def forward(self, x: Tensor) -> Tensor:
        for w in (3, 15):
            x = rg.attention(x, x, x, mask=rg.Where(lambda b, h, i, j: (i - j).abs() < w))  # noqa: B023
        return x


def test_a_recording_keeps_functions_as_they_were() -> None:
    model, (q, _, _) = Windows(), tensors()
    with torch.no_grad(), rg.record(model, (rg.facts.Inputs(),)) as tape:
        model(q)
    for call, w in zip(tape.calls, (3, 15), strict=True):
        kept = call[rg.facts.Inputs()]
        found = rg.attention_weights(kept.q, kept.k, score=kept.score, mask=kept.mask)
        torch.testing.assert_close(found, rg.attention_weights(kept.q, kept.k, mask=rg.Window(w - 1, w - 1)))


def test_a_second_derivative_reads_what_the_forward_read() -> None:
    q, k, v = tensors()
    found: list[Tensor] = []
    for n in (2.0, 2.0):  # the second call has a plan
        leaf = q.clone().requires_grad_()
        out = rg.attention(leaf, k, v, score=rg.ScaledDot() >> Applied(lambda s: s * n))  # noqa: B023
        n = 7.0
        (first,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
        found += [first.detach(), torch.autograd.grad(first.square().sum(), leaf)[0]]
    leaf = q.clone().requires_grad_()
    out = rg.attention(leaf, k, v, score=rg.ScaledDot(2.0 / 8**0.5))
    (first,) = torch.autograd.grad(out.square().sum(), leaf, create_graph=True)
    expected = [first.detach(), torch.autograd.grad(first.square().sum(), leaf)[0]]
    torch.testing.assert_close(found, expected * 2, rtol=1e-3, atol=1e-4)


@dataclass(frozen=True)
class Same(rg.Modifier):
    """Adds 1 where queries and keys have the same number."""

    ids: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s + (at.queries(self.ids) == at.keys(self.ids)).to(s.dtype)


@pytest.mark.parametrize("backend", [rg.Tiled(), None])
def test_whole_numbers_of_a_modifier_stay_whole_in_a_backward(backend: rg.Backend | None) -> None:
    q, k, v = tensors()
    ids = torch.arange(20) // 2 + (torch.arange(20) % 2) + (1 << 40)  # neighbours differ by one
    leaf, exact = q.clone().requires_grad_(), q.clone().double().requires_grad_()
    score = rg.ScaledDot() >> Same(ids)
    out = rg.attention(leaf, k, v, score=score, backend=backend)
    bias = (ids[:, None] == ids).double() + 1.0  # of 1 for all nothing changes
    right = rg.attention(exact, k.double(), v.double(), score=rg.ScaledDot() >> rg.Bias(bias))
    found, expected = (torch.autograd.grad(x.square().sum(), t)[0] for x, t in ((out, leaf), (right, exact)))
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-5)


@dataclass(frozen=True)
class Gained(rg.Modifier):
    """A function of a score, times a number for each head."""

    gain: Tensor
    fn: Callable[[Tensor], Tensor]

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return self.fn(s) * at.heads(self.gain)


def test_a_checkpoint_of_a_first_call_with_functions() -> None:
    (q, k, v), ones = tensors(), torch.ones(2)
    leaf = q.clone().requires_grad_()

    def call(x: Tensor) -> Tensor:
        score = rg.ScaledDot() >> Gained(ones, lambda s: s * 1.5 + 0.25)
        return rg.attention(x, k, v, score=score, mask=rg.Where(lambda b, h, i, j: (i - 2 * j).abs() < 31))

    out = checkpoint(call, leaf, use_reentrant=False)
    (found,) = torch.autograd.grad(out.square().sum(), leaf)
    (expected,) = torch.autograd.grad(call(leaf).square().sum(), leaf)
    torch.testing.assert_close(found, expected)
