"""What the oracle does to intermediate results: nothing, or what the roundings of a dtype may. Nothing of regard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class Unrounded:
    """Leaves every result as it is."""

    def __call__(self, x: Tensor, floor: float = 0.0) -> Tensor:
        return x

    def product(self, q: Tensor, k: Tensor) -> Tensor:
        """q kᵀ."""
        return q @ k.mT

    def sum(self, terms: Tensor) -> Tensor:
        """Over the last axis."""
        return terms.sum(-1)

    def softmax(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits, -1)

    def slope(self, y: Tensor, x: Tensor) -> Tensor:
        """y = f(x), f saturating: its derivative is computed from y."""
        return y


UNROUNDED = Unrounded()


@dataclass(frozen=True)
class Roundings(Unrounded):
    """x -> x (1 ± up to 2 units), values and gradients; at least what a rounding of a number `floor` makes.

    weights: the unit of the weights where they are multiplied with values. twice: gradients are differentiated again.
    """

    unit: float
    weights: float
    random: torch.Generator
    twice: bool = False

    def __call__(self, x: Tensor, floor: float = 0.0) -> Tensor:
        return _Perturbed.apply(x, self, floor)

    def product(self, q: Tensor, k: Tensor) -> Tensor:
        """The terms of a sum round its partial sums, which may be larger than the sum is."""
        terms = q.detach().abs() @ k.detach().abs().mT
        return self(q @ k.mT) + (self.of(terms) - terms)

    def sum(self, terms: Tensor) -> Tensor:
        sizes = terms.detach().abs().sum(-1)
        return self(terms.sum(-1)) + (self.of(sizes) - sizes)

    def softmax(self, logits: Tensor) -> Tensor:
        """Its gradient P dP - P (sum of P dP) is the difference of two numbers, each with roundings."""
        if not logits.shape[-1]:
            return logits
        return self((logits - _Perturbed.apply(torch.logsumexp(logits, -1, keepdim=True), self, None)).exp())

    def slope(self, y: Tensor, x: Tensor) -> Tensor:
        """1 - y² and y (1 - y) keep no more digits than 1 does."""
        return y + (x - x.detach()) * self.of(torch.zeros_like(y), 1.0).detach()

    def of(self, x: Tensor, floor: float = 0.0, unit: float | None = None) -> Tensor:
        noise = (torch.rand(x.shape, generator=self.random, dtype=x.dtype) * 4 - 2) * (unit or self.unit)
        return torch.where(x.isfinite(), x + noise * x.abs().clamp(min=floor), x)


class _Perturbed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, roundings: Roundings, floor: float | None) -> Tensor:
        ctx.roundings = roundings
        return x.view_as(x) if floor is None else roundings.of(x, floor)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return ctx.roundings.of(g), None, None


class PerturbedSoftmax(torch.autograd.Function):
    """(p, lse, p V) of logits whose last column may be a sink. dS = P (dP - Delta), each rounded by itself."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, v: Tensor, roundings: Roundings) -> tuple[Tensor, Tensor, Tensor]:
        # the sum of a row is rounded too, for all of its weights alike
        whole = torch.softmax(logits, -1) * roundings.of(
            logits.new_ones(*logits.shape[:-1], 1), unit=2 * roundings.unit
        )
        p = roundings.of(whole)[..., : v.shape[-2]]
        out = roundings.of(roundings.of(p, unit=roundings.weights) @ roundings.of(v))
        ctx.save_for_backward(whole, v, out)
        ctx.roundings = roundings
        lse = torch.logsumexp(logits, -1) if logits.shape[-1] else logits.sum(-1)
        return p, roundings.of(lse, 1.0), out

    @staticmethod
    def backward(ctx: Any, g_p: Tensor, g_lse: Tensor, g_out: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        (whole, v, out), of = ctx.saved_tensors, ctx.roundings.of
        p = of(whole)[..., : v.shape[-2]]
        delta = of(of(g_out * out).sum(-1, keepdim=True)) + of(of(g_p * p).sum(-1, keepdim=True)) - g_lse[..., None]
        g = torch.cat([of(g_out @ of(v).mT) + g_p, g_out.new_zeros(*g_p.shape[:-1], whole.shape[-1] - p.shape[-1])], -1)
        return of(whole) * (of(g) - of(delta)), of(p, unit=ctx.roundings.weights).mT @ g_out, None
