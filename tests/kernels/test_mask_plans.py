"""Plans whose calls lower their own masks: of functions and classes of a person's, and of numbers written out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from fuzz.build import Unplanned
from needed import needs_kernels
from regard.core.region import Region
from regard.runtime import plan_cache

pytestmark = needs_kernels

reach = 3  # a global of functions below


@dataclass(frozen=True)
class Near(rg.Mask):
    """A class of one's own, with a tensor and a rule that depends on a number."""

    far: Tensor
    after: int | None = None

    def visible(self, at: Region) -> Tensor:
        seen = (at.i - at.j).abs() <= at.heads(self.far)
        return seen if self.after is None else seen & (at.j - at.i <= self.after)


@dataclass(frozen=True)
class Plain(rg.Mask):
    """One whose answer does not depend on positions, unless it is asked to."""

    of_positions: bool

    def visible(self, at: Region) -> Tensor:
        return at.i - at.j >= -2 if self.of_positions else (at.row + at.col) % 3 != 1

    def compares_positions(self) -> bool:
        return self.of_positions


class Steps(rg.Modifier):
    """A modifier of one's own beside the mask: both are programs."""

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s - (at.i - at.j).abs() * 0.01


@dataclass(frozen=True)
class Scaled(rg.Modifier):
    """One with a number a head, whose shape shows where there are no pairs."""

    by: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s * at.heads(self.by)


def with_reach(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i - j).abs() <= reach


