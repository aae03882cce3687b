"""CircuitLayer: which tokens the heads of a layer copy and seek, for the tokens of a text, as the page shows them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class TokenRows(NamedTuple):
    """For each token of a text, other tokens: those with the largest numbers first.

    texts  for each token the texts of the others
    rank   (t,) how many tokens of the vocabulary have a larger number than the token itself
    """

    texts: tuple[tuple[str, ...], ...]
    rank: Tensor


class CircuitLayer(NamedTuple):
    """The OV and QK circuits of one layer at the tokens of a text (Elhage et al. 2021), for each head.

    tokens  (t,) the texts of the tokens, each once
    raised  what a head that reads the token raises in the logits
    sought  the keys that a query at the token prefers; none where the layer has no QK circuit
    """

    tokens: tuple[str, ...]
    raised: tuple[TokenRows, ...]
    sought: tuple[TokenRows, ...]
