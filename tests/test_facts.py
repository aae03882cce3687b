"""Every fact against its definition on the dense float64 weights, over several tiles."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.inspect import sweep as sweeping
from regard.inspect.facts import Entropy, Fact, Map, MaxScore, Received, Top
from regard.inspect.look import look

NQ, NK, HEADS, KEY_HEADS, WIDTH = 53, 61, 6, 3, 7

SCORES = {
    "scaled": rg.ScaledDot(),
    "capped": rg.ScaledDot() >> rg.SoftCap(2.0) >> rg.Alibi(torch.linspace(0.1, 1, HEADS, dtype=torch.float64)),
    "additive": rg.Additive(
        torch.linspace(-1, 1, WIDTH * 5, dtype=torch.float64).reshape(WIDTH, 5),
        torch.linspace(1, -2, WIDTH * 5, dtype=torch.float64).reshape(WIDTH, 5),
        torch.linspace(-2, 3, 5, dtype=torch.float64),
    ),
    "distance": rg.Distance(0.3),
}
MASKS = {
    "everything": rg.Everything(),
    "causal": rg.Causal(),
    "window": rg.Causal() & rg.Window(before=11, after=0) | rg.Prefix(2),
    "empty rows": rg.Causal() & rg.Lengths(keys=torch.tensor([0, 17]), queries=torch.tensor([31, 53])),
}
FACTS: tuple[Fact[object], ...] = (Entropy(), MaxScore(), Top(3), Received(), Map(7, 11))


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each fact is put together from many tiles."""
    size = sweeping.Size(rows=13, keys=17)
    monkeypatch.setattr(sweeping, "Size", lambda: size)


def call(score: str, mask: str, sink: Tensor | None) -> tuple[sweeping.Seen, Tensor, Tensor]:
    """The facts of one call, its dense weights, and its dense masked scores."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2, HEADS, NQ, WIDTH, dtype=torch.float64, generator=generator)
    k = torch.randn(2, KEY_HEADS, NK, WIDTH, dtype=torch.float64, generator=generator)
    where = {"score": SCORES[score], "mask": MASKS[mask], "positions": rg.tail(NQ, NK)}
    seen = look(q, k, facts=FACTS, sink=sink, **where)
    p = rg.attention_weights(q, k, sink=sink, **where)
    log_p = p.log() + rg.attention_state(q, k, k, sink=sink, **where).finish()[1][..., None]
    return seen, p, log_p.masked_fill(p == 0, -math.inf)


@pytest.fixture(params=[(s, m, sink) for s in SCORES for m in MASKS for sink in (None, 1.5)], ids=str)
def case(request: pytest.FixtureRequest) -> tuple[sweeping.Seen, Tensor, Tensor]:
    score, mask, sink = request.param
    return call(score, mask, None if sink is None else torch.full((HEADS,), sink, dtype=torch.float64))


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


def test_entropy(case: tuple[sweeping.Seen, Tensor, Tensor]) -> None:
    seen, p, _ = case
    close(seen[Entropy()], -torch.special.xlogy(p, p).sum(-1))


def test_max_score(case: tuple[sweeping.Seen, Tensor, Tensor]) -> None:
    seen, p, scores = case
    peak, some = seen[MaxScore()], p.sum(-1) > 0
    close(peak.score, scores.amax(-1))
    close(scores.gather(-1, peak.key.clamp(min=0)[..., None])[..., 0][some], scores.amax(-1)[some])
    assert (peak.key[~some] == -1).all()


def test_top(case: tuple[sweeping.Seen, Tensor, Tensor]) -> None:
    seen, p, _ = case
    top, dense = seen[Top(3)], p.topk(3, -1).values
    close(top.weights, dense)
    close(p.gather(-1, top.keys.clamp(min=0)).masked_fill(top.keys < 0, 0), dense)
    close(top.rest, p.sum(-1) - dense.sum(-1))
    assert ((top.keys == -1) == (dense == 0)).all()


def test_received(case: tuple[sweeping.Seen, Tensor, Tensor]) -> None:
    seen, p, _ = case
    close(seen[Received()], p.sum(-2))


def test_map(case: tuple[sweeping.Seen, Tensor, Tensor]) -> None:
    seen, p, _ = case
    rows, cols = torch.arange(NQ) * 7 // NQ, torch.arange(NK) * 11 // NK
    expected = torch.zeros(*p.shape[:-2], 7, 11, dtype=p.dtype)
    for a in range(7):
        for b in range(11):
            expected[..., a, b] = p[..., rows == a, :][..., cols == b].sum(-1).mean(-1)
    close(seen[Map(7, 11)], expected)
    close(seen[Map(7, 11)].sum(-1), torch.stack([p[..., rows == a, :].sum(-1).mean(-1) for a in range(7)], -1))


def test_by_hand() -> None:
    q = torch.zeros(3, 1, dtype=torch.float64)
    k = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64)
    seen = look(q, k, mask=rg.Causal(), facts=FACTS)
    close(seen[Entropy()], torch.tensor([0.0, math.log(2), math.log(3)], dtype=torch.float64))
    close(seen[Received()], torch.tensor([1 + 1 / 2 + 1 / 3, 1 / 2 + 1 / 3, 1 / 3], dtype=torch.float64))


def test_a_map_has_no_more_cells_than_tokens() -> None:
    x = torch.randn(1, 1, 5, 3)
    assert look(x, x, facts=(Map(64, 64),))[Map(64, 64)].shape == (1, 1, 5, 5)


def test_what_was_not_asked_for_is_named() -> None:
    x = torch.randn(1, 1, 5, 3)
    with pytest.raises(KeyError, match=r"Top\(k=2\) was not asked for; this look has Entropy\(\)"):
        look(x, x, facts=(Entropy(),))[Top(2)]


@pytest.mark.parametrize(("make", "text"), [(lambda: Top(0), "Top(k=0)"), (lambda: Map(0, 3), "Map(rows=0")])
def test_impossible_facts(make: object, text: str) -> None:
    with pytest.raises(ValueError, match="expected 1") as caught:
        make()
    assert text in str(caught.value)


def test_no_queries_and_no_keys() -> None:
    for nq, nk in ((0, 5), (5, 0)):
        seen = look(torch.zeros(2, 3, nq, 4), torch.zeros(2, 3, nk, 4), facts=FACTS)
        assert seen[Entropy()].shape == (2, 3, nq) and (seen[Entropy()] == 0).all()
        assert seen[Received()].shape == (2, 3, nk)
        assert seen[Top(3)].rest.shape == (2, 3, nq)


def test_facts_of_numpy_arrays_and_gradients_left_alone() -> None:
    q = torch.randn(1, 2, 9, 4, requires_grad=True)
    seen = look(q, q, facts=(Entropy(),))
    assert not seen[Entropy()].requires_grad
    again = look(q.detach().numpy(), q.detach().numpy(), facts=(Entropy(),))
    close(again[Entropy()].double(), seen[Entropy()].double())
