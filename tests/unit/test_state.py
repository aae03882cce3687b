"""State is a commutative monoid, and any split of the keys is the whole."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard import ShapeError, State

INF = math.inf
CLOSE = {"rtol": 1e-13, "atol": 1e-13}
SHAPE, DV = (2, 3), 5

# What a part of the keys may look like: nothing, hidden whole, plain, and scores that overflow exp by far.
KINDS = ("none", "hidden", "partly hidden", "plain", "high", "low")
kinds = st.sampled_from(KINDS)
moderate = st.sampled_from(KINDS[:4])
seeds = st.integers(0, 2**31)


def part(kind: str, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Scores (2, 3, keys), values (2, keys, 5) and visibility of one set of keys."""
    g = torch.Generator().manual_seed(seed)
    keys = 0 if kind == "none" else int(torch.randint(1, 8, (), generator=g))
    s = torch.randn(*SHAPE, keys, dtype=torch.float64, generator=g) * 3
    v = torch.randn(SHAPE[0], keys, DV, dtype=torch.float64, generator=g)
    visible = torch.ones_like(s, dtype=torch.bool)
    if "hidden" in kind:
        visible = torch.rand(s.shape, generator=g) < (0.5 if "partly" in kind else 0)
    return s + {"high": 1e34, "low": -1e34}.get(kind, 0), v, visible


def state(kind: str, seed: int) -> State:
    return State.of(*part(kind, seed))


def assert_same(a: State, b: State) -> None:
    for x, y in zip(a.finish(), b.finish(), strict=True):
        torch.testing.assert_close(x, y, **CLOSE)
        assert not x.isnan().any()


