"""attention, attention_state, attention_weights, attention_scores, explain: the functions."""

from __future__ import annotations

import inspect
from typing import Any, overload

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

import regard.runtime.pairs as pairs
import regard.runtime.plan_cache as plan_cache
import regard.sequences.nested_call as nested_call
from regard.backends.base import Backend
from regard.call.arguments import answers_calls, answers_calls_of_pairs, missing_tensors, unexpected_arguments
from regard.call.of_pairs import check_of_some_keys
from regard.core.arrays import Array, any_nested
from regard.core.dropout import Dropout, undrawn
from regard.core.positions import Positions
from regard.core.state import State
from regard.core.value import calls_functions_of_others
from regard.masks.algebra import Everything, Mask
from regard.runtime.binding import BoundCall
from regard.runtime.dispatch import Explanation
from regard.scores.algebra import Score
from regard.scores.similarity import ScaledDot


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score: Score = ...,
    mask: Mask = ...,
    positions: Positions | None = None,
    sink: Tensor | float | None = None,
    dropout: Dropout | None = None,
    backend: Backend | None = None,
) -> Tensor: ...


@overload
def attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    score: Score = ...,
    mask: Mask = ...,
    positions: Positions | None = None,
    sink: Tensor | float | None = None,
    dropout: Dropout | None = None,
    backend: Backend | None = None,
) -> Array: ...


def attention(
    q: Any = None,
    k: Any = None,
    v: Any = None,
    *others: Any,
    score: Score = ScaledDot(),
    mask: Mask = Everything(),
    positions: Positions | None = None,
    sink: Tensor | float | None = None,
    dropout: Dropout | None = None,
    backend: Backend | None = None,
    **unknown: Any,
) -> Any:
    """Exact attention: out_i = Σ_j p_ij v_j, p_ij = exp(s_ij) / Σ_j' exp(s_ij'), over the keys j that query i may see.

    q (*batch, h, nq, dk), k (*batch, hk, nk, dk), v (*batch, hk, nk, dv) -> (*batch, h, nq, dv), in q's dtype. Three
    axes are (batch, n, d), two (n, d): one head and no head axis. h is a multiple of hk; query head i reads key head
    i // (h // hk). dv may differ from dk. float16, bfloat16 (sums in float32), float32, float64. Memory is linear in nq
    and nk.

    NumPy arrays (and other DLPack arrays) are taken without a copy, and the output is of the same kind. Jagged nested
    tensors of torch, (batch, h, n*, d), are sequences of unequal lengths: each attends to its own keys, and the output
    is nested like q. Masks and scores then see one batch element, and the positions of each sequence. If only q is
    nested, and k and v are (batch, hk, nk, d), sequence b of q attends to the keys of batch element b: the new tokens
    of a batch with a cache, many in some sequences and one in others. Masks and scores then see batch element b;
    positions.q has a number for each query, the sequences one after another.

    score      similarity and modifiers; default q · k / sqrt(dk)
    mask       which keys a query may see; a query that may see nothing gets 0, and gradients 0
    positions  where queries and keys stand: needed where nq differs from nk and a mask or score compares positions
    sink       a logit without a value, a number or (h,): it takes mass and adds nothing
    dropout    Dropout(p), applied to the weights after the softmax
    backend    a Backend that must run it, or None: the first that can (see `explain`)

    The output is differentiable, to any order and in forward mode, with respect to q, k, v, the sink and every tensor
    in the score. Hidden keys and values never change the output, NaN and inf included; a NaN that a query can see stays
    visible. Inputs are never written to, and outputs never share their memory.
    The axes of the output may lie in memory in the order of q's, as those of torch's function do: use reshape(), not
    view(), on it.
    Raises ShapeError, TypeError or ValueError for wrong inputs, Unsupported where a named backend cannot run the call.
    Source: Vaswani et al. 2017 (arXiv 1706.03762); Dao et al. 2022 (arXiv 2205.14135).

    >>> import regard as rg
    >>> q, k, v = torch.randn(2, 8, 128, 64), torch.randn(2, 2, 128, 64), torch.randn(2, 2, 128, 32)
    >>> rg.attention(q, k, v, score=rg.ScaledDot() >> rg.SoftCap(50.0), mask=rg.Causal()).shape
    torch.Size([2, 8, 128, 32])
    """
    if others or unknown:
        raise unexpected_arguments(others, unknown)
    if has_torch_function((q, k, v)):  # modes and tensor subclasses see the call as they see torch's own
        if any_nested(q, k, v):
            return nested_call.attend(attention, q, k, v, score, mask, positions, sink, dropout, backend)
        named: dict[str, Any] = {"score": score, "mask": mask, "positions": positions, "sink": sink}
        return handle_torch_function(attention, (q, k, v), q, k, v, **named, dropout=dropout, backend=backend)
    known = plan_cache.attend(q, k, v, score, mask, positions, sink, dropout, backend)
    if known is not None:
        return known
    if q is None or k is None or v is None:
        raise missing_tensors(q=q, k=k, v=v)
    return BoundCall(q, k, v, score, mask, positions, sink, dropout).output(backend)


