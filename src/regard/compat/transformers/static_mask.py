"""StaticMask: the mask of a cache of fixed shapes, as graphs read it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.compat.transformers.mask import LazyMask, ReducedMask
from regard.core.region import Frame
from regard.masks.algebra import Everything, Mask
from regard.masks.between import Between
from regard.masks.dense import Dense


@dataclass(frozen=True, eq=False)
class StaticMask(LazyMask):
    """A lazy mask for a cache whose tensors keep their shapes (StaticCache), made outside of the graph that reads it.

    `generate` makes the mask of each step, then calls the model, which may be compiled. A graph belongs to the numbers
    in the objects that it is given, and is compiled again for others; tensors are its inputs. So a graph reads no
    positions here, but tensors that have the same shapes at each step.

    sizes       the shape of the mask
    in_graphs   what may attend, as indices: an interval of keys for each query; booleans where it is no interval
    """

    sizes: tuple[int, int, int, int] = field(init=False)
    in_graphs: Mask = field(init=False)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.sizes

    def as_called(self, whole: bool) -> ReducedMask:
        return ReducedMask(self.in_graphs, None) if torch.compiler.is_compiling() else super().as_called(whole)

    def dense(self) -> Tensor:
        if not torch.compiler.is_compiling():
            return super().dense()
        batch, _, nq, nk = self.sizes
        return self.form.write(self.in_graphs.on(nq, nk, batch=(batch,)).dense().expand(self.sizes))

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", (self.batch, 1, *self.positions.counts))
        super().__post_init__()
        object.__setattr__(self, "in_graphs", self._by_indices())

    def _by_indices(self) -> Mask:
        batch, _, nq, nk = self.sizes
        mask, positions, keys = self.reduced
        first, count = (0, nk) if keys is None else (keys.start, keys.stop - keys.start)
        if type(mask) is Everything:  # each step without padding
            bounds = (torch.full((batch, nq), n, dtype=torch.int32, device=self.device) for n in (first, first + count))
            return Between(*bounds)
        interval = mask.rows(Frame.of(nq, count, batch=(batch,), positions=positions))
        if interval is None:
            return Dense(self.mask.on(nq, nk, positions=self.positions, batch=(batch,)).dense())
        start, stop = ((bound[..., 0, :].expand(batch, nq) + first).int() for bound in interval)
        return Between(start, stop)
