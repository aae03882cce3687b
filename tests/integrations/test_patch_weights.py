"""nn.MultiheadAttention with need_weights=True, its default, under regard.patch: torch's weights, on regard."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard as rg
from needed import needs_kernels

pytestmark = needs_kernels
ON_REGARD = ("multi_head_attention_forward", None)
NQ, NK = 5, 7
HIDDEN = torch.arange(NK) >= torch.tensor([[5], [3]])
BLOCKED = torch.rand(NQ, NK, generator=torch.Generator().manual_seed(3)) < 0.4
BLOCKED[:, 0] = False
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no bias": {"bias": False},
    "other widths": {"kdim": 5, "vdim": 11},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "both appended": {"add_bias_kv": True, "add_zero_attn": True},
}
MASKS: dict[str, dict[str, Tensor]] = {
    "no mask": {},
    "padding": {"key_padding_mask": HIDDEN},
    "blocked": {"attn_mask": BLOCKED},
    "added": {"attn_mask": torch.linspace(-2, 2, 6 * NQ * NK).view(6, NQ, NK)},
    "blocked, padding": {"attn_mask": BLOCKED, "key_padding_mask": HIDDEN},
}


def layer_of(**options: Any) -> nn.MultiheadAttention:
    layer = nn.MultiheadAttention(12, 3, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer


def results(layer: nn.Module, inputs: tuple[Tensor, ...], **options: Any) -> tuple[Tensor, ...]:
    """(output, weights), and the gradients that both together send to the inputs and the parameters."""
    out, weights = layer(*inputs, **options)
    seeds = [torch.linspace(-1, 1, t.numel()).view_as(t) for t in (out, weights)]
    leaves = [t for t in (*inputs, *layer.parameters()) if t.requires_grad]
    return out, weights, *torch.autograd.grad((out, weights), leaves, seeds)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS.keys())
def test_output_weights_and_gradients(
    options: dict[str, Any], masks: dict[str, Tensor], batch_first: bool, average: bool
) -> None:
    layer = layer_of(**options, batch_first=batch_first)
    shapes = ((2, NQ, 12), (2, NK, options.get("kdim", 12)), (2, NK, options.get("vdim", 12)))
    inputs = tuple(torch.randn(shape) for shape in shapes)
    inputs = tuple((t if batch_first else t.transpose(0, 1)).requires_grad_() for t in inputs)
    expected = results(layer, inputs, **masks, average_attn_weights=average)
    with rg.patch(report=None) as patch:
        found = results(layer, inputs, **masks, average_attn_weights=average)
    assert dict(patch.calls) == {ON_REGARD: 1}
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_self_attention_in_eval_where_torch_has_a_fused_kernel(average: bool, batch_first: bool) -> None:
    layer, x = layer_of(batch_first=batch_first).eval(), torch.randn(2, NK, 12)
    x = x if batch_first else x.transpose(0, 1)
    causal = nn.Transformer.generate_square_subsequent_mask(NK)
    with torch.no_grad():
        for given in ({}, {"attn_mask": causal, "is_causal": True}):
            expected = layer(x, x, x, average_attn_weights=average, **given)
            with rg.patch(report=None) as patch:
                found = layer(x, x, x, average_attn_weights=average, **given)
            assert dict(patch.calls) == {ON_REGARD: 1}
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_without_a_batch_and_by_position() -> None:
    layer, q, k = layer_of(), torch.randn(NQ, 12), torch.randn(NK, 12)
    options = (12, 3, layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.0)
    call = (q, k, k, *options, layer.out_proj.weight, layer.out_proj.bias, True, None)
    for needed in (True, False):
        expected = F.multi_head_attention_forward(*call, needed)
        with rg.patch(report=None) as patch:
            found = F.multi_head_attention_forward(*call, needed)
        assert dict(patch.calls) == {ON_REGARD: 1} and (found[1] is not None) == needed
        torch.testing.assert_close(found, expected)


def test_under_autocast() -> None:
    layer, x = layer_of(batch_first=True), torch.randn(2, NK, 12)
    with torch.autocast("cpu", torch.bfloat16):
        expected = layer(x, x, x)
        with rg.patch(report=None):
            found = layer(x, x, x)
    assert [t.dtype for t in found] == [t.dtype for t in expected]
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)


def test_with_dropout_the_weights_are_those_before_it() -> None:
    layer, x = layer_of(batch_first=True, dropout=0.5), torch.randn(2, NK, 12)
    with rg.patch(report=None):
        out, weights = layer(x, x, x)
    expected = layer.eval()(x, x, x)
    torch.testing.assert_close(weights, expected[1])
    assert not out.isclose(expected[0]).all()


@pytest.mark.full
def test_in_a_graph() -> None:
    layer, x = layer_of(batch_first=True), torch.randn(2, NK, 12)
    expected = layer(x, x, x, key_padding_mask=HIDDEN)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with rg.patch(report=None) as patch:
        found = compiled(x, x, x, key_padding_mask=HIDDEN)
    assert dict(patch.traced) == {ON_REGARD: 1}
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
