"""What is recorded of calls of regard's own: the function, the layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import regard as rg
from recorded_models import FACTS, Plain, measure

F64 = torch.float64


def test_regards_own_function_is_seen_with_its_arguments() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            score = rg.ScaledDot() >> rg.SoftCap(3.0)
            return rg.attention(x, x[:, :1], x[:, :1], score=score, mask=rg.Causal(), sink=0.5)

    model, x = Own(), torch.randn(2, 4, 5, 8, dtype=F64)
    with rg.record(model, FACTS) as tape:
        model(x)
    expected = rg.attention_weights(x, x[:, :1], score=rg.ScaledDot() >> rg.SoftCap(3.0), mask=rg.Causal(), sink=0.5)
    (call,) = tape.calls
    measure(call, expected)


def test_regards_layer_is_told_of_once() -> None:
    layer, x = rg.nn.MultiHeadAttention(12, heads=3, key_heads=1, rotary=rg.nn.Rotary(4)), torch.randn(2, 7, 12)
    with rg.record(layer, FACTS) as tape:
        layer(x, mask=rg.Causal())
    (call,) = tape.calls
    measure(call, layer.weights(x, mask=rg.Causal()).detach())
    assert call.view.mask == rg.Causal()


def test_one_layer_may_call_twice() -> None:
    class Twice(Plain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x))

    model = Twice()
    with rg.record(model) as tape:
        model(torch.randn(1, 5, 12))
    assert [(call.name, call.number) for call in tape.calls] == [("Twice", 0), ("Twice", 1)]
