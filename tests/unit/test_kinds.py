"""Cross-attention is known by what layers are called with: with caches, in any order, in models of other shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard as rg

IMAGE, TEXT = 6, 8  # tokens
LABELS = {"tokens": [f"t{n}" for n in range(TEXT)], "key_tokens": [f"p{n}" for n in range(IMAGE)]}


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, 4)).transpose(1, 2)


class Attention(nn.Module):
    """Self-attention with a cache, or cross-attention, whose keys a cache may hold from the second call on."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.keys = nn.Linear(8, 8), None

    def forward(self, x: Tensor, key_value_states: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
        self.keys = self.keys if key_value_states is None else key_value_states
        read = self.keys if seen is None else seen
        assert read is not None
        q, k = split(self.query(x)), split(read)
        n, m = q.shape[2], k.shape[2]
        mask = None if seen is None else torch.ones(n, m, dtype=torch.bool).tril(m - n)
        return F.scaled_dot_product_attention(q, k, k, mask).transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self, cross_first: bool) -> None:
        super().__init__()
        self.of_image, self.of_text, self.cross_first = Attention(), Attention(), cross_first

    def forward(self, x: Tensor, image: Tensor | None, seen: Tensor) -> Tensor:
        if self.cross_first:
            return self.of_text(x + self.of_image(x, key_value_states=image), seen=seen)
        x = x + self.of_text(x, seen=seen)
        return x + self.of_image(x, key_value_states=image)


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("cross_first", [False, True])
def test_steps_of_cross_attention(cross_first: bool, cached: bool) -> None:
    """Before the self-attention of each step, as in Flamingo, and with keys that are given once, as in Llama 3.2."""
    torch.manual_seed(0)
    x, image, model = torch.randn(1, TEXT, 8), torch.randn(1, IMAGE, 8), Block(cross_first)
    with torch.no_grad(), rg.record(model, facts=rg.Report.FACTS) as tape:
        for first, end in ((0, 5), (5, 6), (6, 7), (7, 8)):
            model(x[:, first:end], None if cached and first else image, x[:, :end])
    for labels in ({}, {"tokens": LABELS["tokens"]}, LABELS):
        report = rg.Report.of(tape, title="a text about an image", model="two layers", **labels)
        layers = {layer.name: layer for layer in report.layers}
        assert len(report.layers) == 2
        for layer in layers.values():
            assert layer.queries.positions.tolist() == list(range(TEXT))
            assert layer.queries.tokens == tuple(labels.get("tokens", ()))
        assert layers["of_image"].keys.tokens == tuple(labels.get("key_tokens", ()))
        assert not layers["of_image"].looks_at_itself


def test_arguments_that_a_class_does_not_know() -> None:
    model = Block(cross_first=False)
    own = model.of_image.forward

    def forward(x: Tensor, scale: float = 1.0, **others: Any) -> Tensor:
        return own(x * scale, **others)

    model.of_image.forward = forward  # type: ignore[method-assign]
    x, image = torch.randn(1, TEXT, 8), torch.randn(1, IMAGE, 8)
    with torch.no_grad(), rg.record(model) as tape:
        model.of_image(x, scale=2.0, key_value_states=image)
        model.of_image(x, key_value_states=image)
    assert [call.kind for call in tape.calls] == ["cross", "cross"]


def test_an_encoder_that_is_a_function() -> None:
    model = nn.Transformer(8, 2, num_decoder_layers=1, dim_feedforward=8, custom_encoder=lambda src, **_: src).eval()
    with torch.no_grad(), rg.record(model) as tape:
        model(torch.randn(IMAGE, 1, 8), torch.randn(TEXT, 1, 8))
    assert [call.kind for call in tape.calls] == ["self", "cross"]


def test_a_layer_that_encoder_and_decoder_share() -> None:
    model = nn.Transformer(8, 2, 1, 1, dim_feedforward=8, batch_first=True).eval()
    model.decoder.layers[0].self_attn = model.encoder.layers[0].self_attn
    with torch.no_grad(), rg.record(model) as tape:
        model(torch.randn(1, IMAGE, 8), torch.randn(1, TEXT, 8))
    assert [call.kind for call in tape.calls] == ["self", "self", "cross"]
