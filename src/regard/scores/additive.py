"""Additive: the perceptron of Bahdanau, or of GATv2, as a similarity."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from regard.core.dtypes import widen
from regard.core.errors import ShapeError
from regard.core.region import Frame, Region
from regard.core.shapes import count_of, listed, one_or
from regard.core.tracing import finite
from regard.core.wrong_calls import answers_wrong_calls, kind_of
from regard.scores.activations import Activation, LeakyReLU, Sigmoid, Tanh
from regard.scores.algebra import Pull, Score, Similarity
from regard.scores.fields import drawn, parameter
from regard.scores.finite import by_row


@answers_wrong_calls(
    {
        **dict.fromkeys(("W_q", "W1", "W_a"), "write w_q=W.T where W is an nn.Linear's weight, (h, dq)"),
        **dict.fromkeys(("W_k", "W2", "U_a"), "write w_k=W.T where W is an nn.Linear's weight, (h, dk)"),
        **dict.fromkeys(("v", "w_v", "v_a", "a"), "write w=v, of shape (h,)"),
        "bias": "write b=bias",
    },
    "w_q is (dq, h), w_k (dk, h) and w (h,): Additive(w_q, w_k, w); w_q or w_k is None where that side is projected.",
)
@dataclass(frozen=True)
class Additive(Similarity):
    """s_ij = w · f(q_i w_q + k_j w_k + b): a perceptron with one hidden layer of width h.

    w_q (dq, h) or (heads, dq, h), w_k (dk, h) or (key heads, dk, h), w and b (h,) or (heads, h).
    w_q or w_k None: q or k is projected already. Memory is linear in the sequence; no (nq, nk, h) is made.
    activation: f, Tanh() as in Bahdanau's, Sigmoid(), or LeakyReLU() as in GATv2.
    Papers and nn.Linear have W_q (h, dq) and W_k (h, dk): write Additive(W_q.T, W_k.T, v).
    Source: Bahdanau et al. 2014 (arXiv 1409.0473), d2l.ai §11.3; Brody et al. 2021 (arXiv 2105.14491), whose a is w and
    whose W is w_q above w_k.

    >>> import regard as rg, torch
    >>> score = Additive(torch.ones(3, 5), torch.ones(2, 5), torch.ones(5))
    >>> rg.attention_weights(torch.ones(1, 3), torch.zeros(2, 2), score=score)
    tensor([[0.5000, 0.5000]])
    """

    formula: ClassVar[str] = "s_ij = w · f(q_i w_q + k_j w_k + b)"
    head_axes: ClassVar[Mapping[str, int] | None] = {"w_q": -3, "w_k": -3, "w": -2, "b": -2}
    of_key_heads: ClassVar[frozenset[str]] = frozenset(("w_k",))
    w_q: Tensor | None
    w_k: Tensor | None
    w: Tensor
    b: Tensor | None = None
    activation: Activation = field(default_factory=lambda: Tanh())  # torch.compile knows no object as a default

    def __post_init__(self) -> None:
        for name in ("w_q", "w_k", "w", "b"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, parameter(getattr(self, name), f"Additive.{name}"))
        if not isinstance(self.activation, Activation):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"Additive.activation is {kind_of(self.activation)}; expected Tanh(), Sigmoid() or LeakyReLU()."
            )

    @property
    def footprint(self) -> int:
        return self.w.shape[-1]

    def widths(self, dq: int, dk: int) -> str | None:
        if 0 in (self.w.dim(), 1 if self.b is None else self.b.dim()):
            return "Additive.w or b has no axes; expected (h,) or (heads, h)"
        hidden = self.w.shape[-1]
        for name, side, weight, width in (("w_q", "q", self.w_q, dq), ("w_k", "k", self.w_k, dk)):
            if weight is None and width != hidden:
                return f"{side} has width {width}; with {name} None it must be projected to w's {hidden} already"
            if weight is not None and (weight.dim() > 3 or tuple(weight.shape[-2:]) != (width, hidden)):
                turned = tuple(weight.shape[-2:]) == (hidden, width)
                way = f"; write {name}.{'T' if weight.dim() == 2 else 'mT'}" if turned else ""
                way += ", as of an nn.Linear's weight" if turned else ""
                return f"Additive.{name} has shape {listed(weight.shape)}; expected (..., {width}, {hidden}){way}"
        if self.b is not None and self.b.shape[-1] != hidden:
            return f"Additive.b has shape {listed(self.b.shape)}; expected (..., {hidden}), as w"
        return None

    def shape_error(self, frame: Frame) -> str | None:
        for name, t, core in (("w_q", self.w_q, 2), ("w", self.w, 1), ("b", self.b, 1)):
            if t is not None and t.dim() != core and (t.dim() != core + 1 or not one_or(t.shape[0], frame.heads)):
                return (
                    f"Additive.{name} has shape {listed(t.shape)}; expected {count_of(core, 'axis')}, or "
                    "heads before them."
                )
        return None

    def prepare(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        q, k = widen(q), widen(k)
        if self.w_k is not None and self.w_k.dim() > 2 and not one_or(self.w_k.shape[0], k.shape[-3]):
            raise ShapeError(f"Additive.w_k has shape {listed(self.w_k.shape)}; k has {count_of(k.shape[-3], 'head')}.")
        q = _projected(q, self.w_q)
        k = _projected(k, self.w_k)
        return q if self.b is None else q + self.b.to(q.dtype).unsqueeze(-2), k

    def compare(self, q: Tensor, k: Tensor, at: Region) -> Tensor:
        hidden = self.activation.of(q[..., :, None, :] + k[..., None, :, :])
        return (hidden @ self.w.to(q.dtype)[..., None, :, None]).squeeze(-1)

    def quick(self, q: Tensor, k: Tensor, at: Region) -> tuple[Tensor, Pull] | None:
        # contiguous, features first, or the pairs would be laid out in the order of q's strides
        q, k = q.mT.contiguous()[..., None], k.mT.contiguous()[..., None, :]
        if not finite(q, k):
            return None
        hidden = self.activation.of_sums(q, k)
        flat = hidden.flatten(-2)
        # with a head axis: torch would fold the many pairs under a w of one axis, which copies them
        w = self.w.to(q.dtype).expand(q.shape[-4], -1)
        s = (w[:, None, :] @ flat).squeeze(-2).unflatten(-1, hidden.shape[-2:])

        def pull(g: Tensor) -> tuple[Tensor | None, ...]:
            g_w = (g.flatten(-2)[..., None, :] @ flat.mT).squeeze(-2).sum_to_size(self.w.shape)
            slope = self.activation.slope_(hidden).mul_(g[..., None, :, :])
            g_q, g_k = ((slope.sum(axis) * w[..., None]).mT for axis in (-1, -2))
            return g_q, g_k, *self.in_place_of_w(g_w)

        return s, pull

    def in_place_of_w(self, g: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of tensors() once q and k are prepared: w's, and None for w_q, w_k and b, which may be w itself."""
        named = (("w_q", self.w_q), ("w_k", self.w_k), ("w", self.w), ("b", self.b))
        return tuple(g if name == "w" else None for name, t in named if t is not None)

    @classmethod
    def examples(cls, frame: Frame, width: int) -> tuple[Score, ...]:
        hidden, heads = width + 2, frame.heads
        one = cls(drawn(frame, width, hidden), drawn(frame, width, hidden), drawn(frame, hidden), drawn(frame, hidden))
        each = cls(drawn(frame, heads, width, width), None, drawn(frame, heads, width), drawn(frame, heads, width))
        gated = cls(None, drawn(frame, width, width), drawn(frame, width), None, Sigmoid())
        gat = cls(
            drawn(frame, width, hidden), drawn(frame, width, hidden), drawn(frame, heads, hidden), None, LeakyReLU()
        )
        return one, each, cls(None, None, drawn(frame, width)), gated, gat


def _projected(x: Tensor, weight: Tensor | None) -> Tensor:
    return x if weight is None else by_row(x, lambda row: row @ weight.to(row.dtype))
