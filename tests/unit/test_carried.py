"""What attention carries: weights times ‖v W^O‖, held to the vectors themselves, written out in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import regard as rg
from regard import facts, testing

AT = testing.frame((2,), 6, 17, 23)
WIDTH, OUT = 5, 11
CASES = {"": {}, "grouped": {"key_heads": 2}, "sink": {"sink": True}}


def parts(call: testing.Case, weight: Tensor) -> Tensor:
    """‖p_ij v_j W^O_h‖, each vector made: (b, h, nq, nk)."""
    p = rg.attention_weights(
        call.q.double(),
        call.k.double(),
        score=call.score,
        mask=call.mask,
        positions=call.positions,
        sink=None if call.sink is None else call.sink.double(),
    )
    values = call.v.double().repeat_interleave(call.q.shape[1] // call.v.shape[1], 1)
    vectors = torch.einsum("bhij,bhjv,hvo->bhijo", p, values, weight.double())
    return vectors.norm(dim=-1)


def drawn(name: str) -> tuple[testing.Case, Tensor, Tensor]:
    """A call, its norms, and the lengths of all parts."""
    call = testing.draw(AT, mask=rg.Causal(), **CASES[name])
    weight = torch.randn(AT.heads, call.v.shape[-1], OUT, dtype=torch.float64)
    return call, rg.heads.value_norms(call.v.double(), weight), parts(call, weight)


def looked(call: testing.Case, fact: facts.Fact[Tensor]) -> Tensor:
    given = {"score": call.score, "mask": call.mask, "positions": call.positions, "sink": call.sink}
    return rg.look(call.q, call.k, facts=(fact,), **given)[fact]


@pytest.mark.parametrize("name", CASES)
def test_facts_are_of_the_lengths_of_the_vectors(name: str) -> None:
    call, norms, carried = drawn(name)
    near = {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(looked(call, facts.Carried(norms)).double(), carried.sum(-2), **near)
    rows = looked(call, facts.Carried(norms, facts.Rows(range(AT.nq)))).double()
    torch.testing.assert_close(rows, carried, **near)
    top = looked(call, facts.Carried(norms, facts.Top(3)))
    torch.testing.assert_close(top.weights.double(), carried.topk(3, -1).values, **near)
    torch.testing.assert_close(top.weights.double(), carried.gather(-1, top.keys.clamp(min=0)), **near)
    pooled = looked(call, facts.Carried(norms, facts.Map(AT.nq, AT.nk))).double()
    torch.testing.assert_close(pooled, carried, **near)


def test_the_norm_with_a_wide_or_a_narrow_output() -> None:
    for out in (3, 5, 8):
        v, weight = torch.randn(2, 7, 5, dtype=torch.float64), torch.randn(4, 5, out, dtype=torch.float64)
        by_hand = torch.stack([(v[head // 2] @ weight[head]).norm(dim=-1) for head in range(4)])
        torch.testing.assert_close(rg.heads.value_norms(v, weight), by_hand)


def test_calls_without_heads() -> None:
    q, norms = torch.randn(2, 5, 4), torch.rand(2, 5)
    alone = rg.look(q, q, facts=(facts.Carried(norms), facts.Carried(norms, facts.Rows([1, 3]))))
    headed = rg.look(q[:, None], q[:, None], facts=(facts.Carried(norms[:, None]),))
    torch.testing.assert_close(alone[facts.Carried(norms)], headed[facts.Carried(norms[:, None])][:, 0])
    assert alone[facts.Carried(norms, facts.Rows([1, 3]))].shape == (2, 2, 5)


@pytest.mark.parametrize("wanted", [facts.Received(), facts.Map(), facts.Top(2)], ids=repr)
def test_a_norm_that_is_not_finite_is_seen_by_the_readers_of_its_key(wanted: facts.Fact[Tensor]) -> None:
    x, norms = torch.randn(1, 1, 4, 8), torch.tensor([1.0, 2.0, torch.nan, 1.0])
    hidden = rg.Dense(torch.tensor([True, True, False, True]))
    fact, finite = facts.Carried(norms, wanted), facts.Carried(norms.nan_to_num(7.0), wanted)
    for mask in (rg.Causal(), rg.Causal() & hidden):
        got, other = (rg.look(x, x, mask=mask, facts=(one,))[one] for one in (fact, finite))
        found, expected = (one.weights if isinstance(one, tuple) else one for one in (got, other))
        assert bool(found.isnan().any()) == (mask == rg.Causal())
        if mask != rg.Causal():
            torch.testing.assert_close(found, expected)


def test_a_norm_that_is_not_finite_stays_in_its_cell() -> None:
    x, norms = torch.randn(1, 1, 4, 8), torch.tensor([1.0, 2.0, torch.nan, 1.0])
    fact = facts.Carried(norms, facts.Map(2, 4))
    assert rg.look(x, x, facts=(fact,))[fact].isnan().any(-2)[0, 0].tolist() == [False, False, True, False]


def test_a_key_that_carries_nothing_stays_visible() -> None:
    x, norms = torch.zeros(1, 1, 3, 8), torch.tensor([0.0, 0.0, 1.0])
    seen = rg.look(x, x, facts=(facts.Carried(norms, facts.Top(3)), facts.Carried(norms, facts.Map(1, 3))))
    assert seen[facts.Carried(norms, facts.Top(3))].keys.sort(-1).values[0, 0, 0].tolist() == [0, 1, 2]
    assert seen[facts.Carried(norms, facts.Top(3))].weights[0, 0, 0, 1:].tolist() == [0, 0]
    torch.testing.assert_close(seen[facts.Carried(norms, facts.Map(1, 3))][0, 0, 0], torch.tensor([0, 0, 1 / 3]))


def test_refusals() -> None:
    x, norms = torch.zeros(1, 2, 5, 4), torch.ones(5)
    with pytest.raises(TypeError, match=r"Carried.fact is Entropy\(\); expected one that sums, ranks or copies"):
        facts.Carried(norms, facts.Entropy())
    with pytest.raises(TypeError, match=r"Carried.fact is a str; expected one"):
        facts.Carried(norms, "received")  # pyright: ignore
    with pytest.raises(TypeError, match=r"Carried.norms has dtype torch.bool, shape \(5,\); expected a norm a key"):
        facts.Carried(torch.ones(5, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"Carried.norms holds -1; expected norms, 0 or larger"):
        facts.Carried(-norms)
    with pytest.raises(rg.ShapeError, match=r"Carried.norms has shape \(4,\); expected \(5,\), or one that broadcasts"):
        rg.look(x, x, facts=(facts.Carried(norms[:4]),))
    with pytest.raises(rg.ShapeError, match=r"v has shape \(3, 5, 4\), weight \(4, 4, 9\); expected v"):
        rg.heads.value_norms(torch.zeros(3, 5, 4), torch.zeros(4, 4, 9))