def dense(s: Tensor, v: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """softmax and logsumexp written out; an empty row gives 0 and -inf."""
    masked = s.masked_fill(~visible, -INF)
    p = torch.softmax(masked, -1).masked_fill(~visible.any(-1, keepdim=True), 0)
    return p @ v, torch.logsumexp(masked, -1)


@given(kinds, kinds, seeds)
def test_merging_commutes(a: str, b: str, seed: int) -> None:
    x, y = state(a, seed), state(b, seed + 1)
    assert_same(x | y, y | x)


@given(kinds, kinds, kinds, seeds)
def test_merging_associates(a: str, b: str, c: str, seed: int) -> None:
    x, y, z = state(a, seed), state(b, seed + 1), state(c, seed + 2)
    assert_same((x | y) | z, x | (y | z))


@given(kinds, seeds)
def test_empty_is_neutral(kind: str, seed: int) -> None:
    x, nothing = state(kind, seed), State.empty(SHAPE, DV, dtype=torch.float64)
    for merged in (x | nothing, nothing | x):
        for mine, theirs in zip((merged.m, merged.l, merged.o), (x.m, x.l, x.o), strict=True):
            assert torch.equal(mine, theirs)


@given(st.lists(kinds, min_size=1, max_size=4), seeds, st.randoms(use_true_random=False))
def test_any_split_in_any_order_is_the_whole(parts: list[str], seed: int, random) -> None:
    pieces = [part(kind, seed + n) for n, kind in enumerate(parts)]
    s, v, visible = (torch.cat(ts, axis) for ts, axis in zip(zip(*pieces, strict=True), (-1, -2, -1), strict=True))
    order = list(range(s.shape[-1]))
    random.shuffle(order)
    merged = State.empty(SHAPE, DV, dtype=torch.float64)
    while order:
        cut = random.randint(1, len(order))
        now, order = order[:cut], order[cut:]
        merged = merged | State.of(s[..., now], v[..., now, :], visible[..., now])
    assert_same(merged, State.of(s, v, visible))
    if s.shape[-1]:
        for got, expected in zip(merged.finish(), dense(s, v, visible), strict=True):
            torch.testing.assert_close(got, expected, **CLOSE)


@given(st.lists(moderate.filter("none".__ne__), min_size=2, max_size=3), seeds)
def test_gradients_are_those_of_the_dense_softmax(parts: list[str], seed: int) -> None:
    pieces = [part(kind, seed + n) for n, kind in enumerate(parts)]
    s = torch.cat([p[0] for p in pieces], -1).requires_grad_()
    v = torch.cat([p[1] for p in pieces], -2).requires_grad_()
    visible = torch.cat([p[2] for p in pieces], -1)
    w = torch.randn(*SHAPE, DV, dtype=torch.float64)
    # autograd of the dense softmax is NaN in an empty row, so only the others are compared, and these shall be 0
    seen = visible.any(-1)

    def gradients(out: Tensor, lse: Tensor) -> tuple[Tensor, ...]:
        loss = (out * w)[seen].sum() + lse[seen].sin().sum() + 0 * out.sum()
        found = torch.autograd.grad(loss, (s, v), allow_unused=True)
        return tuple(g.nan_to_num() for g in found)

    merged = State.empty(SHAPE, DV, dtype=torch.float64)
    for cols in torch.arange(s.shape[-1]).split([p[0].shape[-1] for p in pieces]):
        merged = merged | State.of(s[..., cols], v[..., cols, :], visible[..., cols])
    out, lse = merged.finish()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (s, v), retain_graph=True))
    for got, expected in zip(gradients(out, lse), gradients(*dense(s, v, visible)), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_two_empty_parts_are_empty_with_gradients_of_zero() -> None:
    s = torch.randn(2, 3, requires_grad=True)
    v = torch.randn(3, 5, requires_grad=True)
    hidden = torch.zeros(2, 3, dtype=torch.bool)
    for parts in (
        (State.of(s, v, hidden), State.of(s, v, hidden)),
        (State.of(s, v, hidden), State.empty((2,), 5)),
        (State.of_lse(v[:2], s.sum(-1) - INF), State.of(s, v, hidden)),
        (State.of_sink(s[:, 0] - INF, 5), State.of(s, v, hidden)),
    ):
        out, lse = (parts[0] | parts[1]).finish()
        assert torch.equal(out, torch.zeros(2, 5))
        assert torch.equal(lse, torch.full((2,), -INF))
        grads = torch.autograd.grad((out.sum() + lse.exp().sum()), (s, v), allow_unused=True)
        assert all(g is None or not g.any() for g in grads)


def test_hand_worked_numbers() -> None:
    # scores ln 1, ln 2, ln 5: weights 1/8, 2/8, 5/8
    s = torch.tensor([[1.0, 2.0, 5.0]], dtype=torch.float64).log()
    v = torch.tensor([[8.0], [16.0], [24.0]], dtype=torch.float64)
    out, lse = State.of(s, v).finish()
    torch.testing.assert_close(out, torch.tensor([[20.0]], dtype=torch.float64), **CLOSE)
    torch.testing.assert_close(lse.exp(), torch.tensor([8.0], dtype=torch.float64), **CLOSE)
    out, lse = State.of(s, v, torch.tensor([True, False, True])).finish()
    torch.testing.assert_close(out, torch.tensor([[128 / 6]], dtype=torch.float64), **CLOSE)
    torch.testing.assert_close(lse.exp(), torch.tensor([6.0], dtype=torch.float64), **CLOSE)


@given(moderate, moderate, seeds, st.sampled_from([math.e, 2.0, 10.0]))
def test_another_kernels_result_merges_like_its_keys(a: str, b: str, seed: int, base: float) -> None:
    x, y = state(a, seed), state(b, seed + 1)
    out, lse = x.finish()
    assert_same(State.of_lse(out, lse / math.log(base), base=base) | y, x | y)


def test_of_lse_reads_both_ways_to_say_empty() -> None:
    out = torch.tensor([[math.nan, 7.0], [0.0, 0.0], [3.0, 4.0]], requires_grad=True)
    lse = torch.tensor([-INF, INF, 0.5], requires_grad=True)
    got, total = (State.of_lse(out, lse) | State.of_lse(out, lse)).finish()
    assert torch.equal(got, torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 4.0]]))
    torch.testing.assert_close(total, torch.tensor([-INF, -INF, 0.5 + math.log(2)]))
    (got.sum() + total[2]).backward()
    torch.testing.assert_close(out.grad, torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]))
    torch.testing.assert_close(lse.grad, torch.tensor([0.0, 0.0, 1.0]))


