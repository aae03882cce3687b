"""Power distances (KERPLE): native/steps/power_distance.h."""

from __future__ import annotations

from regard.backends.native.modifiers.base import number_by_head
from regard.backends.native.modifiers.distance import DistancePenalties
from regard.scores.power_distance import PowerDistance


class PowerDistances(DistancePenalties[PowerDistance]):
    """Weights times powers of distances."""

    stage = PowerDistance
    step, header = "PowerDistance", "power_distance.h"
    operands = (
        number_by_head("power_distance_weights", "of distance^power, which is subtracted", learned="weight"),
        number_by_head("power_distance_powers", "to which distances are raised; 0 stays 0", learned="power"),
    )
