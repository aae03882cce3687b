"""A mask and a score of a whole call, for a call with some of its heads."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from regard.call.of_part import PartMask, PartModifier
from regard.core.errors import Unsupported
from regard.masks.algebra import And, Mask, Not, Or
from regard.masks.dense import Dense
from regard.parallel.heads import HeadShare
from regard.scores.algebra import Modifier, Pipeline, Score, Similarity, as_pipeline


def mask_of_heads(mask: Mask, heads: HeadShare) -> Mask:
    """The mask of a call with `heads`, which is one for all of them."""
    if not mask.differs_by_head():
        return mask
    if isinstance(mask, (And, Or)):
        return type(mask)(mask_of_heads(mask.a, heads), mask_of_heads(mask.b, heads))
    if isinstance(mask, Not):
        return Not(mask_of_heads(mask.a, heads))
    return Dense(heads.of(mask.allowed, -3)) if type(mask) is Dense else PartMask(mask, heads)


def score_of_heads(score: Score, heads: HeadShare) -> Score:
    """The same of a score. Raises Unsupported for a similarity of your own that is no Custom."""
    return Pipeline(tuple(_stage_of_heads(stage, heads) for stage in as_pipeline(score).stages))


def _stage_of_heads(stage: Score, heads: HeadShare) -> Score:
    axes = vars(type(stage)).get("head_axes")  # not inherited: a subclass may mean something else
    if axes is not None:
        of = {id(t): (name, axis) for name, axis in axes.items() for t in _tensors(getattr(stage, name))}

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
    return PartModifier(stage, heads)


def _tensors(item: Any) -> tuple[Any, ...]:
    """The tensors of a field, which may hold several."""
    return item if isinstance(item, tuple) else (item,)
