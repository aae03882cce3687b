"""Elementwise: a similarity of your own that is a sum over features."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.core.region import Frame, Region
from regard.core.shapes import blocks, broadcast_shape, broadcasts, listed, one_or
from regard.core.tracing import data_unavailable, finite, symbolic
from regard.core.vjp import vjp
from regard.core.wrong_calls import answers_wrong_calls, check_parameters, kind_of
from regard.scores.algebra import Pull, Score, Similarity
from regard.scores.fields import drawn, parameters

# At least so many features are evaluated at once, and more where a tile has few pairs: up to so many numbers.
_FEATURES, _BUDGET = 16, 1 << 20


@dataclass(frozen=True)
class Elementwise(Similarity):
    """s_ij = Σ_f fn(q_if, k_jf, t_f, ...): a sum over features of an elementwise function that you define.

    fn gets some of the features: of queries (*batch, h, r, 1, f), of keys (*batch, h, 1, c, f) and of the tensors, and
    returns what each feature of each pair adds, (*batch, h, r, c, f), or what broadcasts to it but has all f features.
    It must be elementwise: what it returns for one feature of one pair depends on nothing else. The constructor tries
    that on a few numbers.

    tensors: widths, weights or gates, of shape (), (d,) or (heads, d), d the width of q and k; an axis of size 1 is
    shared. Each gets its gradient if it requires one; a fn that uses another such tensor raises an error. Memory is
    linear in the sequence: features are summed a few at a time, and no (nq, nk, d) is made. The native kernels run fn
    as a program, where it consists of elementwise operations that they know.

    >>> import regard as rg
    >>> manhattan = Elementwise(lambda q, k: -(q - k).abs())
    >>> rg.attention_weights(torch.zeros(1, 2), torch.tensor([[0.0, 0.0], [1.0, -2.0]]), score=manhattan)
    tensor([[0.9526, 0.0474]])
    >>> gaussian = Elementwise(lambda q, k, width: -(((q - k) / width) ** 2), tensors=(torch.tensor([1.0, 2.0]),))
    >>> gat = Elementwise(lambda q, k, a: a * torch.nn.functional.leaky_relu(q + k, 0.2), tensors=(torch.ones(2),))
    """

    formula: ClassVar[str] = "s_ij = Σ_f fn(q_if, k_jf, t_f, ...)"
    head_axes: ClassVar[Mapping[str, int] | None] = {"inputs": -2}
    fn: Callable[..., Tensor]
    inputs: tuple[Tensor, ...] = ()

    @answers_wrong_calls({"inputs": "write tensors="})
    def __init__(self, fn: Callable[..., Tensor], tensors: tuple[Any, ...] = ()) -> None:
        if not callable(fn):
            raise TypeError(
                f"Elementwise.fn is {kind_of(fn)}; expected a function of q and k, which gives what each feature adds "
                "to their score."
            )
        object.__setattr__(self, "fn", fn)
        object.__setattr__(self, "inputs", parameters(tensors, "Elementwise.tensors"))
        for t in self.inputs:
            if t.dim() > 2:
                raise TypeError(
                    f"Elementwise.tensors has a tensor of shape {listed(t.shape)}; expected (), (d,) or (heads, d)."
                )
        if not data_unavailable(*self.inputs):
            self._try()

    @classmethod
    def untried(cls, fn: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Elementwise:
        """One around a function that is known to be elementwise, and is not tried again."""
        made = object.__new__(cls)
        object.__setattr__(made, "fn", fn)
        object.__setattr__(made, "inputs", inputs)
        return made

    @property
    def footprint(self) -> int:
        return _FEATURES

    def widths(self, dq: int, dk: int) -> str | None:
        if dq != dk:
            return super().widths(dq, dk)
        for t in self.inputs:
            if t.dim() and not one_or(t.shape[-1], dq):
                way = ""
                if t.dim() == 1:
                    way = "; a number for each head is (heads, 1)"
                return f"Elementwise.tensors has a tensor of shape {listed(t.shape)}; q and k have width {dq}{way}"
        return None

    def shape_error(self, frame: Frame) -> str | None:
        for t in self.inputs:
            if t.dim() == 2 and not one_or(t.shape[0], frame.heads):
                return (
                    f"Elementwise.tensors has a tensor of shape {listed(t.shape)}; expected (d,) or a row a head, "
                    f"({frame.heads}, d)."
                )
        return None

    def compare(self, q: Tensor, k: Tensor, at: Region) -> Tensor:
        shape, given = _scores_shape(q, k), (q, k, *self._aligned(q.dtype))
        parts, total = _parts(shape, q.shape[-1]), q.new_zeros(shape)
        for part in parts:
            total = total + self._terms(given, part).sum(-1)
        if not (total.requires_grad and finite(q, k)) or finite(total):
            return total
        # scores overflow: where the pair is hidden, 0 times its derivative would be NaN
        some = total.isfinite()
        rest = sum((self._some(given, part, some) for part in parts), q.new_zeros(shape))
        return torch.where(some, rest, total.detach())

    def quick(self, q: Tensor, k: Tensor, at: Region) -> tuple[Tensor, Pull] | None:
        if not finite(q, k):
            return None
        s, tensors = self.compare(q, k, at), self._aligned(q.dtype)

        def pull(g: Tensor) -> tuple[Tensor | None, ...]:
            given = [x.detach().requires_grad_() for x in (q, k, *tensors)]
            sums = [torch.zeros_like(x) for x in given]
            for part in _parts(s.shape, q.shape[-1]):
                with torch.enable_grad():
                    terms = self._terms(given, part).sum(-1)
                if not terms.requires_grad:
                    continue
                found = vjp([terms], given, [g])
                if not finite(*(x for x in found if x is not None)):
                    with torch.enable_grad():  # 0 times an infinite derivative is NaN
                        terms = self._some(given, part, g != 0)
                    found = vjp([terms], given, [g])
                for to, x in zip(sums, found, strict=True):
                    if x is not None:
                        to += x
            shapes = (x.shape for x in self.inputs)
            return sums[0], sums[1], *(x.reshape(shape) for x, shape in zip(sums[2:], shapes, strict=True))

        return s, pull

    def _some(self, given: Sequence[Tensor], part: slice, some: Tensor) -> Tensor:
        """What some of the features add to the scores of some pairs; anything, without a derivative, to the others."""
        q, k, *tensors = _of_part(given, part)
        q, k = torch.where(some[..., None], q, 1.5), torch.where(some[..., None], k, 0.75)  # few functions have a pole
        return self.fn(q, k, *tensors).expand(q.shape).sum(-1)

    @staticmethod
    def aligned(tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors, shaped to meet pairs (*batch, h, r, c, f): (), (d,) or (heads, 1, 1, d)."""
        return [t if t.dim() < 2 else t[:, None, None, :] for t in tensors]

    def _aligned(self, dtype: torch.dtype) -> list[Tensor]:
        return [t.to(dtype) for t in self.aligned(self.inputs)]

    def _terms(self, given: Sequence[Tensor], part: slice) -> Tensor:
        """What some of the features add to the score of each pair, (*batch, h, r, c, f). given: q, k, the tensors."""
        q, k, *tensors = _of_part(given, part)
        expected = broadcast_shape(q.shape, k.shape)
        try:
            terms: Any = self.fn(q, k, *tensors)
        except TypeError:
            names = ("q", "k", *("tensor" for _ in tensors))
            check_parameters(self.fn, "Elementwise.fn", names, "Elementwise(lambda q, k: -(q - k).abs())")
            raise
        right = isinstance(terms, Tensor) and terms.dim() and terms.shape[-1] == expected[-1]
        if not right or not broadcasts(terms.shape, expected):
            got = listed(terms.shape) if isinstance(terms, Tensor) else type(terms).__name__
            raise TypeError(
                f"Elementwise.fn returned {got} for q {listed(q.shape)} and k {listed(k.shape)}; expected "
                f"{listed(expected)}: what each feature adds, not their sum."
            )
        return terms.expand(expected)

    @torch.no_grad()
    def _try(self) -> None:
        """Raises TypeError where fn, of a few pairs and features, is not what it is of all of them."""
        heads, width = (max([t.shape[axis] for t in self.inputs if t.dim() >= -axis], default=1) for axis in (-2, -1))
        if 0 in (heads, width):
            return
        width, device = width if width > 1 else 3, self.inputs[0].device if self.inputs else "cpu"
        # no two alike, and none so large that a sum of exponentials would lose one
        x = torch.arange(heads * 5 * width, dtype=torch.float64, device=device).reshape(heads, 5, width).sin() + 1.5
        q, k, tensors = x[:, :2], x[:, 2:], self._aligned(torch.float64)
        try:
            whole = self._terms((q, k, *tensors), slice(0, width))
            part = self._terms((q[:, 1:], k[:, 1:], *tensors), slice(0, 2))
        except RuntimeError as error:
            raise TypeError(
                f"Elementwise.fn raises an error for some of the features ({error}). It is called with a few of them "
                "at a time: pass tensors with a number for each feature along, as in "
                "Elementwise(lambda q, k, w: ..., tensors=(w,))."
            ) from error
        if not torch.allclose(part, whole[:, 1:, 1:, :2], rtol=1e-9, atol=1e-12, equal_nan=True):
            raise TypeError(
                "Elementwise.fn is not elementwise: what it returns for a feature of a pair depends on other features "
                "or pairs, or on chance. Custom(fn) takes any function of q and k."
            )

    @classmethod
    def examples(cls, frame: Frame, width: int) -> tuple[Score, ...]:
        return (
            cls(_manhattan),
            cls(_gaussian, tensors=(drawn(frame, width),)),
            cls(_gat, tensors=(drawn(frame, frame.heads, width),)),
            cls(_gated, tensors=(drawn(frame, frame.heads, 1),)),
        )


