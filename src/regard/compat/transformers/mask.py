"""The mask that transformers' models hand from layer to layer, as a mask of regard's: nothing of n × n is made."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import and_masks, packed_sequence_mask_function

from regard.compat.transformers.padding import Pack, real_at, real_interval, real_keys
from regard.compat.transformers.patterns import MaskContext, MaskFunction, mask_of, of_differences
from regard.compat.transformers.written_out import Form, WrittenOut
from regard.core.errors import Unsupported
from regard.core.positions import Positions, head, tail
from regard.core.region import Frame
from regard.core.tracing import data_unavailable
from regard.masks.algebra import And, Everything, Mask, Or
from regard.masks.between import Between
from regard.masks.positional import Causal


class ReducedMask(NamedTuple):
    """A mask as regard.attention is called with it: nothing hidden, a pattern, or one interval a query.

    keys: the only ones that any query sees, as indices; None = all. `mask` and `positions` are of those keys.
    """

    mask: Mask
    positions: Positions | None
    keys: slice | None = None


@dataclass(frozen=True, eq=False)
class LazyMask(WrittenOut):
    """A mask (batch, 1, nq, nk) that is not there: the function that makes it, where it is asked, and the padding.

    transformers makes one a forward and shares it among layers. Its slices of queries and of keys are lazy masks again;
    where a model computes with it otherwise, it is written out, as the tensor that sdpa would have had.

    batch      how many sequences
    positions  absolute positions of the queries (nq,) and keys (nk,)
    fn         fn(batch, head, query, key) -> whether the query may see the key
    form       what it is where it is written out
    padding    booleans (batch, n) by absolute position, True = a real token; None = all are real
    mapped     whether fn takes one number each, and is to be mapped over pairs
    pattern    what fn lets through, padding or not, to be read at `positions`
    reduced    the mask as regard.attention is called with it

    >>> from transformers.masking_utils import causal_mask_function
    >>> lazy = LazyMask(1, tail(2, 4), causal_mask_function, Form(), torch.tensor([[False, True, True, True]]))
    >>> lazy.shape, lazy.mask
    ((1, 1, 2, 4), Causal() & Lengths(keys=int64[1], first=int64[1]))
    >>> lazy.mask.draw(2, 4, positions=lazy.positions)
    ·■■·
    ·■■■
    """

    ndim: ClassVar[int] = 4

    batch: int
    positions: Positions
    fn: MaskFunction
    form: Form
    padding: Tensor | None = None
    mapped: bool = False
    pattern: Mask = field(init=False)
    reduced: ReducedMask = field(init=False)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, 1, *self.positions.counts

    @property
    def device(self) -> torch.device:
        return self.positions.q.device

    @property
    def dtype(self) -> torch.dtype:
        return self.form.dtype

    def dim(self) -> int:
        return self.ndim

    def size(self, axis: int | None = None) -> Any:
        return self.shape if axis is None else self.shape[axis]

    def for_queries(self, nq: int) -> LazyMask:
        """The mask for nq queries: itself, but where it has one query that stands for all (LightGlue, BridgeTower)."""
        if nq == 1 or self.shape[2] != 1 or not isinstance(self.pattern, Everything):
            return self
        k = self.positions.k
        q = k if nq == len(k) else torch.arange(nq, dtype=torch.int64, device=k.device)
        return replace(self, positions=Positions(q, k))

    def contiguous(self) -> LazyMask:
        return self

    def to(self, *to: Any, **named: Any) -> Any:
        """Itself on the device that it was made for and in the dtype that it is written out in; other dtypes: a tensor.

        The arguments are those of torch.Tensor.to.
        """
        for device in (named.get("device"), *to):
            if isinstance(device, (str, torch.device)) and torch.device(device).type != self.device.type:
                raise Unsupported(
                    f"a mask made on {self.device} is wanted on {device}; regard serves models that live on one "
                    "device. Load the model without device_map."
                )
        dtypes = [x.dtype if isinstance(x, Tensor) else x for x in (named.get("dtype"), *to)]
        others = [x for x in dtypes if isinstance(x, torch.dtype) and x != self.dtype]
        return self.written("to").to(others[0]) if others else self

    def __getitem__(self, index: Any) -> Any:
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) <= self.ndim and all(isinstance(part, slice) for part in parts):
            *both, rows, cols = (*parts, *(slice(None),) * (self.ndim - len(parts)))
            if all(part == slice(None) for part in both):
                return replace(self, positions=Positions(self.positions.q[rows], self.positions.k[cols]))
        return super().__getitem__(index)

    def dense(self) -> Tensor:
        return self._dense

    @cached_property
    def _dense(self) -> Tensor:
        _, _, nq, nk = self.shape
        allowed = self.mask.on(nq, nk, positions=self.positions, batch=(self.batch,)).dense()
        return self.form.write(allowed.expand(self.shape))

    def __post_init__(self) -> None:
        object.__setattr__(self, "pattern", mask_of(self.fn, MaskContext(self.positions, self.mapped)))
        # made here, once for all layers
        object.__setattr__(self, "reduced", self._by_numbers() or self._by_rows())

    @property
    def mask(self) -> Mask:
        """What may attend, to be read at `positions`."""
        if self.padding is None:
            return self.pattern
        return self.pattern & real_keys(real_at(self.padding, self.positions.k))

    def _by_numbers(self) -> ReducedMask | None:
        """Where positions are known as numbers and the pattern is a band of distances: no tensors but the padding's."""
        rule, span = self.pattern.rule(), self.positions.span
        if rule is None or not rule.of_distances or span is None or torch.compiler.is_compiling():
            return None
        (i, nq), (j, nk) = span.q, span.k
        if isinstance(i, tuple):
            return None
        # the keys that some query sees, and whether every query sees all of them
        first = 0 if rule.before is None else max(0, i - rule.before - j)
        last = nk if rule.after is None else min(nk, i + nq + rule.after - j)
        if first >= last:
            return None
        behind = rule.before is None or i + nq - 1 - rule.before <= j + first
        ahead = rule.after is None or i + rule.after + 1 >= j + last
        keys = None if last - first == nk else slice(first, last)
        if behind and ahead:
            seen = real_interval(self.padding, nq, j + first, last - first)
            return None if seen is None else ReducedMask(seen, None, keys)
        if self.padding is not None or i + nq != j + last:
            return None
        return ReducedMask(self.pattern, None if nq == last - first else tail(nq, last - first), keys)

    def _by_rows(self) -> ReducedMask:
        mask, positions = self.mask, self.positions
        _, _, nq, nk = self.shape
        if data_unavailable(positions.q, *mask.tensors()):
            return ReducedMask(mask, positions)
        interval = mask.rows(Frame.of(nq, nk, batch=(self.batch,), positions=positions))
        if interval is None:
            return ReducedMask(mask, positions)
        if bool((interval.start <= 0).all()) and bool((interval.stop >= nk).all()):
            return ReducedMask(Everything(), None)
        if not mask.tensors() and nq == nk and positions.consecutive and torch.equal(positions.q, positions.k):
            return ReducedMask(mask, None)
        return ReducedMask(Between(interval.start[..., 0, :].int(), interval.stop[..., 0, :].int()), None)

    def as_called(self, whole: bool) -> ReducedMask:
        """The mask as regard.attention is called with it; whole: with all keys, for what numbers them."""
        return ReducedMask(self.mask, self.positions) if whole and self.reduced.keys is not None else self.reduced

    @cached_property
    def packed(self) -> tuple[Pack, LazyMask] | None:
        """The real tokens, and what they see of each other, (1, 1, total, total), where that is the same as here.

        None where it is not sure: queries and keys are not the same tokens, the pattern is not known, or it compares
        distances and there is padding between real tokens. None also where there is no padding, or nothing else.
        """
        batch, _, nq, nk = self.shape
        padding, columns = self.padding, torch.arange(nk, device=self.device, dtype=torch.int64)
        if padding is None or padding.shape != (batch, nq):
            return None
        if not (torch.equal(self.positions.q, columns) and torch.equal(self.positions.k, columns)):
            return None
        pack = Pack.of(padding)
        total, ids = len(pack.index), pack.documents
        apart = bool(((pack.index.diff() != 1) & (ids.diff() == 0)).any())
        distances = not isinstance(self.pattern, Everything)
        if total in (0, padding.numel()) or not of_differences(self.pattern) or (apart and distances):
            return None
        fn = and_masks(packed_sequence_mask_function(ids[None]), self.fn)
        return pack, LazyMask(1, head(total, total, self.device), fn, self.form)

    @property
    def causal(self) -> bool:
        """Whether it is known to compare queries and keys of one sequence."""
        return _has_causal(self.pattern)

    def real(self) -> Tensor | None:
        """Which queries are real tokens (batch, nq), where queries and keys are of one sequence; None = all."""
        return None if self.padding is None else real_at(self.padding, self.positions.q)


def _has_causal(mask: Mask) -> bool:
    return isinstance(mask, Causal) or (isinstance(mask, (And, Or)) and (_has_causal(mask.a) or _has_causal(mask.b)))
