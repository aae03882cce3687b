"""CarriedLayer: what one attention layer carries on a text, as a report and its page show it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from regard.core.value import with_shapes
from regard.inspect.facts.rows import TopKeys


class CarriedLayer(NamedTuple):
    """What one attention layer carries, with c_j = ‖v_j W^O_h‖ and the weights p_ij; for each head h.

    norms     (h, nk) c_j
    weights   (h, nk) Σ_i p_ij, the mass of weights that each key receives
    received  (h, nk) Σ_i p_ij c_j, how much of each key's value all queries receive
    top       (h, nq, 4) the keys that carry most, and how much: p_ij c_j; of all other keys (h, nq) the sum
    map       (h, rows, cols) up to 128 × 128 cells: Σ_j p_ij c_j over a cell's keys, mean of its queries
    """

    norms: Tensor
    weights: Tensor
    received: Tensor
    top: TopKeys
    map: Tensor

    def __repr__(self) -> str:
        return with_shapes("CarriedLayer", self._asdict())