def _scores_shape(q: Tensor, k: Tensor) -> tuple[int, ...]:
    return (*broadcast_shape(q.shape[:-2], k.shape[:-2]), q.shape[-2], k.shape[-2])


def _of_part(given: Sequence[Tensor], part: slice) -> list[Tensor]:
    """Some of the features of q and k, as pairs, and of the tensors."""
    q, k, *tensors = given
    return [
        q[..., :, None, part],
        k[..., None, :, part],
        *(t if t.shape[-1:] in ((), (1,)) else t[..., part] for t in tensors),
    ]


def _parts(shape: Sequence[int], width: int) -> list[slice]:
    """The features that are evaluated together for scores of that shape."""
    pairs = 1
    for n in shape:
        pairs *= n
    return blocks(width, _FEATURES if symbolic(pairs) else max(_FEATURES, _BUDGET // max(pairs, 1)))


def _manhattan(q: Tensor, k: Tensor) -> Tensor:
    return -(q - k).abs()


def _gaussian(q: Tensor, k: Tensor, width: Tensor) -> Tensor:
    return -(((q - k) * width.sigmoid()) ** 2)


def _gat(q: Tensor, k: Tensor, a: Tensor) -> Tensor:
    return a * torch.nn.functional.leaky_relu(q + k, 0.2)


def _gated(q: Tensor, k: Tensor, gate: Tensor) -> Tensor:
    return q * k * torch.sigmoid(gate * (q + k))