def test_of_lse_is_differentiable_in_both_arguments() -> None:
    out = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    lse = torch.randn(3, dtype=torch.float64, requires_grad=True)
    s, v = torch.randn(3, 5, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    for base in (math.e, 2.0):
        assert torch.autograd.gradcheck(
            lambda o, x, base=base: (State.of_lse(o, x, base) | State.of(s, v)).finish(), (out, lse)
        )


def test_a_sink_takes_mass_and_adds_nothing() -> None:
    s, v = torch.randn(3, 5, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    sink = torch.randn(3, dtype=torch.float64, requires_grad=True)
    got = (State.of(s, v) | State.of_sink(sink, 2)).finish()
    wider, longer = torch.cat([s, sink[:, None]], -1), torch.cat([v, torch.zeros(1, 2, dtype=torch.float64)])
    expected = dense(wider, longer, torch.ones_like(wider, dtype=torch.bool))
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, **CLOSE)
    assert torch.autograd.gradcheck(lambda x: (State.of(s, v) | State.of_sink(x, 2)).finish(), (sink,))


@pytest.mark.parametrize("bad", [math.nan, INF, -INF])
def test_what_is_hidden_leaks_nowhere_and_what_is_seen_stays(bad: float) -> None:
    s, v = torch.randn(2, 5, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    visible = torch.ones(2, 5, dtype=torch.bool)
    visible[0, 4] = False  # the first query does not see the last key, the second does
    clean = State.of(s[:1, :4], v[:4]).finish()[0]
    spoilt = v.clone()
    spoilt[4, 1] = bad
    spoilt.requires_grad_()
    scores = s.clone().requires_grad_()
    out, _ = State.of(scores, spoilt, visible).finish()
    torch.testing.assert_close(out[:1], clean, **CLOSE)
    assert not out[1, 1].isfinite() and out[1, [0, 2]].isfinite().all()
    of_scores, of_values = torch.autograd.grad(out[0].sum(), (scores, spoilt))
    assert of_scores[0].isfinite().all() and of_scores[0, 4] == 0
    assert of_values.isfinite().all() and not of_values[4].any()

    hidden_score = s.clone()
    hidden_score[0, 4] = bad
    hidden_score.requires_grad_()
    out, lse = State.of(hidden_score, v, visible).finish()
    torch.testing.assert_close(out[:1], clean, **CLOSE)
    (g,) = torch.autograd.grad(out[0].sum() + lse[0], hidden_score)
    assert g.isfinite().all() and g[0, 4] == 0


def test_a_score_of_nan_that_is_seen_stays_nan_through_merges() -> None:
    s = torch.tensor([[0.0, math.nan]])
    out, lse = (State.of(torch.zeros(1, 1), torch.ones(1, 1)) | State.of(s, torch.ones(2, 1))).finish()
    assert out.isnan().all() and lse.isnan().all()


def test_half_precision_is_summed_in_float32() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        state = State.of(torch.full((1, 3), 60.0, dtype=dtype), torch.ones(3, 2, dtype=dtype))
        assert {state.m.dtype, state.l.dtype, state.o.dtype} == {torch.float32}
        torch.testing.assert_close(state.finish()[1], torch.tensor([60 + math.log(3)]))


def test_dropout_thins_the_output_and_not_the_mass() -> None:
    s, v = torch.zeros(1, 4), torch.ones(4, 1)
    out, lse = State.of(s, v, keep=torch.tensor([[2.0, 0.0, 0.0, 0.0]])).finish()
    assert out.item() == 0.5 and lse.item() == pytest.approx(math.log(4))


def test_an_lse_of_another_shape_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"lse has shape \(3,\); out \(2, 5\) needs \(2,\)"):
        State.of_lse(torch.zeros(2, 5), torch.zeros(3))
