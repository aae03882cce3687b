"""Saved-tensor hooks may bring back every tensor with other strides, and the gradients stay the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import regard as rg
from fuzz.build import Unplanned
from needed import needs_kernels
from regard import testing
from regard.backends.native.modifiers.table import why_not_learned
from regard.runtime import plan_cache

pytestmark = needs_kernels

# queries of the kernels of blocks, and few enough for those of rows
FRAMES = {
    "blocks": testing.frame(batch=(2,), heads=4, nq=67, nk=71),
    "few queries": testing.frame(batch=(2,), heads=2, nq=3, nk=71),
}


def other_strides(t: Tensor) -> Tensor:
    """The axes in the opposite order, no two elements beside each other."""
    made = t.new_empty((*t.shape[::-1], 2))[..., 0]
    return made.permute(*range(t.dim())[::-1]).copy_(t)


def check_gradients(given: list[Tensor], run: Callable[[], Tensor]) -> None:
    """The gradients of `given` with and without the hooks."""
    found: list[tuple[Tensor | None, ...]] = []
    for unpack in (lambda t: t, other_strides):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
            out = run()
            cotangent = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out.dtype)
            found.append(torch.autograd.grad(out, given, cotangent, allow_unused=True))
    for right, mine in zip(*found, strict=True):
        if mine is not None and mine.numel():  # sums in another order differ by roundings of the largest
            torch.testing.assert_close(mine, right, rtol=0, atol=1e-4 * max(float(right.abs().max()), 1.0))


def calls(size: str) -> Iterator[testing.Case]:
    """Each mask, and each score, that the kernels have, on leaves."""
    at = FRAMES[size]
    drawn = [testing.draw(at, mask=mask) for mask in testing.masks(at).values()]
    drawn += [testing.draw(at, score=score, mask=rg.Causal()) for score in testing.scores(at).values()]
    for case in drawn:
        call = case.leaves(torch.float32)
        if rg.Native().why_not(call.problem, lse=False) is None:
            yield call


@pytest.mark.parametrize("backend", [None, rg.Native(), Unplanned()], ids=repr)
@pytest.mark.parametrize("size", FRAMES)
def test_every_mask_and_score(size: str, backend: rg.Backend | None) -> None:
    tried = 0
    for call in calls(size):
        plan_cache.clear()
        how = {"score": call.score, "mask": call.mask, "sink": call.sink, "positions": call.positions}

        def run(call: testing.Case = call, how: dict[str, object] = how) -> Tensor:
            return rg.attention(call.q, call.k, call.v, **how, dropout=call.dropout, backend=backend)

        check_gradients(list(call.differentiable.values()), run)
        tried += 1
    assert tried > 30


def fixed(call: testing.Case) -> testing.Case:
    """The same call with a score that learns nothing, which has a plan."""
    for t in call.score.tensors():
        t.requires_grad_(False)
    return call


def given_to(call: testing.Case) -> dict[str, Any]:
    """What `attention` is given besides q, k and v."""
    how = {"score": call.score, "mask": call.mask, "sink": call.sink, "positions": call.positions}
    return {**how, "dropout": call.dropout}


@pytest.mark.parametrize("size", FRAMES)
def test_the_first_call_saves_as_many_tensors_as_those_with_a_plan(size: str) -> None:
    """A checkpoint compares the two, and fails where they differ."""
    at = FRAMES[size]
    additive = rg.Additive(torch.randn(7, 12), torch.randn(7, 12), torch.randn(12))
    for call in [*calls(size), *map(fixed, calls(size)), testing.draw(at, score=additive).leaves(torch.float32)]:
        plan_cache.clear()
        counts = []
        for _ in range(3):
            saved: list[Tensor] = []
            with torch.autograd.graph.saved_tensors_hooks(lambda t, saved=saved: saved.append(t) or t, lambda t: t):
                rg.attention(call.q, call.k, call.v, **given_to(call))
            counts.append(len(saved))
        assert len(set(counts)) == 1, (call.score, call.mask, counts)


@pytest.mark.full
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("size", FRAMES)
def test_what_is_changed_in_place_is_noticed_or_changes_no_gradient(size: str, twice: bool) -> None:
    """Every tensor of a call, between its forward and its backward; with and without a plan."""
    noticed = 0
    for call in map(fixed, calls(size)):
        at = call.problem.frame.positions
        call = replace(call, positions=rg.Positions(at.q.clone(), at.k.clone()))
        leaves = [t for t in call.differentiable.values() if t.requires_grad]
        described = *call.score.tensors(), *call.mask.tensors(), *call.positions.tensors()
        for t in (call.q, call.k, call.v, *described, *(() if call.sink is None else (call.sink,))):
            for way in ("general", "plan") if t.numel() else ():
                backend = Unplanned() if way == "general" else None
                out = rg.attention(call.q, call.k, call.v, **given_to(call), backend=backend)
                right = torch.autograd.grad(out.sum(), leaves, retain_graph=True, allow_unused=True)
                before = t.detach().clone()
                with torch.no_grad():
                    t.copy_(~t if t.dtype == torch.bool else t.flip(0) + 1)
                try:
                    mine = torch.autograd.grad(out.sum(), leaves, create_graph=twice, allow_unused=True)
                except RuntimeError as error:
                    assert "modified by an inplace operation" in str(error)  # noqa: PT017
                    noticed += 1
                else:
                    for a, b in zip(mine, right, strict=True):
                        assert a is b or testing.error(a.detach(), b) < 1e-5, (call.score, call.mask, t)
                with torch.no_grad():
                    t.copy_(before)
    assert noticed > 100


@pytest.mark.parametrize("size", FRAMES)
def test_additive_scores(size: str) -> None:
    at = FRAMES[size]
    w_q, w_k, b, w = (torch.randn(shape) / 2 for shape in ((7, 12), (7, 12), (12,), (12,)))
    for activation in (rg.Tanh(), rg.LeakyReLU(0.1)):
        call = testing.draw(at, score=rg.Additive(w_q, w_k, w, b, activation)).leaves(torch.float32)

        def run(call: testing.Case = call) -> Tensor:
            return rg.attention(call.q, call.k, call.v, score=call.score, backend=rg.Native())

        check_gradients(list(call.differentiable.values()), run)


@pytest.mark.parametrize("size", FRAMES)
def test_the_node_of_a_graph(size: str) -> None:
    tried = 0
    for call in calls(size):
        needs = tuple(t.requires_grad for t in call.problem.tensors())
        streamed = isinstance(call.problem.similarity, rg.Additive) or why_not_learned(call.problem, needs)
        if not streamed:
            check_gradients(list(call.differentiable.values()), lambda call=call: rg.Native().traced(call.problem)[0])
            tried += 1
    assert tried > 20


def test_a_shared_key_head_that_was_expanded() -> None:
    q, v = (torch.randn(2, 4, 23, 16, requires_grad=True) for _ in range(2))
    k = torch.randn(2, 1, 23, 16, requires_grad=True)
    check_gradients([q, k, v], lambda: rg.attention(q, k.expand(2, 4, 23, 16), v))


RUNS: dict[str, Callable[[Tensor, Tensor, Tensor, rg.Score], Tensor]] = {
    "a plan": lambda q, k, v, score: rg.attention(q, k, v, mask=rg.Causal()),
    "native": lambda q, k, v, score: rg.attention(q, k, v, score=score, mask=rg.Causal(), backend=Unplanned()),
    "tiled": lambda q, k, v, score: rg.attention(q, k, v, score=score, mask=rg.Causal(), backend=rg.Tiled()),
    "reference": lambda q, k, v, score: rg.attention(q, k, v, score=score, mask=rg.Causal(), backend=rg.Reference()),
    "state": lambda q, k, v, score: rg.attention_state(q, k, v, score=score, mask=rg.Causal()).o,
    "weights": lambda q, k, v, score: rg.attention_weights(q, k, score=score, mask=rg.Causal()) @ v,
    "entropy": lambda q, k, v, score: rg.entropy(q, k, score=score, mask=rg.Causal()),
}


@pytest.mark.parametrize("name", RUNS)
def test_autograd_alone_keeps_the_tensors_of_a_call(name: str) -> None:
    """Hooks may put them elsewhere (offloading, checkpoints): their memory is then free until the backward."""
    at = FRAMES["blocks"]
    x = torch.randn(3, *at.batch, at.heads, at.nq, 16, requires_grad=True)
    table = torch.randn(at.nq, at.nq, requires_grad=True)

    def run() -> tuple[Tensor, list[StorageWeakRef]]:
        (q, k, v), bias = (part * 3 for part in x), table * 3
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t):
            out = RUNS[name](q, k, v, rg.ScaledDot() >> rg.Bias(bias))
        return out, [StorageWeakRef(t.untyped_storage()) for t in (q, k, v, bias)]

    plan_cache.clear()
    for _ in range(2):  # the second call of its kind may have a plan
        out, held = run()
        assert [storage.expired() for storage in held] == [True] * 4
        found = torch.autograd.grad(out.sum(), (x, table), allow_unused=True)
        assert found[0] is not None


def test_positions_that_change_while_hooks_hold_copies() -> None:
    """Gradients are those at the positions of the forward, which the hooks saved."""
    found = []
    for changed in (False, True):
        plan_cache.clear()
        torch.manual_seed(0)
        q, k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in "qkv")
        at = rg.Positions(torch.arange(5) * 3, torch.arange(5) * 2)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            out = rg.attention(q, k, v, score=rg.ScaledDot() >> rg.Alibi(torch.tensor([0.5, 0.25])), positions=at)
        if changed:
            at.q.add_(7)
        found.append(torch.autograd.grad(out.square().sum(), (q, k, v)))
    for mine, right in zip(*found, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)
