"""Dropout is a function of (seed, batch, head, query, key): the same for every tiling, and repeatable."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard as rg
from regard import Dropout, Positions
from regard.core.region import Frame

SHAPE = (2, 3, 11, 13)


def keep(
    dropout: Dropout, nq: int, nk: int, offset: int = 0, batch: tuple[int, ...] = (), heads: int = 1
) -> torch.Tensor:
    at = Positions(torch.arange(nq) + offset, torch.arange(nk) + offset)
    frame = Frame.of(nq, nk, batch=batch, heads=heads, positions=at)
    return dropout.keep(frame.region(), torch.float64).expand(frame.shape)


@given(st.integers(1, 11), st.integers(1, 13), st.integers(-(2**63), 2**63 - 1))
def test_every_tiling_drops_the_same(r: int, c: int, seed: int) -> None:
    frame = Frame.of(11, 13, batch=(2,), heads=3, positions=rg.tail(11, 13))
    dropout = Dropout(0.4, seed=seed)
    whole = dropout.keep(frame.region(), torch.float32)
    tiling = frame.tiling(r, c)
    for rows in tiling.row_blocks:
        for cols in tiling.col_blocks:
            tile = dropout.keep(frame.region(rows, cols), torch.float32)
            assert torch.equal(tile.expand(2, 3, *tile.shape[-2:]), whole[..., rows, cols])


def test_attention_is_the_same_for_every_backend_and_tiling() -> None:
    q, k, v = (torch.randn(2, 3, n, 7, dtype=torch.float64) for n in (11, 13, 13))
    at, dropout = rg.tail(11, 13), Dropout(0.4, seed=5)
    outs = [
        rg.attention(q, k, v, mask=rg.Causal(), positions=at, dropout=dropout, backend=backend)
        for backend in (rg.Reference(), rg.Tiled(), rg.Tiled(2, 3), rg.Tiled(7, 5))
    ]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_weights_keep_their_mean(p: float) -> None:
    kept = keep(Dropout(p, seed=3), 211, 307, heads=2)
    values = set(kept.unique().tolist())
    assert values == {0.0, 1 / (1 - p)}
    # five standard deviations of the mean of n Bernoulli variables
    assert abs(float(kept.mean()) - 1) < 5 * math.sqrt(p / (1 - p) / kept.numel())
    for axis in (-1, -2, -3):
        line = kept.mean(axis)
        assert float((line - 1).abs().max()) < 6 * math.sqrt(p / (1 - p) / kept.shape[axis])


def test_p_of_0_and_1() -> None:
    assert (keep(Dropout(0.0, seed=1), 5, 7) == 1).all()
    assert (keep(Dropout(1.0, seed=1), 5, 7) == 0).all()
    x = torch.randn(SHAPE)
    assert torch.equal(rg.attention(x, x, x, dropout=Dropout(0.0)), rg.attention(x, x, x))
    y = x.clone().requires_grad_()
    out = rg.attention(y, y, y, dropout=Dropout(1.0))
    out.sum().backward()
    assert not out.any() and y.grad is not None and not y.grad.any()


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_what_is_no_probability_is_refused(p: float) -> None:
    with pytest.raises(ValueError, match="expected a probability from 0 to 1"):
        Dropout(p)


@pytest.mark.parametrize("offset", [2**31 - 5, 2**31, 2**32, 2**33, 2**40 + 3])
def test_positions_past_2_31_count(offset: int) -> None:
    far = keep(Dropout(0.5, seed=1), 31, 37, offset)
    share = float((far == keep(Dropout(0.5, seed=1), 31, 37)).double().mean())
    assert abs(share - 0.5) < 5 * 0.5 / math.sqrt(31 * 37)
    assert abs(float(far.mean()) - 1) < 5 / math.sqrt(31 * 37)


def test_positions_and_not_indices_decide() -> None:
    dropout = Dropout(0.5, seed=1)
    frame = Frame.of(3, 7, positions=rg.tail(3, 7))
    assert torch.equal(dropout.keep(frame.region(), torch.float64)[0], keep(dropout, 7, 7)[0, 4:])


@pytest.mark.parametrize("other", [2, 1 + 2**32, 1 + 2**61, -1])
def test_seeds_differ(other: int) -> None:
    a, b = (keep(Dropout(0.5, seed=seed), 31, 37) for seed in (1, other))
    assert abs(float((a == b).double().mean()) - 0.5) < 5 * 0.5 / math.sqrt(31 * 37)


def test_batch_elements_heads_queries_and_keys_differ() -> None:
    kept = keep(Dropout(0.5, seed=1), 64, 64, batch=(2,), heads=3) > 0
    bound = 5 * 0.5 / 64
    lines = [
        kept[0, 0],
        kept[1, 0],
        kept[0, 1],
        kept[1, 2],
        kept[0, 0].mT,
        kept[0, 0].roll(1, 0),
        kept[0, 0].roll(1, 1),
    ]
    for m, one in enumerate(lines):
        for other in lines[:m]:
            assert abs(float((one == other).double().mean()) - 0.5) < bound


def test_manual_seed_repeats_it_and_a_seed_leaves_the_generator_alone() -> None:
    x = torch.randn(SHAPE)
    outs = []
    for _ in range(2):
        torch.manual_seed(11)
        outs.append([rg.attention(x, x, x, dropout=Dropout(0.3)) for _ in range(2)])
    assert torch.equal(outs[0][0], outs[1][0]) and torch.equal(outs[0][1], outs[1][1])
    assert not torch.equal(outs[0][0], outs[0][1])
    state = torch.get_rng_state()
    rg.attention(x, x, x, dropout=Dropout(0.3, seed=3))
    assert torch.equal(torch.get_rng_state(), state)


def test_a_seed_once_drawn_is_kept() -> None:
    drawn = Dropout(0.3).seeded()
    assert drawn.seed is not None and drawn.seeded() is drawn


def test_explaining_a_call_draws_no_seed() -> None:
    x, state = torch.randn(1, 2, 5, 8), torch.get_rng_state()
    rg.explain(x, x, x, dropout=Dropout(0.1))
    assert torch.equal(torch.get_rng_state(), state)
