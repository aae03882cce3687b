"""attention_over: the same answer and gradients as attention over all keys at once, whatever the parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import regard as rg
from regard import testing
from regard.backends.base import Backend
from regard.sources import Chunks, Part, Source
from regard.testing import Case

FRAME = testing.frame()
CUTS = (0, 5, 6, 6, 13, 17)  # one key, and none
MASKS, SCORES = list(testing.masks(FRAME)), list(testing.scores(FRAME))
CALLS = [(mask, "ScaledDot") for mask in MASKS] + [("Or", score) for score in SCORES] + [("Documents", "Pipeline")]


@cache
def drawn() -> tuple[dict[str, rg.Mask], dict[str, rg.Score]]:
    torch.manual_seed(0)
    return testing.masks(FRAME), testing.scores(FRAME)


def parts(k: Tensor, v: Tensor, cuts: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    return [(k[..., a:b, :], v[..., a:b, :]) for a, b in pairwise(cuts)]


def over(call: Case, cuts: tuple[int, ...] = CUTS, **given: object) -> Tensor:
    assert call.positions is not None
    source = parts(call.k, call.v, cuts)
    return rg.attention_over(
        call.q, source, score=call.score, mask=call.mask, positions=call.positions.q, sink=call.sink, **given
    )


def whole(call: Case) -> Tensor:
    return rg.attention(
        *(call.q, call.k, call.v),
        score=call.score,
        mask=call.mask,
        positions=call.positions,
        sink=call.sink,
        backend=rg.Reference(),
    )


def results(run: Callable[[Case], Tensor], call: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    call = call.leaves(dtype)
    out = run(call)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(out.dtype)
    wanted = call.differentiable
    return {"out": out.detach(), **dict(zip(wanted, torch.autograd.grad(out, tuple(wanted.values()), g), strict=True))}


def off(got: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    assert got.keys() == exact.keys()
    return max(testing.error(t, exact[name]) / max(float(exact[name].detach().std()), 1.0) for name, t in got.items())


@pytest.mark.parametrize(("mask", "score"), CALLS)
def test_parts_are_the_whole(mask: str, score: str) -> None:
    masks, scores = drawn()
    call = testing.draw(FRAME, mask=masks[mask], score=scores[score], sink=True)
    assert off(results(over, call, torch.float64), results(whole, call, torch.float64)) < 1e-13


@pytest.mark.parametrize("backend", [None, rg.Tiled(rows=4, keys=3), rg.Reference()], ids=str)
@pytest.mark.parametrize("mask", MASKS)
def test_parts_are_the_whole_in_float32(mask: str, backend: Backend | None) -> None:
    call = testing.draw(FRAME, mask=drawn()[0][mask])
    got = results(lambda call: over(call, backend=backend), call, torch.float32)
    exact = results(whole, call.leaves(torch.float32), torch.float64)
    assert off(got, exact) < 2e-6


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    call = testing.draw(FRAME, mask=rg.Causal())
    got, plain = results(over, call, dtype), results(whole, call, dtype)
    exact = results(whole, call.leaves(dtype), torch.float64)
    for name, t in got.items():
        assert t.dtype == dtype
        assert testing.error(t, exact[name]) <= testing.tolerance(exact[name], plain[name]), name


@given(cuts=st.lists(st.integers(0, 17), max_size=6), ahead=st.integers(0, 4))
def test_any_parts(cuts: list[int], ahead: int) -> None:
    call = testing.draw(FRAME, mask=drawn()[0]["Or"], sink=True)
    at = (0, *sorted(cuts), 17)
    got = results(lambda call: over(call, at, ahead=ahead), call, torch.float64)
    assert off(got, results(whole, call, torch.float64)) < 1e-13


@pytest.mark.parametrize("axes", [2, 3])
def test_fewer_axes(axes: int) -> None:
    frame = testing.frame((), 1, headed=False) if axes == 2 else testing.frame(heads=1, headed=False)
    call = testing.draw(frame, mask=rg.Causal())
    assert off(results(over, call, torch.float64), results(whole, call, torch.float64)) < 1e-13


def test_large_offsets() -> None:
    """Weights come from m and l: an offset of 1e9 on all scores of a row changes nothing but the digits it costs."""
    call = testing.draw(FRAME, score=rg.ScaledDot() >> rg.Bias(torch.full((FRAME.nq, FRAME.nk), -1e9).double()))
    assert off(results(over, call, torch.float64), results(whole, call, torch.float64)) < 1e-6


def test_rows_that_see_nothing() -> None:
    k, v = torch.randn(6, 4), torch.randn(6, 3)
    q = torch.randn(2, 4, requires_grad=True)
    mask = rg.Dense(torch.tensor([[False] * 6, [True] * 6]))
    out = rg.attention_over(q, parts(k, v, (0, 3, 6)), mask=mask)
    assert torch.equal(out[0], torch.zeros(3))
    (g,) = torch.autograd.grad(out, q, torch.full_like(out, math.inf).masked_fill(torch.tensor([[False], [True]]), 1.0))
    assert torch.equal(g[0], torch.zeros(4))
    assert g[1].isfinite().all() and g[1].any()


def test_what_is_hidden_leaks_nothing() -> None:
    """NaN in a part that a query may not see, and in a part that nobody sees."""
    q, k, v = torch.randn(2, 4, requires_grad=True), torch.randn(6, 4), torch.randn(6, 3)
    mask = rg.Dense(torch.tensor([[True] * 3 + [False] * 3, [True] * 4 + [False] * 2]))
    clean = results(
        lambda call: over(call, (0, 3, 6)), Case(q, k, v, mask=mask, positions=rg.tail(2, 6)), torch.float64
    )
    k[4:], v[4:] = math.nan, math.inf
    call = Case(q, k, v, mask=mask, positions=rg.tail(2, 6))
    spoilt = results(lambda call: over(call, (0, 3, 6)), call, torch.float64)
    assert all(torch.equal(spoilt[name], clean[name]) for name in ("out", "q"))
    assert spoilt["k"].isfinite().all() and spoilt["v"].isfinite().all()


@dataclass
class Counted(Source):
    """Parts of n keys, of which `read` lists those that were read."""

    n: int
    count: int

    def __post_init__(self) -> None:
        self.read: list[int] = []
        self.keys, self.first_position = self.n * self.count, 0

    def parts(self) -> Iterator[Part]:
        for m in range(self.count):
            yield Part(m * self.n, self.n, torch.arange(m * self.n, (m + 1) * self.n), lambda m=m: self.load(m))

    def load(self, m: int) -> tuple[Tensor, Tensor]:
        self.read.append(m)
        return torch.full((self.n, 4), float(m)), torch.full((self.n, 3), float(m))


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        (rg.Causal(), [0, 1]),
        (rg.Causal() & rg.Window(before=2, after=0), [1]),
        (rg.Window(before=0, after=8) | rg.Prefix(1), [0, 1, 2]),
        (rg.Lengths(keys=torch.tensor(9)), [0, 1]),
        (rg.Dense(torch.arange(40)[None] >= 32), [4]),
        (rg.Documents(torch.tensor([3, 3]), torch.arange(40) // 8), [3]),
        (rg.Where(lambda b, h, i, j: j < 0), [0, 1, 2, 3, 4]),  # which knows no cover
        (~rg.Everything(), [0]),  # one tells what shape the answer has
    ],
)
def test_hidden_parts_are_not_read(mask: rg.Mask, seen: list[int], ahead: int) -> None:
    source, q = Counted(8, 5), torch.zeros(2, 4, requires_grad=True)
    out = rg.attention_over(q, source, mask=mask, positions=torch.tensor([12, 13]), ahead=ahead)
    assert source.read == seen
    k, v = (torch.cat([source.load(m)[n] for m in range(5)]) for n in (0, 1))
    exact = rg.attention(q, k, v, mask=mask, positions=rg.Positions(torch.tensor([12, 13]), torch.arange(40)))
    torch.testing.assert_close(out, exact)
    source.read.clear()
    out.sum().backward()
    assert source.read == seen


def test_positions_of_the_parts() -> None:
    """Keys that come in any order, with their positions."""
    q, k, v = torch.randn(3, 8), torch.randn(10, 8), torch.randn(10, 2)
    order = torch.randperm(10)
    source = [(k[i], v[i], i) for i in order.split(4)]
    at = torch.tensor([2, 9, 5])
    for mask in (
        rg.Causal(),
        rg.Causal() & rg.Window(before=3, after=0),
        rg.Where(lambda b, h, i, j: (i + j) % 2 == 0),
    ):
        exact = rg.attention(q, k, v, mask=mask, positions=rg.Positions(at, torch.arange(10)))
        torch.testing.assert_close(rg.attention_over(q, source, mask=mask, positions=at), exact)


def test_positions_of_each_sequence() -> None:
    q, k, v = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8), torch.randn(2, 3, 7, 4)
    at = rg.Positions(torch.randint(0, 9, (2, 5)), torch.randint(0, 9, (2, 7)))
    source = [(k[..., a:b, :], v[..., a:b, :], at.k[:, a:b]) for a, b in ((0, 3), (3, 7))]
    exact = rg.attention(q, k, v, mask=rg.Causal(), positions=at)
    torch.testing.assert_close(rg.attention_over(q, source, mask=rg.Causal(), positions=at.q), exact)


def test_positions_as_the_keys() -> None:
    """As many queries as keys, nothing said: both count up from where the source begins."""
    q, k, v = torch.randn(6, 8), torch.randn(6, 8), torch.randn(6, 2)
    exact = rg.attention(q, k, v, mask=rg.Causal())
    torch.testing.assert_close(rg.attention_over(q, parts(k, v, (0, 2, 6)), mask=rg.Causal()), exact)
    later = rg.sources.Arrays(k, v, size=4, start=100)
    torch.testing.assert_close(rg.attention_over(q, later, mask=rg.Causal()), exact)


def test_unknown_positions_are_refused() -> None:
    q, kv = torch.zeros(2, 8), (torch.zeros(3, 8), torch.zeros(3, 8))
    with pytest.raises(rg.ShapeError, match=r"6 keys under Causal\(\).*\n.*torch.arange\(4, 6\).*last 2"):
        rg.attention_over(q, [kv, kv], mask=rg.Causal())
    with pytest.raises(rg.ShapeError, match="keys whose number or positions are not known"):
        rg.attention_over(q, iter([kv, kv]), mask=rg.Causal())
    with pytest.raises(TypeError, match=r"positions is a Positions; expected those of the queries, positions=x.q"):
        rg.attention_over(q, [kv], positions=rg.head(2, 3))  # type: ignore[arg-type]


def test_indices_need_a_known_number_of_keys() -> None:
    q, kv = torch.zeros(2, 8), (torch.zeros(3, 8), torch.zeros(3, 8))
    for mask, score in (
        (rg.Lengths(keys=torch.tensor(4)), rg.ScaledDot()),
        (rg.Everything(), rg.ScaledDot() >> rg.Bias(torch.zeros(6))),
    ):
        rg.attention_over(q, [kv, kv], mask=mask, score=score)
        with pytest.raises(rg.Unsupported, match=r"reads indices of keys, .* Chunks of a list"):
            rg.attention_over(q, iter([kv, kv]), mask=mask, score=score)
    positional = rg.Causal() & ~rg.Window(before=0, after=0)
    rg.attention_over(q, iter([kv, kv]), mask=positional, positions=torch.tensor([4, 5]))


@pytest.mark.parametrize(
    "stage",
    [rg.SoftCap(2.0), rg.LogDistance(0.5, 0.1), rg.RelativeBias(torch.randn(6, 1), rg.ClippedBuckets(3, 2))],
    ids=lambda stage: type(stage).__name__,
)
def test_a_modifier_without_indices_goes_over_any_source(stage: rg.Modifier) -> None:
    q, k, v = (torch.randn(n, 8, dtype=torch.float64) for n in (2, 6, 6))
    score, at = rg.ScaledDot() >> stage, rg.tail(2, 6)
    out = rg.attention_over(q, iter([(k[:3], v[:3]), (k[3:], v[3:])]), score=score, positions=at.q)
    torch.testing.assert_close(out, rg.attention(q, k, v, score=score, positions=at))


@pytest.mark.parametrize("last", [3, 5])
def test_a_bias_that_fits_a_part_only_is_refused(last: int) -> None:
    q, kv = torch.zeros(2, 8), (torch.zeros(3, 8), torch.zeros(3, 8))
    with pytest.raises(rg.ShapeError, match=rf"Bias.bias has shape \(2, {last}\); the whole call has 6 keys"):
        rg.attention_over(q, [kv, kv], score=rg.ScaledDot() >> rg.Bias(torch.zeros(2, last)))


def test_a_mask_that_does_not_fit_is_refused() -> None:
    q, kv = torch.zeros(2, 8), (torch.zeros(3, 8), torch.zeros(3, 8))
    with pytest.raises(rg.ShapeError, match=r"Dense.allowed has shape \(2, 3\).*\(2, 6\)"):
        rg.attention_over(q, [kv, kv], mask=rg.Dense(torch.ones(2, 3) > 0))
    kv, at = (torch.zeros(2, 3, 8),) * 2, torch.zeros(2, 2, dtype=torch.int64)
    mask = rg.Causal() & rg.Prefix(torch.tensor([1, 2, 3]))
    with pytest.raises(rg.ShapeError, match=r"Prefix.n has shape \(3,\); expected the batch axes \(2,\)"):
        rg.attention_over(q.expand(2, 2, 8), [kv], mask=mask, positions=at)


@dataclass(frozen=True)
class ByIndex(rg.Modifier):
    """A modifier of one's own that reads indices and positions, and a number a key."""

    rate: Tensor

    def modify(self, s: Tensor, at: object) -> Tensor:
        return s + at.keys(self.rate) * (at.col - at.row) + at.j  # type: ignore[attr-defined]


