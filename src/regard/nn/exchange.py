"""Exchange of weights with torch.nn.MultiheadAttention, exact both ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from regard.core.errors import Unsupported
from regard.core.shapes import count_of
from regard.core.wrong_calls import kind_of
from regard.nn.heads import Heads, plain
from regard.scores.algebra import Score
from regard.scores.similarity import ScaledDot

H = TypeVar("H", bound=Heads)


def from_torch(layer: nn.MultiheadAttention, build: Callable[..., H]) -> H:
    """What computes the same on (batch, n, d), built by MultiHeadAttention; see MultiHeadAttention.from_torch."""
    if not isinstance(layer, nn.MultiheadAttention):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"from_torch: layer is {kind_of(layer)}; expected torch.nn.MultiheadAttention.")
    if layer.bias_k is not None or layer.bias_v is not None:
        raise Unsupported("nn.MultiheadAttention with add_bias_kv: its extra key and value have no counterpart here.")
    if layer.kdim != layer.vdim:
        raise Unsupported(
            f"nn.MultiheadAttention with kdim={layer.kdim}, vdim={layer.vdim}: keys and values read one context."
        )
    ours = build(
        layer.embed_dim,
        layer.num_heads,
        d_context=layer.kdim,
        bias=cast("Tensor | None", layer.in_proj_bias) is not None,
        sink=0.0 if layer.add_zero_attn else None,
        dropout=layer.dropout,
        device=layer.out_proj.weight.device,
        dtype=layer.out_proj.weight.dtype,
    )
    if ours.sink is not None:
        ours.sink.requires_grad_(False)
    _copy(_theirs(layer), _ours(ours))
    return ours.train(layer.training)


def to_torch(layer: Heads) -> nn.MultiheadAttention:
    """torch's layer with the weights of ours; see MultiHeadAttention.to_torch."""
    why = _why_not_torch(layer)
    if why is not None:
        raise Unsupported(f"torch.nn.MultiheadAttention cannot express this layer: {why}.")
    source = _ours(layer)
    theirs = nn.MultiheadAttention(
        layer.d_model,
        layer.heads,
        dropout=layer.dropout.p,
        bias=len(source) == 8,
        add_zero_attn=layer.sink is not None,
        kdim=layer.d_context,
        vdim=layer.d_context,
        batch_first=True,
        device=source[0].device,
        dtype=source[0].dtype,
    )
    _copy(source, _theirs(theirs))
    return theirs.train(layer.training)


def _linears(layer: Heads) -> list[nn.Linear]:
    return [cast(nn.Linear, p) for p in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)]


def _ours(layer: Heads) -> list[Tensor]:
    """The weights of q, k, v and out, then their biases if there are any."""
    biases = [cast("Tensor | None", p.bias) for p in _linears(layer)]
    return [*(p.weight for p in _linears(layer)), *(b for b in biases if b is not None)]


def _theirs(layer: nn.MultiheadAttention) -> list[Tensor]:
    """The same of torch's layer, which keeps q, k and v in one tensor where their widths are equal."""
    packed, bias = cast("Tensor | None", layer.in_proj_weight), cast("Tensor | None", layer.in_proj_bias)
    apart = (layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight)
    weights = apart if packed is None else packed.chunk(3)
    return [*weights, layer.out_proj.weight, *(() if bias is None else (*bias.chunk(3), layer.out_proj.bias))]


def _copy(sources: list[Tensor], targets: list[Tensor]) -> None:
    with torch.no_grad():
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)


def _why_not_torch(layer: Heads) -> str | None:
    linears = _linears(layer)
    for name, p in zip(("q_proj", "k_proj", "v_proj", "out_proj"), linears, strict=True):
        if not plain(p):
            return f"{name} is {kind_of(p)}; it has nn.Linear"
    width, out, score = layer.d_model, linears[3].out_features, layer.score
    d_k, d_v = linears[0].out_features // layer.heads, linears[2].out_features // layer.key_heads
    scaled = isinstance(score, Score) and score in (ScaledDot(), ScaledDot(d_k**-0.5))
    reasons = {
        f"{count_of(layer.heads, 'head')} on {count_of(layer.key_heads, 'key head')}": layer.key_heads != layer.heads,
        f"d_k={d_k}, d_v={d_v}; it has d_model / heads for both": {d_k * layer.heads, d_v * layer.heads} != {width},
        f"d_out={out}; it returns d_model": out != width,
        f"score {score!r}; it has ScaledDot()": not scaled,
        "rotary": layer.rotary is not None,
        "qk_norm": layer.q_norm is not None,
        "a sink other than 0": layer.sink is not None and bool((layer.sink != 0).any()),
        "bias on some projections only": len(_ours(layer)) not in (4, 8),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
