"""What is read of torch's own attention calls, against the weights that torch itself computes."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention

import regard as rg
from recorded_models import FACTS, measure, weights

F64 = torch.float64
INF = math.inf


class Call(nn.Module):
    """A model that is one call of torch's function."""

    def forward(self, *args: object, **options: object) -> Tensor:
        return scaled_dot_product_attention(*args, **options)


def dense(q: Tensor, k: Tensor, added: Tensor | None, scale: float | None, groups: int) -> Tensor:
    """The weights by their definition; `added`: numbers, -inf hides. A row that sees nothing is 0."""
    s = q @ k.repeat_interleave(groups, -3).mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    return (s if added is None else s + added).softmax(-1).nan_to_num(0)


def causal(nq: int, nk: int) -> Tensor:
    return torch.ones(nq, nk, dtype=torch.bool).tril()


def added(mask: Tensor) -> Tensor:
    return mask if mask.dtype == F64 else torch.zeros(mask.shape, dtype=F64).masked_fill(~mask, -INF)


def masks(b: int, h: int, nq: int, nk: int) -> dict[str, Tensor]:
    """Boolean and numeric masks of every broadcast."""
    made: dict[str, Tensor] = {}
    for shape in ((nq, nk), (1, nk), (b, 1, 1, nk), (1, h, nq, nk), (b, h, nq, nk), (b, 1, nq, nk)):
        allowed = torch.rand(shape) < 0.7
        allowed[..., 0] = True
        numbers = torch.randn(shape, dtype=F64)
        made |= {f"bool {shape}": allowed, f"float {shape}": numbers, f"inf {shape}": added(allowed)}
        made[f"mixed {shape}"] = numbers.masked_fill(~allowed, -INF)
    return made


@pytest.mark.parametrize("kind", masks(2, 3, 5, 7))
def test_masks_of_scaled_dot_product_attention(kind: str) -> None:
    q, k, mask = torch.randn(2, 3, 5, 4, dtype=F64), torch.randn(2, 3, 7, 4, dtype=F64), masks(2, 3, 5, 7)[kind]
    model = Call()
    with rg.record(model, FACTS) as tape:
        out = model(q, k, k, attn_mask=mask)
    measure(tape.calls[0], p := dense(q, k, added(mask), None, 1))
    torch.testing.assert_close(p @ k, out)


def test_two_axes_are_queries_and_keys_though_there_are_as_many_sequences() -> None:
    x = torch.randn(5, 3, 5, 4, dtype=F64)
    model = Call()
    with rg.record(model, FACTS) as tape:
        model(x, x, x, causal(5, 5))
    measure(tape.calls[0], dense(x, x, added(causal(5, 5)), None, 1))


@pytest.mark.parametrize(("nq", "nk"), [(5, 5), (5, 7), (7, 5)])
def test_is_causal_counts_both_sides_from_the_first(nq: int, nk: int) -> None:
    q, k = torch.randn(2, 3, nq, 4, dtype=F64), torch.randn(2, 3, nk, 4, dtype=F64)
    model = Call()
    with rg.record(model, FACTS) as tape:
        out = model(q, k, k, is_causal=True)
    (call,) = tape.calls
    measure(call, p := dense(q, k, added(causal(nq, nk)), None, 1))
    torch.testing.assert_close(p @ k, out)
    assert torch.equal(call.view.dense().expand(2, 3, nq, nk)[0, 0], causal(nq, nk))


@pytest.mark.parametrize("scale", [0.3, 2.0])
def test_scale_groups_and_dropout(scale: float) -> None:
    q, k = torch.randn(2, 6, 5, 4, dtype=F64), torch.randn(2, 2, 5, 4, dtype=F64)
    model = Call()
    with rg.record(model, FACTS) as tape:
        model(q, k, k, None, 0.5, True, scale=scale, enable_gqa=True)
    (call,) = tape.calls
    assert call.k_shape == (2, 2, 5, 4)
    measure(call, dense(q, k, added(causal(5, 5)), scale, 3))


def test_heads_that_torch_broadcasts() -> None:
    q, k = torch.randn(1, 1, 5, 4, dtype=F64), torch.randn(2, 3, 7, 4, dtype=F64)
    model = Call()
    with rg.record(model, FACTS) as tape:
        model(q, k, k)
    measure(tape.calls[0], dense(q, k, None, None, 1))