def nowhere(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """No program: the kernels read a map of tiles."""
    return torch.special.bessel_j0((i - j).float()) > 0


ids = torch.arange(400) // 7
MASKS: dict[str, Callable[[int], rg.Mask]] = {
    "a function": lambda n: rg.Where(with_reach),
    "a closure": lambda n: rg.Where(lambda b, h, i, j: (i - j).abs() <= n % 7),
    "a table": lambda n: rg.Where(lambda b, h, i, j, of=ids + n: of[i] >= of[j]),
    "causal, a function": lambda n: rg.Causal() & rg.Where(with_reach),
    "a function, a prefix": lambda n: rg.Where(with_reach) | rg.Prefix(2 + n % 3),
    "not a function": lambda n: ~rg.Where(with_reach),
    "no program": lambda n: rg.Where(nowhere),
    "window, no program": lambda n: rg.Window(9, 9) & rg.Where(nowhere),
    "lengths, a closure": lambda n: (
        rg.Lengths(keys=torch.tensor([5, 6 + n % 5])) & rg.Where(lambda b, h, i, j: j != n % 4)
    ),
    "a class": lambda n: Near(torch.tensor([1.0, 2.0, 4.0, n % 5])),
    "a class, causal": lambda n: Near(torch.full((4,), float(n % 9)), n % 2) & rg.Causal(),
}
SHAPED: dict[str, Callable[[int, int], rg.Mask]] = {
    "not dense": lambda nq, nk: ~rg.Dense(torch.rand(2, 1, nq, nk) < 0.3),
    "dense or causal": lambda nq, nk: rg.Dense(torch.rand(nk) < 0.3) | rg.Causal(),
    "retained, documents": lambda nq, nk: (
        rg.Retained(torch.randint(nk, (2, 4, nk)) + 3)
        & rg.Documents(torch.arange(nk)[-nq:] // 9, torch.arange(nk) // 9)
    ),
    "documents or prefix": lambda nq, nk: (
        rg.Documents(torch.randint(3, (2, nq)), torch.randint(3, (2, nk))) | rg.Prefix(torch.tensor([1, nk // 2]))
    ),
}
SCORES: dict[str, rg.Score] = {
    "dot": rg.ScaledDot(),
    "own": rg.ScaledDot() >> Steps(),
    "slopes": rg.ScaledDot() >> rg.Alibi(torch.rand(4)),
}
LENGTHS = [(40, 40), (33, 33), (1, 40), (19, 70), (300, 300), (2, 9), (40, 40)]


def drawn(nq: int, nk: int, grad: bool) -> list[Tensor]:
    return [torch.randn(2, h, n, 16).requires_grad_(grad) for h, n in ((4, nq), (2, nk), (2, nk))]


def outcomes(tensors: list[Tensor], **given: Any) -> list[Tensor]:
    out = rg.attention(*tensors, **given)
    if not out.requires_grad:
        return [out]
    return [out.detach(), *torch.autograd.grad((out * out).sum(), tensors)]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("mask", [*MASKS, *SHAPED])
def test_the_bits_are_those_without_plans(mask: str, score: str, grad: bool) -> None:
    global reach
    for n, (nq, nk) in enumerate(LENGTHS):
        reach = n  # which the plan of the last call did not know
        tensors = drawn(nq, nk, grad)
        given: dict[str, Any] = {
            "mask": MASKS[mask](n) if mask in MASKS else SHAPED[mask](nq, nk),
            "score": SCORES[score],
            "positions": rg.tail(nq, nk),
        }
        if n % 3 == 1:
            given |= {"dropout": rg.Dropout(0.3, seed=n), "sink": torch.randn(4)}
        if n % 3 == 2:
            given["positions"] = rg.Positions(torch.arange(nk - nq, nk) + 5, torch.arange(nk))
        found, expected = outcomes(tensors, **given), outcomes(tensors, **given, backend=Unplanned())
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a, b), (nq, nk)


@pytest.mark.parametrize("mask", MASKS)
def test_one_plan_serves_all_lengths_and_functions(mask: str) -> None:
    plan_cache.clear()
    for n in range(12):
        q, k, v = drawn(20 + n, 20 + n, False)
        rg.attention(q, k, v, mask=MASKS[mask](n))
    # a number in a mask of regard's own is part of a structure
    assert len(plan_cache.plans()) == (3 if "prefix" in mask else 1)


def test_row_statistics() -> None:
    visible = rg.facts.Visible()
    for n in range(4):
        q, k, _ = drawn(30 + n, 30 + n, False)
        mask = rg.Where(lambda b, h, i, j, n=n: i - j >= n)
        expected = (torch.arange(30 + n) - n + 1).clamp(min=0)
        assert torch.equal(rg.look(q, k, mask=mask, facts=(visible,))[visible], expected.expand(2, 4, -1))


def test_a_class_that_compares_positions_only_sometimes() -> None:
    q, k, v = drawn(7, 9, False)
    rg.attention(q, k, v, mask=Plain(False))
    rg.attention(q, k, v, mask=Plain(False))
    with pytest.raises(rg.ShapeError, match="their positions are not given"):
        rg.attention(q, k, v, mask=Plain(True))


def test_errors_are_those_of_calls_without_plans() -> None:
    q, k, v = drawn(40, 40, False)
    kinds = [torch.bool, torch.float32, torch.bool]

    def fn(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j).to(kinds[0])

    rg.attention(q, k, v, mask=rg.Where(fn))
    kinds.pop(0)
    with pytest.raises(TypeError, match=r"Where.fn returned torch.float32; expected a boolean tensor"):
        rg.attention(q, k, v, mask=rg.Where(fn))
    kinds.pop(0)
    rg.attention(q, k, v, mask=rg.Where(fn))
    with pytest.raises(rg.ShapeError, match=r"at\.heads\(t\): t has shape \(3,\); expected one number a head"):
        rg.attention(q, k, v, mask=Near(torch.ones(3)))


def test_the_backward_reads_what_the_forward_read() -> None:
    global reach
    tensors = drawn(64, 64, True)
    for _ in range(2):
        reach = 4
        out = rg.attention(*tensors, mask=rg.Where(with_reach))
        reach = 0
        found = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
        twice = torch.autograd.grad(found[0].square().sum(), tensors[0])
        window = rg.attention(*tensors, mask=rg.Window(4, 4))
        expected = torch.autograd.grad(window.square().sum(), tensors, create_graph=True)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(
            *twice, *torch.autograd.grad(expected[0].square().sum(), tensors[0]), rtol=1e-4, atol=1e-5
        )


@pytest.mark.full
def test_a_large_map_is_neither_kept_for_the_backward_nor_made_in_vain() -> None:
    """Its bits are linear in n squared: the general way makes them again."""
    q, k, v = (torch.randn(1, 1, 2048, 8, requires_grad=True) for _ in range(3))
    asked = 0

    def counted(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        nonlocal asked
        asked += i.numel() * j.numel()
        return nowhere(b, h, i, j)

    pairs: list[int] = []
    for backend in (None, None, Unplanned()):
        asked = 0
        out = rg.attention(q, k, v, mask=rg.Where(counted), backend=backend)
        assert "_Planned" not in str(getattr(out.grad_fn, "call", ""))
        found = torch.autograd.grad(out.sum(), v)[0]
        pairs.append(asked)
        expected = rg.attention_weights(q, k, mask=rg.Where(nowhere)).sum(-2)[..., None].expand(-1, -1, -1, 8)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert pairs[1] < 1.01 * pairs[2]


@pytest.mark.parametrize("sizes", [(0, 10), (3, 0)])
def test_calls_without_pairs(sizes: tuple[int, int]) -> None:
    for _ in range(2):
        tensors = [torch.randn(4, n, 16, requires_grad=True) for n in (sizes[0], sizes[1], sizes[1])]
        score = rg.ScaledDot() >> Scaled(torch.rand(4))
        given: dict[str, Any] = {"mask": rg.Where(with_reach), "score": score, "positions": rg.tail(*sizes)}
        assert not any(t.any() for t in outcomes(tensors, **given))
