"""What is right: the formula of attention, plainly, in float64; and how far a result is from it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from benchmarks.architectures import Exact
from benchmarks.cases import ARCHITECTURES, DROPPED, MODELS, PATCHED, Case
from benchmarks.functions import indices, score_of, term_of
from benchmarks.inputs import BUCKETS, Inputs
from benchmarks.models import Greedy, Vectors
from benchmarks.patched import Outputs

SCORES = 1 << 24  # that are looked at: all heads of as many queries as that; in training all queries of some heads
AT_ONCE = 1 << 24  # numbers of one intermediate
WORSE = 8.0  # a result with so many times the error of a plain evaluation in its dtype is no rounding any more
SPREAD = 0.03  # how far the spread of what dropout does may be from the expected


@dataclass(frozen=True)
class Truth:
    """Results of a case in float64 (the output, in training gradients too), and by how much a candidate may miss them.

    Errors are relative: the root mean square of the differences, over that of the result. Under dropout, which draws
    its own numbers, the error is how far the spread of the differences is from the one that dropout must have.
    """

    rows: Tensor
    heads: int
    right: tuple[Tensor, ...]
    spread: Tensor | None
    limit: float

    def error(self, results: list[Tensor]) -> float:
        """The largest error of a candidate's results: (batch, heads, n, dv), and gradients."""
        out = results[0].double()[:, : self.heads, self.rows]
        if self.spread is not None:
            return abs(_size((out - self.right[0]) / self.spread.sqrt()) - 1)
        got = [out, *(_heads(t, r, self.heads) for t, r in zip(results[1:], self.right[1:], strict=True))]
        return max(_relative(t, r) for t, r in zip(got, self.right, strict=True))


def exact(case: Case, x: Inputs) -> Truth | Greedy | Vectors | Outputs | Exact:
    if case.what in PATCHED:
        return Outputs(x, WORSE)
    if case.what in ARCHITECTURES:
        return Exact(x, WORSE)
    if case.what in MODELS:
        return Vectors(case) if case.what == "sentences" else Greedy(x, WORSE)
    n = case.shape[-2]
    if case.passes == "forward":
        heads, step = case.heads, max(1, math.ceil(n / max(1, SCORES // (case.batch * case.heads * case.keys))))
        rows = torch.arange(0, n, step)
    else:
        heads, rows = min(case.heads, 2), torch.arange(n)
    part = _part(x, heads)
    right = _results(part, rows, torch.float64)
    plain = [t.double() for t in _results(part, rows, x.q.dtype)]
    one_rounding = torch.finfo(x.q.dtype).eps / 4  # about the root mean square of it
    errors = [max(_relative(t, r), one_rounding) for t, r in zip(plain, right, strict=True)]
    if case.what != "dropout":
        return Truth(rows, heads, right, None, WORSE * max(errors))
    return Truth(rows, heads, right, _spread(part, rows), SPREAD)


def _part(x: Inputs, heads: int) -> Inputs:
    """The inputs with four axes, and their first heads only."""
    q, k, v = x.four()
    if heads < q.shape[1]:
        k, v = k[:, :heads], v[:, :heads]
    learned = x.learned
    if learned is not None and x.case.what in ("bias", "t5", "learned table") and x.case.passes != "forward":
        learned = learned[:, :heads]
    cotangent = None if x.cotangent is None else x.cotangent[:, :heads]
    return replace(x, q=q[:, :heads], k=k, v=v, learned=learned, cotangent=cotangent)


def _results(x: Inputs, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The output of some rows and, where there is a cotangent, all gradients, a block of rows at a time."""
    leaves = [t.detach().to(dtype, copy=True).requires_grad_(x.cotangent is not None) for t in _leaves(x)]
    outs: list[Tensor] = []
    width = 1 if x.case.what != "additive" and term_of(x.case) is None else x.case.shape[-1]
    step = max(1, AT_ONCE // (x.q.shape[0] * x.q.shape[1] * x.case.keys * width))
    with torch.set_grad_enabled(x.cotangent is not None):
        for block in rows.split(step):
            out = _weights(x, leaves, block) @ _shared(leaves[2], x)
            if x.cotangent is not None:
                out.backward(x.cotangent[:, :, block].to(dtype))
            outs.append(out.detach())
    return torch.cat(outs, dim=-2), *(t.grad for t in leaves if t.grad is not None)


def _leaves(x: Inputs) -> list[Tensor]:
    return [x.q, x.k, x.v] if x.learned is None else [x.q, x.k, x.v, x.learned]


def _shared(t: Tensor, x: Inputs) -> Tensor:
    """Keys or values, once for each query head."""
    return t if t.shape[1] == x.q.shape[1] else t.repeat_interleave(x.q.shape[1] // t.shape[1], dim=1)


def _weights(x: Inputs, leaves: list[Tensor], rows: Tensor) -> Tensor:
    q, k, what, term = leaves[0][:, :, rows], _shared(leaves[1], x), x.case.what, term_of(x.case)
    if what == "additive":
        scores = torch.tanh(q[..., :, None, :] + k[..., None, :, :]) @ leaves[3]
    elif term is not None:
        scores = term(q[..., :, None, :], k[..., None, :, :]).sum(-1)
    else:
        scores = q @ k.mT * q.shape[-1] ** -0.5
    if what == "bias":
        scores = scores + leaves[3][..., rows, :]
    if what == "t5":
        scores = scores + leaves[3][BUCKETS.index(rows[:, None], torch.arange(x.case.keys))].movedim(-1, 0)
    score = score_of(x.case)
    if score is not None:
        b, h, i, j = indices(x.case, rows)
        scores = score(scores, b, h[: q.shape[1]], i, j, *leaves[3:])
    seen = x.visible(rows)
    return (scores if seen is None else scores.masked_fill(~seen, -torch.inf)).softmax(-1)


def _spread(x: Inputs, rows: Tensor) -> Tensor:
    """The variance that dropout gives each number of the output."""
    leaves = [t.double() for t in _leaves(x)]
    return DROPPED / (1 - DROPPED) * _weights(x, leaves, rows).square() @ _shared(leaves[2], x).square()


def _heads(got: Tensor, right: Tensor, heads: int) -> Tensor:
    """The same part of a gradient as the truth has."""
    return got.double() if got.shape == right.shape else got.double()[:, :heads]


def _relative(got: Tensor, right: Tensor) -> float:
    return _size(got - right) / max(_size(right), torch.finfo(torch.float64).tiny)


def _size(t: Tensor) -> float:
    """The root mean square; infinite where a number is NaN."""
    return float(t.square().mean().sqrt().nan_to_num(math.inf))
