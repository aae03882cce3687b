"""Tanh, Sigmoid, LeakyReLU: values, derivatives, and their cheaper way for sums."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.scores.activations import Activation

ACTIVATIONS = [rg.Tanh(), rg.Sigmoid(), rg.LeakyReLU(), rg.LeakyReLU(0.0), rg.LeakyReLU(1.0)]


def test_values() -> None:
    x = torch.tensor([-2.0, 0.0, 3.0], dtype=torch.float64)
    for activation, expected in (
        (rg.Tanh(), [-0.9640275800758169, 0.0, 0.9950547536867305]),
        (rg.Sigmoid(), [0.11920292202211755, 0.5, 0.9525741268224334]),
        (rg.LeakyReLU(), [-0.4, 0.0, 3.0]),
        (rg.LeakyReLU(0.0), [0.0, 0.0, 3.0]),
    ):
        torch.testing.assert_close(activation.of(x), torch.tensor(expected, dtype=torch.float64))


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_the_derivative_from_the_value(activation: Activation) -> None:
    x = torch.tensor([-40.0, -3.0, -0.1, 0.0, 0.1, 3.0, 40.0], dtype=torch.float64, requires_grad=True)
    y = activation.of(x)
    (right,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(activation.slope_(y.detach().clone()), right, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("size", [1.0, 30.0, 1000.0])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_sums(activation: Activation, size: float) -> None:
    q, k = (size * torch.linspace(-1, 1, n, dtype=torch.float64) for n in (13, 17))
    q, k = q[:, None], k[None, :]
    torch.testing.assert_close(activation.of_sums(q, k), activation.of(q + k), rtol=1e-12, atol=1e-12)


def test_refusals() -> None:
    for slope in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match="expected a slope from 0 to 1"):
            rg.LeakyReLU(slope)
    with pytest.raises(TypeError, match=r"Additive.activation is a str; expected Tanh\(\)"):
        rg.Additive(None, None, torch.ones(3), None, "tanh")  # pyright: ignore[reportArgumentType]