@answers_calls
def attention_state(
    q: Any,
    k: Any,
    v: Any,
    *,
    score: Score = ScaledDot(),
    mask: Mask = Everything(),
    positions: Positions | None = None,
    sink: Tensor | float | None = None,
    dropout: Dropout | None = None,
    backend: Backend | None = None,
) -> State:
    """The State of these keys for these queries; `|` merges it with that of other keys. Arguments as `attention`.

    m and l have the shape (*batch, h, nq), o (*batch, h, nq, dv), in the accumulation dtype (float32, or float64).
    `finish()` gives (out, lse). A sink belongs to one of the parts only. Differentiable. Raises Unsupported where a
    function of the score or the mask reads several keys at once, as topk does: those of other parts are not there.

    >>> import regard as rg
    >>> q, k, v = torch.randn(5, 8), torch.randn(7, 8), torch.randn(7, 3)
    >>> parts = rg.attention_state(q, k[:4], v[:4]) | rg.attention_state(q, k[4:], v[4:])
    >>> torch.allclose(parts.finish()[0], rg.attention(q, k, v), atol=1e-6)
    True
    """
    arguments = plan_cache.AttentionArguments(q, k, v, score, mask, positions, sink, dropout)
    known = plan_cache.attend_with_stats(arguments, backend)
    if known is not None:
        if calls_functions_of_others(mask):  # a score that the kernels run is a function of single pairs
            check_of_some_keys(BoundCall(*arguments._replace(dropout=None)).problem)  # which would draw a seed
        out, stats = known
        return State(stats.m, stats.l, out * stats.l[..., None])
    call = BoundCall(*arguments)
    with call.precision():
        check_of_some_keys(call.problem)
        out, stats = call.run_with_stats(backend)
        m, l = (call.layout.restore(t, 1) for t in (stats.m, stats.l))
        return State(m, l, call.layout.restore(out, 2) * l[..., None])


@overload
def attention_weights(
    q: Tensor,
    k: Tensor,
    *,
    score: Score = ...,
    mask: Mask = ...,
    positions: Positions | None = None,
    sink: Tensor | float | None = None,
    rows: Any = None,
) -> Tensor: ...


@overload
def attention_weights(
    q: Array,
    k: Array,
    *,
    score: Score = ...,
    mask: Mask = ...,
    positions: Positions | None = None,
    sink: Tensor | float | None = None,
    rows: Any = None,
) -> Array: ...


@answers_calls_of_pairs
def attention_weights(
    q: Any,
    k: Any,
    *,
    score: Score = ScaledDot(),
    mask: Mask = Everything(),
    positions: Positions | None = None,
    sink: Tensor | float | None = None,
    rows: Any = None,
) -> Any:
    """The weights p_ij themselves: (*batch, h, nq, nk), or for some queries only, `rows` (r,): (*batch, h, r, nk).

    Weights before dropout, one matrix per head, never averaged. Each row sums to 1, an empty row to 0, and with a sink
    to 1 minus the sink's weight. The memory is that of the result. In q's dtype, differentiable. Arguments as
    `attention`.
    Raises IndexError for a row that does not exist.

    >>> import regard as rg
    >>> x = torch.zeros(4, 8)
    >>> rg.attention_weights(x, x, mask=rg.Causal(), rows=torch.tensor([1, -1]))
    tensor([[0.5000, 0.5000, 0.0000, 0.0000],
            [0.2500, 0.2500, 0.2500, 0.2500]])
    """
    return pairs.of_call(pairs.Weights(), q, k, score, mask, positions, sink, rows)


