"""Weights from and to torch.nn.MultiheadAttention, exact both ways."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

import regard as rg
from regard.masks.convert import from_mha

exact = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
WIDTH, HEADS, NQ, NK, BATCH = 15, 3, 7, 11, 2
DOUBLE = {"dtype": torch.float64}

SOURCES = {
    "plain": {},
    "no bias": {"bias": False},
    "a context of another width": {"kdim": 13, "vdim": 13},
    "the same without bias": {"kdim": 13, "vdim": 13, "bias": False},
    "add_zero_attn": {"add_zero_attn": True},
    "dropout": {"dropout": 0.25},
}


def theirs(batch_first: bool = True, **options: object) -> nn.MultiheadAttention:
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, **DOUBLE, **options)  # type: ignore[arg-type]
    for name, p in layer.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(p)  # torch starts them at 0, where nothing would show
    return layer


def inputs(layer: nn.MultiheadAttention) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, NQ, WIDTH, **DOUBLE), torch.randn(BATCH, NK, layer.kdim, **DOUBLE)


def called(layer: nn.MultiheadAttention, x: Tensor, c: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    """What torch's layer gives for batch-first tensors, whatever its own order, and its weights of each head."""
    if not layer.batch_first:
        x, c = x.transpose(0, 1), c.transpose(0, 1)
    out, weights = layer(x, c, c, average_attn_weights=False, **options)
    return (out if layer.batch_first else out.transpose(0, 1)), weights


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("name", SOURCES)
def test_from_torch_computes_the_same(name: str, batch_first: bool) -> None:
    layer = theirs(batch_first, **SOURCES[name]).eval()
    ours, (x, c) = rg.nn.MultiHeadAttention.from_torch(layer), inputs(layer)
    out, weights = called(layer, x, c)
    exact(ours(x, c), out)
    exact(ours.weights(x, c), weights[..., :NK])  # add_zero_attn brings a column of its own


@pytest.mark.parametrize("name", SOURCES)
def test_there_and_back_gives_the_same_bits(name: str) -> None:
    layer = theirs(**SOURCES[name])
    back = rg.nn.MultiHeadAttention.from_torch(layer).to_torch()
    assert back.batch_first and back.training
    mine, its = layer.state_dict(), back.state_dict()
    assert list(mine) == list(its) and all(torch.equal(mine[n], its[n]) for n in mine)
    for setting in ("embed_dim", "num_heads", "kdim", "vdim", "dropout", "add_zero_attn"):
        assert getattr(back, setting) == getattr(layer, setting)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"d_context": 13}, {"sink": 0.0}, {"dropout": 0.25}])
def test_to_torch_computes_the_same(options: dict[str, object]) -> None:
    ours = rg.nn.MultiHeadAttention(WIDTH, HEADS, **DOUBLE, **options).eval()  # type: ignore[arg-type]
    for name, p in ours.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(p)
    layer = ours.to_torch()
    x, c = inputs(layer)
    exact(called(layer, x, c)[0], ours(x, c))
    again = rg.nn.MultiHeadAttention.from_torch(layer)
    assert all(torch.equal(p, again.state_dict()[n]) for n, p in ours.state_dict().items())


@pytest.mark.parametrize("name", ["plain", "add_zero_attn", "a context of another width"])
def test_masks_and_gradients_agree(name: str) -> None:
    layer = theirs(**SOURCES[name])
    ours, (x, c) = rg.nn.MultiHeadAttention.from_torch(layer), inputs(layer)
    blocked, padding = torch.rand(BATCH * HEADS, NQ, NK) < 0.3, torch.arange(NK) >= torch.tensor([[NK], [NK - 4]])
    blocked[..., 0] = False  # no row is empty: there torch gives NaN
    out, _ = called(layer, x.requires_grad_(), c.requires_grad_(), attn_mask=blocked, key_padding_mask=padding)
    mine = ours(x, c, mask=from_mha(blocked, padding, HEADS).mask)
    exact(mine, out)
    g, leaves = torch.randn_like(out), (x, c)
    for found, true in zip(torch.autograd.grad(mine, leaves, g), torch.autograd.grad(out, leaves, g), strict=True):
        exact(found, true)


def test_the_copy_shares_nothing_and_keeps_mode_dtype_and_dropout() -> None:
    layer = nn.MultiheadAttention(WIDTH, HEADS, dropout=0.25, dtype=torch.bfloat16).eval()
    ours = rg.nn.MultiHeadAttention.from_torch(layer)
    back = ours.to_torch()
    assert not ours.training and ours.dropout.p == 0.25 and not back.training and back.dropout == 0.25
    assert {p.dtype for p in (*ours.parameters(), *back.parameters())} == {torch.bfloat16}
    memory = [{p.untyped_storage().data_ptr() for p in m.parameters()} for m in (layer, ours, back)]
    assert not memory[0] & memory[1] and not memory[1] & memory[2]


def test_a_zero_key_becomes_a_sink_that_is_not_trained() -> None:
    ours = rg.nn.MultiHeadAttention.from_torch(theirs(add_zero_attn=True))
    assert ours.sink is not None and torch.equal(ours.sink.detach(), torch.zeros(HEADS, **DOUBLE))
    assert not ours.sink.requires_grad


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"add_bias_kv": True}, "nn.MultiheadAttention with add_bias_kv"),
        ({"kdim": 13, "vdim": 5}, "kdim=13, vdim=5: keys and values read one context"),
    ],
)
def test_what_has_no_counterpart_here_is_refused(options: dict[str, object], said: str) -> None:
    with pytest.raises(rg.Unsupported, match=said):
        rg.nn.MultiHeadAttention.from_torch(theirs(**options))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"key_heads": 1}, "3 heads on 1 key head"),
        ({"d_k": 7}, "d_k=7, d_v=5; it has d_model / heads for both"),
        ({"d_v": 7}, "d_k=5, d_v=7; it has"),
        ({"d_out": 4}, "d_out=4; it returns d_model"),
        ({"score": rg.Dot()}, r"score Dot\(\); it has ScaledDot\(\)"),
        ({"score": rg.nn.BilinearScore(5, 5)}, "score BilinearScore"),
        ({"rotary": rg.nn.Rotary(4)}, "rotary"),
        ({"qk_norm": nn.RMSNorm}, "qk_norm"),
        ({"sink": 1.0}, "a sink other than 0"),
    ],
)
def test_what_torch_cannot_express_is_refused(options: dict[str, object], said: str) -> None:
    ours = rg.nn.MultiHeadAttention(WIDTH, HEADS, **options)  # type: ignore[arg-type]
    with pytest.raises(rg.Unsupported, match=f"cannot express this layer: {said}"):
        ours.to_torch()


def test_the_default_scale_written_out_is_no_obstacle() -> None:
    ours = rg.nn.MultiHeadAttention(WIDTH, HEADS, score=rg.ScaledDot(5**-0.5), **DOUBLE)
    x = torch.randn(BATCH, NQ, WIDTH, **DOUBLE)
    exact(called(ours.to_torch(), x, x)[0], ours(x))


def test_a_layer_whose_projections_were_replaced_is_refused() -> None:
    ours = rg.nn.MultiHeadAttention(WIDTH, HEADS)
    ours.v_proj = nn.Linear(WIDTH, WIDTH, bias=False)
    with pytest.raises(rg.Unsupported, match="bias on some projections only"):
        ours.to_torch()
    ours.v_proj = nn.Sequential(ours.v_proj)
    with pytest.raises(rg.Unsupported, match=r"v_proj is a Sequential; it has nn\.Linear"):
        ours.to_torch()
