"""Functions of scores and masks that draw random numbers: no gradients of other numbers than those of the output."""

from __future__ import annotations

from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from own_modifier import OfScores


def dropped(s: Tensor) -> Tensor:
    return torch.nn.functional.dropout(s, 0.5)


RANDOM: dict[str, dict[str, Any]] = {
    "modifier": {"score": rg.Dot() >> OfScores(dropped)},
    "modifier, one number": {"score": rg.Dot() >> OfScores(lambda s: s * torch.rand(()))},
    "similarity": {"score": rg.Custom(lambda q, k: dropped(q @ k.mT))},
    "mask": {"mask": rg.Where(lambda b, h, i, j: torch.rand(12, 12) > 0.3)},
}


@pytest.fixture
def q() -> Tensor:
    return torch.randn(1, 1, 12, 4, requires_grad=True)


@pytest.mark.parametrize("name", RANDOM)
@pytest.mark.parametrize("backend", [None, rg.Tiled()], ids=str)
def test_are_refused_where_a_backward_would_draw_again(name: str, backend: rg.Backend | None, q: Tensor) -> None:
    if name == "mask" and backend is None:
        backend = rg.Tiled()  # the native kernels keep what a mask said
    with pytest.raises(rg.Unsupported, match="draws random numbers"):
        rg.attention(q, q, q, backend=backend, **RANDOM[name])
    with torch.no_grad():
        assert rg.attention(q, q, q, backend=backend, **RANDOM[name]).shape == q.shape


@pytest.mark.parametrize("name", RANDOM)
def test_the_reference_calls_them_once(name: str, q: Tensor) -> None:
    out = rg.attention(q, q, q, backend=rg.Reference(), **RANDOM[name])
    assert torch.autograd.grad(out.sum(), q)[0].isfinite().all()


def test_random_numbers_that_a_field_holds_are_no_concern(q: Tensor) -> None:
    score = rg.Dot() >> rg.Bias(torch.rand(12, 12))
    out = rg.attention(q, q, q, score=score, backend=rg.Tiled(), dropout=rg.Dropout(0.5))
    assert torch.autograd.grad(out.sum(), q)[0].isfinite().all()


def test_another_thread_may_draw_meanwhile(q: Tensor) -> None:
    """One that loads the next batch, say: torch has one generator for all threads."""

    def meanwhile(s: Tensor) -> Tensor:
        thread = Thread(target=torch.rand, args=(3,))
        thread.start()
        thread.join()
        return s * 0.5

    out = rg.attention(q, q, q, score=rg.Dot() >> OfScores(meanwhile), backend=rg.Tiled())
    expected = rg.attention(q, q, q, score=rg.ScaledDot(0.5))
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out.sum(), q), torch.autograd.grad(expected.sum(), q))


def test_a_score_mod_draws_no_number_that_stays() -> None:
    """As in PyTorch, where vmap refuses to draw."""
    x = torch.randn(1, 1, 8, 4)
    with pytest.raises(RuntimeError, match="random"):
        rg.compat.torch.flex_attention(x, x, x, lambda s, b, h, i, j: s * torch.rand(()))
