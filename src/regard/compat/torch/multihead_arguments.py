"""The arguments of torch.nn.functional.multi_head_attention_forward: what torch refuses of them, and the projections.

Errors are of torch's classes, AssertionError and RuntimeError. Source: torch/nn/functional.py, torch 2.13.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import linear

from regard.core.dtypes import autocast
from regard.core.shapes import listed

Weights = Tensor | tuple[Tensor | None, Tensor | None, Tensor | None] | None


def check_sizes(query: Tensor, key: Tensor, value: Tensor, embed_dim: int, heads: int, separate: bool) -> None:
    """Refuses inputs (n, batch, width), or (n, width), that do not fit; separate: each has a width of its own."""
    if query.shape[-1] != embed_dim:
        raise AssertionError(f"query has width {query.shape[-1]}; expected embed_dim, {embed_dim}.")
    if embed_dim % heads:
        raise AssertionError(f"embed_dim is {embed_dim}, num_heads {heads}; expected a multiple of it.")
    alike = key.shape[:-1] == value.shape[:-1] if separate else key.shape == value.shape
    if not alike:
        raise AssertionError(f"key has shape {listed(key.shape)}, value {listed(value.shape)}; expected one shape.")


def check_appended(
    bias_k: Tensor | None, bias_v: Tensor | None, static_k: Tensor | None, static_v: Tensor | None
) -> None:
    """Refuses one of bias_k and bias_v without the other, and both beside keys or values that are given."""
    if (bias_k is None) != (bias_v is None):
        missing, other = ("bias_k", "bias_v") if bias_k is None else ("bias_v", "bias_k")
        raise AssertionError(f"{other} is given and {missing} is None; pass both, or neither.")
    for name, static in (("static_k", static_k), ("static_v", static_v)):
        if bias_k is not None and static is not None:
            raise AssertionError(
                f"bias_k and bias_v are given with {name}, to which nothing is appended; leave one out."
            )


def static_rows(name: str, static: Tensor | None, projected: Tensor, q: Tensor) -> Tensor:
    """Keys or values (batch, heads, n, d): static (batch * heads, n, d) where it is given, else what was projected."""
    batch, heads, _, width = q.shape
    if static is None:
        if projected.shape[0] != batch:
            raise RuntimeError(f"key has a batch of {projected.shape[0]}, query of {batch}; expected one batch.")
        return projected
    if static.dim() != 3 or (static.shape[0], static.shape[2]) != (batch * heads, width):
        expected = f"(batch * num_heads, n, head_dim) = ({batch * heads}, n, {width})"
        raise AssertionError(f"{name} has shape {listed(static.shape)}; expected {expected}.")
    return static.unflatten(0, (batch, heads))


def check_mask_shapes(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    pairs: tuple[int, int],
    keys: tuple[int, int, int],
    batched: bool,
) -> None:
    """Refuses masks of other shapes. pairs: how many queries and keys come in; keys: batch, heads, keys under masks."""
    batch, heads, nk = keys
    _check_shape("attn_mask", attn_mask, pairs, (batch * heads, *pairs))
    _check_shape("key_padding_mask", key_padding_mask, (batch, nk) if batched else (nk,))
    if attn_mask is not None and nk != pairs[1]:
        raise RuntimeError(f"attn_mask is of {pairs[1]} keys, as key is; static_k or bias_k make them {nk}.")


def check_mask_dtypes(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, query: Tensor, q: Tensor, need_weights: bool
) -> None:
    """Refuses masks whose numbers torch does not add to the scores of q, which is projected from query."""
    given = [query.dtype if t.dtype == torch.bool else t.dtype for t in (attn_mask, key_padding_mask) if t is not None]
    if not given:
        return
    dtype, expected = reduce(torch.promote_types, given), {q.dtype}
    if not need_weights:
        expected |= {torch.float32}
    if autocast(q.device.type) and q.dtype != torch.float64:
        expected |= {torch.float32, torch.float16, torch.bfloat16}
    if dtype.is_floating_point and dtype not in expected:
        raise RuntimeError(f"the masks add up to {dtype}, queries are {q.dtype}; expected one dtype, or booleans.")


def project(query: Tensor, key: Tensor, value: Tensor, weights: Weights, bias: Tensor | None) -> tuple[Tensor, ...]:
    """q, k and v from in_proj_weight (3E, E), or from three weights (E, width), and in_proj_bias (3E,)."""
    width = query.shape[-1]
    if isinstance(weights, tuple):
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        given = tuple(zip("qkv", (query, key, value), weights, biases, strict=True))
        for name, x, w, b in given:
            if w is None:
                raise AssertionError("use_separate_proj_weight needs q_proj_weight, k_proj_weight and v_proj_weight.")
            if w.shape != (width, x.shape[-1]):
                expected = f"({width}, {x.shape[-1]})"
                raise AssertionError(f"{name}_proj_weight has shape {listed(w.shape)}; expected {expected}.")
            if b is not None and b.shape != (width,):
                raise AssertionError(f"in_proj_bias has {listed(b.shape)} for {name}; expected ({width},).")
        return tuple(linear_as_it_lies(x, w, b) for _, x, w, b in given if w is not None)
    if weights is None:
        raise AssertionError("in_proj_weight is None; expected (3 * embed_dim, embed_dim).")
    if weights.shape != (3 * width, width):
        raise RuntimeError(f"in_proj_weight has shape {listed(weights.shape)}; expected ({3 * width}, {width}).")
    together = query.dim() == 3 and key is value  # without a batch torch sees three tensors
    if together and query is key:
        return linear_as_it_lies(query, weights, bias).chunk(3, -1)
    # as torch: a bias of one number for each would broadcast
    biases = (None,) * 3 if bias is None else bias.split([width] * 3) if together else bias.chunk(3)
    each = zip((query, key, value), weights.chunk(3), biases, strict=True)
    return tuple(linear_as_it_lies(x, w, b) for x, w, b in each)


def linear_as_it_lies(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x weight^T + bias of x (L, N, E) or (L, E), in the order in which x lies in memory: nothing is copied for it."""
    if x.dim() == 3 and not x.is_contiguous():
        return linear(x.transpose(0, 1), weight, bias).transpose(0, 1)
    return linear(x, weight, bias)


def _check_shape(name: str, mask: Tensor | None, *shapes: tuple[int, ...]) -> None:
    if mask is not None and mask.shape not in shapes:
        expected = " or ".join(listed(shape) for shape in shapes)
        raise RuntimeError(f"{name} has shape {listed(mask.shape)}; expected {expected}.")
