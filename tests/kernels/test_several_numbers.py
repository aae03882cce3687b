"""Functions of a pair that read several numbers, such as a row of a table, and those with a backward of their own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from needed import needs_kernels
from pair_definition import BATCH, HEADS, Case, Mod, N, Numbers, definition, largest_errors
from regard.compat.torch import explain_flex_attention, flex_attention
from regard.core.region import Region

pytestmark = needs_kernels


def read(by: str, *shape: int) -> Case:
    """A score_mod, of a learned tensor t and another one u with the same numbers."""

    def case(numbers: Numbers) -> Mod:
        t = numbers.learn(*shape)
        given: dict[str, Any] = {"t": t, "u": t.detach().clone(), "torch": torch, "weights": numbers.fixed(shape[-1])}
        return eval(f"lambda s, b, h, i, j: {by}", given)

    return case


CASES: dict[str, Case] = {
    "the sum of a row": read("s + t[i].sum() * s", N, 3),
    "the sum of a square row": read("s * (1 + t[i].sum() / 99)", N, N),
    "the mean of a row of the key": read("s + t[b, h, j].mean()", BATCH, HEADS, N, 4),
    "a product of rows": read("s + (t[i] * t[j]).sum(-1)", N, 3),
    "a dot product": read("s + torch.dot(t[i], t[j])", N, 3),
    "a dot product of another row": read("s + t[i] @ (u[j] * 2 - 1)", N, 3),
    "the norm of a difference": read("s - (t[i] - t[j]).norm()", N, 2),
    "the nearest of several": read("s + (t[i] - t[j]).abs().amax(-1) - (t[i] * t[j]).amin(-1)", N, 3),
    "a product of factors": read("s * (1 + t[i] * t[j] * 0.1).prod()", N, 3),
    "weighted features": read("s + (torch.tanh(t[i] + t[j]) * weights).sum()", N, 3),
    "a bilinear form": read("s * (1 + (t[h] @ t[h, 1] * u[0, j % 3]).sum() / 9)", HEADS, 3, 3),
    "an element of a row": read("s + t[i][1] * t[j][-1]", N, 3),
    "an element by another index": read("s + t[i][j % 3]", N, 3),
    "a row by the difference": read("s + t[(i - j).clamp(-4, 4) + 4].sum()", 9, 3),
    "a head of a row": read("s + t[(i - j).clamp(-4, 4) + 4][..., h]", 9, HEADS),
    "a column": read("s + t[:, h].sum() + t[1, :, h].sum() * s", 3, HEADS, HEADS),
    "a softmax of a row": read("s + t[i].softmax(-1)[j % 3]", N, 3),
    "of the head alone": read("s * (t[h] ** 2).sum() + t[h][b]", HEADS, BATCH),
    "parts of a row": read("s + torch.cat([t[i][:1], t[j][1:]]).sum() + torch.stack(t[i].unbind()).flip(0)[0]", N, 3),
}


@pytest.mark.parametrize("name", CASES)
def test_score_mods(name: str) -> None:
    errors = largest_errors(CASES[name], None)
    assert max(errors.values()) <= 3e-5, errors


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_products_of_rows_are_more_features(key_heads: int, own: bool) -> None:
    """The rows of keys are those of a head of keys, or of queries, whose rows have equal numbers at first."""
    given = [torch.randn(BATCH, n, N, 16, dtype=torch.float64) for n in (HEADS, key_heads, key_heads)]
    rows = torch.randn(BATCH, HEADS, N, 20), torch.ones(BATCH, HEADS if own else key_heads, N, 20)
    results, group = list[tuple[Tensor, ...]](), HEADS // key_heads
    for dtype in (torch.float64, torch.float32):
        x = [t.to(dtype).requires_grad_() for t in given]
        a, c = (t.to(dtype).requires_grad_() for t in rows)

        def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor, a: Tensor = a, c: Tensor = c) -> Tensor:
            return s + (a[b, h, i] * torch.tanh(c[b, h if own else h // group, j])).sum(-1) / 8

        wide = [x[0], *(t.repeat_interleave(group, 1) for t in x[1:])]
        definite = dtype == torch.float64
        out = definition(*wide, mod, None) if definite else flex_attention(*x, mod, enable_gqa=True)
        results.append((out, *torch.autograd.grad(out.square().sum(), (*x, a, c))))
        plan = dict(explain_flex_attention(*x, mod).facts)
    for right, mine in zip(*results, strict=True):
        assert (mine - right).abs().max() <= 3e-5 * right.abs().max().clamp(min=1)
    assert plan["score_mod"] == "a product of rows of 20 numbers, as more features of query and key"
    assert plan["backward"] == "the same kernels"


def test_the_norm_of_nothing_has_no_gradient() -> None:
    t = torch.ones(N, 2, requires_grad=True)
    q = torch.randn(BATCH, HEADS, N, 16)
    out = flex_attention(q, q, q, lambda s, b, h, i, j: s + (t[i] - t[j]).norm())
    assert torch.autograd.grad(out.sum(), t)[0].eq(0).all()


@pytest.mark.parametrize(
    ("why", "fn"),
    [
        ("no instruction for aten.atan.default", torch.atan),
        ("no instruction for aten.erfc.default", torch.erfc),
        ("no instruction for aten.hypot.default", lambda s: torch.hypot(s, s + 1)),
        ("no instruction for aten.lgamma.default", torch.lgamma),
        ("aten.round.decimals rounds to decimals", lambda s: torch.round(s, decimals=1)),
    ],
)
def test_what_has_no_instruction_is_named(why: str, fn: Any) -> None:
    q = torch.randn(BATCH, HEADS, N, 16)
    plan = explain_flex_attention(q, q, q, lambda s, b, h, i, j: fn(s))
    assert plan.backend == rg.Tiled() and why in dict(plan.rows)["not Native()"]


class Straight(torch.autograd.Function):
    """tanh, whose gradient is twice that of its argument."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.tanh(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 2 * g