@overload
def attention_scores(
    q: Tensor, k: Tensor, *, score: Score = ..., mask: Mask = ..., positions: Positions | None = None, rows: Any = None
) -> Tensor: ...


@overload
def attention_scores(
    q: Array, k: Array, *, score: Score = ..., mask: Mask = ..., positions: Positions | None = None, rows: Any = None
) -> Array: ...


@answers_calls_of_pairs
def attention_scores(
    q: Any,
    k: Any,
    *,
    score: Score = ScaledDot(),
    mask: Mask = Everything(),
    positions: Positions | None = None,
    rows: Any = None,
) -> Any:
    """The scores s_ij before the softmax: (*batch, h, nq, nk), or for the queries `rows` (r,) only: (*batch, h, r, nk).

    The similarity of q_i and k_j, then the modifiers, then -inf where the mask hides the key; one matrix a head.
    Omitted arguments have no effect: without `mask` every pair has its score, ScaledDot() is the scaled product only,
    ScaledDot() >> SoftCap(c) the capped one. (qk_matmul_output of ONNX's Attention, as numbered since onnx#7913: 0 the
    product, 1 capped, 2 masked.) There is no `sink` here: its score is the logit itself, and it changes no other.

    The result is float32, or float64 for float64 inputs, as for `max_score` and the log-sum-exp: in bfloat16 999 and
    1001 would be the same number. softmax(s, -1) is `attention_weights` of the same arguments, except for rows that see
    nothing, which are all -inf here. The memory is that of the result. Differentiable, to any order and in forward
    mode, with respect to q, k and every tensor in the score. A score of -inf, whether the mask or a bias hides the
    pair, is a constant: its gradient is 0, also beside NaN. A NaN that a query can see stays visible. Arguments and
    errors as `attention`.
    Raises IndexError for a row that does not exist.
    Source: Vaswani et al. 2017 (arXiv 1706.03762), eq. 1: the argument of the softmax.

    >>> import regard as rg
    >>> q, k = torch.tensor([[1.0, 0.0], [3.0, 4.0]]), torch.eye(2)
    >>> rg.attention_scores(q, k, score=rg.Dot(), mask=rg.Causal())
    tensor([[1., -inf],
            [3., 4.]])
    >>> rg.attention_scores(q, k, score=rg.Dot(), rows=[0])
    tensor([[1., 0.]])
    """
    return pairs.of_call(pairs.Scores(), q, k, score, mask, positions, None, rows)


@answers_calls
def explain(
    q: Any,
    k: Any,
    v: Any,
    *,
    score: Score = ScaledDot(),
    mask: Mask = Everything(),
    positions: Positions | None = None,
    sink: Tensor | float | None = None,
    dropout: Dropout | None = None,
    backend: Backend | None = None,
) -> Explanation:
    """How `attention` would run this call: the backend, why not the others, tiles skipped, bytes needed.

    >>> import regard as rg
    >>> x = torch.zeros(4096, 64)
    >>> rg.explain(x, x, x, mask=rg.Causal(), backend=rg.Tiled()).backend
    Tiled()
    """
    dropout = undrawn(dropout)
    if any_nested(q, k, v):
        return nested_call.explain(q, k, v, score, mask, positions, sink, dropout, backend)
    return BoundCall(q, k, v, score, mask, positions, sink, dropout).explain(backend)


# `others` and `unknown` are there to be refused: help and completion show what there is, which is explain's too
_signature = inspect.signature(explain).replace(return_annotation="Tensor")
setattr(attention, "__signature__", _signature)  # noqa: B010
