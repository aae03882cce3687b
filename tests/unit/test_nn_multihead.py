"""MultiHeadAttention: what its heads add up to, and what can be done to it."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import regard as rg

exact = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
DOUBLE = {"dtype": torch.float64}
BATCH, NQ, NK = 2, 7, 11

LAYERS = {
    "plain": ({}, 15, 3),
    "no bias": ({"bias": False}, 15, 3),
    "grouped": ({"key_heads": 2}, 12, 6),
    "one key head": ({"key_heads": 1, "d_v": 7}, 12, 6),
    "unequal widths": ({"d_k": 5, "d_v": 7, "d_out": 13}, 11, 3),
    "cross": ({"d_context": 19, "d_v": 5, "key_heads": 1}, 15, 3),
    "every option": (
        {"d_k": 4, "d_v": 5, "key_heads": 2, "sink": 0.3, "rotary": rg.nn.Rotary(2), "qk_norm": nn.RMSNorm},
        6,
        4,
    ),
}


def build(name: str, **more: object) -> rg.nn.MultiHeadAttention:
    options, width, heads = LAYERS[name]
    layer = rg.nn.MultiHeadAttention(width, heads, **DOUBLE, **options, **more)  # type: ignore[arg-type]
    for n, p in layer.named_parameters():
        if n.endswith(("bias", "norm.weight", "sink")):
            nn.init.normal_(p)
    return layer


def written_out(layer: rg.nn.MultiHeadAttention, x: Tensor, c: Tensor) -> Tensor:
    """The formula, a head, a batch element and a query at a time."""
    group = layer.heads // layer.key_heads

    def part(linear: nn.Module, t: Tensor, head: int, width: int) -> Tensor:
        assert isinstance(linear, nn.Linear)
        rows = slice(head * width, (head + 1) * width)
        return t @ linear.weight[rows].T + (0 if linear.bias is None else linear.bias[rows])

    heads = []
    for i in range(layer.heads):
        q, k, v = (
            part(layer.q_proj, x, i, layer.d_k),
            part(layer.k_proj, c, i // group, layer.d_k),
            part(layer.v_proj, c, i // group, layer.d_v),
        )
        heads.append(torch.softmax(q @ k.mT / math.sqrt(layer.d_k), -1) @ v)
    assert isinstance(layer.out_proj, nn.Linear)
    return torch.cat(heads, -1) @ layer.out_proj.weight.T + (0 if layer.out_proj.bias is None else layer.out_proj.bias)


def inputs(layer: rg.nn.MultiHeadAttention) -> tuple[Tensor, Tensor | None]:
    x = torch.randn(BATCH, NQ, layer.d_model, **DOUBLE)
    return x, None if layer.d_context == layer.d_model else torch.randn(BATCH, NK, layer.d_context, **DOUBLE)


@pytest.mark.parametrize("name", [n for n in LAYERS if n != "every option"])
def test_it_is_the_formula(name: str) -> None:
    layer = build(name)
    x, c = inputs(layer)
    out = layer(x, c)
    assert out.shape == (BATCH, NQ, layer.out_proj.out_features)
    exact(out, written_out(layer, x, x if c is None else c))


@pytest.mark.parametrize("name", LAYERS)
def test_heads_add_up_to_the_layer(name: str) -> None:
    layer = build(name)
    x, c = inputs(layer)
    parts = layer.per_head(x, c)
    assert parts.shape == (BATCH, layer.heads, NQ, layer.out_proj.out_features)
    bias = 0 if layer.out_proj.bias is None else layer.out_proj.bias
    exact(parts.sum(-3) + bias, layer(x, c))
    some = {"mask": rg.Prefix(3) & rg.Lengths(torch.tensor([2, 5])), "positions": rg.head(NQ, NQ if c is None else NK)}
    exact(layer.per_head(x, c, **some).sum(-3) + bias, layer(x, c, **some))
    assert bool((layer(x, c, **some) - layer(x, c)).abs().max() > 1e-3)


@pytest.mark.parametrize("name", ["no bias", "grouped", "unequal widths", "cross"])
def test_circuits_reproduce_scores_and_outputs(name: str) -> None:
    layer = build(name)
    for linear in (layer.q_proj, layer.k_proj, layer.v_proj):
        if linear.bias is not None:
            nn.init.zeros_(linear.bias)
    x, c = inputs(layer)
    seen, parts, weights = x if c is None else c, layer.per_head(x, c), layer.weights(x, c)
    for i in range(layer.heads):
        scores = x @ layer.qk_circuit(i) @ seen.mT / math.sqrt(layer.d_k)
        exact(torch.softmax(scores, -1), weights[:, i])
        exact(weights[:, i] @ seen @ layer.ov_circuit(i), parts[:, i])


def test_a_head_that_does_not_exist_has_no_circuit() -> None:
    layer = build("plain")
    for circuit in (layer.qk_circuit, layer.ov_circuit):
        for head in (-1, 3):
            with pytest.raises(IndexError, match=f"head {head}; this layer has heads 0 to 2"):
                circuit(head)


class LoRA(nn.Module):
    """What adapters do: a wrapper around a projection that it keeps, with a term of low rank beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features, **DOUBLE))
        self.up = nn.Parameter(torch.randn(base.out_features, rank, **DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


PROJECTIONS = ("q_proj", "k_proj", "v_proj", "out_proj")


@pytest.mark.parametrize("name", PROJECTIONS)
def test_an_adapter_in_place_of_a_projection_works_and_learns(name: str) -> None:
    layer = build("plain")
    x, _ = inputs(layer)
    adapter = LoRA(getattr(layer, name))
    setattr(layer, name, adapter)
    layer(x).square().sum().backward()
    assert adapter.down.grad is not None and bool(adapter.down.grad.abs().max() > 1e-6)
    adapted = layer(x)
    merged = nn.Linear(adapter.base.in_features, adapter.base.out_features, **DOUBLE)
    merged.load_state_dict({"weight": adapter.base.weight + adapter.up @ adapter.down, "bias": adapter.base.bias})
    setattr(layer, name, merged)
    exact(layer(x), adapted)
    exact(written_out(layer, x, x), adapted)


class Doubled(nn.Linear):
    """A Linear whose weight does not tell the whole truth."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_what_reads_weights_refuses_a_projection_with_a_forward_of_its_own() -> None:
    layer, x = build("plain"), torch.randn(NQ, 15, **DOUBLE)
    for name, reads in (("out_proj", lambda: layer.per_head(x)), ("k_proj", lambda: layer.qk_circuit(0))):
        for other in (LoRA(getattr(layer, name)), Doubled(15, 15, **DOUBLE)):
            setattr(layer, name, other)
            said = f"{name} is a {type(other).__name__}, whose forward is its own; merge it into an nn.Linear first"
            with pytest.raises(rg.Unsupported, match=said):
                reads()


@pytest.mark.parametrize("name", PROJECTIONS)
def test_hooks_on_projections_fire_and_may_change_the_result(name: str) -> None:
    layer, seen = build("plain"), []
    x, _ = inputs(layer)
    before = layer(x)
    getattr(layer, name).register_forward_hook(lambda module, args, out: seen.append(out) or 2 * out)
    after = layer(x)
    assert len(seen) == 1 and seen[0].shape == (BATCH, NQ, 15)
    assert bool((after - before).abs().max() > 1e-3)


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"d_model": 15, "heads": 4}, r"d_model=15 is no multiple of heads=4; give d_k and d_v"),
        ({"d_model": 15, "heads": 4, "d_k": 3}, r"give d_k and d_v"),
        (
            {"d_model": 12, "heads": 4, "key_heads": 3},
            r"heads=4, key_heads=3; expected heads to be a multiple of key_heads",
        ),
        ({"d_model": 12, "heads": 0}, r"heads=0"),
        ({"d_model": 12, "heads": 4, "key_heads": 0}, r"key_heads=0"),
        (
            {"d_model": 12, "heads": 4, "rotary": rg.nn.Rotary(4)},
            r"Rotary\(4, base=10000\) turns 4 features; a query has 3",
        ),
        ({"d_model": 12, "heads": 4, "dropout": 1.5}, r"Dropout\(p=1.5\)"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rg.nn.MultiHeadAttention(**sizes)  # type: ignore[arg-type]
