"""The soft cap: native/steps/softcap.h."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from regard.backends.native.c_structs import Member
from regard.backends.native.modifiers.base import KernelModifier, by_head
from regard.core.problem import Problem
from regard.scores.modifiers import SoftCap


@dataclass(frozen=True, eq=False, kw_only=True)
class SoftCapOperands:
    """cap: 0 for none. cap_last: whether it comes after the other modifiers, instead of before.

    caps: float32 (h,) or (1,), a cap for each head; then `cap` only says that there are some.
    """

    cap: float = 0.0
    cap_last: bool = False
    caps: Tensor | None = None


class SoftCaps(KernelModifier[SoftCap]):
    """Soft caps: before all other modifiers, or after them."""

    stage = SoftCap
    operands = SoftCapOperands
    members = (
        Member("float", "cap", "soft cap, 0 for none"),
        Member("int32_t", "cap_last", "whether it is applied after the other modifiers, not before"),
        Member("const float*", "caps", "(heads,): a cap for each head, where cap is not 0"),
        Member("int64_t", "caps_stride"),
    )

    @classmethod
    def why_not(cls, problem: Problem, stage: SoftCap) -> str | None:
        between = (type(part) for part in problem.score.parts[2:-1])
        return "its soft cap comes first or last" if SoftCap in between else None

    @classmethod
    def why_not_learned(cls, asked: Sequence[bool]) -> str | None:
        return "its soft cap is learned" if any(asked) else None

    @classmethod
    def lower(cls, problem: Problem, stages: Sequence[SoftCap]) -> dict[str, Any]:
        (stage,) = stages
        last = problem.score.parts[1] is not stage
        if not isinstance(stage.cap, Tensor):
            return {"cap": float(stage.cap), "cap_last": last}
        return {"cap": 1.0, "cap_last": last, "caps": by_head(stage.cap)}

    @classmethod
    def shapes(cls, shape: tuple[int, ...], names: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
        return {"caps": (shape[-3],)}
