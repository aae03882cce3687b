"""Slopes (ALiBi), of positions or points: native/steps/slopes.h."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.backends.native.c_structs import Member, members
from regard.backends.native.modifiers.base import KernelModifier, by_head
from regard.backends.native.modifiers.distance import place, why_not_near
from regard.core.problem import Problem
from regard.scores.modifiers import Alibi

DIMS = 4  # coordinates that a point can have


@dataclass(frozen=True, eq=False, kw_only=True)
class SlopeOperands:
    """slopes: float32 (h,) or (1,), what a step of distance costs.

    points_of_q, points_of_k: float32 (dims, nq), (dims, nk), coordinates, where the slopes multiply their distance.
    """

    slopes: Tensor | None = None
    points_of_q: Tensor | None = None
    points_of_k: Tensor | None = None


class Slopes(KernelModifier[Alibi]):
    """Slopes times distances, of positions or points."""

    stage = Alibi
    operands = SlopeOperands
    members = (
        Member("const float*", "slopes", "(heads,)"),
        Member("int64_t", "slopes_stride"),
        *members("const float*", "points_of_q points_of_k", "(dims, n): points, whose distance slopes multiply"),
        Member("int64_t", "dims", "at most REGARD_DIMS"),
    )
    gradients = (Member("float*", "dslopes", "(heads,), written"),)
    learned: ClassVar[Mapping[str, str]] = {"slopes": "slopes"}
    leaves = ("slopes",)
    counts: ClassVar[Mapping[str, str]] = {"points_of_q": "dims"}
    of_lengths = frozenset({"points_of_q", "points_of_k"})

    @classmethod
    def why_not(cls, problem: Problem, stage: Alibi) -> str | None:
        if stage.coordinates is None:
            return why_not_near(problem)
        dims = stage.coordinates.shape[1]
        return None if dims <= DIMS else f"its points have up to {DIMS} coordinates, not {dims}"

    @classmethod
    def why_not_learned(cls, asked: Sequence[bool]) -> str | None:
        return "its coordinates are learned" if any(asked[1:]) else None

    @classmethod
    def lower(cls, problem: Problem, stages: Sequence[Alibi]) -> dict[str, Any]:
        (stage,) = stages
        points = place(problem) if stage.coordinates is None else _points(stage)
        return {"slopes": by_head(stage.slopes), **points}

    @classmethod
    def shapes(cls, shape: tuple[int, ...], names: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        return {"slopes": (shape[-3],)}


def _points(stage: Alibi) -> dict[str, Tensor]:
    k = stage.coordinates
    q = k if stage.query_coordinates is None else stage.query_coordinates
    assert q is not None and k is not None
    if torch.float64 in (q.dtype, k.dtype):
        # only differences count: float32 would lose them where the points lie far from 0
        centre = k.masked_fill(~k.isfinite(), 0).double().mean(0).nan_to_num(0, 0, 0)
        q, k = q - centre, k - centre
    return {"points_of_q": q.float().T.contiguous(), "points_of_k": k.float().T.contiguous()}
