"""A mask and a score of a whole call, for a call with some of its heads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.core.errors import Unsupported
from regard.core.region import Frame, Region, Tiling
from regard.masks.algebra import And, Everything, Mask, Not, Or
from regard.masks.dense import Dense
from regard.masks.positional import Causal, Dilated, Prefix, Window
from regard.masks.ragged import Documents, Lengths
from regard.parallel.heads import Heads
from regard.scores.additive import Additive
from regard.scores.algebra import Modifier, Pipeline, Score, Similarity, as_pipeline
from regard.scores.modifiers import Alibi, Bias, LogDistance, RelativeBias, SoftCap
from regard.scores.similarity import Bilinear, Cosine, Custom, Distance, Dot, ScaledDot
from regard.scores.temperature import Temperature

# The tensors of a stage that may have a head axis, and which it is. Custom's fn sees some heads as a call of its own.
HEAD_AXES: dict[type[Score], dict[str, int]] = {
    Dot: {},
    Custom: {},
    ScaledDot: {"scale": -1},
    Cosine: {"scale": -1},
    Distance: {"gamma": -1},
    Bilinear: {"m": -3},
    Additive: {"w_q": -3, "w_k": -3, "w": -2, "b": -2},
    SoftCap: {"cap": -1},
    Alibi: {"slopes": -1},
    LogDistance: {"weight": -1, "rate": -1},
    Temperature: {"t": -1},
    Bias: {"bias": -3},
    RelativeBias: {"table": -1},
}
OF_KEY_HEADS = (Additive, "w_k")


def mask_of_heads(mask: Mask, heads: Heads) -> Mask:
    """The mask of a call with `heads`, which is one for all of them."""
    if isinstance(mask, (And, Or)):
        return type(mask)(mask_of_heads(mask.a, heads), mask_of_heads(mask.b, heads))
    if isinstance(mask, Not):
        return Not(mask_of_heads(mask.a, heads))
    if type(mask) in (Everything, Causal, Window, Prefix, Dilated, Lengths, Documents):
        return mask
    return Dense(heads.of(mask.allowed, -3)) if type(mask) is Dense else MaskOfHeads(mask, heads)


def score_of_heads(score: Score, heads: Heads) -> Score:
    """The same of a score. Raises Unsupported for a similarity of your own that is no Custom."""
    return Pipeline(tuple(_stage_of_heads(stage, heads) for stage in as_pipeline(score).stages))


def _stage_of_heads(stage: Score, heads: Heads) -> Score:
    axes = HEAD_AXES.get(type(stage))
    if axes is not None:
        of = {id(getattr(stage, name)): (name, axis) for name, axis in axes.items()}

        def cut(t: Tensor) -> Tensor:
            if id(t) not in of:
                return t
            name, axis = of[id(t)]
            of_keys = (type(stage), name) == OF_KEY_HEADS and t.dim() == -axis and t.shape[axis] > 1
            return heads.of_keys(t, axis) if of_keys else heads.of(t, axis)

        return stage.with_tensors(iter([cut(t) for t in stage.tensors()]))
    if isinstance(stage, Similarity):
        raise Unsupported(
            f"{stage!r} is a similarity of your own, and nothing says which of its tensors have a head axis. Write it "
            "as Custom(fn, tensors), whose fn sees each rank's heads as a call of its own, or call ring_attention, "
            "where every rank has all heads."
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
