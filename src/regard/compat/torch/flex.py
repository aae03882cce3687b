"""torch.nn.attention.flex_attention.flex_attention, on regard: on a CPU, with gradients, in linear memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.core.errors import Unsupported
from regard.core.region import Region
from regard.core.shapes import listed
from regard.masks.algebra import Everything, Mask
from regard.runtime.binding import Call
from regard.scores.algebra import Modifier, Score
from regard.scores.similarity import ScaledDot


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """softmax of score_mod(query key^T · scale, b, h, i, j), hidden where block_mask.mask_mod says so, times value.

    query (B, H, L, E), key (B, Hk, S, E), value (B, Hk, S, Ev) -> (B, H, L, Ev). Both functions see one pair at a time,
    i and j are indices from 0, as torch has it; of the blocks of block_mask nothing is read, as by torch without
    torch.compile. A mask runs on the native kernels, a score_mod tile by tile in PyTorch. kernel_options are ignored.
    With return_lse, or return_aux=AuxRequest(lse=True), (out, natural log-sum-exp) as torch returns it.

    Differentiable in query, key and value, which torch is not on a CPU. A query that sees nothing gives 0.
    Raises Unsupported, with the reason, for return_aux=AuxRequest(max_scores=True), a score_mod that uses a tensor that
    requires a gradient, and shapes that torch refuses too.
    Source: torch.nn.attention.flex_attention, torch 2.13; Dong et al. 2024 (arXiv 2412.05496).

    >>> q = torch.randn(1, 2, 5, 8, requires_grad=True)
    >>> out = flex_attention(q, q, q, lambda s, b, h, i, j: s - 0.1 * (i - j).abs())
    >>> torch.autograd.grad(out.sum(), q)[0].shape
    torch.Size([1, 2, 5, 8])
    """
    aux = (enable_gqa, return_lse, kernel_options)
    why = why_left_flex(query, key, value, score_mod, block_mask, scale, *aux, return_aux=return_aux)
    if why is not None:
        raise Unsupported(f"flex_attention: {why}.")
    score: Score = ScaledDot(scale)
    score = score if score_mod is None else score >> ScoreMod(score_mod)
    mask = Everything() if block_mask is None else MaskMod(block_mask.mask_mod)
    call = Call(query, key, value, score, mask, None, None, None)
    with call.precision():
        if not return_lse and return_aux is None:
            return call.run(None).to(call.problem.dtype)
        out, stats = call.run_with_stats(None)
        out, lse = out.to(call.problem.dtype), stats.lse
    if return_aux is None:
        return out, lse
    from torch.nn.attention.flex_attention import AuxOutput

    return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=None)


def why_left_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> str | None:
    """Why regard does not run a call of flex_attention as torch would; None where it does."""
    shapes = ", ".join(listed(t.shape) for t in (query, key, value))
    if any(t.dim() != 4 or len(t) != len(query) for t in (query, key, value)):
        return f"its tensors have shapes {shapes}; expected four axes and one batch"
    if query.shape[1] % max(key.shape[1], 1) or (query.shape[1] != key.shape[1] and not enable_gqa):
        return f"its tensors have shapes {shapes}; expected as many heads, or a multiple with enable_gqa"
    if not query.dtype == key.dtype == value.dtype:
        return f"its tensors are {query.dtype}, {key.dtype}, {value.dtype}; expected one dtype"
    if return_aux is not None and (return_aux.max_scores or return_lse):
        return "the largest scores are asked for"
    if torch.compiler.is_compiling():
        return "it is inside torch.compile, which makes a kernel of it"
    if block_mask is not None:
        n = query.shape[2], key.shape[2]
        if tuple(block_mask.shape[-2:]) != n:
            return f"its block_mask was created for {listed(block_mask.shape)}; q and k have lengths {n}"
    if score_mod is not None and torch.is_grad_enabled() and 0 not in (*query.shape, *key.shape):
        first = torch.zeros((), dtype=torch.int64)
        with _indexing():
            s = score_mod(torch.zeros(()), first, first, first, first)
        if s.requires_grad:
            return "its score_mod uses a tensor that requires a gradient, which would get none"
    return None


@dataclass(frozen=True)
class ScoreMod(Modifier):
    """s -> fn(s, b, h, i, j) of one pair: i and j are indices."""

    positional: ClassVar[bool] = False
    fn: Callable[..., Tensor]

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return _each_pair(self.fn, at, s)


@dataclass(frozen=True)
class MaskMod(Mask):
    """The pairs for which fn(b, h, i, j) is True: i and j are indices."""

    positional: ClassVar[bool] = False
    fn: Callable[..., Tensor]

    def visible(self, at: Region) -> Tensor:
        seen = _each_pair(self.fn, at)
        for axis in (0, 1):  # what does not depend on the batch element or the head is there once
            seen = seen.narrow(axis, 0, 1) if seen.shape[axis] > 1 and seen.stride(axis) == 0 else seen
        return seen


def _each_pair(fn: Callable[..., Tensor], at: Region, *scores: Tensor) -> Tensor:
    """fn of single pairs (with their scores), by vmap over (batch, heads, queries, keys), as torch evaluates it."""
    index = tuple(t.reshape(-1) for t in (at.b, at.h, at.row, at.col))
    for axis in (3, 2, 1, 0):
        dims = tuple(0 if axis == other else None for other in range(4))
        fn = torch.vmap(fn, in_dims=(0,) * len(scores) + dims)
    with _indexing():
        return fn(*scores, *index)


def _indexing() -> Any:
    """While it is open, tensor[i] takes the i of a pair, under vmap too."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    return TransformGetItemToIndex()
