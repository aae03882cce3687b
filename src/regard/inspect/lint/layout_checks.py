"""What shapes and memory say of q, k and v whose axes may be in another order."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from regard.call.arguments import MANY_HEADS, more_heads_than_tokens
from regard.call.problem import Problem
from regard.core.positions import Positions
from regard.core.shapes import count_of
from regard.inspect.lint.defect import Defect


def turned_round(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, positions: Positions | None, sink: Tensor | float | None
) -> Iterator[Defect]:
    """(*batch, n, heads, d) where (*batch, heads, n, d) is read: more heads than tokens, in numbers that are unlikely.

    Not where something else of the call fits the numbers of heads and tokens that are read: positions, tensors of the
    mask, the score or the sink, or v in memory as a transposed projection lies.
    """
    held = (*problem.mask_tensors, *problem.score_tensors, *([sink] if isinstance(sink, Tensor) else []))
    if q.dim() < 4 or positions is not None or any(t.dim() for t in held):
        return
    heads, n = q.shape[-3], q.shape[-2]
    unlikely = heads >= MANY_HEADS or (not usual(heads) and usual(n))
    if not more_heads_than_tokens(q, k) or not unlikely or v.stride(-3) <= v.stride(-2):
        return
    yield Defect(
        "heads and tokens turned round",
        heads,
        f"q, k and v are read as (batch, heads, n, d): {heads} heads of {count_of(n, 'token')}. As "
        f"(batch, n, heads, d) they would be {heads} tokens and {count_of(n, 'head')}, which is more usual.",
        "If the axes are (batch, n, heads, d), as flash-attention has them, write q.transpose(1, 2), and k's and v's "
        "too. If they are right, pass positions=head(nq, nk), and this goes.",
    )


def usual(heads: int) -> bool:
    """Whether models have so many heads: numbers without a prime factor above 7, such as 12, 14, 25, 64.

    >>> [n for n in range(2, 40) if not usual(n)]
    [11, 13, 17, 19, 22, 23, 26, 29, 31, 33, 34, 37, 38, 39]
    """
    for prime in (2, 3, 5, 7):
        while heads % prime == 0 and heads > 1:
            heads //= prime
    return heads == 1
