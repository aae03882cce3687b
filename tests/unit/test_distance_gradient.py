"""A learned Distance(gamma): gradients as exact as those that torch finds of the formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import regard as rg
from regard import testing


def evaluated(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, g: Tensor) -> list[Tensor]:
    """softmax(-gamma |q - k|²) v by torch, as |q|² - 2 q·k + |k|² about the mean of the keys."""
    centre = k.detach().mean(-2, keepdim=True)
    x, y = q - centre, k - centre
    squares = x.square().sum(-1)[..., :, None] - 2 * (x @ y.mT) + y.square().sum(-1)[..., None, :]
    out = torch.softmax(-gamma[:, None, None] * squares, -1) @ v
    return [found.double() for found in torch.autograd.grad(out, (q, k, v, gamma), g)]


@pytest.mark.parametrize("backend", [None, rg.Native(), rg.Tiled(), rg.Reference()], ids=repr)
@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_gradients_of_a_learned_distance(backend: rg.Backend | None, spread: float) -> None:
    """Scores of some hundreds: an output and row statistics from two ways of rounding them made it 50 times worse."""
    found, exact, plain = ([] for _ in range(3))
    for _ in range(8):  # of one draw, a ratio of errors says little
        q, k, v = (torch.randn(2, 3, n, 16) * size for n, size in ((48, spread), (64, spread), (64, 1.0)))
        gamma, g = torch.tensor([0.5, 1.0, 2.0]), torch.randn(2, 3, 48, 16) + 1
        for dtype, to in ((torch.float64, exact), (torch.float32, plain)):
            to.append(evaluated(*(t.to(dtype).requires_grad_() for t in (q, k, v, gamma)), g.to(dtype)))
        own = [t.clone().requires_grad_() for t in (q, k, v, gamma)]
        out = rg.attention(*own[:3], score=rg.Distance(own[3]), backend=backend)
        found.append([t.double() for t in torch.autograd.grad(out, own, g)])
    for n, name in enumerate(("q", "k", "v", "gamma")):
        got, want, theirs = (torch.stack([each[n] for each in some]) for some in (found, exact, plain))
        ratio = testing.error(got, want) / testing.error(theirs, want)
        assert ratio <= 2, f"{name}: {ratio:.1f} times the error of torch's own evaluation"