@pytest.mark.parametrize("shape", [(5, 4), (2, 5, 4)])
def test_tensors_without_heads_get_an_axis_of_one(shape: tuple[int, ...]) -> None:
    x, mask = torch.randn(shape, dtype=F64), causal(5, 5)
    model = Call()
    with rg.record(model, FACTS) as tape:
        model(x, x, x, mask)
    (call,) = tape.calls
    assert call[rg.facts.Entropy()].shape == (*shape[:-2], 1, 5)
    measure(call, dense(x[..., None, :, :], x[..., None, :, :], added(mask), None, 1))


def test_a_row_that_sees_nothing_is_empty() -> None:
    x, mask = torch.randn(1, 1, 3, 4, dtype=F64), causal(3, 3)
    mask[1] = False
    model = Call()
    with rg.record(model, FACTS) as tape:
        model(x, x, x, mask)
    (call,) = tape.calls
    measure(call, dense(x, x, added(mask), None, 1))
    assert call.seen.lse[0, 0, 1] == -INF


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_refused() -> None:
    x = torch.nested.nested_tensor([torch.randn(3, 2, 4), torch.randn(5, 2, 4)], layout=torch.jagged).transpose(1, 2)
    model = Call()
    with pytest.raises(rg.Unsupported, match=r"Call: its sequences are nested tensors; pad them"), rg.record(model):
        model(x, x, x)


MHA = {
    "plain": {},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
    "other widths": {"kdim": 10, "vdim": 14},
    "extra key": {"add_bias_kv": True},
    "zero key": {"add_zero_attn": True},
    "both keys": {"add_bias_kv": True, "add_zero_attn": True, "kdim": 10, "vdim": 14, "batch_first": True},
}
PADDED = torch.tensor([[False] * 7, [False] * 4 + [True] * 3])


def mha_masks(heads: int, nq: int, nk: int) -> dict[str, dict[str, Tensor]]:
    hidden = torch.rand(nq, nk) < 0.4
    hidden[:, 0] = False
    each = torch.rand(2 * heads, nq, nk) < 0.4
    each[..., 0] = False
    return {
        "none": {},
        "bool": {"attn_mask": hidden},
        "float": {"attn_mask": torch.randn(nq, nk, dtype=F64)},
        "each": {"attn_mask": each},
        "padding": {"key_padding_mask": PADDED},
        "float padding": {"key_padding_mask": torch.zeros(2, 7, dtype=F64).masked_fill(PADDED, -INF)},
        "both": {"attn_mask": hidden, "key_padding_mask": PADDED},
    }


@pytest.mark.parametrize(("made", "kind"), [*product(MHA, mha_masks(4, 5, 7))])
def test_multihead_attention_between_sequences(made: str, kind: str) -> None:
    layer = nn.MultiheadAttention(12, 4, dtype=F64, **MHA[made])
    for one in (layer.in_proj_bias, layer.bias_k):
        if one is not None:
            nn.init.normal_(one)
    first = layer.batch_first
    shapes = ((2, 5, 12), (2, 7, layer.kdim), (2, 7, layer.vdim))
    q, k, v = (torch.randn(s if first else (s[1], s[0], s[2]), dtype=F64) for s in shapes)
    given = mha_masks(4, 5, 7)[kind]
    with rg.record(layer, FACTS) as tape:
        _, p = layer(q, k, v, average_attn_weights=False, **given)
        layer(q, k, v, need_weights=False, **given)
    assert [(call.name, call.number) for call in tape.calls] == [("MultiheadAttention", 0), ("MultiheadAttention", 1)]
    for call in tape.calls:
        measure(call, p.detach())


def test_what_is_padding_asks_nothing_of_itself() -> None:
    layer, x = nn.MultiheadAttention(12, 3, batch_first=True, dtype=F64), torch.randn(2, 7, 12, dtype=F64)
    with rg.record(layer, FACTS) as tape:
        _, p = layer(x, x, x, key_padding_mask=PADDED, average_attn_weights=False)
    measure(tape.calls[0], p.detach().masked_fill(PADDED[:, None, :, None], 0))


def test_multihead_attention_without_batch() -> None:
    layer, x = nn.MultiheadAttention(12, 3, dtype=F64), torch.randn(7, 12, dtype=F64)
    with rg.record(layer, FACTS) as tape:
        _, p = layer(x, x, x, key_padding_mask=PADDED[1], average_attn_weights=False)
    assert tape.calls[0].q_shape == (1, 3, 7, 4)
    measure(tape.calls[0], p.detach()[None].masked_fill(PADDED[1][:, None], 0))


