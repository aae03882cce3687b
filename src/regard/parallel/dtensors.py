"""DTensors whose sequence is sharded over one dimension of a mesh, as this rank's tokens and back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.core.errors import ShapeError
from regard.core.wrong_calls import kind_of


def is_dtensor(*tensors: Any) -> bool:
    """Whether one of them is a DTensor, known by its module's name: torch.distributed.tensor is not imported."""
    return any(type(t).__module__.startswith("torch.distributed") for t in tensors)


def local_tokens(q: Any, k: Any, v: Any, group: Any) -> tuple[tuple[Tensor, Tensor, Tensor], Any]:
    """This rank's tokens of three DTensors, and the group over which their sequence is sharded.

    Raises TypeError where only some are DTensors, ShapeError unless each is sharded along the axis of tokens over one
    dimension of one mesh, and whole over the others; ValueError where another group is given.
    """
    from torch.distributed.tensor import DTensor

    for name, t in (("q", q), ("k", k), ("v", v)):
        if not isinstance(t, DTensor):
            raise TypeError(f"{name} is {kind_of(t)}, and others are DTensors; expected three of them.")
        sharded = [n for n, placement in enumerate(t.placements) if placement.is_shard(t.dim() - 2)]
        rest = [placement for n, placement in enumerate(t.placements) if n not in sharded]
        if len(sharded) != 1 or not all(placement.is_replicate() for placement in rest):
            raise ShapeError(
                f"{name} has the placements {t.placements}; expected Shard({t.dim() - 2}), its tokens, over one "
                "dimension of the mesh and Replicate() over the others."
            )
        if t.device_mesh != q.device_mesh or sharded != [_dimension(q)]:
            raise ShapeError(f"{name} is sharded over another dimension or mesh than q; expected one for all three.")
    own = q.device_mesh.get_group(_dimension(q))
    if group is not None and getattr(group, "get_group", lambda: group)() is not own:
        raise ValueError("group is another one than that over which q is sharded; leave it out.")
    return (q.to_local(), k.to_local(), v.to_local()), own


def as_dtensor(out: Tensor, q: Any, width: int) -> Tensor:
    """This rank's tokens of the output, as a DTensor placed like q."""
    from torch.distributed.tensor import DTensor

    shape = (*q.shape[:-1], width)
    strides = [1]
    for size in shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    return DTensor.from_local(
        out, q.device_mesh, q.placements, run_check=False, shape=torch.Size(shape), stride=tuple(strides)
    )


def _dimension(q: Any) -> int:
    return next(n for n, placement in enumerate(q.placements) if placement.is_shard(q.dim() - 2))
