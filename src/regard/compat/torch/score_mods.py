"""score_mod of FlexAttention as a score of regard's, and a mask, where what it computes is one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.compat.torch.mask_mods import MaskMod, mask_of
from regard.compat.torch.pair_functions import (
    ATEN,
    Node,
    NotRecorded,
    Sizes,
    each_pair,
    evaluate,
    pair_function,
    record,
)
from regard.core.arrays import of_numbers
from regard.core.functions import settle, settled
from regard.core.region import Region
from regard.core.shapes import broadcast_shape
from regard.masks.algebra import Everything, Mask
from regard.scores.algebra import Modifier, Score
from regard.scores.buckets import ClippedBuckets
from regard.scores.modifiers import Bias, RelativeBias, SoftCap
from regard.scores.similarity import ScaledDot


@dataclass(frozen=True)
class ScoreMod(Modifier):
    """s -> fn(s, b, h, i, j) of one pair: i and j are indices."""

    positional: ClassVar[bool] = False
    fn: Callable[..., Tensor]

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return each_pair(self.of_pair(), at, s)

    def of_pair(self) -> Callable[..., Tensor]:
        return self.fn


@dataclass(frozen=True)
class LearnedScoreMod(ScoreMod):
    """s -> fn(learned, s, b, h, i, j) of one pair. learned: tensors whose gradients are computed."""

    learned: tuple[Tensor, ...]

    def of_pair(self) -> Callable[..., Tensor]:
        def pair(*args: Tensor) -> Tensor:
            return self.fn(self.learned, *args)

        if settled(self.fn):
            settle(pair)
        return pair


def translate_score(fn: Callable[..., Tensor], scale: float, sizes: Sizes) -> tuple[Score, Mask]:
    """A score_mod as a Score, and the Mask of the pairs that it hides by -inf; scale: of the product of q and k.

    What it knows, in any order in which they make sense: a factor, one number or one a head, at the beginning; sums
    with what depends on i - j (ALiBi, relative biases, ...), on a query alone or on a key alone, or with a tensor
    indexed by b, h, i, j; cap · tanh(s / cap); where(condition, s, -inf).
    Raises NotRecorded, with what it does not know, as a clause.
    """
    if not sizes.pairs:
        raise NotRecorded("there are no pairs")
    result = record(fn, "sbhij", sizes.dtype, sizes.device)
    reading = _ScoreReading(sizes)
    if not isinstance(result, Node) or "s" not in result.reads:
        raise NotRecorded("its result does not depend on the score")
    reading.read(result)
    reading.check_biases()
    factor: float | Tensor = scale if reading.factor is None else reading.factor.double() * scale
    if isinstance(factor, Tensor):
        factor = factor.item() if factor.dim() == 0 else factor.to(sizes.dtype)
    score: Score = ScaledDot(factor)
    for modifier in reading.modifiers:
        score = score >> modifier
    return score, reduce(and_, reading.masks, Everything())


class _ScoreReading:
    """What a recorded score_mod does to a score, step by step."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.factor: Tensor | None = None
        self.modifiers: list[Modifier] = []
        self.masks: list[Mask] = []

    def read(self, node: Any) -> None:
        """Takes the steps that lead from the score to a node."""
        if not isinstance(node, Node) or "s" not in node.reads:
            raise NotRecorded("it does not lead from the score to its result step by step")
        if node.value.dtype != self.sizes.dtype:
            raise NotRecorded(f"a step of it has the dtype {node.value.dtype}, scores have {self.sizes.dtype}")
        if node.op is None:
            return
        if node.op in (ATEN.add.Tensor, ATEN.sub.Tensor) and not node.kwargs:
            self._add(*node.args, negative=node.op == ATEN.sub.Tensor)
        elif node.op == ATEN.mul.Tensor:
            self._multiply(*node.args)
        elif node.op == ATEN.div.Tensor and not node.kwargs:
            self.read(node.args[0])
            self._scale(1 / _number(node.args[1], "a score is divided"))
        elif node.op == ATEN.where.self:
            self._hide(*node.args)
        elif node.op in (ATEN.masked_fill.Scalar, ATEN.masked_fill.Tensor):
            kept, hidden, filled = node.args
            self._hide(hidden, filled, kept)
        else:
            raise NotRecorded(f"{node.op} of a score is no step that regard has")

    def check_biases(self) -> None:
        """Raises NotRecorded where the sum of the biases is larger than each: a program reads each by itself."""
        biases = [modifier.bias for modifier in self.modifiers if isinstance(modifier, Bias)]
        shapes = [broadcast_shape(bias.shape, (1, 1, 1, 1)) for bias in biases]
        if shapes and broadcast_shape(*shapes) not in shapes:
            raise NotRecorded("what is added depends on several axes")

    def _add(self, a: Any, b: Any, negative: bool) -> None:
        if not _scores(a):
            if negative:
                raise NotRecorded("a score is subtracted")
            a, b = b, a
        self.read(a)
        if _scores(b):
            raise NotRecorded("a score is added to a score")
        if not isinstance(b, Node):
            number = of_numbers(b, self.sizes.dtype).to(self.sizes.device, self.sizes.dtype)
            self._append(Bias.around(_sign(number, negative).expand(1, 1)))
        elif b.by_difference and "b" not in b.reads:
            table = _sign(self.sizes.by_difference(b).to(self.sizes.dtype), negative)
            self._append(RelativeBias(table.reshape(-1, table.shape[-1]).T.flip(0), _every_difference(self.sizes)))
        elif not {"i", "j"} <= b.reads:
            self._append(Bias.around(_sign(self.sizes.by_axes(b).to(self.sizes.dtype), negative)))
        elif negative or self.masks:
            raise NotRecorded("what depends on queries and keys is subtracted, or added to hidden scores")
        else:
            self.modifiers.append(Bias(_indexed(b, self.sizes)))

    def _append(self, modifier: Bias | RelativeBias) -> None:
        """Appends a small table, and one that follows another of its kind as the sum of both."""
        table = modifier.bias if isinstance(modifier, Bias) else modifier.table
        if self.masks and not bool(table.isfinite().all()):
            raise NotRecorded("what is not finite is added to hidden scores")
        last = self.modifiers[-1] if self.modifiers else None
        if isinstance(last, RelativeBias) and isinstance(modifier, RelativeBias):
            self.modifiers[-1] = RelativeBias(last.table + modifier.table, modifier.buckets)
        else:
            self.modifiers.append(modifier)

    def _multiply(self, a: Any, b: Any) -> None:
        a, b = (a, b) if _scores(a) else (b, a)
        cap = self._capped(a, b)
        if cap is not None:
            if self.masks:
                raise NotRecorded("hidden scores are capped, which shows them again")
            self.modifiers.append(SoftCap(cap))
            return
        self.read(a)
        if isinstance(b, Node) and b.reads == frozenset("h"):
            self._scale(evaluate(b, **self.sizes.indices("h")))
        else:
            self._scale(_number(b, "a score is multiplied"))

    def _capped(self, a: Node, b: Any) -> float | None:
        """The cap of tanh(s / cap) · cap, whose scores s have then been read; None for other products."""
        if a.op != ATEN.tanh.default:
            return None
        cap, inner = _number(b, "tanh of a score is multiplied"), a.args[0]
        if isinstance(inner, Node) and inner.op == ATEN.div.Tensor and not inner.kwargs:
            same = _number(inner.args[1], "a score is divided") == cap
        elif isinstance(inner, Node) and inner.op == ATEN.mul.Tensor:
            s, factor = inner.args if _scores(inner.args[0]) else inner.args[::-1]
            inner = Node(inner.op, (s, factor), {}, inner.reads, inner.shift, inner.value)
            same = _number(factor, "a score is multiplied") == 1 / cap if cap else False
        else:
            same = False
        if not same or not 0 < cap < math.inf:
            raise NotRecorded("tanh of a score is no soft cap, cap · tanh(s / cap)")
        assert isinstance(inner, Node)
        self.read(inner.args[0])
        return cap

    def _scale(self, factor: float | Tensor) -> None:
        numbers = of_numbers(factor, torch.float64).to(torch.float64)
        if self.modifiers:
            raise NotRecorded("a factor follows other steps")
        if self.masks and not bool(((numbers > 0) & (numbers < math.inf)).all()):
            raise NotRecorded("hidden scores are multiplied by numbers that are not positive")
        self.factor = numbers if self.factor is None else self.factor * numbers

    def _hide(self, condition: Any, kept: Any, hidden: Any) -> None:
        """where(condition, kept, hidden), one of which is the score, the other -inf."""
        shown = _scores(kept)
        s, fill = (kept, hidden) if shown else (hidden, kept)
        self.read(s)
        if _scores(condition) or _number(fill, "a score is replaced") != -math.inf:
            raise NotRecorded("where() hides pairs by -inf, and by what does not depend on scores")
        mask = mask_of(condition, self.sizes)
        mask = MaskMod(pair_function(condition)) if mask is None else mask
        self.masks.append(mask if shown else ~mask)


