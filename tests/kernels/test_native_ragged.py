"""Sequences with any numbers of queries in one native call: each as if alone, and wrong numbers refused."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from kernel_checks import modifiers
from needed import needs_kernels
from regard import testing
from regard.backends.native.abi import CODES, RaggedArguments
from regard.backends.native.call_operands import NUMBERS, RAGGED
from regard.backends.native.ffi import library
from regard.backends.native.modifiers.table import lower_modifiers
from regard.backends.native.ragged import RaggedPlan
from regard.core.int8_rows import Int8Rows, products, rounded
from regard.nn import PagedCache
from regard.runtime import plan_cache
from regard.sequences import one_list
from regard.sequences.nested_queries import nested_queries
from regard.sequences.ragged_call import RaggedCall, ragged_call

pytestmark = needs_kernels

HEADS, KEY_HEADS, DK, DV, SIZE = 6, 2, 19, 23, 7
NEW = [131, 1, 0, 64, 1, 3, 9, 2, 5]  # blocks, decoding, nothing, one whole block, decoding, few, ...
HELD = [90, 700, 13, 0, 0, 40, 300, 0, 2]  # keys before these
BY_HEAD = torch.linspace(0.2, 1, HEADS)


def ragged_modifiers() -> dict[str, rg.Score]:
    """Those whose operands sequences of any lengths can share. Biases, which belong to one number of queries and keys,
    have tests of their own (test_ragged_programs.py)."""
    at, found = testing.frame(heads=HEADS), dict[str, rg.Score]()
    for name, score in modifiers(at, DK).items():
        given = lower_modifiers(testing.draw(at, dk=DK, score=score).leaves(torch.float32).problem)
        if given.keys() <= RAGGED | NUMBERS.keys() and not isinstance(score.stages[1], rg.Bias):
            found[name] = score
    return found


CALLS: dict[str, dict[str, Any]] = {
    "causal": {"mask": rg.Causal()},
    "window": {"mask": rg.Window(before=50, after=0)},
    "window ahead": {"mask": rg.Window(before=None, after=3)},
    "everything": {},
    **{name: {"mask": rg.Causal(), "score": score} for name, score in ragged_modifiers().items()},
    "sink": {"mask": rg.Causal(), "sink": BY_HEAD},
    "one sink": {"mask": rg.Causal(), "sink": 0.7},
}


def jagged(parts: list[Tensor]) -> Tensor:
    return rg.pack([t.transpose(0, 1) for t in parts]).nested().transpose(1, 2)


class Batch:
    """Queries of each sequence, its keys and values, and where these are read: in pages, or one behind another."""

    def __init__(
        self, dtype: torch.dtype, paged: bool, new: list[int] = NEW, held: list[int] = HELD, int8: bool = False
    ) -> None:
        counts = [a + b for a, b in zip(new, held, strict=True)]
        self.q = [torch.randn(HEADS, n, DK).to(dtype) for n in new]
        self.k, self.v = ([torch.randn(KEY_HEADS, n, d).to(dtype) for n in counts] for d in (DK, DV))
        self.mask: rg.Mask = rg.Lengths(keys=torch.tensor(counts))
        firsts = [torch.arange(a, a + n) for a, n in zip(held, new, strict=True)]
        self.positions = rg.Positions(torch.cat(firsts), torch.arange(max(counts)))
        if paged:
            pages = sum(-(-n // SIZE) for n in counts)
            cache = PagedCache(len(new), KEY_HEADS, pages, SIZE, DK, DV, torch.int8 if int8 else dtype)
            self.kv = cache.append(jagged(self.k), jagged(self.v))
        else:
            self.kv = tuple(torch.full((len(new), KEY_HEADS, max(counts), d), torch.nan).to(dtype) for d in (DK, DV))
            for b, n in enumerate(counts):
                self.kv[0][b, :, :n], self.kv[1][b, :, :n] = self.k[b], self.v[b]
            if int8:
                self.kv = tuple(Int8Rows(*rounded(t), dtype) for t in self.kv)
        if int8:  # what the kept numbers are
            self.k, self.v = ([products(*rounded(t), torch.float32) for t in x] for x in (self.k, self.v))

    def together(self, mask: rg.Mask = rg.Everything(), **options: Any) -> list[Tensor]:
        out = rg.attention(jagged(self.q), *self.kv, mask=mask & self.mask, positions=self.positions, **options)
        return [t.transpose(0, 1) for t in out.transpose(1, 2).unbind()]

    def alone(self, dtype: torch.dtype | None = None, **options: Any) -> list[Tensor]:
        """A call for each sequence, of tensors in another dtype."""
        each = zip(*([t.to(dtype or t.dtype) for t in x] for x in (self.q, self.k, self.v)), strict=True)
        tails = [rg.tail(q.shape[1], k.shape[1]) for q, k in zip(self.q, self.k, strict=True)]
        return [
            rg.attention(q[None], k[None], v[None], positions=at, **options)[0]
            for (q, k, v), at in zip(each, tails, strict=True)
        ]


@pytest.fixture(autouse=True)
def lists(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each call whether it ran as one list."""
    found, attend = list[bool](), one_list.attend

    def seen(*given: Any) -> Tensor | None:
        out = attend(*given)
        found.append(out is not None)
        return out

    monkeypatch.setattr("regard.sequences.one_list.attend", seen)
    return found


