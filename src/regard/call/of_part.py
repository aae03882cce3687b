"""A mask and a score of a whole call, for a call with a part of it, and what the part adds to gradients."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from regard.call.part import PartOfCall, QueriesAndKeys
from regard.core.errors import ShapeError, Unsupported
from regard.core.region import Frame, Region, Tiling
from regard.core.shapes import listed
from regard.core.state import RowStats, State
from regard.core.vjp import vjp
from regard.masks.algebra import And, Mask
from regard.masks.intervals import Interval, IntervalRule
from regard.masks.of_rule import mask_of_rule
from regard.scores.algebra import Modifier, Pipeline, Score, Similarity, as_pipeline
from regard.scores.modifiers import Alibi, Bias


def mask_of_part(mask: Mask, part: QueriesAndKeys) -> Mask:
    """The mask of a call with that part, which is one for the whole.

    Raises Unsupported where it reads the indices of keys and their number is not known.
    """
    if not mask.reads_indices():
        return mask
    if type(mask) is And:  # each side by itself: one may be an operand of the native kernels
        return And(mask_of_part(mask.a, part), mask_of_part(mask.b, part))
    return PartMask(mask, _known(part, mask))


def score_of_part(score: Score, part: QueriesAndKeys) -> Score:
    """The same of a score. A similarity sees the part as a call of its own."""
    return Pipeline(tuple(_stage_of_part(stage, part) for stage in as_pipeline(score).stages))


def part_gradients(
    state: State, whole: RowStats, g: Tensor, delta: Tensor, inputs: list[Tensor]
) -> tuple[Tensor | None, ...]:
    """What the state of some keys, a differentiable result of `inputs`, adds to the gradients of these.

    whole: the row statistics over all keys; g and delta: the cotangent of the output, and rowsum(g · out) less the
    cotangent of its log-sum-exp. With m, l of the whole and (m', l', o') of the part,  out = Σ o' e^(m' - m) / l  and
    l = Σ l' e^(m' - m):  so o' has the cotangent g e^(m' - m) / l, and l' has -delta e^(m' - m) / l.
    """
    share = whole.weight_of(state.m)
    cotangents = ((state.o, g * share[..., None]), (state.l, -delta * share))
    pairs = [pair for pair in cotangents if pair[0].requires_grad]
    if not pairs:
        return (None,) * len(inputs)
    results, given = zip(*pairs, strict=True)
    return vjp(results, inputs, given)


def _stage_of_part(stage: Score, part: QueriesAndKeys) -> Score:
    if type(stage) is Bias:  # by type: a subclass may do something else with its tensor
        return _bias_of_part(stage, part)
    if type(stage) is Alibi and stage.coordinates is not None:
        at = stage.coordinates
        if at.shape[0] != _known(part, stage).nk:
            raise ShapeError(f"Alibi.coordinates has shape {listed(at.shape)}; the whole call has {part.nk} keys.")
        queries = at if stage.query_coordinates is None else stage.query_coordinates
        return replace(stage, coordinates=part.of_keys(at, 0), query_coordinates=part.of_queries(queries, 0))
    if isinstance(stage, Similarity) or type(stage) is Alibi:
        return stage
    assert isinstance(stage, Modifier)
    return stage if not stage.indexed else PartModifier(stage, _known(part, stage))


def _bias_of_part(stage: Bias, part: QueriesAndKeys) -> Score:
    bias, axes = stage.bias, (("queries", -2, part.nq), ("keys", -1, part.nk))
    for name, axis, count in axes:
        if bias.dim() < -axis or bias.shape[axis] == 1 or (axis == -2 and part.rows is None):
            continue
        if axis == -1:
            count = _known(part, stage).nk
        if bias.shape[axis] != count:
            raise ShapeError(f"Bias.bias has shape {listed(bias.shape)}; the whole call has {count} {name}.")
        bias = part.of_keys(bias, axis) if axis == -1 else part.of_queries(bias, axis)
    return stage if bias is stage.bias else stage.with_tensors(iter([bias]))


def _known(part: QueriesAndKeys, value: Mask | Score) -> QueriesAndKeys:
    if part.nk is None:
        raise Unsupported(
            f"{value!r} reads indices of keys, and the source does not know how many it has. Pass a source that does: "
            "Chunks of a list, Arrays, Safetensors. What compares positions alone (Causal(), Window(...), Alibi(...)) "
            "goes over any source."
        )
    return part


@dataclass(frozen=True)
class PartMask(Mask):
    """A mask of a whole call, for a call with a part of it."""

    whole: Mask
    part: PartOfCall

    def visible(self, at: Region) -> Tensor:
        return self.whole.visible(self.part.region(at))

    def cover(self, at: Tiling) -> Tensor:
        return self.whole.cover(self.part.tiling(at))

    def rows(self, frame: Frame) -> Interval | None:
        rule = self.rule()
        return None if rule is None else mask_of_rule(rule).rows(frame)

    def rule(self) -> IntervalRule | None:
        rule = self.whole.rule()
        return None if rule is None else self.part.rule(rule)

    def compares_positions(self) -> bool:
        return self.whole.compares_positions()

    def shape_error(self, frame: Frame) -> str | None:
        return self.whole.shape_error(self.part.frame(frame))

    def batch(self) -> tuple[int, ...]:
        return self.whole.batch()


@dataclass(frozen=True)
class PartModifier(Modifier):
    """A modifier of a whole call, for a call with a part of it."""

    whole: Modifier
    part: PartOfCall

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return self.whole.modify(s, self.part.region(at))

    def compares_positions(self) -> bool:
        return self.whole.compares_positions()

    def shape_error(self, frame: Frame) -> str | None:
        return self.whole.shape_error(self.part.frame(frame))
