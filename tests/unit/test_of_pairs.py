"""Functions that look at several queries or keys at once, where a backend calls them for a part of these."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import regard as rg
from own_modifier import OfScores


def of_many(count: int) -> Callable[[Tensor], Tensor]:
    def largest(s: Tensor) -> Tensor:
        return s.masked_fill(s < s.topk(min(count, s.shape[-1])).values[..., -1:], -torch.inf)

    return largest


largest = of_many(4)


def own(fn: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    return {"score": rg.ScaledDot() >> OfScores(fn)}


DEPEND: dict[str, dict[str, Any]] = {
    "largest": own(largest),
    "mean of keys": own(lambda s: 2 * s - s.mean(-1, keepdim=True)),
    "mean of queries": own(lambda s: s - s.mean(-2, keepdim=True)),
    "sum so far": own(lambda s: s.cumsum(-1)),
    "before a cap": {"score": rg.ScaledDot() >> OfScores(largest) >> rg.SoftCap(2.0)},
    "similarity": {"score": rg.Custom(lambda q, k: (q @ k.mT).softmax(-1))},
    "mask": {"mask": rg.Where(lambda b, h, i, j: (j - j.amin(-1, keepdim=True)) % 3 < 2)},
}
DO_NOT: dict[str, dict[str, Any]] = {
    "in float32 alone": {"score": rg.Custom(lambda q, k: (q.float() @ k.float().mT) * torch.ones(1))},
    "of float32": {"score": rg.Custom(lambda q, k: torch.tanh(q @ torch.eye(6) @ k.mT))},
    "rounded": own(lambda s: s.round()),
    "of features": {"score": rg.Custom(lambda q, k: q.softmax(-1) @ k.mT)},
    "distances": {"score": rg.Custom(lambda q, k: -torch.cdist(q, k, p=1))},
    "mask": {"mask": rg.Where(lambda b, h, i, j: (i * j) % 5 < 3)},
}
SMALL = rg.Tiled(rows=8, keys=16)


@pytest.fixture
def q() -> Tensor:
    return torch.randn(2, 3, 40, 6, requires_grad=True)


@pytest.mark.parametrize("name", DEPEND)
def test_are_refused_where_there_are_several_tiles(name: str, q: Tensor) -> None:
    for needs in (True, False):
        with pytest.raises(rg.Unsupported, match="of a pair depends on other pairs"):
            rg.attention(q.detach().requires_grad_(needs), q, q, backend=SMALL, **DEPEND[name])
    with pytest.raises(rg.Unsupported, match="of a pair depends on other pairs"):
        rg.explain(q, q, q, backend=SMALL, **DEPEND[name])


Call = Callable[[Tensor], Tensor]
WAYS: dict[str, Callable[[Call, Tensor], Any]] = {
    "grad": lambda call, x: torch.func.grad(lambda y: call(y).sum())(x),
    "vmap": lambda call, x: torch.vmap(call)(x),
    "jvp": lambda call, x: torch.func.jvp(call, (x,), (x,)),
    "make_fx": lambda call, x: make_fx(call)(x)(x),
    "make_fx of fake tensors": lambda call, x: make_fx(call, tracing_mode="fake")(x)(x),
}


@pytest.mark.parametrize("name", DEPEND)
@pytest.mark.parametrize("way", WAYS)
def test_are_refused_where_nobody_reads_numbers(name: str, way: str, q: Tensor) -> None:
    with pytest.raises(rg.Unsupported, match="of a pair depends on other pairs"):
        WAYS[way](lambda x: rg.attention(x, x, x, backend=SMALL, **DEPEND[name]), q.detach())


@pytest.mark.parametrize("name", DO_NOT)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "jvp"])  # torch.cdist has no such derivative
def test_functions_of_single_pairs_run_where_nobody_reads_numbers(name: str, way: str, q: Tensor) -> None:
    def calls(backend: rg.Backend) -> Call:
        return lambda x: rg.attention(x, x, x, backend=backend, **DO_NOT[name])

    found, right = (WAYS[way](calls(backend), q.detach()) for backend in (SMALL, rg.Reference()))
    torch.testing.assert_close(found, right)


@pytest.mark.full
@pytest.mark.parametrize("name", ["mean of keys", "similarity", "mask"])
def test_are_refused_in_a_graph(name: str, q: Tensor) -> None:
    torch.compiler.reset()
    call = torch.compile(lambda x: rg.attention(x, x, x, backend=SMALL, **DEPEND[name]), backend="aot_eager")
    with pytest.raises(rg.Unsupported, match="of a pair depends on other pairs"):
        call(q.detach())


@pytest.mark.parametrize("name", DEPEND)
def test_run_where_there_is_one(name: str, q: Tensor) -> None:
    one, right = (rg.attention(q, q, q, backend=b, **DEPEND[name]) for b in (rg.Tiled(64, 64), rg.Reference()))
    torch.testing.assert_close(one, right)


@pytest.mark.parametrize("name", DO_NOT)
def test_functions_of_single_pairs_run(name: str, q: Tensor) -> None:
    found, right = (rg.attention(q, q, q, backend=b, **DO_NOT[name]) for b in (SMALL, rg.Reference()))
    torch.testing.assert_close(found, right)


def test_random_numbers_are_drawn_as_without_the_check(q: Tensor) -> None:
    drawn, x = list[Tensor](), q.detach()

    def draw(s: Tensor) -> Tensor:
        one = torch.rand(())
        if s.dtype == torch.float32:  # the check computes in float64
            drawn.append(one)
        return s * one

    torch.manual_seed(5)
    rg.attention(x, x, x, score=rg.ScaledDot() >> OfScores(draw), backend=SMALL)
    torch.manual_seed(5)
    assert len(drawn) > 5 * 3 and drawn == [torch.rand(()) for _ in drawn]


@pytest.mark.parametrize(("n", "refused"), [(100, False), (3000, True)])
def test_a_mask_that_is_no_program_is_refused_where_it_is_written_out_in_parts(n: int, refused: bool) -> None:
    x = torch.randn(1, 1, n, 8)
    mask = rg.Where(lambda b, h, i, j: (i - j).abs() < 90 + (i - j).abs().amin(-2, keepdim=True))
    if refused:
        with pytest.raises(rg.Unsupported, match="the mask of a pair depends on other pairs"):
            rg.attention(x, x, x, mask=mask)
    else:
        found, right = (rg.attention(x, x, x, mask=mask, backend=b) for b in (None, rg.Reference()))
        torch.testing.assert_close(found, right)


@pytest.mark.parametrize("name", [name for name in DEPEND if name != "mean of queries"])  # these are all there
def test_are_refused_where_states_are_merged(name: str, q: Tensor) -> None:
    for needs in (True, False):
        x = q.detach().requires_grad_(needs)
        with pytest.raises(rg.Unsupported, match="alone, and the result is merged"):
            rg.attention_state(x, x, x, **DEPEND[name])
        with pytest.raises(rg.Unsupported, match="alone, and the result is merged"):
            rg.attention_over(x, [(x, x), (x, x)], positions=torch.arange(40), **DEPEND[name])


@pytest.mark.parametrize("name", DO_NOT)
def test_functions_of_single_pairs_have_states(name: str, q: Tensor) -> None:
    x = q.detach()
    parts = [(x[..., :15, :], x[..., :15, :]), (x[..., 15:, :], x[..., 15:, :])]
    torch.testing.assert_close(rg.attention_over(x, parts, **DO_NOT[name]), rg.attention(x, x, x, **DO_NOT[name]))


@pytest.mark.parametrize("name", [name for name in DEPEND if name != "mask"])  # the least position of each is 0
def test_are_refused_where_sequences_are_nested(name: str) -> None:
    x = torch.nested.nested_tensor([torch.randn(n, 2, 6) for n in (5, 40, 20)], layout=torch.jagged).transpose(1, 2)
    with pytest.raises(rg.Unsupported, match="several sequences at once"):
        rg.attention(x, x, x, **DEPEND[name])


OUTSIDE = torch.randn(6, 6)
FAR: dict[str, dict[str, Any]] = {
    "more than two tiles": own(of_many(34)),
    "in large tiles": own(lambda s: s * (5 if s.shape[-1] > 20 else 1)),
    "in the last tile": own(lambda s: s * (5 if s.shape[-1] < 10 else 1)),
    "NaN": own(lambda s: (2 * s - s.nanmean(-1, keepdim=True)).masked_fill(s.isnan(), torch.nan)),
    "in float32 alone": {"score": rg.Custom(lambda q, k: (q @ OUTSIDE @ k.mT).softmax(-1))},
}


@pytest.mark.parametrize("name", FAR)
def test_what_differs_far_away_is_refused(name: str, q: Tensor) -> None:
    x = q.detach()
    k = x.index_fill(-2, torch.tensor([3]), torch.nan) if name == "NaN" else x
    with pytest.raises(rg.Unsupported, match="depends on other pairs"):
        rg.attention(x, k, x, backend=SMALL, **FAR[name])


def test_weights_of_some_rows(q: Tensor) -> None:
    """All rows are one part here, some are not."""
    assert rg.attention_weights(q, q, **DEPEND["mean of queries"]).shape == (2, 3, 40, 40)
    with pytest.raises(rg.Unsupported, match="depends on other pairs"):
        rg.attention_weights(q, q, rows=[0, 5, 7], **DEPEND["mean of queries"])


@dataclass(frozen=True)
class OwnMask(rg.Mask):
    """Hides every third key."""

    def visible(self, at: rg.Region) -> Tensor:
        return at.col % 3 != 1


@pytest.mark.parametrize("backend", [None, rg.Tiled()], ids=str)
@pytest.mark.parametrize("mask", [rg.Causal(), OwnMask()], ids=str)
def test_a_state_draws_one_seed_of_dropout(mask: rg.Mask, backend: rg.Backend | None) -> None:
    x = torch.randn(1, 1, 20, 8)
    for _ in range(2):  # the second call may have a plan
        torch.manual_seed(3)
        rg.attention_state(x, x, x, mask=mask, dropout=rg.Dropout(0.1), backend=backend)
        after = torch.get_rng_state()
        torch.manual_seed(3)
        rg.Dropout(0.1).seeded()
        assert torch.equal(torch.get_rng_state(), after)
