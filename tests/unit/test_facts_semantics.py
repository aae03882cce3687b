"""Facts at the edges: what leaks nowhere, what is refused, what is swept, and what a look is."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import regard as rg
from fact_checks import AT, every, hold, looked, tiles
from regard import facts, testing
from regard.call.problem import Problem

PADDED = rg.Lengths(keys=torch.tensor([29, 11]), queries=torch.tensor([23, 13]))


def test_what_a_mask_hides_leaks_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN and infinities in padded keys and queries: the answers are those of zeros in their place."""
    tiles(monkeypatch, 5, 7)
    clean = testing.draw(AT, mask=PADDED)
    clean.q[1, :, 13:], clean.k[1, :, 11:] = 0, 0
    dirty = replace(clean, q=clean.q.clone(), k=clean.k.clone())
    dirty.q[1, :, 13:], dirty.k[1, :, 11:20], dirty.k[1, :, 20:] = math.nan, math.nan, math.inf
    wanted = every()
    a, b = looked(clean, wanted), looked(dirty, wanted)
    for fact in wanted:
        torch.testing.assert_close(a[fact], b[fact], rtol=1e-12, atol=1e-14, equal_nan=isinstance(fact, facts.ScoreMap))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_a_row_sees_stays_in_that_row(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One query is not a number: it alone, what pools it, and the keys that it sees, answer so."""
    tiles(monkeypatch, 5, 7)
    call = testing.draw(AT, mask=rg.Causal())
    call.q[0, 2, 9] = bad
    wanted = (facts.Entropy(), facts.Top(3), facts.Mass.first(2), facts.Distance(), facts.Received(), facts.Map(5, 7))
    seen = looked(call, wanted)
    row = torch.zeros(2, 6, 23, dtype=torch.bool)
    row[0, 2, 9] = True
    for fact in wanted[:1] + wanted[2:4]:
        assert torch.equal(seen[fact].isnan().reshape(2, 6, 23), row), fact
    assert torch.equal(seen[facts.Top(3)].rest.isnan() | seen[facts.Top(3)].weights.isnan().any(-1), row)
    # positions are the last 23 of 29: query 9 sees the keys up to 15
    keys, cells = torch.zeros(2, 6, 29, dtype=torch.bool), torch.zeros(2, 6, 5, 7, dtype=torch.bool)
    keys[0, 2, :16], cells[0, 2, 9 * 5 // 23, : 15 * 7 // 29 + 1] = True, True
    assert torch.equal(seen[facts.Received()].isnan(), keys)
    assert torch.equal(seen[facts.Map(5, 7)].isnan(), cells)


def test_a_visible_nan_is_the_largest_score() -> None:
    call = testing.draw(AT)
    call.k[0, 0, 11] = math.nan
    peak = looked(call, (facts.MaxScore(),))[facts.MaxScore()]
    assert (peak.key[0, :3] == 11).all() and peak.score[0, :3].isnan().all() and peak.score[1].isfinite().all()


def test_weight_0_counts_nothing_even_of_nan() -> None:
    call = testing.draw(AT)
    call.q[:, :, 9] = math.nan
    weights = torch.ones(23).index_fill_(0, torch.tensor(9), 0)
    assert looked(call, (facts.Received(weights),))[facts.Received(weights)].isfinite().all()


def test_rows_that_see_nothing_are_left_out_of_means() -> None:
    """Half of the queries of one cell are padding: the other half makes its mean."""
    x = torch.randn(1, 1, 8, 4)
    mask = rg.Lengths(queries=torch.tensor([6]))
    for sink in (None, -50.0):
        pooled = rg.look(x, x, mask=mask, sink=sink, facts=(facts.Map(2, 4),))[facts.Map(2, 4)]
        torch.testing.assert_close(pooled.sum(-1), torch.ones(1, 1, 2))
    whole = rg.look(x, x, mask=rg.Lengths(queries=torch.tensor([4])), facts=(facts.Map(2, 4),))[facts.Map(2, 4)]
    assert torch.equal(whole.sum(-1)[0, 0, 1], torch.tensor(0.0))


def test_by_hand() -> None:
    q = torch.zeros(3, 1, dtype=torch.float64)
    k = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
    asked = (facts.Entropy(), facts.RelativeEntropy(), facts.EffectiveKeys(), facts.Concentration())
    asked += (facts.Received(), facts.MeanReceived())
    seen = rg.look(q, k, mask=rg.Causal(), facts=asked)
    expected = (
        [0.0, math.log(2), math.log(3)],
        [0.0, 1.0, 1.0],
        [1.0, 2.0, 3.0],
        [1.0, 1 / 2, 1 / 3],
        [1 + 1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3],
        [(1 + 1 / 2 + 1 / 3) / 3, (1 / 2 + 1 / 3) / 2, 1 / 3],
    )
    for fact, numbers in zip(asked, expected, strict=True):
        torch.testing.assert_close(seen[fact], torch.tensor(numbers, dtype=torch.float64))


def test_a_sink_takes_its_share() -> None:
    x = torch.zeros(2, 4)
    asked = (facts.SinkMass(), facts.Entropy(), facts.Concentration(), facts.Distance())
    seen = rg.look(x, x, mask=rg.Lengths(queries=torch.tensor(1)), sink=0.0, facts=asked)
    third = torch.tensor([1 / 3, 1.0])  # an empty row: all of it
    torch.testing.assert_close(seen[facts.SinkMass()], third)
    torch.testing.assert_close(seen[facts.Entropy()], torch.tensor([2 / 3 * math.log(3), 0.0]))
    torch.testing.assert_close(seen[facts.Concentration()], torch.tensor([2 / 9, 0.0]))
    torch.testing.assert_close(seen[facts.Distance()], torch.tensor([1 / 3, 0.0]))


def test_positions_are_absolute() -> None:
    """Queries at 7 and 9 of a cache whose keys stand at 5, 7, 9, twice each."""
    at = rg.Positions(q=torch.tensor([7, 9]), k=torch.tensor([5, 7, 9, 5, 7, 9]))
    asked = (facts.Distance(), facts.Offsets((0, -2)), facts.Within(before=2, after=0), facts.Mass.first(6))
    seen = rg.look(torch.zeros(2, 4), torch.zeros(6, 4), positions=at, facts=asked)
    torch.testing.assert_close(seen[asked[0]], torch.tensor([4 / 3, 2.0]))
    torch.testing.assert_close(seen[asked[1]], torch.full((2, 2), 1 / 3))
    torch.testing.assert_close(seen[asked[2]], torch.full((2,), 2 / 3))
    torch.testing.assert_close(seen[asked[3]], torch.full((2, 1), 1 / 3))


def test_a_call_without_head_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    tiles(monkeypatch, 5, 7)
    at = testing.frame((3,), 1, 23, 29, headed=False)
    hidden = testing.draw(at, mask=rg.Causal())
    shown = replace(hidden, q=hidden.q[:, None], k=hidden.k[:, None], v=hidden.v[:, None])
    weights = torch.rand(3, 23)
    for mine, theirs in ((facts.Received(weights), facts.Received(weights[:, None])), (facts.Top(2), facts.Top(2))):
        a, b = looked(hidden, (mine,))[mine], looked(shown, (theirs,))[theirs]
        pairs = [(a, b)] if isinstance(a, Tensor) else list(zip(a, b, strict=True))
        assert all(torch.equal(x, y.squeeze(1)) for x, y in pairs)


def test_only_what_is_asked_for_is_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    tile = Problem.tile

    def counting(self: Problem, at: rg.core.region.Region, *rest: object, **more: object) -> object:
        found = tile(self, at, *rest, **more)  # type: ignore[arg-type]
        counted.append(found.scores.shape[-2] * found.scores.shape[-1])
        return found

    call = testing.draw(AT, mask=rg.Causal())
    pairs = {
        facts.Rows([3, 5]): 2 * 29,
        facts.Columns([0]): 23,
        facts.Received.last(4): 4 * 29,
        facts.SinkMass(): 0,
        facts.Received(): 23 * 29,
    }
    for fact, expected in pairs.items():
        problem = call.problem
        stats = rg.attention_state(call.q, call.k, call.v, mask=call.mask, positions=call.positions).stats
        with monkeypatch.context() as patch:
            patch.setattr(Problem, "tile", counting)
            rg.inspect.sweep.sweep(problem, stats, (fact,))
        assert sum(counted) == expected, fact
        counted.clear()


def test_facts_made_of_others_share_their_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    tally = facts.Entropy.accumulator
    monkeypatch.setattr(facts.Entropy, "accumulator", lambda self, *rest: made.append("") or tally(self, *rest))
    looked(testing.draw(AT), (facts.Entropy(), facts.RelativeEntropy(), facts.EffectiveKeys()))
    assert len(made) == 1


def test_means_over_the_heads_of_a_group() -> None:
    call = testing.draw(AT)
    seen = looked(call, (facts.Entropy(), facts.Visible(), facts.MaxScore(), facts.Mass.first(2)))
    for fact in (facts.Entropy(), facts.Visible(), facts.Mass.first(2)):
        each = seen[fact].double()
        expected = torch.stack([each[:, :3].mean(1), each[:, 3:].mean(1)], 1)
        torch.testing.assert_close(seen.grouped(fact), expected)
    with pytest.raises(TypeError, match=r"MaxScore\(\) answers with score, key, which have no common mean"):
        seen.grouped(facts.MaxScore())
    alone = rg.look(call.q[0, 0], call.k[0, 0], facts=(facts.Entropy(),))
    with pytest.raises(TypeError, match="no head axis"):
        alone.grouped(facts.Entropy())


def test_facts_are_values() -> None:
    for one, other in zip(every(), every(), strict=True):
        again = pickle.loads(pickle.dumps(one))
        assert one == again and hash(one) == hash(again) and repr(one) == repr(again)
        if not any(t.dtype == torch.float64 for t in one.tensors()):  # weights are drawn
            assert one == other
    assert facts.Rows([1, 2]) != facts.Rows([1, 3]) and facts.Mass.first(1) != facts.Mass(torch.tensor([0]))


Refused = tuple[Callable[[], object], type[Exception], str]
X = torch.zeros(2, 3, 5, 4)
REFUSALS: list[Refused] = [
    (lambda: facts.Top(0), ValueError, "Top(k=0): expected 1 key or more."),
    (lambda: facts.Map(0, 3), ValueError, "Map(rows=0, cols=3): expected 1 cell or more each way."),
    (lambda: facts.ScoreMap(3, 0), ValueError, "ScoreMap(rows=3, cols=0): expected 1 cell or more"),
    (lambda: facts.Histogram((0.5,)), ValueError, "Histogram(edges=(0.5,)): expected 2 edges or more"),
    (lambda: facts.Histogram((0.5, 0.5)), ValueError, "each above the one before"),
    (lambda: facts.Mass(torch.tensor([0, -2])), ValueError, "Mass.groups holds -2; expected group numbers from 0"),
    (lambda: facts.Mass(torch.tensor([0.5])), TypeError, "Mass.groups has dtype torch.float32; expected integers."),
    (lambda: facts.Mass.first(0), ValueError, "Mass.first(0): expected 1 position or more."),
    (lambda: facts.Received.last(0), ValueError, "Received.last(0): expected 1 query or more."),
    (lambda: facts.Received(torch.tensor([True])), TypeError, "Received.weights has dtype torch.bool"),
    (lambda: facts.Within(before=-1, after=0), ValueError, "before=-1): expected a count of keys"),
    (lambda: facts.Offsets(()), ValueError, "Offsets(offsets=()): expected 1 offset or more"),
    (lambda: facts.Offsets(-1), TypeError, "Offsets.offsets is an int; expected a tuple: Offsets((-1, 1))."),
    (lambda: facts.Offsets((0.5,)), TypeError, "Offsets.offsets holds 0.5, a float; expected integers."),
    (lambda: facts.Rows([0.5]), TypeError, "Rows.rows has dtype torch.float32, shape (1,); expected integers, (r,)."),
    (lambda: rg.look(X, X, facts=(facts.Rows([5]),)), IndexError, "Rows.rows holds [5]; there are 5 queries."),
    (lambda: rg.look(X, X, facts=(facts.Columns([-6]),)), IndexError, "Columns.columns holds [-6]; there are 5 keys."),
    (lambda: rg.look(X, X, facts=(facts.Mass(torch.zeros(4, dtype=int)),)), rg.ShapeError, "expected (5,) or (2, 5)."),
    (lambda: rg.look(X, X, facts=(facts.Received(torch.ones(2, 5)),)), rg.ShapeError, "broadcasts to (2, 3, 5)."),
    (lambda: rg.look(X, X, facts=facts.Entropy()), TypeError, "expected a tuple of facts: facts=(Entropy(),)."),
    (lambda: rg.look(X, X, facts=(facts.Entropy,)), TypeError, "holds the class Entropy, not one of its values"),
    (lambda: rg.look(X, X, facts=("entropy",)), TypeError, "facts holds a str; expected facts, such as Entropy()."),
    (lambda: rg.look(X, X[..., :4, :], facts=(facts.Distance(),)), rg.ShapeError, "5 queries meet 4 keys under Dist"),
    (lambda: rg.look(X, X, facts=(facts.Entropy(),))[facts.Top(2)], KeyError, "Top(k=2) was not computed; this look"),
]


@pytest.mark.parametrize(("make", "kind", "text"), REFUSALS, ids=lambda x: x if isinstance(x, str) else "")
def test_refusals_say_what_was_expected(make: Callable[[], object], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind) as caught:
        make()
    assert text in str(caught.value)


def test_numpy_arrays_and_tensors_that_require_gradients() -> None:
    q = torch.randn(1, 2, 9, 4, requires_grad=True)
    seen = rg.look(q, q, facts=(facts.Entropy(),))
    assert not seen[facts.Entropy()].requires_grad
    again = rg.look(q.detach().numpy(), q.detach().numpy(), facts=(facts.Entropy(),))
    assert torch.equal(again[facts.Entropy()], seen[facts.Entropy()])


@pytest.mark.full
def test_facts_on_the_default_tiles() -> None:
    """Longer than one tile of the budget."""
    at = testing.frame((1,), 2, 700, 1300)
    hold(testing.draw(at, mask=rg.Causal()), every(at)[:-2], torch.float32)
