"""Masks, scores, sinks and dropout that a compiled function makes of numbers, which change from call to call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor

import regard as rg

pytestmark = pytest.mark.full  # torch's compiler takes seconds for each graph

MADE: dict[str, Callable[[int, float], dict[str, Any]]] = {
    "window": lambda n, x: {"mask": rg.Causal() & rg.Window(before=n, after=0)},
    "dilated": lambda n, x: {"mask": rg.Dilated(n)},
    "prefix": lambda n, x: {"mask": rg.Causal() | rg.Prefix(n)},
    "scale": lambda n, x: {"score": rg.ScaledDot(x)},
    "cosine": lambda n, x: {"score": rg.Cosine(x)},
    "soft cap": lambda n, x: {"score": rg.ScaledDot() >> rg.SoftCap(x)},
    "clamp": lambda n, x: {"score": rg.ScaledDot() >> rg.Clamp(-x, x)},
    "log distance": lambda n, x: {"score": rg.ScaledDot() >> rg.LogDistance(x, x)},
    "power distance": lambda n, x: {"score": rg.ScaledDot() >> rg.PowerDistance(x, x)},
    "sink": lambda n, x: {"sink": x},
    "dropout": lambda n, x: {"dropout": rg.Dropout(x / 2, seed=n)},
    "dropout without a seed": lambda n, x: {"dropout": rg.Dropout(x / 2)},
}


@pytest.mark.parametrize("name", MADE)
def test_values_that_a_graph_makes_of_numbers_that_change(name: str) -> None:
    """torch.compile makes symbols of numbers that change, for which it does not trace all that Python has."""
    torch._dynamo.reset()

    def call(q: Tensor, n: int, x: float) -> Tensor:
        return rg.attention(q, q, q, **MADE[name](n, x))

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    for length, n, x in ((8, 3, 0.25), (9, 4, 1.5), (10, 5, 1.25)):
        q = torch.randn(1, 2, length, 8)
        torch.manual_seed(n)
        got = compiled(q, n, x)
        torch.manual_seed(n)
        torch.testing.assert_close(got, call(q, n, x), rtol=1e-4, atol=2e-5)
