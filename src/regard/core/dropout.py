"""Dropout: a function of (seed, batch, head, query, key), so that every backend and tiling drops the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.core.errors import Unsupported
from regard.core.region import Region
from regard.core.shapes import listed
from regard.core.tracing import scripted
from regard.core.value import Value
from regard.core.wrong_calls import answers_wrong_calls, kind_of

# 24 bits decide: they are exact in float32, and p is met to 6e-8
BITS = 24
# what the number of a head is multiplied by
_HEAD = 0x85EBCA77


@answers_wrong_calls(dict.fromkeys(("dropout_p", "dropout", "prob", "rate"), "write Dropout(p)"))
@dataclass(frozen=True)
class Dropout(Value):
    """Drops each weight with probability p after the softmax, and multiplies the others by 1 / (1 - p).

    Whether a weight is kept depends only on (seed, batch, head, position of query, position of key). Without a seed,
    each call draws one from torch's generator, so that torch.manual_seed makes it reproducible.
    Raises ValueError unless 0 ≤ p ≤ 1.
    Source: Srivastava et al. 2014.

    >>> Dropout(0.1, seed=7)
    Dropout(p=0.1, seed=7)
    """

    argument: ClassVar[str] = "dropout"
    p: float
    seed: int | None = None

    def __post_init__(self) -> None:
        # classes are asked for: torch.compile does not trace hasattr of a number that a graph holds as a symbol
        if not isinstance(self.p, (Real, Tensor)):
            raise TypeError(f"Dropout.p is {kind_of(self.p)}; expected a number from 0 to 1.")
        if self.seed is not None and not isinstance(self.seed, (Integral, Tensor, torch.SymInt)):
            raise TypeError(f"Dropout.seed is {kind_of(self.seed)}; expected an integer, or None.")
        if isinstance(self.p, Tensor):
            if self.p.dim():
                raise TypeError(f"Dropout.p has shape {listed(self.p.shape)}; expected one number from 0 to 1.")
            object.__setattr__(self, "p", self.p.item())
        # an integer of NumPy's has no room for the products of its bits; the symbol of a graph must stay one
        if isinstance(self.seed, Integral) and type(self.seed) is not int:
            object.__setattr__(self, "seed", int(self.seed))
        if not 0 <= self.p <= 1:
            raise ValueError(f"Dropout(p={self.p}): expected a probability from 0 to 1.")

    def seeded(self) -> Dropout:
        """The same with its seed fixed."""
        if self.seed is not None:
            return self
        if scripted():
            raise Unsupported(
                f"{self!r} draws a seed at each call; torch.jit.trace would keep that of the first. "
                "Pass seed=..., or trace the model in eval mode."
            )
        seed: Any = torch.randint(
            1 << 62, (), dtype=torch.int64, device="cpu"
        ).item()  # in a graph a symbol, which int() would fix
        return Dropout(self.p, seed)

    def from_head(self, first: int) -> Dropout:
        """The same with head `first` as its head 0, for a call with the heads from there on. The seed must be fixed."""
        assert self.seed is not None
        # a head's number is added to the seed's upper word, in `_bits` and natively (steps/dropout.h)
        upper = (self.seed >> 32) + first * _HEAD & 0xFFFFFFFF
        seed = upper << 32 | self.seed & 0xFFFFFFFF
        return Dropout(self.p, seed - (seed >> 63 << 64))  # of 64 bits with a sign, as graphs hold it

    def keep(self, at: Region, dtype: torch.dtype) -> Tensor:
        """The factor of each weight of a region, 0 or 1 / (1 - p), broadcastable to (*batch, h, r, c)."""
        assert self.seed is not None
        kept = (_bits(self.seed, at) >> (32 - BITS)) >= self.threshold
        return kept.to(dtype) * self.scale

    @property
    def threshold(self) -> int:
        """A weight is kept if the upper 24 of its 32 random bits, as a number, are at least this."""
        return round(self.p * (1 << BITS))

    @property
    def scale(self) -> float:
        """The factor of the weights that are kept."""
        return 1 / (1 - self.p) if self.p < 1 else 0.0


def undrawn(dropout: Dropout | None) -> Dropout | None:
    """That of a call that is not computed, with some seed: drawing one would move torch's generator."""
    if isinstance(dropout, Dropout) and dropout.seed is None:
        return replace(dropout, seed=0)
    return dropout  # what is no Dropout is refused later


def _bits(seed: int, at: Region) -> Tensor:
    """32 uniform bits for each pair, in int64: four rounds of mixing, each absorbing one coordinate."""
    x = _mix(_word(at.b) * 0x9E3779B1 + (seed & 0xFFFFFFFF))
    x = _mix(x + _word(at.h) * _HEAD + (seed >> 32 & 0xFFFFFFFF))
    x = _mix(x + _word(at.i) * 0xC2B2AE3D)
    return _mix(x + _word(at.j) * 0x27D4EB2F)


def _word(n: Tensor) -> Tensor:
    """A 64-bit integer folded to 32 bits, so that offsets past 2^32 count too."""
    return (n ^ (n >> 32) * 0x165667B1) & 0xFFFFFFFF


def _mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit words that spreads every bit. Source: Wellons, "lowbias32" (2018)."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)