def _scores(x: Any) -> bool:
    return isinstance(x, Node) and "s" in x.reads


def _sign(t: Tensor, negative: bool) -> Tensor:
    return -t if negative else t


def _number(x: Any, what: str) -> float:
    """A number of Python, or a tensor of one that is no Node."""
    if isinstance(x, Node) or (isinstance(x, Tensor) and x.dim()):
        raise NotRecorded(f"{what} by something that depends on the pair")
    return float(x)


def _every_difference(sizes: Sizes) -> ClippedBuckets:
    """One row of a table for each j - i, from -(nq - 1) to nk - 1."""
    return ClippedBuckets(before=sizes.nq - 1, after=sizes.nk - 1)


def _indexed(node: Node, sizes: Sizes) -> Tensor:
    """The tensor that a node indexes by b, h, i and j, each once at most: a view (batch or 1, heads or 1, nq, nk)."""
    names = list[str]()
    x: Any = node
    while isinstance(x, Node) and x.op == ATEN.index.Tensor:
        indices = x.args[1]
        if not all(isinstance(index, Node) and index.op is None for index in indices):
            break
        names = [index.args[0] for index in indices] + names
        x = x.args[0]
    if not isinstance(x, Tensor) or len(names) != x.dim() or len({*names}) != len(names):
        raise NotRecorded("what is added depends on queries and keys, and neither on i - j alone nor by one index each")
    if not x.is_floating_point():
        raise NotRecorded(f"the tensor that is added has dtype {x.dtype}")
    counts = {name: len(index) for name, index in sizes.indices("bhij").items()}
    if any(size < counts[name] for name, size in zip(names, x.shape, strict=True)):
        raise NotRecorded("the tensor that is added is smaller than the call")
    for axis, name in enumerate(names):
        x = x.narrow(axis, 0, counts[name])
    ordered = x.permute([names.index(name) for name in "bhij" if name in names])
    return ordered.reshape([counts[name] if name in names else 1 for name in "bhij"])
