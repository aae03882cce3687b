"""Scores and masks of a person's own on sequences with any numbers of queries, in one native call: each as if alone."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from needed import needs_kernels
from regard import testing
from regard.backends.native.abi import CODES, RaggedArguments
from regard.backends.native.ragged import RaggedPlan
from regard.sequences import one_list
from regard.sequences.nested_queries import nested_queries
from regard.sequences.ragged_call import RaggedCall, ragged_call
from test_native_ragged import HEADS, HELD, NEW, Batch, jagged, lists

__all__ = ["lists"]
pytestmark = needs_kernels

COUNTS = [a + b for a, b in zip(NEW, HELD, strict=True)]
BATCH, MOST, KEYS = len(NEW), max(NEW), max(COUNTS)
BY_HEAD = torch.linspace(0.2, 1, HEADS)


@dataclass(frozen=True)
class Taken(rg.Modifier):
    """Multiplies by what a method of the region takes of a tensor: adding a number of the query changes no weight."""

    method: str
    t: Tensor

    def modify(self, s: Tensor, at: Any) -> Tensor:
        return s * (1 + torch.tanh(getattr(at, self.method)(self.t)).to(s.dtype))


@dataclass(frozen=True)
class Wave(rg.Modifier):
    """Of positions, by head."""

    rates: Tensor

    def modify(self, s: Tensor, at: Any) -> Tensor:
        return s + at.heads(self.rates).to(s.dtype) * torch.sin((at.i - at.j).to(s.dtype) * 0.1)


@dataclass(frozen=True)
class Table(rg.Modifier):
    """An element of a table for each pair, by position and head."""

    table: Tensor

    def modify(self, s: Tensor, at: Any) -> Tensor:
        return s + self.table[at.h, (at.i - at.j).clamp(0, 40)].to(s.dtype)


@dataclass(frozen=True)
class Index(rg.Modifier):
    """The index of the query in its sequence, of the key, and of the sequence; alone, that is given."""

    sequence: int | None = None
    positional = False

    def modify(self, s: Tensor, at: Any) -> Tensor:
        b = at.b if self.sequence is None else self.sequence
        return s * (1 + 0.1 * b) + 0.01 * at.row - 0.02 * at.col


OF_SEQUENCES, OF_QUERIES, OF_KEYS = torch.randn(BATCH), torch.randn(BATCH, MOST), torch.randn(BATCH, KEYS)
OF_PAIRS, SINKS = torch.randn(BATCH, 1, MOST, KEYS), torch.randn(BATCH, HEADS)
SEEN = torch.rand(BATCH, 1, MOST, KEYS) < 0.7
TABLE = torch.randn(HEADS, 41)


def score(*modifiers: rg.Score) -> dict[str, Any]:
    whole: rg.Score = rg.ScaledDot()
    for one in modifiers:
        whole = whole >> one
    return {"score": whole, "mask": rg.Causal()}


def third(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i + 2 * j + h) % 3 != 0


# The options of the call on all sequences (None), or of the call on sequence b, which has n queries over count keys.
CASES: dict[str, Callable[[int | None, int, int], dict[str, Any]]] = {
    "wave": lambda b, n, count: score(Wave(BY_HEAD)),
    "wave without bounds": lambda b, n, count: {"score": rg.Dot() >> Wave(BY_HEAD)},
    "after regard's own": lambda b, n, count: score(rg.SoftCap(2.0), rg.Alibi(BY_HEAD), Wave(BY_HEAD)),
    "table": lambda b, n, count: score(Table(TABLE)),
    "indices": lambda b, n, count: score(Index(b)),
    "heads": lambda b, n, count: score(Taken("heads", BY_HEAD)),
    "sequences": lambda b, n, count: score(Taken("sequences", OF_SEQUENCES if b is None else OF_SEQUENCES[b])),
    "queries": lambda b, n, count: score(Taken("queries", OF_QUERIES if b is None else OF_QUERIES[b, :n])),
    "keys": lambda b, n, count: score(Taken("keys", OF_KEYS if b is None else OF_KEYS[b, :count])),
    "pairs": lambda b, n, count: score(Taken("pairs", OF_PAIRS if b is None else OF_PAIRS[b, :, :n, :count])),
    "custom": lambda b, n, count: {"score": rg.Custom(lambda q, k: torch.tanh(q @ k.mT / 4)), "mask": rg.Causal()},
    "bias": lambda b, n, count: score(rg.Bias(OF_PAIRS if b is None else OF_PAIRS[b, :, :n, :count])),
    "bias and slopes": lambda b, n, count: score(
        rg.Alibi(BY_HEAD), rg.Bias(OF_PAIRS if b is None else OF_PAIRS[b, :, :n, :count])
    ),
    "sinks": lambda b, n, count: {"sink": SINKS if b is None else SINKS[b], "mask": rg.Causal()},
    "where": lambda b, n, count: {"mask": rg.Where(third)},
    "where and causal": lambda b, n, count: {"mask": rg.Where(third) & rg.Causal()},
    "where and window": lambda b, n, count: {"mask": rg.Window(50, 0) & rg.Where(third), **score(Wave(BY_HEAD))},
    "dense": lambda b, n, count: {"mask": rg.Dense(SEEN if b is None else SEEN[b, :, :n, :count]) & rg.Causal()},
    "dilated": lambda b, n, count: {"mask": rg.Dilated(3) & rg.Causal()},
}


def alone(batch: Batch, name: str, dtype: torch.dtype | None = None) -> list[Tensor]:
    """A call of the reference for each sequence."""
    found = list[Tensor]()
    for b, (q, k, v) in enumerate(zip(batch.q, batch.k, batch.v, strict=True)):
        own, at = CASES[name](b, q.shape[1], k.shape[1]), rg.tail(q.shape[1], k.shape[1])
        q, k, v = (t[None].to(dtype or t.dtype) for t in (q, k, v))
        found.append(rg.attention(q, k, v, positions=at, backend=rg.Reference(), **own)[0])
    return found


@pytest.mark.parametrize("paged", [True, False], ids=["pages", "contiguous"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_each_sequence_is_as_if_alone(name: str, dtype: torch.dtype, paged: bool, lists: list[bool]) -> None:
    batch = Batch(dtype, paged)
    together = batch.together(**CASES[name](None, MOST, KEYS))
    for found, exact, rough in zip(together, alone(batch, name, torch.float64), alone(batch, name), strict=True):
        assert found.dtype == dtype and found.shape == exact.shape
        assert not found.numel() or testing.error(found, exact) <= testing.tolerance(exact, rough)
    assert lists == [True]


@pytest.mark.parametrize("paged", [True, False], ids=["pages", "contiguous"])
@pytest.mark.parametrize("name", ["wave", "keys", "where and causal"])
def test_int8_is_read_where_it_lies(name: str, paged: bool, lists: list[bool]) -> None:
    batch = Batch(torch.float32, paged, int8=True)
    together = batch.together(**CASES[name](None, MOST, KEYS))
    for found, exact, rough in zip(together, alone(batch, name, torch.float64), alone(batch, name), strict=True):
        assert not found.numel() or testing.error(found, exact) <= testing.tolerance(exact, rough)
    assert lists == [True]


@pytest.mark.parametrize("name", ["wave", "sequences", "where and causal"])
def test_lists_of_few_queries(name: str, lists: list[bool]) -> None:
    """No sequence has enough for a block."""
    batch = Batch(torch.float32, True, [1, 2, 1, 1, 0, 1, 1, 3, 1], HELD)
    together = batch.together(**CASES[name](None, 3, batch.kv[0].shape[2]))
    for found, exact in zip(together, alone(batch, name, torch.float64), strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)
    assert lists == [True]


def test_one_head_without_an_axis(lists: list[bool]) -> None:
    batch = Batch(torch.float32, False)
    own = {"score": rg.ScaledDot() >> Wave(BY_HEAD[:1]), "mask": rg.Where(third) & rg.Causal()}
    k, v = (t[:, 0] for t in batch.kv)
    options = {**own, "mask": own["mask"] & batch.mask, "positions": batch.positions}
    out = rg.attention(rg.pack([t[0] for t in batch.q]).nested(), k, v, **options)
    for found, q, k, v in zip(out.unbind(), batch.q, batch.k, batch.v, strict=True):
        at = rg.tail(q.shape[1], k.shape[1])
        q, k, v = (t[:1].double() for t in (q, k, v))
        true = rg.attention(q, k, v, positions=at, backend=rg.Reference(), **own)
        torch.testing.assert_close(found.double(), true[0], rtol=0, atol=1e-5)
    assert lists == [True]


def test_positions_that_do_not_count_up_reach_a_program(lists: list[bool]) -> None:
    """Nothing but the program reads them."""
    batch = Batch(torch.float32, True)
    at = rg.Positions(batch.positions.q * 3 % 101, batch.positions.k * 7 % 31)
    batch.positions = at
    found = batch.together(score=rg.ScaledDot() >> Wave(BY_HEAD))
    for b, (q, k, v) in enumerate(zip(batch.q, batch.k, batch.v, strict=True)):
        own = rg.Positions(at.q[sum(NEW[:b]) :][: NEW[b]], at.k[: COUNTS[b]])
        q, k, v = (t[None].double() for t in (q, k, v))
        options = {"score": rg.ScaledDot() >> Wave(BY_HEAD), "positions": own, "backend": rg.Reference()}
        torch.testing.assert_close(found[b].double(), rg.attention(q, k, v, **options)[0], rtol=0, atol=1e-5)
    assert lists == [True]


def nested_line(batch: Batch, mask: rg.Mask, **options: Any) -> str:
    found = rg.explain(jagged(batch.q), *batch.kv, mask=mask & batch.mask, positions=batch.positions, **options)
    return dict(found.facts)["nested"]


def test_explain_says_that_a_program_runs_on_the_list_or_why_not() -> None:
    batch = Batch(torch.float32, True)
    own = score(Wave(BY_HEAD))["score"]
    listed = f"{sum(NEW)} queries of 8 sequences in one call; above, as if all were as long as the longest"
    assert nested_line(batch, rg.Where(third) & rg.Causal(), score=own) == listed
    padded = f"{sum(NEW)} queries of 9 sequences in one call, padded to {BATCH * MOST}, since "
    reasons: dict[str, dict[str, Any]] = {
        "dropout is drawn for a padded batch": {"dropout": rg.Dropout(0.5, seed=1)},
        "Tiled() has no call on sequences of unequal lengths": {"backend": rg.Tiled()},
        "Cosine(scale=3.0) prepares the keys, and the kernel reads keys and values alike": {
            "score": rg.Cosine(3.0) >> Wave(BY_HEAD)
        },
    }
    for reason, options in reasons.items():
        assert nested_line(batch, rg.Causal(), **{"score": own, **options}) == padded + reason
    cosine = nested_line(Batch(torch.float32, False), rg.Causal(), score=rg.Cosine(3.0) >> Wave(BY_HEAD))
    assert cosine == padded + "Cosine(scale=3.0) makes other queries and keys first"
    union = (rg.Causal() | rg.Prefix(2)) & rg.Causal()
    assert nested_line(batch, union) == (
        f"{padded}Causal() | Prefix(n=2) gives each query an interval of keys that is no rule of distances and lengths"
    )


BAD = CODES["REGARD_BAD_ARGUMENT"]


@pytest.mark.parametrize("operand", ["program_0", "bias", "allowed"])
def test_parts_that_lie_elsewhere_are_refused(operand: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stride from sequence to sequence leads out of an operand."""
    named = {"program_0": "keys", "bias": "bias", "allowed": "dense"}[operand]
    batch, options = Batch(torch.float32, False), CASES[named](None, MOST, KEYS)
    own, mask = options.get("score", rg.ScaledDot()), options["mask"] & batch.mask
    if operand == "allowed":
        mask = rg.Dense(SEEN[..., :1, :]) & batch.mask
    queries = nested_queries(jagged(batch.q), *batch.kv, own, mask, batch.positions)
    call = ragged_call(queries, *batch.kv, own, mask, batch.positions, None, None)
    assert isinstance(call, RaggedCall)
    plan = one_list._plan(call, own, None, None)
    assert isinstance(plan, RaggedPlan)
    caught: list[RaggedArguments] = []
    entry = plan.entry

    def seen(at: int, parallel: Any) -> int:
        caught.append(RaggedArguments.from_buffer_copy(RaggedArguments.from_address(at)))
        return entry(at, parallel)

    monkeypatch.setattr(plan, "entry", seen)
    out = plan.run(call)
    assert out is not None
    at = batch.positions.q.tolist(), batch.positions.k.tolist()
    numbers = [(ctypes.c_int64 * len(x))(*x) for x in (queries.offsets.tolist(), COUNTS, *at)]
    given = RaggedArguments.from_buffer_copy(caught[0])
    given.q_offsets, given.key_counts = (ctypes.addressof(x) for x in numbers[:2])
    if given.call.q_at:
        given.call.q_at, given.call.k_at = (ctypes.addressof(x) for x in numbers[2:])
    assert entry(ctypes.addressof(given), None) == 0
    out.fill_(torch.nan)
    one = getattr(given.call, operand)
    assert one.data and one.batch[3]
    right = one.batch[3]
    for wrong in (right * 2, -right, 1 << 62, -(1 << 63)):
        one.batch[3] = wrong
        assert entry(ctypes.addressof(given), None) == BAD
    one.batch[3] = right
    for wrong in (one.size // 2, 0):
        one.size = wrong
        assert entry(ctypes.addressof(given), None) == BAD
    assert out.isnan().all()
