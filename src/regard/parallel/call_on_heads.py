"""A mask and a score of a whole call, for a call with some of its heads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.core.errors import Unsupported
from regard.core.region import Frame, Region, Tiling
from regard.masks.algebra import And, Mask, Not, Or
from regard.masks.dense import Dense
from regard.parallel.heads import Heads
from regard.scores.algebra import Modifier, Pipeline, Score, Similarity, as_pipeline


def mask_of_heads(mask: Mask, heads: Heads) -> Mask:
    """The mask of a call with `heads`, which is one for all of them."""
    if not mask.differs_by_head():
        return mask
    if isinstance(mask, (And, Or)):
        return type(mask)(mask_of_heads(mask.a, heads), mask_of_heads(mask.b, heads))
    if isinstance(mask, Not):
        return Not(mask_of_heads(mask.a, heads))
    return Dense(heads.of(mask.allowed, -3)) if type(mask) is Dense else MaskOfHeads(mask, heads)


def score_of_heads(score: Score, heads: Heads) -> Score:
    """The same of a score. Raises Unsupported for a similarity of your own that is no Custom."""
    return Pipeline(tuple(_stage_of_heads(stage, heads) for stage in as_pipeline(score).stages))


def _stage_of_heads(stage: Score, heads: Heads) -> Score:
    axes = vars(type(stage)).get("head_axes")  # not inherited: a subclass may mean something else
    if axes is not None:
        of = {id(getattr(stage, name)): (name, axis) for name, axis in axes.items()}

        def cut(t: Tensor) -> Tensor:
            if id(t) not in of:
                return t
            name, axis = of[id(t)]
            of_keys = name in stage.of_key_heads and t.dim() == -axis and t.shape[axis] > 1
            return heads.of_keys(t, axis) if of_keys else heads.of(t, axis)

        return stage.with_tensors(iter([cut(t) for t in stage.tensors()]))
    if isinstance(stage, Similarity):
        raise Unsupported(
            f"{stage!r} is a similarity of your own, and nothing says which of its tensors have a head axis. Say it in "
            "its class, as in head_axes = {'w': -2} ({} for none), or call ring_attention, where every rank has all "
            "heads."
        )
    assert isinstance(stage, Modifier)
    return ModifierOfHeads(stage, heads)


@dataclass(frozen=True)
class MaskOfHeads(Mask):
    """A mask of a call with all heads, for a call with some."""

    whole: Mask
    heads: Heads

    def visible(self, at: Region) -> Tensor:
        return self.whole.visible(_RegionOfWhole(at, self.heads))

    def cover(self, at: Tiling) -> Tensor:
        return self.whole.cover(_TilingOfWhole(at, self.heads))

    def compares_positions(self) -> bool:
        return self.whole.compares_positions()

    def shape_error(self, frame: Frame) -> str | None:
        return self.whole.shape_error(replace(frame, heads=self.heads.total))

    def batch(self) -> tuple[int, ...]:
        return self.whole.batch()


@dataclass(frozen=True)
class ModifierOfHeads(Modifier):
    """A modifier of a call with all heads, for a call with some."""

    whole: Modifier
    heads: Heads

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return self.whole.modify(s, _RegionOfWhole(at, self.heads))

    def compares_positions(self) -> bool:
        return self.whole.compares_positions()

    def shape_error(self, frame: Frame) -> str | None:
        return self.whole.shape_error(replace(frame, heads=self.heads.total))


class _RegionOfWhole(Region):
    """A region of a call with some heads, which have there the numbers and the tensors that they have in the whole."""

    def __init__(self, at: Region, some: Heads) -> None:
        super().__init__(replace(at.frame, heads=some.total), at.rows, at.cols)
        self._at, self._some = at, some

    @property
    def i(self) -> Tensor:
        return self._at.i

    @property
    def j(self) -> Tensor:
        return self._at.j

    @property
    def h(self) -> Tensor:
        some = self._some
        return torch.arange(some.first, some.first + some.count, device=self.frame.device, dtype=torch.int64)[
            :, None, None
        ]

    def heads(self, t: Tensor) -> Tensor:
        return self._at.heads(self._some.of(t, -1))

    def pairs(self, t: Tensor) -> Tensor:
        return self._at.pairs(self._some.of(t, -3))


class _TilingOfWhole(Tiling):
    """A tiling of a call with some heads that takes tensors of the whole."""

    def __init__(self, at: Tiling, some: Heads) -> None:
        super().__init__(at.frame, at.r, at.c)
        self._at, self._some = at, some

    @property
    def row(self) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._at.row

    @property
    def col(self) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._at.col

    def queries(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return self._at.queries(t)

    def keys(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return self._at.keys(t)

    @property
    def i(self) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._at.i

    @property
    def j(self) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._at.j

    def pairs(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return self._at.pairs(self._some.of(t, -3))
