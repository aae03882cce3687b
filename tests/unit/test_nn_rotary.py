"""Rotary: a rotation by the position, against complex numbers."""

from __future__ import annotations

import copy
import pickle
from functools import partial

import pytest
import torch
from torch import Tensor

import regard as rg

exact = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
KINDS = (rg.nn.Rotary, rg.nn.RotaryInterleaved)
BASE = 100.0


def by_complex_numbers(x: Tensor, positions: Tensor, base: float = BASE) -> Tensor:
    """Neighbours as the real and imaginary part of one number, multiplied by e^(i · position · base^(-2m / width))."""
    z = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    m = torch.arange(z.shape[-1], dtype=torch.float64)
    angle = positions.double()[..., None] * base ** (-2 * m / x.shape[-1])
    return torch.view_as_real(z * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


def test_interleaved_multiplies_complex_numbers() -> None:
    x, at = torch.randn(3, 5, 7, 6, dtype=torch.float64), torch.randint(-1000, 1000, (7,))
    exact(rg.nn.RotaryInterleaved(6, BASE)(x, at), by_complex_numbers(x, at))


def test_the_base_is_that_of_the_paper() -> None:
    x, at = torch.randn(7, 6, dtype=torch.float64), torch.arange(7)
    exact(rg.nn.RotaryInterleaved(6)(x, at), by_complex_numbers(x, at, 10000.0))


def test_halves_and_neighbours_are_permutations_of_each_other() -> None:
    x, at = torch.randn(3, 5, 7, 10, dtype=torch.float64), torch.arange(7) * 11
    order = torch.arange(10).unflatten(0, (5, 2)).T.flatten()  # 0 2 4 6 8 1 3 5 7 9: halves hold what neighbours hold
    halves = rg.nn.Rotary(10, BASE)(x[..., order], at)
    assert torch.equal(halves, rg.nn.RotaryInterleaved(10, BASE)(x, at)[..., order])


@pytest.mark.parametrize("kind", KINDS)
def test_products_depend_on_the_difference_of_positions_alone(kind: type[rg.nn.Rotary]) -> None:
    rotary, i, j = kind(6, BASE), torch.arange(5), torch.arange(7)
    q, k = torch.randn(5, 6, dtype=torch.float64), torch.randn(7, 6, dtype=torch.float64)
    scores = [rotary(q, i + shift) @ rotary(k, j + shift).T for shift in (0, 13, -4)]
    exact(scores[1], scores[0])
    exact(scores[2], scores[0])
    assert (rotary(q, i + 1) @ rotary(k, j).T - scores[0]).abs().max() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_stay_and_position_0_changes_nothing(kind: type[rg.nn.Rotary]) -> None:
    x = torch.randn(7, 6, dtype=torch.float64)
    exact(kind(6)(x, torch.arange(7)).norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(kind(6)(x, torch.zeros(7, dtype=torch.int64)), x)


@pytest.mark.parametrize("kind", KINDS)
def test_positions_may_have_the_batch_axes(kind: type[rg.nn.Rotary]) -> None:
    x, at, rotary = torch.randn(2, 3, 5, 7, 6, dtype=torch.float64), torch.randint(99, (2, 3, 7)), kind(6)
    out = rotary(x, at)
    for a in range(2):
        for b in range(3):
            exact(out[a, b], rotary(x[a, b], at[a, b]))


@pytest.mark.parametrize("kind", KINDS)
def test_features_beyond_the_width_pass_unchanged(kind: type[rg.nn.Rotary]) -> None:
    x, at = torch.randn(2, 3, 7, 11, dtype=torch.float64), torch.arange(7)
    out = kind(4)(x, at)
    assert torch.equal(out[..., 4:], x[..., 4:])
    exact(out[..., :4], kind(4)(x[..., :4], at))


def test_a_batch_that_only_positions_have_is_broadcast_in_partial_rotation_too() -> None:
    x, at = torch.randn(1, 3, 7, 11, dtype=torch.float64), torch.randint(99, (2, 7))
    exact(rg.nn.Rotary(4)(x, at)[1], rg.nn.Rotary(4)(x[0], at[1]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_far_positions_are_as_accurate_as_near_ones(kind: type[rg.nn.Rotary], dtype: torch.dtype) -> None:
    x, at = torch.randn(3, 64, dtype=torch.float64).to(dtype), torch.tensor([100_000, 100_003, 2**31 + 7])
    out, true = kind(64)(x, at), kind(64)(x.double(), at)
    assert out.dtype == dtype
    # one rounding to dtype, and a few of float32 before it, each relative to the pair's length
    bound = (
        torch.finfo(dtype).eps / 2 * true.abs() + 4 * torch.finfo(torch.float32).eps * x.double().norm(dim=-1)[:, None]
    )
    assert bool(((out.double() - true).abs() <= bound).all())


def test_gradient_is_the_opposite_rotation() -> None:
    x, g, at = torch.randn(7, 6, dtype=torch.float64), torch.randn(7, 6, dtype=torch.float64), torch.arange(7)
    x.requires_grad_()
    rotary = rg.nn.Rotary(6)
    (found,) = torch.autograd.grad(rotary(x, at), x, g)
    exact(found, rotary(g, -at))


def test_it_holds_nothing_and_copies_and_pickles() -> None:
    rotary = rg.nn.Rotary(6, base=500.0)
    assert rotary.state_dict() == {} and not list(rotary.parameters()) and not list(rotary.buffers())
    x, at = torch.randn(7, 6), torch.arange(7)
    for twin in (copy.deepcopy(rotary), pickle.loads(pickle.dumps(rotary)), rotary.half()):
        assert torch.equal(twin(x, at), rotary(x, at))
        assert repr(twin) == "Rotary(6, base=500)"


def test_widths_are_checked() -> None:
    for width in (0, 5, -2):
        with pytest.raises(ValueError, match=rf"Rotary\(width={width}\): expected an even number of features"):
            rg.nn.Rotary(width)
    with pytest.raises(
        rg.ShapeError, match=r"x has shape \(7, 4\); Rotary\(6, base=10000\) rotates the first 6 features"
    ):
        rg.nn.Rotary(6)(torch.zeros(7, 4), torch.arange(7))
