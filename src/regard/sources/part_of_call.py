"""A mask and a score of a whole call, for a call with some of its keys."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.core.errors import ShapeError, Unsupported
from regard.core.region import Frame, Index, Region, Tiling
from regard.core.shapes import listed
from regard.masks.algebra import And, Everything, Mask, Not, Or
from regard.masks.dense import Where
from regard.masks.positional import Causal, Dilated, Prefix, Window
from regard.scores.algebra import Modifier, Pipeline, Score, Similarity, as_pipeline
from regard.scores.modifiers import Alibi, Bias, LogDistance, RelativeBias, SoftCap
from regard.sources.source import Part


def mask_of_part(mask: Mask, part: Part, nk: int | None) -> Mask:
    """The mask of a call with the keys of a part, which is one for all `nk` keys of a source.

    Raises Unsupported where it reads the indices of keys and nk is not known.
    """
    return mask if _reads_positions_alone(mask) else PartMask(mask, part.first, _known(nk, mask))


def score_of_part(score: Score, part: Part, nk: int | None) -> Score:
    """The same of a score. A similarity is asked about the part as about a call of its own."""
    return Pipeline(tuple(_stage_of_part(stage, part, nk) for stage in as_pipeline(score).stages))


def _reads_positions_alone(mask: Mask) -> bool:
    if isinstance(mask, (And, Or)):
        return _reads_positions_alone(mask.a) and _reads_positions_alone(mask.b)
    if isinstance(mask, Not):
        return _reads_positions_alone(mask.a)
    return type(mask) in (Everything, Causal, Window, Prefix, Dilated, Where)


def _stage_of_part(stage: Score, part: Part, nk: int | None) -> Score:
    keys = slice(part.first, part.first + part.count)
    if isinstance(stage, Bias) and stage.bias.shape[-1:] not in ((), (1,)):
        if stage.bias.shape[-1] != _known(nk, stage):
            raise ShapeError(f"Bias.bias has shape {listed(stage.bias.shape)}; the source has {nk} keys.")
        return stage.with_tensors(iter([stage.bias[..., keys]]))
    if isinstance(stage, Alibi) and stage.coordinates is not None:
        at = stage.coordinates
        if at.shape[0] != _known(nk, stage):
            raise ShapeError(f"Alibi.coordinates has shape {listed(at.shape)}; the source has {nk} keys.")
        queries = at if stage.query_coordinates is None else stage.query_coordinates
        return replace(stage, coordinates=at[keys], query_coordinates=queries)
    if isinstance(stage, Similarity) or type(stage) in (Alibi, Bias, LogDistance, RelativeBias, SoftCap):
        return stage
    assert isinstance(stage, Modifier)
    return PartModifier(stage, part.first, _known(nk, stage))


def _known(nk: int | None, value: Mask | Score) -> int:
    if nk is None:
        raise Unsupported(
            f"{value!r} reads indices of keys, and the source does not know how many it has. Pass a source that does: "
            "Chunks of a list, Arrays, Safetensors. What compares positions alone (Causal(), Window(...), Alibi(...)) "
            "goes over any source."
        )
    return nk


@dataclass(frozen=True)
class PartMask(Mask):
    """A mask of a call with nk keys, for a call with those from index `first` on."""

    whole: Mask
    first: int
    nk: int

    def visible(self, at: Region) -> Tensor:
        return self.whole.visible(_RegionOfWhole(at, self.first, self.nk))

    def cover(self, at: Tiling) -> Tensor:
        return self.whole.cover(_TilingOfWhole(at, self.first, self.nk))

    def compares_positions(self) -> bool:
        return self.whole.compares_positions()

    def shape_error(self, frame: Frame) -> str | None:
        return self.whole.shape_error(replace(frame, nk=self.nk))

    def batch(self) -> tuple[int, ...]:
        return self.whole.batch()


@dataclass(frozen=True)
class PartModifier(Modifier):
    """A modifier of a call with nk keys, for a call with those from index `first` on."""

    whole: Modifier
    first: int
    nk: int

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return self.whole.modify(s, _RegionOfWhole(at, self.first, self.nk))

    def compares_positions(self) -> bool:
        return self.whole.compares_positions()

    def shape_error(self, frame: Frame) -> str | None:
        return self.whole.shape_error(replace(frame, nk=self.nk))


class _RegionOfWhole(Region):
    """A region of a part, as one of the whole: keys have the indices that they have there, and their own positions."""

    def __init__(self, at: Region, first: int, nk: int) -> None:
        super().__init__(replace(at.frame, nk=nk), at.rows, _moved(at.cols, first, at.frame.nk))
        self._part = at

    @property
    def j(self) -> Tensor:
        return self._part.j


def _moved(index: Index, first: int, count: int) -> Index:
    if isinstance(index, Tensor):
        return index + first
    start, stop, step = index.indices(count)
    return slice(start + first, stop + first, step)


class _TilingOfWhole(Tiling):
    """A tiling of a part that takes tensors of the whole."""

    def __init__(self, at: Tiling, first: int, nk: int) -> None:
        super().__init__(at.frame, at.r, at.c)
        self._first, self._nk = first, nk

    @property
    def j(self) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return super().keys(self.frame.positions.k)

    @property
    def col(self) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return super().keys(torch.arange(self._first, self._first + self.frame.nk, device=self.frame.device))

    def keys(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return super().keys(t[..., self._first : self._first + self.frame.nk])

    def pairs(self, t: Tensor) -> tuple[Tensor, Tensor]:
        whole = t.dim() > 0 and not (t.shape[-1] == 1 != self._nk)
        return super().pairs(t[..., self._first : self._first + self.frame.nk] if whole else t)
