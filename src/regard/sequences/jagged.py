"""Jagged nested tensors of torch, a batch of unequal lengths in one tensor: their values and lengths, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.core.errors import ShapeError
from regard.core.shapes import listed
from regard.core.tracing import watched


def jagged(x: Any, name: str) -> tuple[Tensor, Tensor]:
    """The values of a jagged nested tensor, without its batch axis, and the lengths of its sequences, (batch,)."""
    if not (isinstance(x, Tensor) and x.is_nested and x.layout == torch.jagged):
        kind = f"a nested tensor of layout {x.layout}" if isinstance(x, Tensor) and x.is_nested else "not nested"
        raise TypeError(f"{name} is {kind}; expected torch.nested.nested_tensor(..., layout=torch.jagged).")
    parts: Any = x  # torch does not declare what nested tensors have besides
    holes: Tensor | None = parts.lengths()
    if holes is not None:  # a view with gaps between its sequences, as torch.nested.narrow makes it
        return torch.cat(x.unbind(), ragged_axis(x) - 1), holes.long()
    return parts.values() if _recorded(x) else parts._values, parts.offsets().diff().long()


def _recorded(t: Tensor) -> bool:
    """Whether torch must see how values become nested, and back: for gradients, in a graph.

    Else the attribute and the constructor are enough: torch's functions take 0.2 ms each between two large kernels.
    """
    return t.requires_grad or torch.compiler.is_compiling() or watched()


def ragged_axis(x: Tensor) -> int:
    """The axis of a jagged nested tensor that has another length for each sequence."""
    sizes: tuple[Any, ...] = tuple(x.shape)
    return next(axis for axis, n in enumerate(sizes) if not isinstance(n, int))


def numbered(counts: list[int], starts: Tensor) -> tuple[Tensor, Tensor]:
    """counts[b] tokens of each sequence, one behind another: of which sequence b each is, and starts[b] + 0, 1, ...

    >>> numbered([2, 1], torch.tensor([5, 0]))
    (tensor([0, 0, 1]), tensor([5, 6, 0]))
    """
    lengths = torch.tensor(counts, dtype=torch.int64, device="cpu")
    sequence = torch.arange(len(counts), dtype=torch.int64, device="cpu").repeat_interleave(lengths)
    first = lengths.cumsum(0) - lengths
    return sequence, torch.arange(len(sequence), dtype=torch.int64, device="cpu") - first[sequence] + starts[sequence]


def nest_like(out: Tensor, q: Any) -> Tensor:
    """The output of a flattened call as a nested tensor with q's sequences."""
    values = out[0] if q.dim() == 4 else out
    if _recorded(values):
        return torch.nested.nested_tensor_from_jagged(values, offsets_of(q), jagged_dim=ragged_axis(q))
    return type(q)(values, offsets_of(q), _ragged_idx=ragged_axis(q))


def offsets_of(q: Any) -> Tensor:
    """Where the sequences of a jagged nested tensor begin, one behind another, and the last ends: (batch + 1,)."""
    lengths: Tensor | None = q.lengths()
    return q.offsets() if lengths is None else torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def values_and_lengths(x: Any, name: str) -> tuple[Tensor, Tensor]:
    """The values of q, k or v in axes of regard.attention, and the lengths of the sequences."""
    values, lengths = jagged(x, name)
    if x.dim() < 3 or ragged_axis(x) != x.dim() - 2:
        raise ShapeError(
            f"{name} has shape {listed(x.shape)}; expected the ragged axis before the last one, (batch, heads, n*, d) "
            "or (batch, n*, d): x.transpose(1, 2) of (batch, n*, heads, d)."
        )
    return (values[None] if x.dim() == 4 else values), lengths
