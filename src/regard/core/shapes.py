"""Shapes: heads that share keys, blocks of an axis, and how a message writes a shape."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from regard.core.errors import ShapeError

FARTHEST = 1 << 62  # positions, and what is added to them, are no larger, so that sums are int64


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """(*batch, hk, n, d) as (*batch, heads, n, d): query head i reads key head i // (heads // hk)."""
    return x if x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], dim=-3)


def with_head_axis(x: Tensor) -> Tensor:
    """(*batch, heads, n, d) as it is; (batch, n, d) and (n, d) with an axis of one head."""
    return x if x.dim() > 3 else x.unsqueeze(-3)


def sum_groups(x: Tensor, key_heads: int) -> Tensor:
    """The adjoint of repeat_heads: (*batch, h, n, d) summed over each group to (*batch, key_heads, n, d)."""
    if x.shape[-3] == key_heads:
        return x
    return x.unflatten(-3, (key_heads, x.shape[-3] // key_heads)).sum(-3)


def blocks(n: int, size: int) -> list[slice]:
    """0..n cut into slices of `size`, the last one shorter."""
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def listed(shape: Sequence[int]) -> str:
    """A shape as messages show it: (2, 3, 5)."""
    return str(tuple(shape))


def broadcasts(shape: Sequence[int], full: Sequence[int]) -> bool:
    """Whether a tensor of `shape` broadcasts to one of `full`.

    >>> broadcasts((1, 5), (2, 3, 5)), broadcasts((2, 5), (2, 3, 5))
    (True, False)
    """
    lead = len(full) - len(shape)  # torch 2.8's compiler traces no zip of unequal lengths
    return lead >= 0 and all(a == 1 or a == b for a, b in zip(shape, full[lead:], strict=True))


def broadcast_shape(*shapes: Sequence[int]) -> tuple[int, ...]:
    """The shape to which tensors of all these shapes broadcast; ShapeError where there is none.

    torch.broadcast_shapes without its import of torch.fx.experimental.symbolic_shapes, and so of sympy, which takes
    half a second or more of a process's first call.

    >>> broadcast_shape((2, 1, 4), (3, 1)), broadcast_shape()
    ((2, 3, 4), ())
    """
    common = [1] * max([0, *map(len, shapes)])
    for shape in shapes:
        for axis, size in enumerate(shape, len(common) - len(shape)):
            if size != 1 and size != common[axis]:
                if common[axis] != 1:
                    raise ShapeError(f"shapes {' and '.join(map(listed, shapes))} do not broadcast to one.")
                common[axis] = size
    return tuple(common)


def equal_shapes(a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two shapes are the same; in a graph, where sizes may be symbols, torch.compile guards each of them.

    >>> equal_shapes((2, 3), torch.Size((2, 3))), equal_shapes((3,), (2, 3))
    (True, False)
    """
    return len(a) == len(b) and all(m == n for m, n in zip(a, b, strict=True))


def count_of(n: int, noun: str, form: str = "") -> str:
    """A number and its noun, as messages show them; form: how the number is formatted.

    >>> count_of(1, "query"), count_of(4, "query"), count_of(4096, "token", ",")
    ('1 query', '4 queries', '4,096 tokens')
    """
    words = noun.split(" ")
    return f"{n:{form}} {noun if n == 1 else ' '.join((*words[:-1], _PLURALS.get(words[-1], words[-1] + 's')))}"


_PLURALS = {"query": "queries", "axis": "axes", "index": "indices", "byte": "bytes"}


def one_or(n: int, count: int) -> bool:
    """Whether an axis of n entries has one for all, or one for each of `count`; `in` knows no symbols of graphs."""
    return n == 1 or n == count
