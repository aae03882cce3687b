"""Jagged nested tensors of torch: a batch of unequal lengths in one tensor, and attention over one.

Attention runs on the values, the sequences one behind another along the ragged axis, under Documents; where q alone is
nested, see ragged_queries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.call.arguments import check_kinds
from regard.core.errors import ShapeError
from regard.core.positions import Positions
from regard.core.shapes import count_of, listed
from regard.core.tracing import watched
from regard.masks.algebra import Mask
from regard.masks.ragged import Documents
from regard.scores.algebra import Score


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


def any_nested(*tensors: Any) -> bool:
    return any(isinstance(t, Tensor) and t.is_nested for t in tensors)


def numbered(counts: list[int], starts: Tensor) -> tuple[Tensor, Tensor]:
    """counts[b] tokens of each sequence, one behind another: of which sequence b each is, and starts[b] + 0, 1, ...

    >>> numbered([2, 1], torch.tensor([5, 0]))
    (tensor([0, 0, 1]), tensor([5, 6, 0]))
    """
    lengths = torch.tensor(counts, dtype=torch.int64, device="cpu")
    sequence = torch.arange(len(counts), dtype=torch.int64, device="cpu").repeat_interleave(lengths)
    first = lengths.cumsum(0) - lengths
    return sequence, torch.arange(len(sequence), dtype=torch.int64, device="cpu") - first[sequence] + starts[sequence]


def flatten_call(
    q: Tensor, k: Tensor, v: Tensor, score: Score, mask: Mask, positions: Positions | None
) -> tuple[Tensor, Tensor, Tensor, Mask, Positions | None]:
    """The same call on the values of q, k and v, (batch, heads, n*, d) or (batch, n*, d), as one sequence."""
    check_kinds(score, mask, positions, None)
    values, lengths = zip(*(sequences(t, name) for t, name in ((q, "q"), (k, "k"), (v, "v"))), strict=True)
    if not torch.equal(lengths[1], lengths[2]):
        raise ShapeError(f"v has lengths {lengths[2].tolist()}, k {lengths[1].tolist()}; expected one value a key.")
    if len(lengths[0]) != len(lengths[1]):
        raise ShapeError(f"k has {count_of(len(lengths[1]), 'sequence')}, q {len(lengths[0])}; expected as many.")
    same = torch.equal(lengths[0], lengths[1])
    numbers = torch.arange(len(lengths[0]), device=lengths[0].device, dtype=torch.int64)
    ids = [numbers.repeat_interleave(n) for n in lengths[:2]]
    if positions is None and (mask.compares_positions() or score.compares_positions()):
        if not same:
            raise ShapeError(
                f"q has lengths {lengths[0].tolist()}, k {lengths[1].tolist()} under a mask or a score that compares "
                "positions, and these are not given. Pass positions=Positions(q, k), a number for each token of the "
                "concatenated sequences."
            )
        # distances are the same wherever a sequence begins; what else compares positions counts from there
        if mask.rule() is None or score.compares_positions():
            starts = (lengths[0].cumsum(0) - lengths[0]).repeat_interleave(lengths[0])
            at = torch.arange(len(starts), device=starts.device, dtype=torch.int64) - starts
            positions = Positions(at, at)
    return *values, mask & (Documents(ids[0]) if same else Documents(*ids)), positions


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


def sequences(x: Any, name: str) -> tuple[Tensor, Tensor]:
    """The values of q, k or v in axes of regard.attention, and the lengths of the sequences."""
    values, lengths = jagged(x, name)
    if x.dim() < 3 or ragged_axis(x) != x.dim() - 2:
        raise ShapeError(
            f"{name} has shape {listed(x.shape)}; expected the ragged axis before the last one, (batch, heads, n*, d) "
            "or (batch, n*, d): x.transpose(1, 2) of (batch, n*, heads, d)."
        )
    return (values[None] if x.dim() == 4 else values), lengths
