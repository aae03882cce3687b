"""Custom similarities that are functions of the dot product of q and k, in the native kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from fact_checks import hold, looked
from kernel_checks import check
from needed import needs_kernels
from regard import facts, testing

pytestmark = needs_kernels

FRAMES = {
    "blocks": testing.frame(nq=83, nk=149, batch=(2,), heads=6),
    "few rows": testing.frame(nq=3, nk=150, batch=(2,), heads=6),
}


def number(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64) + 0.5


def by_head(q: Tensor, k: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return torch.sigmoid(q @ k.mT * w[:, None, None]) * 3 + b


CUSTOM: dict[str, Callable[[], rg.Custom]] = {
    "tanh": lambda: rg.Custom(lambda q, k: 4 * torch.tanh(q @ k.mT / 8)),
    "numbers that are learned": lambda: rg.Custom(by_head, (number(6), number(1))),
    "multiples": lambda: rg.Custom(lambda q, k: ((0.5 * q) @ (k / 2).transpose(-1, -2) * q.shape[-1] ** -0.5).relu()),
    "matmul": lambda: rg.Custom(lambda q, k: torch.matmul(q, k.mT).abs().sqrt() / q.size(-1)),
    "einsum": lambda: rg.Custom(lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k) / 5),
    "twice": lambda: rg.Custom(lambda q, k: (q @ k.mT) / (1 + (q @ k.mT).abs())),
}


@pytest.mark.parametrize("size", FRAMES)
@pytest.mark.parametrize("name", CUSTOM)
def test_values_and_gradients(isa: str, name: str, size: str) -> None:
    at, score = FRAMES[size], CUSTOM[name]()
    assert rg.Native().why_not(testing.draw(at, score=score).leaves(torch.float32).problem, lse=True) is None
    check(testing.draw(at, key_heads=3, dk=24, dv=19, score=score, mask=rg.Window(90, 2), sink=True))


@pytest.mark.parametrize("name", ["tanh", "numbers that are learned"])
def test_before_modifiers_and_beside_a_mask(isa: str, name: str) -> None:
    at = FRAMES["blocks"]
    score = CUSTOM[name]() >> rg.Alibi(number(6)) >> rg.SoftCap(4.0)
    check(testing.draw(at, dk=24, dv=19, score=score, mask=rg.Where(lambda b, h, i, j: (i + j + h) % 3 > 0)))


def test_facts(isa: str) -> None:
    asked = (facts.MaxScore(), facts.Entropy(), facts.Received())
    case = testing.draw(FRAMES["blocks"], score=CUSTOM["tanh"]())
    assert {looked(case.leaves(torch.float32), asked).way(fact) for fact in asked} == {"the native kernels"}
    hold(case, asked)


def test_second_derivatives() -> None:
    q = torch.randn(1, 6, 5, 8, dtype=torch.float32, requires_grad=True)
    found = []
    for backend in (rg.Native(), rg.Tiled()):
        out = rg.attention(q, q, q, score=CUSTOM["tanh"](), backend=backend)
        (g,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
        found.append(torch.autograd.grad(g.square().sum(), q)[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (lambda q, k: -torch.cdist(q, k), "otherwise than in q @ k.mT"),
        (lambda q, k: q @ k.mT - k.square().sum(-1)[..., None, :], "otherwise than in q @ k.mT"),
        (lambda q, k: (k @ q.mT).mT, "otherwise than in q @ k.mT"),
        (lambda q, k: q.sin() @ k.mT, "otherwise than in q @ k.mT"),
        (lambda q, k: q @ k.mT / q.shape[-2], "otherwise than in q @ k.mT"),
        (lambda q, k: torch.einsum("bhid,bhje->bhij", q, k), "otherwise than in q @ k.mT"),
        (lambda q, k: torch.special.i0(q @ k.mT), "no instruction for aten.i0"),
        (lambda q, k: (q @ k.mT) - (q @ k.mT).mean(-1, keepdim=True), "no instruction for aten.mean.dim"),
    ],
)
def test_what_is_no_function_of_the_product_says_why(fn: Any, why: str) -> None:
    case = testing.draw(FRAMES["blocks"], score=rg.Custom(fn)).leaves(torch.float32)
    found = rg.Native().why_not(case.problem, lse=True)
    assert found is not None and why in found
    check(testing.draw(FRAMES["few rows"], score=rg.Custom(fn)), backend=rg.Tiled())
