"""Which tokens are real: as masks of keys, intervals where each sequence's stand together, and as a pack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.core.tracing import data_unavailable
from regard.masks.algebra import Everything, Mask
from regard.masks.between import Between
from regard.masks.dense import Dense
from regard.masks.ragged import Lengths


def real_at(padding: Tensor, positions: Tensor) -> Tensor:
    """The padding at absolute positions; what it does not reach is not real (a cache that is longer than the text)."""
    last = padding.shape[-1] - 1
    return padding[:, positions.clamp(0, last)] & (positions <= last)


def real_keys(real: Tensor) -> Mask:
    """The keys that are real (batch, nk): as intervals where each sequence's are together."""
    if data_unavailable(real):
        return Dense(real[:, None, None, :])
    if bool(real.all()):
        return Everything()
    begins = real & ~torch.nn.functional.pad(real, (1, 0))[:, :-1]
    if bool((begins.sum(-1) > 1).any()):
        return Dense(real[:, None, None, :])
    first = begins.long().argmax(-1)
    return Lengths(keys=first + real.sum(-1), first=first)


def real_interval(padding: Tensor | None, nq: int, first: int, count: int) -> Mask | None:
    """The real ones of `count` keys from `first` on, for nq queries that see them all: None where they lie apart."""
    if padding is None:
        return Everything()
    if padding.shape[-1] < first + count or data_unavailable(padding):
        return None
    real = padding[:, first : first + count]
    if bool(real.all()):
        return Everything()
    numbers = real.view(torch.uint8)
    start, length = numbers.argmax(-1, keepdim=True), real.sum(-1, keepdim=True)
    stop = count - numbers.flip(-1).argmax(-1, keepdim=True)
    if not torch.equal(stop - start, length):
        return None
    start, stop = start.int(), stop.int()
    return Between(start, stop) if nq == 1 else Between(start.repeat(1, nq), stop.repeat(1, nq))


@dataclass(frozen=True)
class Pack:
    """The real tokens of a padded batch, one sequence behind another.

    shape  (batch, n) of the padded batch
    index  int64 (total,), where in the padded batch each token stands: its sequence · n + its column

    >>> pack = Pack.of(torch.tensor([[True, True, False], [False, True, False]]))
    >>> pack.index, pack.documents
    (tensor([0, 1, 4]), tensor([0, 0, 1]))
    >>> pack.take(torch.arange(6.0).view(2, 3))
    tensor([[0., 1., 4.]])
    >>> pack.put(torch.tensor([[5.0, 6.0, 7.0]]))
    tensor([[5., 6., 0.],
            [0., 7., 0.]])
    """

    shape: tuple[int, int]
    index: Tensor

    @classmethod
    def of(cls, real: Tensor) -> Pack:
        """Of booleans (batch, n), True = a real token."""
        return cls((real.shape[0], real.shape[1]), real.flatten().nonzero().squeeze(-1))

    @property
    def documents(self) -> Tensor:
        """The number of the sequence that each token belongs to: int64 (total,)."""
        return self.index // self.shape[1]

    def take(self, x: Any) -> Any:
        """What x holds for the real tokens: (batch, n, ...), or (1, n, ...) of all sequences, becomes (1, total, ...).

        Tuples, lists and dicts are taken item by item; everything else is returned as it is.
        """
        if isinstance(x, (tuple, list)):
            return type(x)(map(self.take, x))
        if isinstance(x, dict):
            return {name: self.take(value) for name, value in x.items()}
        if isinstance(x, Tensor) and x.shape[:2] == self.shape:
            return x.flatten(0, 1).index_select(0, self.index)[None]
        if isinstance(x, Tensor) and x.shape[:2] == (1, self.shape[1]):
            return x.index_select(1, self.index % self.shape[1])
        return x

    def put(self, x: Any) -> Any:
        """What a layer gave for the real tokens, (1, total, ...), in its places of (batch, n, ...); zeros elsewhere.

        Tuples are put item by item; everything else is returned as it is.
        """
        if isinstance(x, tuple):
            return tuple(map(self.put, x))
        if isinstance(x, Tensor) and x.shape[:2] == (1, len(self.index)):
            batch, n = self.shape
            return x.new_zeros(batch * n, *x.shape[2:]).index_copy(0, self.index, x[0]).unflatten(0, (batch, n))
        return x
