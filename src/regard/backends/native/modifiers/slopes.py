"""Slopes (ALiBi), of positions or points: native/steps/slopes.h."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.backends.native.modifiers.base import by_head, number_by_head
from regard.backends.native.modifiers.distance import MeasuringModifier, position_operands
from regard.backends.native.operands import EACH_KEY, EACH_QUERY, Axis, Count, KernelOperand, Sizes
from regard.call.problem import Problem
from regard.core.errors import ShapeError
from regard.scores.modifiers import Alibi

DIMS = 4  # coordinates that a point can have


_COORDINATE = Axis("coordinate", lambda s: None, shared=False)
_POINTS = "coordinates of points, whose distance the slopes multiply"


class Slopes(MeasuringModifier[Alibi]):
    """Slopes times distances, of positions or points."""

    stage = Alibi
    step, header = "Slopes", "slopes.h"
    operands = (
        number_by_head("slopes", "what a step of distance costs", learned="slopes"),
        KernelOperand(
            *("points_of_q", torch.float32, (_COORDINATE, EACH_QUERY), f"{_POINTS}; dims: at most REGARD_DIMS"),
            of_lengths=True,
            count=Count("dims", len),
        ),
        KernelOperand("points_of_k", torch.float32, (_COORDINATE, EACH_KEY), _POINTS, of_lengths=True),
    )

    @classmethod
    def measures_positions(cls, stage: Alibi) -> bool:
        return stage.coordinates is None

    @classmethod
    def why_not(cls, problem: Problem, stage: Alibi) -> str | None:
        if stage.coordinates is None:
            return super().why_not(problem, stage)
        dims = stage.coordinates.shape[1]
        return None if dims <= DIMS else f"its points have up to {DIMS} coordinates, not {dims}"

    @classmethod
    def why_not_learned(cls, asked: Sequence[bool]) -> str | None:
        return "its coordinates are learned" if any(asked[1:]) else None

    @classmethod
    def check(cls, operands: Mapping[str, Tensor], sizes: Sizes) -> None:
        q, k = operands.get("points_of_q"), operands.get("points_of_k")
        if q is None and k is None:
            super().check(operands, sizes)
        if q is not None and k is not None and len(q) != len(k):
            raise ShapeError(f"Points of queries have {len(q)} coordinates, those of keys {len(k)}; expected as many.")

    @classmethod
    def lower(cls, problem: Problem, stages: Sequence[Alibi]) -> dict[str, Any]:
        (stage,) = stages
        points = position_operands(problem.frame.positions) if stage.coordinates is None else _points(stage)
        return {"slopes": by_head(stage.slopes), **points}


def _points(stage: Alibi) -> dict[str, Tensor]:
    k = stage.coordinates
    q = k if stage.query_coordinates is None else stage.query_coordinates
    assert q is not None and k is not None
    if torch.float64 in (q.dtype, k.dtype):
        # only differences count: float32 would lose them where the points lie far from 0
        centre = k.masked_fill(~k.isfinite(), 0).double().mean(0).nan_to_num(0, 0, 0)
        q, k = q - centre, k - centre
    return {"points_of_q": q.float().T.contiguous(), "points_of_k": k.float().T.contiguous()}
