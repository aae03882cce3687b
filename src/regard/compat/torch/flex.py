"""torch.nn.attention.flex_attention.flex_attention, on regard: on a CPU, with gradients, in linear memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import regard.runtime.plan_cache as plan_cache
from regard.compat.torch.pair_functions import Sizes
from regard.compat.torch.translations import Translation, translated_call
from regard.core.dtypes import accumulator
from regard.core.errors import Unsupported
from regard.core.positions import Positions, head
from regard.core.shapes import listed
from regard.core.wrong_calls import kind_of
from regard.masks.algebra import Mask
from regard.runtime.binding import BoundCall
from regard.runtime.dispatch import Explanation
from regard.runtime.outline import AttentionArguments
from regard.scores.algebra import Score


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
    and i and j are indices from 0, as in torch; the blocks of block_mask are not read, as in torch without
    torch.compile. regard traces both functions for one pair, and keeps what it finds for equal functions. Sums with a
    function of i - j (ALiBi, relative biases), of i or of j, or with a tensor indexed by b, h, i, j; soft caps;
    factors; where(condition, score, -inf); intervals of i - j, documents, and & | ~ of masks run on the native kernels
    as regard's own scores and masks. Any other mask of arithmetic and logic, and any other score_mod of elementwise
    operations, runs there as a program; other masks are written out pair by pair, other score_mods run tile by tile in
    PyTorch; explain_flex_attention says which. kernel_options are ignored. With return_lse, or
    return_aux=AuxRequest(lse=True), (out, natural log-sum-exp) as torch returns it.

    Differentiable, which torch's function is not on a CPU: in query, key, value, and all tensors that score_mod reads,
    such as a learned table or the parameters of a module. A query that sees nothing gives 0.
    Raises Unsupported, with the reason, for return_aux=AuxRequest(max_scores=True) and shapes that torch refuses too.
    Source: torch.nn.attention.flex_attention, torch 2.13; Dong et al. 2024 (arXiv 2412.05496).

    >>> q = torch.randn(1, 2, 5, 8, requires_grad=True)
    >>> out = flex_attention(q, q, q, lambda s, b, h, i, j: s - 0.1 * (i - j).abs())
    >>> torch.autograd.grad(out.sum(), q)[0].shape
    torch.Size([1, 2, 5, 8])
    """
    _check_functions(score_mod, block_mask)
    aux = (enable_gqa, return_lse, kernel_options)
    why = why_left_flex(query, key, value, score_mod, block_mask, scale, *aux, return_aux=return_aux)
    if why is not None:
        raise Unsupported(f"flex_attention: {why}.")
    (score, mask, _, rows), positions = _translated(query, key, score_mod, block_mask, scale)
    query, key, value = (query, key, value) if rows is None else rows.joined(query, key, value)
    given = AttentionArguments(query, key, value, score, mask, positions, None, None)
    if not return_lse and return_aux is None:
        known = plan_cache.attend(*given, None)
        return BoundCall(*given).output(None) if known is None else known
    out, lse = _with_lse(given)
    if return_aux is None:
        return out, lse
    from torch.nn.attention.flex_attention import AuxOutput

    return out, AuxOutput(lse=lse if return_aux.lse else None, max_scores=None)


def explain_flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
) -> Explanation:
    """How flex_attention would run this call: what regard read from its functions, and what `regard.explain` says.

    >>> q = torch.zeros(1, 2, 5, 8)
    >>> plan = explain_flex_attention(q, q, q, lambda s, b, h, i, j: torch.sin(s))
    >>> dict(plan.facts)["score_mod"]
    'a function of single pairs: aten.sin.default of a score is no step that regard has'
    """
    _check_functions(score_mod, block_mask)
    (score, mask, facts, rows), positions = _translated(query, key, score_mod, block_mask, scale)
    query, key, value = (query, key, value) if rows is None else rows.joined(query, key, value)
    plan = BoundCall(query, key, value, score, mask, positions, None, None).explain(None)
    return replace(plan, facts=(*facts, *plan.facts))


def _with_lse(given: AttentionArguments) -> tuple[Tensor, Tensor]:
    """out in the dtype of the call, and the log-sum-exp."""
    known = plan_cache.attend_with_stats(given, None)
    if known is None:
        call = BoundCall(*given)
        with call.precision():
            known = call.run_with_stats(None)
    out, stats = known
    return out.to(given.v.dtype), stats.lse


def _check_functions(score_mod: Any, block_mask: Any) -> None:
    """TypeError for a score or a mask of regard's, and for a function in place of a BlockMask."""
    for name, given in (("score_mod", score_mod), ("block_mask", block_mask)):
        if isinstance(given, (Score, Mask)):
            way = f"call regard.attention(q, k, v, {given.argument}=...), which takes it"
            raise TypeError(f"{name} is {kind_of(given)}; {way}.")
    if block_mask is not None and not hasattr(block_mask, "mask_mod"):
        way = "write create_block_mask(mask_mod, ...) of torch" if callable(block_mask) else "expected a BlockMask"
        raise TypeError(f"block_mask is {kind_of(block_mask)}; {way}.")


def _translated(
    query: Tensor,
    key: Tensor,
    score_mod: Callable[..., Tensor] | None,
    block_mask: Any,
    scale: float | None,
) -> tuple[Translation, Positions | None]:
    """Score and mask of a call of regard.attention, and the positions."""
    (batch, heads, nq, width), nk = query.shape, key.shape[-2]
    sizes = Sizes(batch, heads, nq, nk, accumulator(query.dtype), query.device)
    mask_mod = None if block_mask is None else block_mask.mask_mod
    factor = max(width, 1) ** -0.5 if scale is None else scale
    found = translated_call(score_mod, mask_mod, factor, sizes, key)
    return found, head(nq, nk, query.device) if nq != nk else None  # i and j are indices


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
        return "return_aux wants the largest scores"
    if torch.compiler.is_compiling():
        return "it is inside torch.compile, which makes a kernel of it"
    if block_mask is not None:
        n = query.shape[2], key.shape[2]
        if tuple(block_mask.shape[-2:]) != n:
            return f"its block_mask was created for {listed(block_mask.shape)}; q and k have lengths {n}"
    return None