def test_a_modifier_of_ones_own() -> None:
    score = rg.ScaledDot() >> ByIndex(torch.randn(FRAME.nk, dtype=torch.float64))
    call = testing.draw(FRAME, score=score)
    assert off(results(over, call, torch.float64), results(whole, call, torch.float64)) < 1e-13


def test_a_backend_that_is_named_runs_every_part() -> None:
    q, kv = torch.zeros(2, 8, dtype=torch.float64), (torch.zeros(3, 8, dtype=torch.float64),) * 2
    with pytest.raises(rg.Unsupported, match="Native"):
        rg.attention_over(q, [kv], backend=rg.Native())


def test_autocast_does_not_reach_it() -> None:
    q, k, v = torch.randn(2, 8, requires_grad=True), torch.randn(6, 8), torch.randn(6, 3)
    exact = torch.autograd.grad(rg.attention_over(q, parts(k, v, (0, 4, 6))).sum(), q)
    with torch.autocast("cpu", torch.bfloat16):
        out = rg.attention_over(q, parts(k, v, (0, 4, 6)))
        assert out.dtype == torch.float32
        assert torch.equal(torch.autograd.grad(out.sum(), q)[0], exact[0])


def test_numpy_in_numpy_out() -> None:
    np = pytest.importorskip("numpy")
    q, k, v = (np.random.randn(n, 8).astype(np.float32) for n in (3, 7, 7))
    out = rg.attention_over(q, [(k[:4], v[:4]), (k[4:], v[4:])])
    assert isinstance(out, np.ndarray)
    np.testing.assert_allclose(out, rg.attention(q, k, v), rtol=1e-5, atol=1e-6)


