"""Modifiers of a score: SoftCap, Alibi, Bias, RelativeBias."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from regard.core.region import Frame, Region
from regard.core.shapes import broadcasts, listed, one_or
from regard.core.tracing import data_unavailable, finite, watched
from regard.core.value import is_regards_own
from regard.core.wrong_calls import answers_wrong_calls, kind_of
from regard.scores.algebra import Modifier, Score
from regard.scores.buckets import Buckets, ClippedBuckets, T5Buckets, missing_rows
from regard.scores.fields import number, parameter, shape_error_by_head
from regard.scores.finite import finite_in, plus


@answers_wrong_calls(
    dict.fromkeys(("softcap", "logit_cap", "max", "value"), "write SoftCap(cap)"),
    "SoftCap(50) keeps the scores within ±50.",
)
@dataclass(frozen=True)
class SoftCap(Modifier):
    """s -> cap · tanh(s / cap): scores stay within ±cap.

    cap: a number above 0 (ValueError), or a floating-point tensor () or (heads,), which may be learned. Tensors are not
    checked: keep learned values positive, for example by exp.

    Source: Gemma 2 (arXiv 2408.00118), with cap 50.

    >>> import regard as rg
    >>> s = rg.ScaledDot() >> SoftCap(1.0)
    >>> rg.attention_weights(torch.full((1, 1), 99.0), torch.tensor([[0.0], [99.0]]), score=s)
    tensor([[0.2689, 0.7311]])
    """

    formula: ClassVar[str] = "s -> cap · tanh(s / cap)"
    head_axes: ClassVar[Mapping[str, int] | None] = {"cap": -1}
    positional: ClassVar[bool] = False
    indexed: ClassVar[bool] = False
    cap: float | Tensor

    def __post_init__(self) -> None:
        object.__setattr__(self, "cap", number(self.cap, "SoftCap.cap"))
        if not isinstance(self.cap, Tensor) and not 0 < self.cap < math.inf:
            raise ValueError(f"SoftCap(cap={self.cap}): expected a finite number above 0.")

    def shape_error(self, frame: Frame) -> str | None:
        return shape_error_by_head(self.cap, "SoftCap.cap", frame.heads)

    def modify(self, s: Tensor, at: Region) -> Tensor:
        # a program that is recorded leaves hidden pairs out by itself
        if torch.compiler.is_compiling() or watched() or finite(s):
            return self._capped(s, at)
        # 0 · NaN is NaN: a hidden score that is no number would make every gradient of its row that
        none = s.isnan()
        return torch.where(none, s.detach(), self._capped(s.masked_fill(none, 0), at))

    def _capped(self, s: Tensor, at: Region) -> Tensor:
        if not isinstance(self.cap, Tensor):
            return self.cap * torch.tanh(s / self.cap)
        cap, most = at.heads(self.cap).to(s.dtype), torch.finfo(s.dtype).max
        # a hidden score of inf would make the cap's gradient 0 · inf
        return cap * torch.tanh(s.clamp(-most, most) / cap)

    @classmethod
    def examples(cls, frame: Frame, width: int) -> tuple[Score, ...]:
        return cls(2.0), cls(torch.linspace(1, 2, frame.heads, dtype=torch.float64, device=frame.device))


@answers_wrong_calls(
    {
        "alibi_slopes": "write slopes=alibi_slopes",
        **dict.fromkeys(("heads", "num_heads", "n_heads"), "write slopes=Alibi.geometric(heads)"),
    },
    "slopes are (heads,): Alibi.geometric(heads) are those of the paper.",
)
@dataclass(frozen=True)
class Alibi(Modifier):
    """s_ij -> s_ij - slope_h · |i - j|: a penalty by distance, one slope a head, (heads,) or ().

    With `coordinates` (nk, dims), and `query_coordinates` (nq, dims) if they differ, the distance is the Euclidean one
    between those points (patches of an image, atoms), and no positions are read.
    Source: Press et al. 2022 (arXiv 2108.12409); in two dimensions Fuller et al. 2023 (arXiv 2311.00566).

    >>> import regard as rg
    >>> s = rg.ScaledDot() >> Alibi(torch.tensor([1.0]))
    >>> rg.attention_weights(torch.zeros(3, 2), torch.zeros(3, 2), score=s)[2]
    tensor([0.0900, 0.2447, 0.6652])
    """

    formula: ClassVar[str] = "s_ij -> s_ij - slope_h · |i - j|"
    head_axes: ClassVar[Mapping[str, int] | None] = {"slopes": -1}
    adds: ClassVar[bool] = True
    slopes: Tensor
    coordinates: Tensor | None = None
    query_coordinates: Tensor | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "slopes", parameter(self.slopes, "Alibi.slopes"))
        for name in ("coordinates", "query_coordinates"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, parameter(getattr(self, name), f"Alibi.{name}"))
        if self.query_coordinates is not None and self.coordinates is None:
            raise ValueError("Alibi: query_coordinates are given without coordinates (of the keys).")

    @staticmethod
    def geometric(heads: int) -> Tensor:
        """The paper's slopes: 2^(-8/n), 2^(-16/n), ... for n heads, interleaved where n is no power of 2.

        >>> Alibi.geometric(4)
        tensor([0.2500, 0.0625, 0.0156, 0.0039])
        """
        if heads < 1:
            raise ValueError(f"Alibi.geometric({heads}): expected 1 head or more.")
        power = 1 << (heads.bit_length() - 1)
        first = [2.0 ** (-8 * (i + 1) / power) for i in range(power)]
        rest = [2.0 ** (-4 * (i + 1) / power) for i in range(0, 2 * power, 2)]
        return torch.tensor((first + rest)[:heads], dtype=torch.float32, device="cpu")

    def compares_positions(self) -> bool:
        return self.coordinates is None

    def shape_error(self, frame: Frame) -> str | None:
        if self.slopes.dim() > 1 or (self.slopes.dim() == 1 and not one_or(self.slopes.shape[0], frame.heads)):
            return f"Alibi.slopes has shape {listed(self.slopes.shape)}; expected one slope a head, ({frame.heads},)."
        q = self.coordinates if self.query_coordinates is None else self.query_coordinates
        for name, at, n in (("coordinates", self.coordinates, frame.nk), ("query_coordinates", q, frame.nq)):
            if at is not None and (at.dim() != 2 or at.shape[0] != n):
                return f"Alibi.{name} has shape {listed(at.shape)}; expected ({n}, dims)."
        if q is not None and self.coordinates is not None and q.shape[1] != self.coordinates.shape[1]:
            return f"Alibi: the queries have {q.shape[1]} coordinates each, the keys {self.coordinates.shape[1]}."
        return None

    def modify(self, s: Tensor, at: Region) -> Tensor:
        slope = at.heads(self.slopes).to(s.dtype)
        if self.coordinates is None:
            return s - slope * (at.i - at.j).abs().to(s.dtype)
        q = self.coordinates if self.query_coordinates is None else self.query_coordinates
        square = not_finite = torch.zeros((), dtype=s.dtype, device=s.device)
        for x, y in zip(q.unbind(-1), self.coordinates.unbind(-1), strict=True):
            wide = torch.promote_types(x.dtype, s.dtype)
            ahead = (at.queries(x).to(wide) - at.keys(y).to(wide)).to(s.dtype)
            fine = ahead.isfinite()
            # a constant: 0 · NaN, the gradient of a hidden pair, would reach the other pairs of its points
            not_finite = not_finite + ahead.detach().abs().masked_fill(fine, 0)
            square = square + ahead.masked_fill(~fine, 0) ** 2
        near = square == 0  # the root has no derivative there
        distance = square.masked_fill(near, 1).sqrt().masked_fill(near, 0)
        return s - slope * distance - slope.detach() * not_finite

    @classmethod
    def examples(cls, frame: Frame, width: int) -> tuple[Score, ...]:
        slopes = cls.geometric(max(frame.heads, 1))[: frame.heads].to(frame.device, torch.float64)
        q, k = (torch.randn(n, 2, dtype=torch.float64, device=frame.device) for n in (frame.nq, frame.nk))
        return cls(slopes), cls(slopes, coordinates=k, query_coordinates=q)


@answers_wrong_calls(
    dict.fromkeys(("attn_bias", "attn_mask", "mask", "tensor", "position_bias"), "write Bias(tensor)"),
    "bias broadcasts to (*batch, heads, nq, nk).",
)
@dataclass(frozen=True)
class Bias(Modifier):
    """s -> s + bias, a tensor that broadcasts to the call's (*batch, heads, nq, nk); -inf hides a pair.

    Added in the accumulation dtype; finite sums stay finite. Its gradient has its own shape and is summed tile by tile.
    A bias of only 0 and 1 is usually a mask, and gives a warning: Dense(mask.bool()) hides, Bias adds. A mask also
    keeps a hidden value that is NaN or infinite out of the output; for a pair that a bias hides, the value is
    multiplied by the weight 0. A later SoftCap makes -inf finite again.

    >>> import regard as rg
    >>> s = rg.ScaledDot() >> Bias(torch.tensor([[0.0, float("-inf")]]))
    >>> rg.attention_weights(torch.zeros(1, 2), torch.zeros(2, 2), score=s)
    tensor([[1., 0.]])
    """

    formula: ClassVar[str] = "s -> s + bias"
    head_axes: ClassVar[Mapping[str, int] | None] = {"bias": -3}
    positional: ClassVar[bool] = False
    adds: ClassVar[bool] = True
    bias: Tensor

    def __post_init__(self) -> None:
        bias = parameter(self.bias, "Bias.bias")
        object.__setattr__(self, "bias", bias)
        if looks_like_a_mask(bias):
            warnings.warn(
                "Bias holds only 0 and 1, which are added to the scores. If it is a mask, write Dense(bias.bool()).",
                stacklevel=4,  # __post_init__, __init__, and the frame that answers wrong calls
            )

    @classmethod
    def around(cls, bias: Tensor) -> Self:
        """A bias of a tensor that was computed: nobody asks whether it was meant as a mask."""
        made = object.__new__(cls)
        object.__setattr__(made, "bias", bias)
        return made

    def shape_error(self, frame: Frame) -> str | None:
        shape, full = tuple(self.bias.shape), frame.shape if frame.headed else (*frame.batch, frame.nq, frame.nk)
        if not broadcasts(shape, full):
            return f"Bias.bias has shape {listed(shape)}; expected one that broadcasts to {listed(full)}."
        return None

    def local(self, at: Region) -> Bias:
        if type(self).modify is not Bias.modify:  # a subclass may do something else with its tensor
            return self
        view = at.pairs(self.bias)
        return self if view is self.bias else _PlacedBias.around(view)

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return plus(s, finite_in(at.pairs(self.bias), s.dtype))

    @classmethod
    def examples(cls, frame: Frame, width: int) -> tuple[Score, ...]:
        shape = frame.shape if frame.headed else (*frame.batch, frame.nq, frame.nk)
        return tuple(
            cls(torch.randn(size, dtype=torch.float64, device=frame.device)) for size in (shape, shape[-2:], shape[-1:])
        )


class _PlacedBias(Bias):
    """The part of a bias that belongs to one region, already cut out of it."""

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return plus(s, finite_in(self.bias, s.dtype))


@answers_wrong_calls(
    {
        **dict.fromkeys(("weight", "bias", "embedding"), "write table=, of shape (buckets, heads)"),
        **dict.fromkeys(("num_buckets", "max_distance"), "write buckets=T5Buckets(count, farthest), for instance"),
    },
    "table is (buckets.count, heads).",
)
@dataclass(frozen=True)
class RelativeBias(Modifier):
    """s_ij -> s_ij + table[bucket(i, j), head]: a learned bias for each class of relative positions.

    table: (buckets, heads) or (buckets, 1). buckets: T5Buckets, T5CausalBuckets, ClippedBuckets, GridBuckets (Swin), or
    your own, as a DifferenceBuckets if the difference alone determines the bucket; IndexError where these return a row
    that the table does not have, unless a graph records the call. The table's gradient is summed tile by tile.
    Source: Raffel et al. 2020, T5 (arXiv 1910.10683); Liu et al. 2021, Swin (arXiv 2103.14030).

    >>> import regard as rg
    >>> table = torch.tensor([[0.0], [0.0], [9.0]])   # one behind or more, at the query, one ahead or more
    >>> s = rg.ScaledDot() >> RelativeBias(table, rg.ClippedBuckets(before=1, after=1))
    >>> rg.attention_weights(torch.zeros(3, 2), torch.zeros(3, 2), score=s).argmax(-1)
    tensor([1, 2, 0])
    """

    formula: ClassVar[str] = "s_ij -> s_ij + table[bucket(i, j), head]"
    head_axes: ClassVar[Mapping[str, int] | None] = {"table": -1}
    indexed: ClassVar[bool] = False
    adds: ClassVar[bool] = True
    table: Tensor
    buckets: Buckets

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", parameter(self.table, "RelativeBias.table"))
        if not isinstance(self.buckets, Buckets):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"RelativeBias.buckets is {kind_of(self.buckets)}; expected Buckets, such as T5Buckets(32)."
            )

    def shape_error(self, frame: Frame) -> str | None:
        shape = tuple(self.table.shape)
        if len(shape) == 2 and shape[0] == self.buckets.count and one_or(shape[1], frame.heads):
            return self.buckets.shape_error(frame)
        return f"RelativeBias.table has shape {listed(shape)}; expected ({self.buckets.count}, {frame.heads})."

    def modify(self, s: Tensor, at: Region) -> Tensor:
        index = self.buckets.index(at.i, at.j)
        missing = None if is_regards_own(type(self.buckets)) else missing_rows(self.buckets, index)
        if missing is not None:
            raise IndexError(f"RelativeBias.buckets: {missing}.")
        table = finite_in(self.table, s.dtype).expand(-1, at.frame.heads)
        return plus(s, table[index, at.h])

    @classmethod
    def examples(cls, frame: Frame, width: int) -> tuple[Score, ...]:
        buckets = ClippedBuckets(before=3, after=2), T5Buckets(8, 16)
        tables = (torch.randn(b.count, frame.heads, dtype=torch.float64, device=frame.device) for b in buckets)
        return tuple(cls(table, b) for table, b in zip(tables, buckets, strict=True))


def looks_like_a_mask(bias: Tensor) -> bool:
    if bias.requires_grad or data_unavailable(bias) or bias.dim() < 2 or bias.numel() < 2:
        return False
    if float(bias[(0,) * bias.dim()]) not in (0.0, 1.0):  # most biases are told apart by their first number
        return False
    for part in (bias[(0,) * (bias.dim() - 1)], bias):
        if not bool(((part == 0) | (part == 1)).all()):
            return False
    return bool((bias == 1).any()) and bool((bias == 0).any())
