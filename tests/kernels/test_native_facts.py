"""The native facts: each is its dense float64 definition, on every instruction set that this machine runs."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from fact_checks import every, hold, looked
from needed import needs_kernels
from regard import facts, testing
from regard.backends.native.abi import SETS, TOP
from regard.backends.native.ffi import Library, library
from regard.inspect.compute_facts import find
from regard.inspect.results import FactResults

pytestmark = needs_kernels

NATIVE = "the native kernels"
HALVES = [torch.float32, torch.bfloat16, torch.float16]
# What the kernels find; the rest is swept in PyTorch.
FOUND = (
    *(facts.Visible, facts.Entropy, facts.RelativeEntropy, facts.EffectiveKeys, facts.Concentration),
    *(facts.MaxScore, facts.Top, facts.Mass),
    *(facts.Distance, facts.Within, facts.Offsets, facts.Received, facts.MeanReceived, facts.MaxReceived),
    *(facts.Readers, facts.Map, facts.Histogram),
)
KEPT = 3 << 18  # scores of a block of queries: kMaxKeptKeys of native/facts/facts.h


def _found(fact: facts.Fact[Any]) -> bool:
    if isinstance(fact, facts.Carried):
        return isinstance(fact.fact, (facts.Received, facts.MeanReceived, facts.MaxReceived)) and _found(fact.fact)
    return isinstance(fact, FOUND) and fact != facts.Received.last(3)


def native(at: rg.core.region.Frame) -> tuple[facts.Fact[Any], ...]:
    """The facts of the house that the kernels find."""
    found = (fact for fact in every(at) if _found(fact))
    return tuple(fact for fact in found if not isinstance(fact, facts.Mass) or fact.count)  # one key is in no group


def held(at: rg.core.region.Frame, call: testing.Case, dtype: torch.dtype = torch.float32) -> None:
    """The law, of facts that the kernels have found."""
    seen = looked(call.leaves(dtype), native(at))
    assert {seen.way(fact) for fact in seen.facts} == {NATIVE}
    hold(call, native(at), dtype)


AT = testing.frame((2,), 6, 67, 151)
MASKS, SCORES = testing.masks(AT), testing.scores(AT)


@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("mask", MASKS)
def test_under_every_mask(mask: str, sink: bool) -> None:
    held(AT, testing.draw(AT, mask=MASKS[mask], sink=sink))


@pytest.mark.parametrize("score", SCORES)
def test_under_every_score(score: str) -> None:
    call = testing.draw(AT, score=SCORES[score], mask=MASKS["Or"], sink=True)
    natively = rg.Native().why_not(call.leaves(torch.float32).problem, lse=True) is None
    if natively and not score.startswith(("Additive", "Elementwise")):
        held(AT, call)
    else:
        assert looked(call.leaves(torch.float32), (facts.Entropy(),)).way(facts.Entropy()) != NATIVE


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("mask", ["Everything", "Causal", "Lengths", "Dense", "Or", "nothing"])
def test_every_instruction_set(isa: str, mask: str, dtype: torch.dtype) -> None:
    slopes = torch.linspace(0.1, 0.5, AT.heads).double()
    score = rg.ScaledDot() >> rg.SoftCap(5.0) >> rg.Alibi(slopes)
    held(AT, testing.draw(AT, dk=32, mask=MASKS[mask], sink=True), dtype)
    held(AT, testing.draw(AT, dk=33, key_heads=3, score=score, mask=MASKS[mask]), dtype)


@pytest.mark.full
@pytest.mark.parametrize("n", [1, 2, 11, 12, 13, 23, 24, 25, 49, 63, 64, 65, 127, 128, 129, 300])
def test_lengths_at_every_edge(isa: str, n: int) -> None:
    at = testing.frame((2,), 2, n, n)
    held(at, testing.draw(at, mask=rg.Causal(), sink=True))
    at = testing.frame((1,), 2, n, 131)
    held(at, testing.draw(at))
    at = testing.frame((1,), 2, 13, n)
    held(at, testing.draw(at))


@pytest.mark.full
@pytest.mark.parametrize("mask", ["Everything", "Causal", "Window", "Or"])
def test_more_keys_than_a_block_keeps(isa: str, mask: str) -> None:
    at = testing.frame((1,), 2, 31, KEPT // library().tile[0] + 203)
    chosen = rg.Window(before=300, after=0) if mask == "Window" else testing.masks(at)[mask]
    held(at, testing.draw(at, mask=chosen, sink=True))


def test_batch_axes_and_strides() -> None:
    at = testing.frame((2, 1, 3), 4, 29, 37)
    call = testing.draw(at, key_heads=2, mask=rg.Causal())
    held(at, call)
    turned = replace(call, q=call.q.mT.contiguous().mT, k=call.k[..., ::1].movedim(-2, 0).contiguous().movedim(0, -2))
    held(at, turned)
    held(at, replace(call, k=call.k[:1].expand_as(call.k)))


@pytest.mark.parametrize("nq", [1, 3, 200])
def test_the_same_bits_for_any_number_of_threads(nq: int) -> None:
    at = testing.frame((1,), 3, nq, 3000)
    call = testing.draw(at, dk=24, mask=testing.masks(at)["Or"]).leaves(torch.float32)
    before, seen, wanted = torch.get_num_threads(), list[FactResults](), native(at)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            seen.append(looked(call, wanted))
    finally:
        torch.set_num_threads(before)
    assert all(same(seen[0], one, wanted) for one in seen[1:])


def same(a: FactResults, b: FactResults, wanted: tuple[facts.Fact[Any], ...]) -> bool:
    """Whether all answers have the same bits."""
    return all(torch.equal(x, y) for fact in wanted for x, y in zip(leaves(a[fact]), leaves(b[fact]), strict=True))


def leaves(answer: Any) -> tuple[Tensor, ...]:
    return (answer,) if isinstance(answer, Tensor) else tuple(answer)


def test_looking_changes_no_bit_of_the_output() -> None:
    x = torch.randn(1, 4, 150, 32)
    before = rg.attention(x, x, x, mask=rg.Causal())
    seen = rg.look(x, x, mask=rg.Causal(), facts=(facts.Entropy(), facts.Received()))
    assert torch.equal(rg.attention(x, x, x, mask=rg.Causal()), before)
    lse = rg.attention_state(x, x, x, mask=rg.Causal()).finish()[1]
    torch.testing.assert_close(seen.lse, lse, rtol=1e-6, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_hidden_keys_never_leak_and_rows_keep_to_themselves(isa: str, bad: float) -> None:
    at = testing.frame((1,), 2, 50, 140)
    call = testing.draw(at, key_heads=2, dk=16, mask=rg.Lengths(keys=torch.tensor([130]))).leaves(torch.float32)
    wanted = native(at)
    clean = looked(call, wanted)
    call.k[:, :, 130:] = bad
    assert same(looked(call, wanted), clean, wanted)
    call.q[0, 1, 7] = math.nan
    halves = facts.Mass((torch.arange(140) >= 130).long())
    dirty = looked(call, (*wanted, halves))
    assert dirty[halves][0, 1, 7, 0].isnan() and (dirty[halves][..., 1] == 0).all()
    some = (facts.Entropy(), facts.Distance(), facts.Mass.first(2), facts.Within(before=None, after=0))
    row = torch.zeros(1, 2, 50, dtype=torch.bool)
    row[0, 1, 7] = True
    for fact in some:
        assert torch.equal(dirty[fact].isnan().reshape(1, 2, 50), row), fact
        assert torch.equal(dirty[fact][~row], clean[fact][~row]), fact
    histogram, counts = facts.Histogram(), clean[facts.Visible()].sum(-1)
    assert torch.equal(clean[histogram].sum(-1), counts)
    counts[0, 1] -= clean[facts.Visible()][0, 1, 7]  # weights of NaN are in no bin
    assert torch.equal(dirty[histogram].sum(-1), counts)
    assert dirty[facts.MaxScore()].score[0, 1, 7].isnan() and dirty[facts.MaxScore()].key[0, 1, 7] == 0
    assert torch.equal(dirty[facts.Received()][0, 0], clean[facts.Received()][0, 0])
    assert dirty[facts.Received()][0, 1, :130].isnan().all() and (dirty[facts.Received()][0, 1, 130:] == 0).all()


@torch.no_grad()
def test_a_row_of_weight_0_and_a_key_of_no_number(isa: str) -> None:
    call = testing.draw(testing.frame((1,), 2, 50, 140), key_heads=2).leaves(torch.float32)
    call.q[:, :, 9] = math.nan
    weights = torch.ones(50).index_fill_(0, torch.tensor(9), 0)
    seen = looked(call, (facts.Received(weights), facts.MaxReceived()))
    assert seen[facts.Received(weights)].isfinite().all() and seen[facts.MaxReceived()].isnan().all()
    call = testing.draw(testing.frame((1,), 2, 50, 140), key_heads=2).leaves(torch.float32)
    call.k[0, 1, 77] = math.nan
    peak = looked(call, (facts.MaxScore(),))[facts.MaxScore()]
    assert (peak.key[0, 1] == 77).all() and peak.score[0, 1].isnan().all() and peak.score[0, 0].isfinite().all()


def test_ties_come_in_the_order_of_keys(isa: str) -> None:
    x = torch.zeros(1, 1, 70, 4)
    for n, k in ((70, 5), (70, TOP), (3, 5)):
        top = rg.look(x, x[:, :, :n], positions=rg.head(70, n), facts=(facts.Top(k),))[facts.Top(k)]
        named = min(n, k)
        assert torch.equal(top.keys[..., :named], torch.arange(named).expand(1, 1, 70, named))
        assert (top.keys[..., named:] == -1).all() and (top.weights[..., named:] == 0).all()
        torch.testing.assert_close(top.rest, torch.full((1, 1, 70), 1 - named / n), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("spread", [1e-3, 1.0, 30.0])
@pytest.mark.parametrize("k", [1, 8, 17, TOP])
def test_the_top_of_scores_of_every_spread(isa: str, spread: float, k: int) -> None:
    at = testing.frame((1,), 2, 40, 700)
    bias = (torch.randint(-1000, 1000, (2, 40, 700)).double() / 1000 * spread).float().double()
    call = testing.draw(at, score=rg.ScaledDot() >> rg.Bias(bias), mask=rg.Causal())
    hold(replace(call, q=call.q * 0), (facts.Top(k), facts.MaxScore()), torch.float32)


def test_the_top_of_scores_that_lie_far_apart(isa: str) -> None:
    """Fewer grains than keys are near the largest, and weights vanish; the order of keys stays."""
    bias = torch.randint(-3000, 3000, (1, 2, 40, 700)).float().masked_fill(torch.rand(40, 700) < 0.9, -1e38)
    x = torch.zeros(1, 2, 700, 8)
    for k in (1, 8, TOP):
        seen = rg.look(x[:, :, :40], x, score=rg.ScaledDot() >> rg.Bias(bias), facts=(facts.Top(k),))
        right = bias.topk(k, -1).values
        assert torch.equal(bias.gather(-1, seen[facts.Top(k)].keys), right)


def test_small_entropies_and_rests_keep_their_digits(isa: str) -> None:
    for far in (8.0, 12.0, 20.0):
        bias = torch.full((30, 30), -far).double().fill_diagonal_(0)
        call = testing.Case(*(torch.zeros(n, 4).double() for n in (30, 30, 30)), score=rg.ScaledDot() >> rg.Bias(bias))
        wanted = (facts.Entropy(), facts.Top(1))
        got, exact = looked(call.leaves(torch.float32), wanted), looked(call, wanted)
        for a, b in ((got[wanted[0]], exact[wanted[0]]), (got[wanted[1]].rest, exact[wanted[1]].rest)):
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=0)


def test_one_sweep_for_all_and_another_for_what_is_asked_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps: list[ctypes.Structure] = []
    run = Library.run
    monkeypatch.setattr(Library, "run", lambda self, given: sweeps.append(given) or run(self, given))
    x = torch.randn(1, 2, 40, 8)
    once = (facts.Entropy(), facts.RelativeEntropy(), facts.Top(3), facts.Map(), facts.Received(), facts.Histogram())
    rg.look(x, x, facts=(*once, facts.Within(3, 0), facts.Within(5, None), facts.Offsets((-1, 2))))
    assert len(sweeps) == 1
    rg.look(x, x, facts=(*once, facts.Map(3, 5), facts.Top(7)))
    assert len(sweeps) == 3


def test_why_not_the_kernels() -> None:
    x = torch.randn(1, 2, 70, 8)
    asked = {
        facts.ScoreMap(): "it has no ScoreMap",
        facts.Top(TOP + 1): "it keeps the top 64 keys at most",
        facts.Mass(torch.arange(70) % (SETS + 1)): "it has 1 to 64 groups of keys",
        facts.Received.last(2): "the last queries alone are a small sweep",
    }
    seen = rg.look(x, x, facts=(facts.Entropy(), *asked))
    assert seen.way(facts.Entropy()) == NATIVE
    for fact, why in asked.items():
        assert seen.way(fact) == f"tiles in PyTorch, not the native kernels: {why}"
    far = rg.Positions(torch.arange(70) * (1 << 26), torch.arange(70))
    assert "2^31 or more apart" in rg.look(x, x, positions=far, facts=(facts.Distance(),)).way(facts.Distance())
    additive = rg.look(x, x, score=rg.Additive(None, None, torch.ones(8)), facts=(facts.Entropy(),))
    assert additive.way(facts.Entropy()).endswith("scores of Additive have no facts")


def test_large_scores_are_swept_with_an_lse_of_their_own() -> None:
    """What PyTorch sweeps has weights of sum 1, whatever the size of scores, beside what the kernels find."""
    x = torch.randn(1, 1, 60, 64) * 12
    seen = rg.look(x, x, facts=(facts.Entropy(), facts.Rows([3, 50])))
    assert float(seen.lse.max()) > 500
    torch.testing.assert_close(seen[facts.Rows([3, 50])].sum(-1), torch.ones(1, 1, 2), rtol=1e-3, atol=0)


@pytest.mark.parametrize("shape", [(0, 2, 5, 5), (2, 0, 5, 5), (2, 2, 0, 5), (2, 2, 5, 0)])
def test_of_no_size(shape: tuple[int, int, int, int]) -> None:
    b, h, nq, nk = shape
    seen = rg.look(torch.zeros(b, h, nq, 4), torch.zeros(b, h, nk, 4), facts=(facts.Entropy(), facts.Received()))
    assert (seen[facts.Entropy()] == 0).all() and seen[facts.Received()].shape == (b, h, nk)
    assert "no queries or no keys" in seen.way(facts.Entropy())


def test_find_is_told_what_does_not_fit() -> None:
    call = testing.draw(testing.frame()).leaves(torch.float32)
    with pytest.raises(rg.ShapeError, match=r"Mass\.groups has shape"):
        find(call.problem, (facts.Mass(torch.zeros(3, dtype=torch.int64)),))


@pytest.mark.parametrize("mask", [rg.Everything(), rg.Causal()], ids=str)
def test_of_equal_scores_the_first_lead(isa: str, mask: rg.Mask) -> None:
    """Also beyond the first tile of keys, after which nothing equal is looked at again."""
    n, k = 700, 5
    top = rg.look(torch.zeros(1, 2, n, 8), torch.randn(1, 2, n, 8), mask=mask, facts=(facts.Top(k),))[facts.Top(k)]
    seen = torch.arange(1, n + 1) if mask == rg.Causal() else torch.full((n,), n)
    first = torch.arange(k).expand(n, k)
    assert torch.equal(top.keys, torch.where(first < seen[:, None], first, -1).expand(1, 2, n, k))
    torch.testing.assert_close(top.rest, ((seen - k).clamp(min=0) / seen).expand(1, 2, n))