def test_a_change_before_backward_is_noticed() -> None:
    q, k, v = torch.randn(2, 8, requires_grad=True), torch.randn(3, 8), torch.randn(3, 8)
    out = rg.attention_over(q, [(k, v)])
    k.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_second_derivative_is_refused() -> None:
    q, k, v = torch.randn(2, 8, requires_grad=True), torch.randn(3, 8), torch.randn(3, 8)
    with pytest.raises(rg.Unsupported, match=r"attention_over can be differentiated once.*attention\(...\)"):
        torch.autograd.grad(rg.attention_over(q, [(k, v)]).sum(), q, create_graph=True)


def test_only_what_is_wanted() -> None:
    """Keys of one part alone: the gradients of everything else are not asked for."""
    q, k, v = torch.randn(2, 8), torch.randn(6, 8), torch.randn(6, 3)
    mine = k[3:].clone().requires_grad_()
    rg.attention_over(q, [(k[:3], v[:3]), (mine, v[3:])]).square().sum().backward()
    leaf = k[3:].clone().requires_grad_()
    rg.attention(q, torch.cat([k[:3], leaf]), v).square().sum().backward()
    torch.testing.assert_close(mine.grad, leaf.grad)


def test_one_tensor_in_two_parts() -> None:
    q, k, v = torch.randn(2, 8), torch.randn(3, 8, requires_grad=True), torch.randn(6, 3)
    rg.attention_over(q, Chunks([(k, v[:3]), (k, v[3:])])).square().sum().backward()
    leaf = k.detach().clone().requires_grad_()
    rg.attention(q, torch.cat([leaf, leaf]), v).square().sum().backward()
    torch.testing.assert_close(k.grad, leaf.grad)
