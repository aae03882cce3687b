"""Log distances (KERPLE): native/steps/log_distance.h."""

from __future__ import annotations

from regard.backends.native.modifiers.base import number_by_head
from regard.backends.native.modifiers.distance import DistancePenalties
from regard.scores.distance_penalty import LogDistance


class LogDistances(DistancePenalties[LogDistance]):
    """Weights times ln(1 + rates times distances)."""

    stage = LogDistance
    step, header = "LogDistance", "log_distance.h"
    operands = (
        number_by_head("log_distance_weights", "of ln(1 + rate · distance), which is subtracted", learned="weight"),
        number_by_head("log_distance_rates", "of the distance", learned="rate"),
    )
