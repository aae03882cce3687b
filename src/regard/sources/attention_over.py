"""attention_over: attention over keys and values that come in parts, folded by State."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

import regard.core.arrays as arrays
from regard.backends.base import Backend
from regard.call.arguments import answers_calls_over
from regard.core.cotangents import linear_in
from regard.core.errors import Unsupported
from regard.core.state import RowStats
from regard.masks.algebra import Everything, Mask
from regard.scores.algebra import Score
from regard.scores.similarity import ScaledDot
from regard.sources.over_call import OverCall, over_call
from regard.sources.progress import Progress
from regard.sources.source import Source


@answers_calls_over
def attention_over(
    q: Any,
    source: Source | Iterable[tuple[Any, ...]] | Callable[[], Iterable[tuple[Any, ...]]],
    *,
    score: Score = ScaledDot(),
    mask: Mask = Everything(),
    positions: Tensor | None = None,
    sink: Tensor | float | None = None,
    backend: Backend | None = None,
    ahead: int = 2,
    progress: Progress = None,
) -> Any:
    """`attention` over keys and values that come in parts, for example from files larger than memory.

    q (*batch, h, nq, dk), the keys and values of each part as `attention` takes them, in q's dtype -> (*batch, h, nq,
    dv), in q's dtype whatever autocast says. The output equals that over all keys at once, up to rounding. Memory: q,
    the output, and `ahead` + 1 parts, one in use and the others read or being read.

    source     a Source (see regard.sources), or what Chunks takes: a list, an iterator, a function that returns one
    score      as `attention`; a similarity of your own sees each part as a call of its own, with its own positions
    mask       as `attention`, over all keys; a part that it hides completely is not read, if `Mask.cover` shows it
    positions  positions of the queries, integers (nq,) or (*batch, nq); the source has those of the keys, from 0 by
               default. None: those of the keys, if there are as many. torch.arange(nk - nq, nk) are the last ones
    sink       as `attention`
    backend    a Backend that must run every part, or None: the first that can
    ahead      the number of parts that a thread reads while another is in use; 0: the calling thread reads
    progress   "tqdm", "rich" (if installed), or a function of (keys done, keys or None), called after each part

    Differentiable once, with respect to q, the sink, the tensors of the score, and the keys and values of a source of
    tensors (Chunks of a list, Arrays of tensors): the backward reads the source a second time, with m and l of each row
    kept from the first, in as little memory. Raises ValueError for gradients with a source that can be read only once,
    or if a part requires a gradient that cannot reach it; RuntimeError, with the error as its cause, if a part cannot
    be read; Unsupported if the mask or the score reads indices of keys and the source does not know their number; and
    the errors of `attention`. When the call ends, also by an error, the thread has ended and files are closed.
    Source: the merge of Milakov and Gimelshein 2018 (arXiv 1805.02867), see State.

    >>> import regard as rg
    >>> q, k, v = torch.randn(3, 8), torch.randn(7, 8), torch.randn(7, 2)
    >>> parts = [(k[:5], v[:5]), (k[5:], v[5:])]
    >>> out = attention_over(q, parts, mask=rg.Causal(), positions=torch.arange(4, 7))
    >>> torch.allclose(out, rg.attention(q, k, v, mask=rg.Causal(), positions=rg.tail(3, 7)), atol=1e-6)
    True
    """
    answer = arrays.answer_like(q)
    q = arrays.tensor(q, "q")
    call = over_call(q, source, score, mask, positions, sink, backend, ahead, progress)
    source = call.source
    given = (q, *call.tensors())
    if not call.recorded or not any(t.requires_grad for t in given):
        return answer(call.fold(q).finish()[0].to(q.dtype))
    if not source.rereadable:
        raise ValueError(
            f"q or a tensor of the score requires a gradient, and the source {source!r} is an iterator: the backward "
            "would read it a second time. Pass a list, or a function that returns a new iterator; or call it under "
            "torch.no_grad()."
        )
    return answer(_AttentionOver.apply(call, *given))


class _AttentionOver(torch.autograd.Function):
    """The output, to autograd: apply(call, q, *call.tensors())."""

    @staticmethod
    def forward(ctx: Any, call: OverCall, q: Tensor, *tensors: Tensor) -> Tensor:
        state = call.fold(q)
        out = state.finish()[0]
        ctx.call = call
        ctx.save_for_backward(q, out, state.m, state.l, *tensors)
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise Unsupported(
                "attention_over can be differentiated once, and this backward is asked to be differentiable "
                "(create_graph=True). attention(...) over all keys can be, to any order."
            )
        q, out, m, l, *tensors = ctx.saved_tensors
        call, needs = ctx.call.with_tensors(tuple(tensors)), tuple(ctx.needs_input_grad[1:])
        return None, *linear_in((g,), lambda plain: call.gradients(q, RowStats(m, l), out, plain[0], needs))
