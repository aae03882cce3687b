"""Calls in which no query sees a key: the derivatives are 0, of first and of second order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from needed import needs_kernels
from regard.backends.base import Backend

NATIVE = pytest.param(rg.Native(), marks=needs_kernels)
BACKENDS = [NATIVE, None, rg.Tiled(rows=2, keys=3), rg.Reference()]


def scores(q: Tensor, k: Tensor, sink: object = None, **given: Any) -> Tensor:
    """attention_scores of a call that may have a sink, which has no score."""
    return rg.attention_scores(q, k, **given)


Function = Callable[[Tensor, Tensor, Tensor, Backend | None, dict[str, Any]], Tensor]
FUNCTIONS: dict[str, Function] = {
    "attention": lambda q, k, v, backend, given: rg.attention(q, k, v, backend=backend, **given),
    "lse": lambda q, k, v, backend, given: rg.attention_state(q, k, v, backend=backend, **given).finish()[1],
    "attention_weights": lambda q, k, v, backend, given: rg.attention_weights(q, k, **given),
    "attention_scores": lambda q, k, v, backend, given: scores(q, k, **given),
    "entropy": lambda q, k, v, backend, given: rg.entropy(q, k, **given),
    "max_score": lambda q, k, v, backend, given: rg.max_score(q, k, **given),
}
HIDDEN: dict[str, tuple[int, int, dict[str, Any]]] = {
    "mask": (5, 7, {"mask": ~rg.Everything()}),
    "lengths": (5, 7, {"mask": rg.Lengths(keys=torch.tensor([0, 0]))}),
    "booleans": (5, 7, {"mask": rg.Dense(torch.zeros(7, dtype=torch.bool))}),
    "bias": (5, 7, {"score": rg.ScaledDot() >> rg.Bias(torch.full((7,), -torch.inf))}),
    "no keys": (5, 0, {}),
    "no queries": (0, 7, {}),
    "neither": (0, 0, {}),
}


CASES = [(function, hidden) for function in FUNCTIONS for hidden in HIDDEN]
# an answer of no rows is no part of a graph
CASES = [case for case in CASES if not (case[0].startswith("attention_") and case[1] in ("no queries", "neither"))]


@pytest.mark.parametrize("backend", BACKENDS, ids=repr)
@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize(("function", "hidden"), CASES)
def test_all_derivatives_are_0(function: str, hidden: str, sink: bool, backend: Backend | None) -> None:
    nq, nk, given = HIDDEN[hidden]
    logit = torch.zeros(3, requires_grad=True)
    given = {**given, "sink": logit} if sink else given
    leaves = tuple(torch.randn(2, 3, n, 4, requires_grad=True) for n in (nq, nk, nk))
    found = FUNCTIONS[function](*leaves, backend, given)
    asked = leaves if function == "attention" else leaves[:2]
    first = torch.autograd.grad(found.sum(), asked, retain_graph=True)
    again = torch.autograd.grad(found.sum(), asked, create_graph=True)
    for t, g, h in zip(asked, first, again, strict=True):
        assert g.shape == h.shape == t.shape and not g.any() and not h.any()
    # a penalty on gradients is differentiated without a look at what anyone sees
    second = torch.autograd.grad(sum(g.square().sum() for g in again), leaves, materialize_grads=True)
    assert not any(g.any() for g in second)