@pytest.mark.parametrize("paged", [True, False], ids=["pages", "contiguous"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_each_sequence_is_as_if_alone(name: str, dtype: torch.dtype, paged: bool, lists: list[bool]) -> None:
    batch = Batch(dtype, paged)
    true = batch.alone(torch.float64, **CALLS[name], backend=rg.Reference())
    plain = batch.alone(**CALLS[name], backend=rg.Reference())
    for found, exact, rough in zip(batch.together(**CALLS[name]), true, plain, strict=True):
        assert found.dtype == dtype and found.shape == exact.shape
        assert not found.numel() or testing.error(found, exact) <= testing.tolerance(exact, rough)
    assert lists == [True]


@pytest.mark.parametrize("paged", [True, False], ids=["pages", "contiguous"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_int8_is_read_where_it_lies(
    name: str, dtype: torch.dtype, paged: bool, lists: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, widened, own = Batch(dtype, paged, int8=True), list[Int8Rows](), Int8Rows.widened
    true = batch.alone(torch.float64, **CALLS[name], backend=rg.Reference())
    plain = batch.alone(torch.float32, **CALLS[name], backend=rg.Reference())
    monkeypatch.setattr(Int8Rows, "widened", lambda self, to: (widened.append(self), own(self, to))[1])
    for found, exact, rough in zip(batch.together(**CALLS[name]), true, plain, strict=True):
        assert not found.numel() or testing.error(found, exact) <= testing.tolerance(exact, rough.to(found.dtype))
    assert lists == [True] and not widened
    plan = str(rg.explain(jagged(batch.q), *batch.kv, mask=rg.Causal() & batch.mask, positions=batch.positions))
    assert "read as it is" in plan


@pytest.mark.parametrize("paged", [True, False], ids=["pages", "contiguous"])
def test_invariant_rows_of_int8_have_the_bits_of_their_floats(paged: bool, lists: list[bool]) -> None:
    batch, options = Batch(torch.float32, paged, int8=True), {"mask": rg.Causal(), "backend": rg.Native(invariant=True)}
    assert all(map(torch.equal, batch.together(**options), batch.alone(**options))) and lists == [True]


@pytest.mark.parametrize("paged", [True, False], ids=["pages", "contiguous"])
@pytest.mark.parametrize("causal", [rg.Causal(), rg.Everything()], ids=repr)
def test_each_sequence_begins_at_its_first_key(causal: rg.Mask, paged: bool, lists: list[bool]) -> None:
    batch = Batch(torch.float32, paged)
    first = [k.shape[1] * 2 // 5 for k in batch.k]
    found = batch.together(causal & rg.Lengths(first=torch.tensor(first)))
    assert lists == [True]
    for n, q, k, v, out in zip(first, batch.q, batch.k, batch.v, found, strict=True):
        at, kv = rg.tail(q.shape[1], k.shape[1]), (k[None], v[None])
        expected = rg.attention(q[None], *kv, mask=causal & rg.Lengths(first=[n]), positions=at, backend=rg.Reference())
        torch.testing.assert_close(out, expected[0])


@pytest.mark.parametrize("paged", [True, False], ids=["pages", "contiguous"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_invariant_rows_have_the_bits_of_a_call_alone(name: str, dtype: torch.dtype, paged: bool) -> None:
    batch, backend = Batch(dtype, paged), rg.Native(invariant=True)
    for found, true in zip(
        batch.together(**CALLS[name], backend=backend), batch.alone(**CALLS[name], backend=backend), strict=True
    ):
        assert torch.equal(found, true)


def test_the_bits_depend_on_no_number_of_threads() -> None:
    batch, threads = Batch(torch.float32, True, [300, 1, 70, 1, 1], [500, 900, 0, 2, 3000]), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = batch.together(rg.Causal())
        torch.set_num_threads(3)
        assert all(map(torch.equal, one, batch.together(rg.Causal())))
    finally:
        torch.set_num_threads(threads)


def test_a_plan_serves_other_numbers(lists: list[bool]) -> None:
    plan_cache.clear()
    for new, held in ((NEW, HELD), (NEW[::-1], HELD), ([2, 0, 90], [5, 800, 1]), ([1, 70], [0, 0])):
        batch = Batch(torch.float32, True, new, held)
        true = batch.alone(torch.float64, mask=rg.Causal(), backend=rg.Reference())
        for found, exact in zip(batch.together(rg.Causal()), true, strict=True):
            torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)
    assert lists == [True] * 4 and len(plan_cache.plans()) == 1


def test_every_layout_of_the_queries_is_read() -> None:
    """(total, heads, d), as models have them; every second feature; one head, without an axis."""
    batch = Batch(torch.float32, False)
    true = batch.alone(torch.float64, mask=rg.Causal(), backend=rg.Reference())
    batch.q = [torch.stack([t, torch.full_like(t, torch.nan)], -1).flatten(2)[..., ::2] for t in batch.q]
    for found, exact in zip(batch.together(rg.Causal()), true, strict=True):
        torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5)
    one = rg.pack([t[0] for t in batch.q]).nested()
    k, v = (t[:, 0] for t in batch.kv)
    out = rg.attention(one, k, v, mask=rg.Causal() & batch.mask, positions=batch.positions)
    for found, exact in zip(out.unbind(), true, strict=True):
        torch.testing.assert_close(found.double(), exact[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"dropout": rg.Dropout(0.5, seed=1)},
        {"score": rg.Cosine(3.0)},
        {"mask": rg.Causal() | rg.Prefix(2)},
        {"backend": rg.Tiled()},
    ],
    ids=["dropout", "cosine", "union", "tiled"],
)
@pytest.mark.parametrize("paged", [True, False], ids=["pages", "contiguous"])
def test_what_is_no_list_goes_another_way(options: dict[str, Any], paged: bool, lists: list[bool]) -> None:
    found = Batch(torch.float32, paged).together(**{"mask": rg.Causal(), **options})
    assert not any(lists) and all(t.isfinite().all() for t in found)


def test_positions_that_do_not_count_up_go_another_way(lists: list[bool]) -> None:
    batch = Batch(torch.float32, True)
    true = batch.together(rg.Causal())
    batch.positions = rg.Positions(batch.positions.q.clone(), batch.positions.k)
    batch.positions.q[-1] += 1000  # sees no more than before
    for found, exact in zip(batch.together(rg.Causal()), true, strict=True):
        torch.testing.assert_close(found, exact, rtol=0, atol=1e-5)
    assert lists == [True, False]
    explained = rg.explain(jagged(batch.q), *batch.kv, mask=rg.Causal() & batch.mask, positions=batch.positions)
    assert "calls, one a number of queries" in dict(explained.facts)["nested"]


def test_gradients_are_those_of_calls_alone() -> None:
    batch = Batch(torch.float32, False)
    batch.q = [t.requires_grad_() for t in batch.q]
    found, true = batch.together(rg.Causal()), batch.alone(mask=rg.Causal())
    grads = [torch.autograd.grad(sum(t.square().sum() for t in outs), batch.q) for outs in (found, true)]
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_lengths_out_of_range_are_refused() -> None:
    batch = Batch(torch.float32, True)
    nk = batch.kv[0].shape[2]
    for wrong in (nk + 1, -1):
        batch.mask = rg.Lengths(keys=torch.tensor([wrong, *[1] * (len(NEW) - 1)]))
        with pytest.raises(rg.ShapeError, match=r"Lengths\.keys"):
            batch.together(rg.Causal())


BAD = CODES["REGARD_BAD_ARGUMENT"]
WRONG: dict[str, tuple[int, Callable[[RaggedArguments, list[Any]], None]]] = {
    "no sequences": (BAD, lambda r, _: setattr(r, "sequences", 0)),
    "no offsets": (BAD, lambda r, _: setattr(r, "q_offsets", None)),
    "offsets that do not begin at 0": (BAD, lambda _, x: x[0].__setitem__(0, 1)),
    "offsets that decrease": (BAD, lambda _, x: x[0].__setitem__(1, 5)),
    "offsets beyond the queries": (BAD, lambda _, x: x[0].__setitem__(2, 10**12)),
    "offsets that end early": (BAD, lambda _, x: x[0].__setitem__(3, 3)),
    "too many keys": (CODES["REGARD_BAD_INTERVAL"], lambda _, x: x[1].__setitem__(1, 9)),
    "fewer keys than none": (CODES["REGARD_BAD_INTERVAL"], lambda _, x: x[1].__setitem__(0, -1)),
    "positions that skip one": (CODES["REGARD_BAD_POSITION"], lambda _, x: x[2].__setitem__(2, 9)),
    "keys that skip one": (CODES["REGARD_BAD_POSITION"], lambda _, x: x[3].__setitem__(3, 9)),
    "positions far away": (CODES["REGARD_BAD_POSITION"], lambda _, x: x[2].__setitem__(0, 1 << 40)),
    "positions beyond 64 bits": (CODES["REGARD_BAD_POSITION"], lambda _, x: x[2].__setitem__(0, -(1 << 63))),
    "bounds without positions": (BAD, lambda r, _: (setattr(r.call, "q_at", None), setattr(r.call, "k_at", None))[0]),
    "a batch axis": (BAD, lambda r, _: r.call.batch.__setitem__(0, 2)),
    "lengths of the call": (BAD, lambda r, x: setattr(r.call, "key_counts", ctypes.addressof(x[1]))),
    "an lse": (BAD, lambda r, x: setattr(r.call.lse, "data", ctypes.addressof(x[1]))),
    "no work": (BAD, lambda r, _: setattr(r, "thread_work", 0)),
    "an unknown dtype": (BAD, lambda r, _: setattr(r.call, "dtype", 7)),
    "a null address": (BAD, lambda r, _: setattr(r.call.k, "data", None)),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_numbers_are_a_code_and_nothing_is_written(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a right call of 1, 0 and 3 queries over up to 8 keys, one number is made wrong."""
    caught: list[RaggedArguments] = []
    entry = library().entry(RaggedArguments)

    q, kv = [torch.randn(HEADS, n, DK) for n in (1, 0, 3)], [torch.randn(3, KEY_HEADS, 8, d) for d in (DK, DV)]
    at = rg.Positions(torch.tensor([7, 2, 3, 4]), torch.arange(8))
    mask = rg.Causal() & rg.Lengths(keys=torch.tensor([8, 0, 5]))
    queries = nested_queries(jagged(q), kv[0], kv[1], rg.ScaledDot(), mask, at)
    call = ragged_call(queries, kv[0], kv[1], rg.ScaledDot(), mask, at, None, None)
    assert isinstance(call, RaggedCall)
    plan = one_list._plan(call, rg.ScaledDot(), None, None)
    assert isinstance(plan, RaggedPlan)

    def seen(at: int, _: Any) -> int:
        caught.append(RaggedArguments.from_buffer_copy(RaggedArguments.from_address(at)))
        return 0

    monkeypatch.setattr(plan, "entry", seen)
    out = plan.run(call)
    assert out is not None
    numbers = [(ctypes.c_int64 * len(x))(*x) for x in ([0, 1, 1, 4], [8, 0, 5], [7, 2, 3, 4], range(8))]
    args = RaggedArguments.from_buffer_copy(caught[0])
    args.q_offsets, args.key_counts, args.call.q_at, args.call.k_at = (ctypes.addressof(x) for x in numbers)
    assert entry(ctypes.addressof(args), None) == 0
    out.fill_(torch.nan)
    code, make_wrong = WRONG[name]
    make_wrong(args, numbers)
    assert entry(ctypes.addressof(args), None) == code and out.isnan().all()
