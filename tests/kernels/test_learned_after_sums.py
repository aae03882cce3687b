"""Gradients of the tensors of modifiers after a sum over features: an additive score, or a function of one's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from exact_checks import check_threads
from kernel_checks import Placed, check, modifiers
from needed import needs_kernels
from regard import testing
from regard.backends.native.kernel_families import family_of
from regard.core.region import Frame, Region

pytestmark = needs_kernels

WIDTH = 24
# What learns of regard's own modifiers, in the kernels: not a cap, nor coordinates.
STEPS = {"Alibi", "Bias", "LogDistance", "PowerDistance", "RelativeBias", "RelativeBias 2", "Temperature 2"}
FRAMES = {
    "blocks": testing.frame(nq=83, nk=149, batch=(2,), heads=6),
    "keys in slices": testing.frame(nq=70, nk=701, batch=(1,), heads=6),
    "few rows": testing.frame(nq=2, nk=150, batch=(2,), heads=6),
}
SIMILARITIES = {
    "Additive": rg.Additive(None, None, torch.linspace(-0.5, 0.5, WIDTH)),
    "LeakyReLU": rg.Additive(None, None, torch.linspace(-0.2, 0.3, WIDTH), None, rg.LeakyReLU()),
    "Elementwise": rg.Elementwise(lambda q, k: -(q - k).abs() / WIDTH),
}


@dataclass(frozen=True)
class Table(rg.Modifier):
    """A factor for each head, and a table by head and distance."""

    widths: Tensor
    table: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        ahead = at.i - at.j
        return torch.tanh(s * at.heads(self.widths)) + self.table[at.h, ahead.clamp(-7, 7) + 7]


def learned(at: Frame) -> dict[str, tuple[rg.Score, ...]]:
    """By name: the stages of modifiers that the kernels have steps for, biases of all shapes, and programs."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random)

    steps = {name: score.stages[1:] for name, score in modifiers(at, WIDTH).items() if name in STEPS}
    (batch,), heads, nq, nk = at.batch, at.heads, at.nq, at.nk
    biases = {
        "a bias for each pair": (nq, nk),
        "a bias for each head and pair": (heads, nq, nk),
        "a bias for each key": (nk,),
        "a bias for each query": (nq, 1),
        "a bias for each head and key": (heads, 1, nk),
        "a bias for each sequence and key": (batch, 1, 1, nk),
        "a bias for each sequence and query": (batch, 1, nq, 1),
    }
    biased = {name: (rg.Bias(normal(*shape)),) for name, shape in biases.items()}
    table = Table(0.5 + normal(heads).abs(), normal(heads, 15))
    placed = Placed(normal(nq), normal(nk), normal(heads, nq, nk))
    several = rg.SoftCap(3.0), table, rg.Bias(normal(nq, nk))
    return {**steps, **biased, "a table": (table,), "placed": (placed,), "several": several}


NAMES = list(learned(FRAMES["few rows"]))


def draw(size: str, name: str, after: str) -> testing.Case:
    at, score = FRAMES[size], SIMILARITIES[after]
    for stage in learned(at)[name]:
        score = score >> stage
    return testing.draw(at, key_heads=3, dk=WIDTH, dv=19, score=score, mask=rg.Window(90, 2), sink=True)


@pytest.mark.parametrize("after", SIMILARITIES)
@pytest.mark.parametrize("size", FRAMES)
@pytest.mark.parametrize("name", NAMES)
def test_gradients(isa: str, name: str, size: str, after: str) -> None:
    case = draw(size, name, after)
    problem = case.leaves(torch.float32).problem
    assert family_of(problem).why_streamed(problem, (True,) * len(problem.tensors())) is None
    check(case)


@pytest.mark.parametrize("after", SIMILARITIES)
@pytest.mark.parametrize("name", ["Alibi", "RelativeBias", "a bias for each pair", "a table", "placed"])
def test_later_calls_find_them_too(name: str, after: str) -> None:
    """By a plan, where there is one: of other numbers and another length."""
    for size in ("blocks", "few rows", "blocks"):
        check(draw(size, name, after), backend=rg.Native())


@pytest.mark.parametrize("after", SIMILARITIES)
@pytest.mark.parametrize(
    "name", ["Alibi", "RelativeBias", "a bias for each key", "a bias for each sequence and key", "a table", "placed"]
)
def test_their_bits_do_not_depend_on_threads(name: str, after: str) -> None:
    case = draw("keys in slices", name, after).leaves(torch.float32)
    given: dict[str, Any] = {"score": case.score, "mask": case.mask, "positions": case.positions, "sink": case.sink}

    def gradients() -> Tensor:
        tensors = [t for t in case.tensors() if t.requires_grad]
        out = rg.attention(case.q, case.k, case.v, **given, backend=rg.Native())
        return torch.cat([g.flatten() for g in torch.autograd.grad(out.square().sum(), tensors)])

    assert check_threads(gradients).isfinite().all()


LARGE = {
    "Additive": rg.Additive(None, None, 1e5 * torch.linspace(-0.5, 0.5, WIDTH)),
    "LeakyReLU": rg.Additive(None, None, 1e5 * torch.linspace(-0.2, 0.3, WIDTH), None, rg.LeakyReLU()),
    "Elementwise": rg.Elementwise(lambda q, k: -1e4 * (q - k).abs()),
}


@pytest.mark.parametrize("learning", [False, True], ids=["constant", "learned"])
@pytest.mark.parametrize("nq", [1, 5, 19, 24, 25, 70])
@pytest.mark.parametrize("after", LARGE)
def test_weights_of_large_scores_sum_to_1_in_the_backward(isa: str, after: str, nq: int, learning: bool) -> None:
    """What a call learns must not decide which kernel computes its scores again: each rounds them in its own way."""
    random = torch.Generator().manual_seed(nq)
    q, k, v = (torch.randn(2, 6, n, WIDTH, generator=random) for n in (nq, 45, 45))
    bias = torch.randn(nq, 45, generator=random).requires_grad_(learning)
    cotangent = torch.randn(2, 6, nq, WIDTH, generator=random)
    rg.attention(q, k, v.requires_grad_(), score=LARGE[after] >> rg.Bias(bias)).backward(cotangent)
    assert v.grad is not None
    torch.testing.assert_close(v.grad.sum(-2), cotangent.sum(-2), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", [(), (WIDTH,), (6, 1)], ids=str)
@pytest.mark.parametrize("nq", [1, 19, 70])
def test_weights_of_a_similarity_that_learns_sum_to_1_in_the_backward(
    isa: str, nq: int, shape: tuple[int, ...]
) -> None:
    """A factor of one number may not be a constant forward and an operand backward, which rounds otherwise."""
    random = torch.Generator().manual_seed(nq)
    q, k, v = (torch.randn(2, 6, n, WIDTH, generator=random) for n in (nq, 45, 45))
    factor = (1e4 + torch.rand(shape, generator=random)).requires_grad_()
    score = rg.Elementwise(lambda q, k, w: -(q - k).abs() * w, (factor,))
    cotangent = torch.randn(2, 6, nq, WIDTH, generator=random)
    rg.attention(q, k, v.requires_grad_(), score=score).backward(cotangent)
    assert v.grad is not None
    torch.testing.assert_close(v.grad.sum(-2), cotangent.sum(-2), rtol=1e-4, atol=1e-4)
