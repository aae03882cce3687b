"""torch.jit.script of models that call regard under torch's names, or torch under a patch: programs of torch's own."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard as rg
from regard.compat.torch import MultiheadAttention, scaled_dot_product_attention
from regard.compat.torch.multihead import multi_head_attention_forward

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit")
HIDDEN = torch.zeros(2, 7, dtype=torch.bool)
HIDDEN[0, 5:] = True
BLOCKED = torch.arange(7) > torch.arange(5)[:, None]


def reloaded(program: Any) -> Any:
    """The program, saved and loaded."""
    file = io.BytesIO()
    torch.jit.save(program, file)
    file.seek(0)
    return torch.jit.load(file)


@pytest.mark.parametrize("kind", [MultiheadAttention, nn.MultiheadAttention])
@pytest.mark.parametrize(
    "options",
    [{}, {"batch_first": True}, {"kdim": 5, "add_bias_kv": True, "add_zero_attn": True}],
    ids=str,
)
def test_a_layer(kind: type[nn.MultiheadAttention], options: dict[str, Any]) -> None:
    layer = kind(12, 3, **options)
    with rg.patch(report=None):
        program = reloaded(torch.jit.script(layer))
    q, k, v = torch.randn(5, 2, 12), torch.randn(7, 2, options.get("kdim", 12)), torch.randn(7, 2, 12)
    if "batch_first" in options:
        q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    for needs in (True, False):
        call = {"key_padding_mask": HIDDEN, "need_weights": needs, "attn_mask": BLOCKED}
        torch.testing.assert_close(program(q, k, v, **call), layer(q, k, v, **call), atol=1e-5, rtol=1e-5)


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(12, 2, 24, dropout=0.0, batch_first=True).eval()


def encoder_on_regard() -> nn.Module:
    model: Any = encoder()
    model.self_attn = MultiheadAttention(12, 2, batch_first=True)
    return model.eval()


@pytest.mark.parametrize("build", [encoder, encoder_on_regard])
def test_a_layer_within_a_model_stays_where_it_was(build: Callable[[], nn.Module]) -> None:
    model, x = build(), torch.randn(2, 7, 12)
    kinds = [type(module) for module in model.modules()]
    with rg.patch(report=None):
        program = torch.jit.script(model)
    torch.testing.assert_close(program(x), model(x), atol=1e-5, rtol=1e-5)
    assert [type(module) for module in model.modules()] == kinds


def by_name(q: Tensor, k: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, k, is_causal=True)


def by_regards_name(q: Tensor, k: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, k, is_causal=True)


def of_a_layer(q: Tensor, k: Tensor) -> Tensor:
    weights, out = torch.ones(24, 8), torch.eye(8)
    return multi_head_attention_forward(
        q[0, :, :2],
        k[0, :, :2],
        k[0, :, :2],
        8,
        2,
        weights,
        None,
        None,
        None,
        False,
        0.0,
        out,
        None,
        need_weights=False,
    )[0]


@pytest.mark.parametrize("function", [by_name, by_regards_name, of_a_layer])
def test_functions(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8)
    with rg.patch(report=None) as patch:
        program = reloaded(torch.jit.script(function))
        found = program(q, k)
    assert patch.calls.total() == 0  # a program calls no Python
    torch.testing.assert_close(found, function(q, k), atol=1e-5, rtol=1e-5)
