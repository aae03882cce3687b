"""Functions of single pairs beside their definition: dense, in float64, by torch.vmap, as torch evaluates them.

A case is a function of Numbers, which makes the numbers that the function reads: the same ones in float64 and float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import regard as rg
from regard.compat.torch import explain_flex_attention, flex_attention
from regard.core.pair_indexing import PairIndexing

BATCH, HEADS, N, WIDTH = 2, 4, 196, 16  # tokens: 14 × 14 of an image, or 12 × 16 and 4 of a text
Mod = Callable[..., Tensor]
Case = Callable[["Numbers"], Mod]


@dataclass
class Numbers:
    """Random numbers of a dtype: equal ones in equal order, whatever the dtype. learned: those with gradients."""

    dtype: torch.dtype
    learned: list[Tensor] = field(default_factory=list[Tensor])
    random: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(5))

    def fixed(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random).to(self.dtype)

    def learn(self, *shape: int) -> Tensor:
        self.learned.append(self.fixed(*shape).requires_grad_())
        return self.learned[-1]

    def whole(self, below: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(below, shape, generator=self.random).to(dtype)


def dense(fn: Mod, *scores: Tensor) -> Tensor:
    """fn of all pairs of a call, (batch, heads, queries, keys)."""
    index = [torch.arange(n) for n in (BATCH, HEADS, N, N)]
    for axis in (3, 2, 1, 0):
        fn = torch.vmap(fn, in_dims=(0,) * len(scores) + tuple(0 if axis == n else None for n in range(4)))
    with PairIndexing():
        return fn(*scores, *index)


def definition(q: Tensor, k: Tensor, v: Tensor, score_mod: Mod | None, mask_mod: Mod | None) -> Tensor:
    s = q @ k.mT / q.shape[-1] ** 0.5
    s = s if score_mod is None else dense(score_mod, s)
    s = s if mask_mod is None else s.masked_fill(~dense(mask_mod), -math.inf)
    empty = (s == -math.inf).all(-1, keepdim=True)
    return torch.softmax(s.masked_fill(empty, 0), -1).masked_fill(empty, 0) @ v


def largest_errors(score: Case | None, mask: Case | None) -> dict[str, float]:
    """The largest errors of the output and of each gradient, relative to the largest number of the definition.

    Asserts that the call runs in the kernels, forward and backward.
    """
    torch.manual_seed(0)
    *given, g = [torch.randn(BATCH, HEADS, N, WIDTH, dtype=torch.float64) for _ in "qkvg"]
    results: list[list[Tensor]] = []
    names = ["output", "q", "k", "v"]
    for dtype in (torch.float64, torch.float32):
        numbers = Numbers(dtype)
        score_mod, mask_mod = (None if case is None else case(numbers) for case in (score, mask))
        x = [t.to(dtype).requires_grad_() for t in given]
        if dtype == torch.float64:
            out = definition(*x, score_mod, mask_mod)
        else:
            seen = None if mask_mod is None else create_block_mask(mask_mod, BATCH, HEADS, N, N, device="cpu")
            plan = explain_flex_attention(*x, score_mod, seen)
            check_native(plan)
            out = flex_attention(*x, score_mod, seen)
        results.append([out, *torch.autograd.grad(out, (*x, *numbers.learned), g.to(dtype))])
    names += [f"learned {n}" for n in range(len(results[0]) - len(names))]
    scale = float(torch.stack([g.detach().abs().max() for g in results[0]]).max())
    return {name: _error(mine, right, scale) for name, right, mine in zip(names, *results, strict=True)}


def _error(mine: Tensor, right: Tensor, scale: float) -> float:
    """The largest error, relative to the largest number; where that is 0 but for rounding, to that of all results."""
    largest = float(right.detach().abs().max())
    return float((mine - right).detach().abs().max()) / (largest if largest > 1e-9 else scale)


def check_native(plan: Any) -> None:
    facts = dict(plan.facts)
    assert plan.backend == rg.Native(), facts
    assert facts["backward"] == "the same kernels", facts
    assert "since no program" not in facts["mask as"], facts