@pytest.mark.parametrize("extra", [{}, {"add_zero_attn": True}])
def test_the_causal_hint_is_a_mask_only_where_torch_takes_it_for_one(extra: dict[str, bool]) -> None:
    layer, x = nn.MultiheadAttention(12, 3, dtype=F64, **extra), torch.randn(7, 2, 12, dtype=F64)
    window = torch.ones(7, 7, dtype=torch.bool).triu(1) | torch.ones(7, 7, dtype=torch.bool).tril(-3)
    with rg.record(layer, FACTS) as tape:
        layer(x, x, x, attn_mask=window, is_causal=True, need_weights=False)
        _, p = layer(x, x, x, attn_mask=window, is_causal=True, average_attn_weights=False)
    hinted, masked = tape.calls
    seen = torch.ones(7, 7 + len(extra), dtype=torch.bool).tril()
    assert torch.equal(weights(hinted) > 0, seen.expand(2, 3, -1, -1))
    measure(masked, p.detach())


def test_static_keys() -> None:
    x, k, v = torch.randn(5, 2, 12, dtype=F64), torch.randn(6, 7, 4, dtype=F64), torch.randn(6, 7, 4, dtype=F64)
    layer = nn.MultiheadAttention(12, 3, dtype=F64)

    class Static(nn.Module):
        def forward(self) -> tuple[Tensor, Tensor]:
            return multi_head_attention_forward(
                *(x, x, x, 12, 3, layer.in_proj_weight, layer.in_proj_bias, None, None, False, 0.0),
                *(layer.out_proj.weight, layer.out_proj.bias),
                static_k=k,
                static_v=v,
                average_attn_weights=False,
            )

    model = Static()
    with rg.record(model, FACTS) as tape:
        _, p = model()
    measure(tape.calls[0], p.detach())


def encoder(norm_first: bool, dropout: float = 0.1) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(12, 2, 16, dropout, norm_first=norm_first, batch_first=True, dtype=F64)
    made = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)
    for one in made.parameters():
        nn.init.normal_(one, std=0.3)
    return made


ENCODED = {
    "plain": {},
    "padding": {"src_key_padding_mask": PADDED},
    "mask": {"mask": torch.ones(7, 7, dtype=torch.bool).triu(1)},
    "both": {"mask": torch.ones(7, 7, dtype=torch.bool).triu(1), "src_key_padding_mask": PADDED},
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize(("norm_first", "kind"), [*product((False, True), ENCODED)])
def test_the_encoders_fused_layers_are_what_its_plain_ones_are(norm_first: bool, kind: str) -> None:
    model, x, given = encoder(norm_first).eval(), torch.randn(2, 7, 12, dtype=F64), ENCODED[kind]
    with torch.no_grad(), rg.record(model, FACTS) as fused:
        model(x, **given)
    with rg.record(model, FACTS) as plain:  # with gradients, torch does not fuse
        model(x, **given)
    assert fused.names == plain.names == ("layers.0.self_attn", "layers.1.self_attn")
    for one, other in zip(fused.calls, plain.calls, strict=True):
        measure(one, weights(other))


@pytest.mark.parametrize("kind", ["plain", "padding"])
def test_the_fused_layer_alone(kind: str) -> None:
    layer, x = nn.MultiheadAttention(12, 2, batch_first=True, dtype=F64).eval(), torch.randn(2, 7, 12, dtype=F64)
    padded = torch.zeros_like(PADDED) if kind == "plain" else PADDED
    with torch.no_grad(), rg.record(layer, FACTS) as tape:
        _, p = layer(x, x, x, key_padding_mask=None if kind == "plain" else padded, average_attn_weights=False)
    measure(tape.calls[0], p.masked_fill(padded[:, None, :, None], 0))


def test_an_encoder_and_a_decoder_in_training() -> None:
    model = nn.Transformer(12, 2, 1, 1, 16, batch_first=True, dtype=F64)
    source, target = torch.randn(2, 7, 12, dtype=F64), torch.randn(2, 5, 12, dtype=F64)
    with rg.record(model, FACTS) as tape:
        model(source, target, tgt_mask=nn.Transformer.generate_square_subsequent_mask(5, dtype=F64), tgt_is_causal=True)
    assert {call.name: (call.q_shape[-2], call.k_shape[-2]) for call in tape.calls} == {
        "encoder.layers.0.self_attn": (7, 7),
        "decoder.layers.0.self_attn": (5, 5),
        "decoder.layers.0.multihead_attn": (5, 7),
    }
    assert torch.equal(weights(tape["decoder.layers.0.self_attn"][0])[0, 0] > 0, causal(5, 5))
