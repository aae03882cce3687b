"""flash-attention's functions, with its arguments, layout and masks, on regard: on a CPU, in any dtype.

    from regard.compat.flash_attention import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Tensors are (batch, n, heads, d) or packed (total, heads, d). What all three functions agree on:

softmax_scale   default 1 / sqrt(d)
causal          aligned bottom-right: the queries are the last ones
window_size     (left, right), a tuple or a tensor: keys besides the query's own, -1 = unbounded; causal makes right 0
softcap         above 0: scores s become softcap · tanh(s / softcap)
alibi_slopes    (heads,) or (batch, heads), added after the cap: -slope · |i + nk - nq - j|. Slopes (batch, heads) cost
                one call for each sequence
dropout_p       0.0 in eval; drawn from torch's generator, not the bits of flash-attention
deterministic   results always are; num_splits: ignored, the kernels split the keys by themselves

Key heads may be fewer than query heads: head i reads head i // (h // hk). A query that sees nothing gives 0, its lse
is +inf. Beyond flash-attention: float32 and float64, values of another width than keys, gradients of the slopes and of
the lse.
Source: Dao 2023 (arXiv 2307.08691); flash_attn/flash_attn_interface.py, flash-attention 2.8.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
from torch import Tensor

from regard.compat.flash_attention_call import CachedTokens, Options, Window, bounds, run
from regard.compat.flash_attention_checks import (
    check_axes,
    check_new_rows,
    check_pools,
    check_slopes,
    check_together,
    checked_lengths,
    checked_rows,
    checked_table,
    checked_totals,
    pages_in_use,
    refuse_probabilities,
)
from regard.compat.flash_attention_rows import packed_rows, rotated, write_rows
from regard.core.errors import ShapeError, Unsupported
from regard.core.shapes import count_of
from regard.masks.convert import check_as_many, cu_seqlens_positions, from_cu_seqlens


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """flash_attn.flash_attn_func: q (batch, nq, heads, d), k and v (batch, nk, hk, d) -> (batch, nq, heads, d).

    return_attn_probs: (out, lse (batch, heads, nq), None); flash-attention's third result, for its own tests, is also
    empty without dropout. Arguments and conventions: see the module.
    Raises ShapeError for shapes that do not fit, Unsupported for return_attn_probs with dropout.

    >>> q, k = torch.randn(2, 3, 8, 16), torch.randn(2, 7, 2, 16)  # 3 new tokens of 7
    >>> flash_attn_func(q, k, k, causal=True, window_size=(4, 0)).shape
    torch.Size([2, 3, 8, 16])
    """
    check_axes(("q", q), ("k", k), ("v", v), shape="(batch, n, heads, d)")
    refuse_probabilities(return_attn_probs, dropout_p)
    options = Options(softmax_scale, causal, window_size, softcap, dropout_p)
    if _by_sequence(alibi_slopes) and len(q):
        check_slopes(alibi_slopes, len(q), q.shape[2])
        if not len(q) == len(k) == len(v):
            raise ShapeError(f"q, k and v have batches of {len(q)}, {len(k)} and {len(v)}; expected as many sequences.")
        rows = (slice(b, b + 1) for b in range(len(q)))
        parts = [run(options.bind_to_last(q[b], k[b], v[b], alibi_slopes[b.start])) for b in rows]
        out, lse = (torch.cat(t) for t in zip(*parts, strict=True))
    else:
        out, lse = run(options.bind_to_last(q, k, v, alibi_slopes))
    return (out, lse, None) if return_attn_probs else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """flash_attn.flash_attn_varlen_func: packed q (total_q, heads, d), k and v (total_k, hk, d) -> (total_q, heads, d).

    cu_seqlens_q, cu_seqlens_k  running totals of the lengths, integers (batch + 1,) from 0; max_seqlen_* are not needed
    block_table                 (batch, most pages): k and v are pools (pages, page_size, hk, d), whose rows are copied
                                to packed keys and values first
    return_attn_probs           (out, lse (heads, total_q), None)

    Raises ShapeError and ValueError for what does not fit, Unsupported for return_attn_probs with dropout.

    >>> x, cu = torch.randn(7, 4, 16), torch.tensor([0, 3, 7], dtype=torch.int32)
    >>> flash_attn_varlen_func(x, x, x, cu, cu, 4, 4, causal=True).shape
    torch.Size([7, 4, 16])
    """
    check_axes(("q", q), shape="(total, heads, d)")
    refuse_probabilities(return_attn_probs, dropout_p)
    if block_table is not None:
        check_axes(("k", k), ("v", v), shape="(pages, page_size, hk, d)")
        check_pools(k, v, "k and v", paged=True)
        k, v = (packed_rows(pool, block_table, cu_seqlens_k) for pool in (k, v))
    check_axes(("k", k), ("v", v), shape="(total, heads, d)")
    cu_seqlens_q = checked_totals(cu_seqlens_q, "cu_seqlens_q", len(q))
    cu_seqlens_k = checked_totals(cu_seqlens_k, "cu_seqlens_k", len(k))
    options = Options(softmax_scale, causal, window_size, softcap, dropout_p)
    if _by_sequence(alibi_slopes) and len(cu_seqlens_q) > 1:
        check_as_many(cu_seqlens_q, cu_seqlens_k)
        check_slopes(alibi_slopes, len(cu_seqlens_q) - 1, q.shape[1])
        spans = (cu.unfold(0, 2, 1).tolist() for cu in (cu_seqlens_q, cu_seqlens_k))
        parts = [
            run(options.bind_to_last(q[None, i:m], k[None, j:n], v[None, j:n], slopes))
            for (i, m), (j, n), slopes in zip(*spans, alibi_slopes, strict=True)
        ]
        out, lse = torch.cat([part[0] for part in parts], 1), torch.cat([part[1] for part in parts], 2)
    else:
        mask = from_cu_seqlens(cu_seqlens_q, cu_seqlens_k) & options.mask()
        positions = cu_seqlens_positions(cu_seqlens_q, cu_seqlens_k)
        out, lse = run(options.bind(q[None], k[None], v[None], alibi_slopes, mask, positions))
    return (out[0], lse[0], None) if return_attn_probs else out[0]


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """flash_attn.flash_attn_with_kvcache: new tokens q (batch, nq, heads, d) attend to a cache, which k and v extend.

    k_cache, v_cache  (batch, room, hk, d); with block_table (batch, most pages) pools (pages, page_size, hk, d) of any
                      page size, read in place
    k, v              (batch, n, hk, d), written in place after the cache_seqlens tokens of each sequence
    cache_seqlens     the number of tokens in the cache, a number or integers (batch,); None: it is full
    cache_batch_idx   (batch,): the row of the cache that each sequence has
    cache_leftpad     (batch,): where each sequence begins in its row; earlier keys are hidden
    rotary_cos, _sin  (positions, width / 2): rotates k, and q, at cache_seqlens and behind; without causal and window
                      all of q at cache_seqlens. rotary_interleaved: features 2m and 2m + 1 make a pair, else m and
                      m + width / 2

    Returns out (batch, nq, heads, d), with return_softmax_lse also the lse (batch, heads, nq). No gradients.
    Raises ShapeError for shapes that do not fit, TypeError for new rows of another dtype than the cache, ValueError if
    the cache is too small, for k without v or rotary_cos without rotary_sin, and for rotation without new keys,
    Unsupported for rotation with cache_leftpad.

    >>> cache = torch.zeros(2, 10, 4, 16)
    >>> q = k = torch.randn(2, 1, 4, 16)
    >>> flash_attn_with_kvcache(q, cache, cache.clone(), k, k, cache_seqlens=torch.tensor([3, 5]), causal=True).shape
    torch.Size([2, 1, 4, 16])
    """
    check_axes(("q", q), ("k_cache", k_cache), ("v_cache", v_cache), shape="(batch, n, heads, d)")
    check_pools(k_cache, v_cache, "k_cache and v_cache", block_table is not None)
    check_new_rows(k, v, (k_cache, v_cache), len(q))
    check_together(rotary_cos=rotary_cos, rotary_sin=rotary_sin)
    with torch.no_grad():
        batch = len(q)
        if block_table is not None:
            if cache_batch_idx is not None:
                raise ValueError("cache_batch_idx and block_table are both given; order the rows of block_table.")
            table = checked_table(block_table, "block_table", batch, len(k_cache))
        else:  # each row of the cache is the one page of its sequence
            own = torch.arange(batch, dtype=torch.int64, device="cpu") if cache_batch_idx is None else cache_batch_idx
            table = checked_rows(own, batch, len(k_cache))[:, None]
        table, room = table.to(k_cache.device, torch.int32), table.shape[1] * k_cache.shape[1]
        lengths = room if cache_seqlens is None else cache_seqlens
        if not isinstance(lengths, Tensor):
            lengths = torch.as_tensor(lengths, dtype=None, device="cpu")
        lengths = checked_lengths(lengths, batch).to(q.device)
        held = lengths.expand(batch)
        if rotary_cos is not None and rotary_sin is not None:
            if k is None:
                raise ValueError("rotary_cos is given without k; expected new keys to rotate with q.")
            if cache_leftpad is not None:
                raise Unsupported("rotary_cos with cache_leftpad; rotate q and k before the call.")
            one_place = not causal and bounds(window_size) == (-1, -1)
            q = rotated(q, rotary_cos, rotary_sin, held, rotary_interleaved, advance=not one_place)
            k = rotated(k, rotary_cos, rotary_sin, held, rotary_interleaved, advance=True)
        new = 0 if k is None or v is None else k.shape[1]
        n = int(held.max()) + new if batch else 0
        if n > room:
            raise ValueError(
                f"the cache has room for {count_of(room, 'token')}; {n} were to be held. Allocate a larger cache."
            )
        table = pages_in_use(table, held + new, k_cache.shape[1], len(k_cache))
        tokens = CachedTokens((k_cache, v_cache), table, (held if lengths.dim() else lengths) + new, cache_leftpad)
        options = Options(softmax_scale, causal, window_size, softcap)
        if _by_sequence(alibi_slopes) and batch:
            check_slopes(alibi_slopes, batch, q.shape[2])
            rows = (slice(b, b + 1) for b in range(batch))
            calls = [tokens.of(b).bind(q[b], alibi_slopes[b.start], options) for b in rows]
        else:
            calls = [tokens.bind(q, alibi_slopes, options)]
        if k is not None and v is not None:  # everything else fits
            write_rows((k_cache, v_cache), (k, v), table, held)
        out, lse = (torch.cat(t) for t in zip(*map(run, calls), strict=True))
    return (out, lse) if return_softmax_lse else out


def _by_sequence(slopes: Tensor | None) -> TypeGuard[Tensor]:
    return slopes is not None and slopes.dim() == 2