@torch.library.custom_op("regard_tests::tanh", mutates_args=())
def approximate(x: Tensor) -> Tensor:
    return torch.tanh(x)


class Approximate(torch.autograd.Function):
    """attention-gym's soft cap: an operation of one's own, which other devices approximate, and its derivative."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.ops.regard_tests.tanh(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * (1 - ctx.saved_tensors[0] ** 2)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor) -> tuple[Tensor, int]:
        return torch.tanh(x), 0


@pytest.mark.parametrize("function", [Straight, Approximate])
def test_a_backward_of_ones_own_is_called(function: Any) -> None:
    """The kernels compute the forward; they know no other derivative than that of what it computes."""
    given, results = torch.randn(3, BATCH, HEADS, N, 16, dtype=torch.float64), list[tuple[Tensor, ...]]()

    def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return 2 * function.apply(s / 2) - (i - j).abs() * 0.1

    for dtype in (torch.float64, torch.float32):
        x = [t.to(dtype).requires_grad_() for t in given]
        out = definition(*x, mod, None) if dtype == torch.float64 else flex_attention(*x, mod)
        results.append((out, *torch.autograd.grad(out.square().sum(), x)))
        if dtype == torch.float32:
            plan = explain_flex_attention(*x, mod)
            said = f"{function.__name__}, a torch.autograd.Function, has a backward of its own"
            assert plan.backend == rg.Native() and said in dict(plan.facts)["backward"]
    for right, mine in zip(*results, strict=True):
        assert (mine - right).abs().max() <= 3e-5 * right.abs().max()
    plain = [t.float() for t in given]
    assert dict(explain_flex_attention(*plain, mod).facts)["backward"] == "the same kernels"


@dataclass(frozen=True)
class Doubly(rg.Modifier):
    slope: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return Straight.apply(s * at.heads(self.slope))


WITH_ITS_OWN: dict[str, Callable[[Tensor], rg.Score]] = {
    "modifier": lambda w: rg.ScaledDot() >> Doubly(w[:HEADS]),
    "Elementwise": lambda w: rg.Elementwise(lambda q, k, w: Straight.apply(-(q - k).abs() * w), (w,)),
    "Elementwise, modifier": lambda w: rg.Elementwise(lambda q, k: q * k / 16) >> Doubly(w[:HEADS]),
    "Custom": lambda w: rg.Custom(lambda q, k, w: Straight.apply((q * w) @ k.mT), (w,)),
}


@pytest.mark.parametrize("before", [nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", WITH_ITS_OWN)
def test_a_backward_of_ones_own_is_called_in_each_score(name: str, before: Any) -> None:
    """Also where the first call needed no gradients, or was traced where autograd records nothing."""
    with before():
        x = torch.randn(BATCH, HEADS, N, 16)
        rg.attention(x, x, x, score=WITH_ITS_OWN[name](torch.ones(16)))
    q, w = torch.randn(BATCH, HEADS, N, 16).requires_grad_(), torch.rand(16).requires_grad_()
    score = WITH_ITS_OWN[name](w)
    for _ in range(2):
        found, right = (
            torch.autograd.grad(rg.attention(q, q, q, score=score, **how).sin().sum(), (q, w))
            for how in ({}, {"backend": rg.Reference()})
        )
        for mine, expected in zip(found, right, strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
    said = "Straight, a torch.autograd.Function, has a backward of its own"
    assert said in dict(rg.explain(q, q, q, score=score).facts)["backward"]
