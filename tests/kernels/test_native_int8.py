"""Keys and values of int8 that the native kernels read where they lie, against float64 of the numbers that they are."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import regard as rg
from exact_checks import check_threads
from fuzz.build import Unplanned
from needed import needs_kernels
from regard import testing
from regard.backends.native.abi import CODES, CallArguments, FactArguments, GradientArguments, Operand
from regard.backends.native.args import lower
from regard.backends.native.c_structs import Struct
from regard.backends.native.ffi import library, runnable
from regard.backends.native.launch import arguments, empty_results
from regard.backends.native.lower_mask import lower_mask
from regard.call.arguments import build_problem
from regard.core.int8_rows import Int8Rows, rounded
from regard.core.paged import Paged
from regard.runtime import plan_cache

pytestmark = needs_kernels

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def in_tensors(x: Tensor, dtype: torch.dtype) -> Int8Rows:
    return Int8Rows(*rounded(x), dtype)


def in_pages(k: Tensor, v: Tensor, dtype: torch.dtype, size: int) -> tuple[Int8Rows, Int8Rows]:
    """Rows cut into pages that lie in any order, among others of no meaning, as are the ends of the last."""
    batch, n = k.shape[0], k.shape[-2]
    each = -(-n // size)
    table = torch.randperm(batch * each + 3)[: batch * each].reshape(batch, each)
    numbers = table.int()

    def pages(t: Tensor) -> Paged:
        pool = torch.full(
            (batch * each + 3, t.shape[1], size, t.shape[-1]), 77.0 if t.dtype == torch.int8 else torch.nan
        )
        padded = torch.nn.functional.pad(t.float(), (0, 0, 0, each * size - n), value=77)
        pool[table] = padded.unflatten(2, (each, size)).transpose(1, 2)
        return Paged(pool.to(t.dtype), numbers, n)

    return tuple(Int8Rows(*map(pages, rounded(x)), dtype) for x in (k, v))  # type: ignore[return-value]


@contextmanager
def widenings() -> Iterator[list[Int8Rows]]:
    """The rows that were widened in here."""
    seen, widened = list[Int8Rows](), Int8Rows.widened

    def noted(self: Int8Rows, dtype: torch.dtype) -> Tensor:
        seen.append(self)
        return widened(self, dtype)

    with patch.object(Int8Rows, "widened", noted):
        yield seen


def compare(case: testing.Case, dtype: torch.dtype, pages: int = 0, read: bool = True) -> None:
    """out and lse within twice the error of a plain evaluation; read: whether the kernels must read int8."""
    case = case.leaves(dtype)
    q, k, v = (t.detach() for t in (case.q, case.k, case.v))
    held = in_pages(k, v, dtype, pages) if pages else (in_tensors(k, dtype), in_tensors(v, dtype))
    exact = case.leaves(torch.float64)

    def outcome(of: testing.Case, q: Tensor, kv: Any, backend: rg.Backend) -> tuple[Tensor, Tensor]:
        given = {"score": of.score, "mask": of.mask, "positions": of.positions, "sink": of.sink, "backend": backend}
        out = rg.attention(q, *kv, **given, dropout=of.dropout)
        return out, rg.attention_state(q, *kv, **given).finish()[1]

    with torch.no_grad():
        with widenings() as widened:
            mine = outcome(case, q, held, rg.Native())
        assert (not widened) == read
        wide = [t.to(torch.float64) for t in held]
        truth, plain = (
            outcome(exact, q.double(), wide, rg.Reference()),
            outcome(case, q, [in_tensors(k, dtype), in_tensors(v, dtype)], rg.Reference()),
        )
        for found, right, usual in zip(mine, truth, plain, strict=True):
            assert testing.error(found, right) <= testing.tolerance(right, usual)


def calls() -> dict[str, testing.Case]:
    """Every mask under every score, of few queries and of blocks of queries."""
    at = {nq: testing.frame(nq=nq, nk=149, batch=(2,), heads=6) for nq in (2, 101)}
    return {
        f"{name}-{nq}": case
        for nq, frame in at.items()
        for name, case in testing.calls(frame)
        if type(case.problem.similarity) in (rg.Dot, rg.ScaledDot)
    }


CALLS = calls() if runnable() else {}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pages", [0, 16])
@pytest.mark.parametrize("name", CALLS)
def test_every_mask_and_score(name: str, pages: int, dtype: torch.dtype) -> None:
    case = CALLS[name]
    half = dtype != torch.float32 and bool(case.problem.similarity.tensors())
    compare(case, dtype, pages, read=not half and rg.Native().why_not(case.leaves(dtype).problem, lse=False) is None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("nq", "group"), [(1, 1), (1, 4), (2, 3), (5, 1), (8, 8), (15, 1), (15, 4), (9, 7), (1, 64)])
def test_rows_of_a_group(isa: str, nq: int, group: int, dtype: torch.dtype) -> None:
    at = testing.frame(nq=nq, nk=193, batch=(2,), heads=2 * group)
    for mask in (rg.Everything(), rg.Causal(), rg.Lengths(keys=torch.tensor([193, 5]))):
        compare(testing.draw(at, key_heads=2, dk=24, dv=40, mask=mask), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("nq", "group"), [(16, 1), (1, 65), (1, 71), (13, 5), (37, 4), (97, 2), (130, 1)])
def test_blocks_of_queries(isa: str, nq: int, group: int, dtype: torch.dtype) -> None:
    at = testing.frame(nq=nq, nk=293, batch=(2,), heads=2 * group)
    left_padded = rg.Causal() & rg.Lengths(first=torch.tensor([0, 283]))
    for pages, mask in (
        (0, rg.Everything()),
        (16, rg.Causal()),
        (300, left_padded),
        (0, rg.Window(before=3, after=60)),
    ):
        case = testing.draw(at, key_heads=2, dk=24, dv=40, mask=mask, dropout=rg.Dropout(0.3, seed=5))
        compare(case, dtype, pages)


@pytest.mark.parametrize(("nq", "invariant"), [(1, True), (7, True), (16, False), (16, True), (300, False)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_have_the_bits_of_the_floats(isa: str, nq: int, invariant: bool, dtype: torch.dtype) -> None:
    """In tensors and in pages, with any number of threads."""
    q, k, v = (torch.randn(2, h, n, d, dtype=dtype) for h, n, d in ((6, nq, 64), (2, 701, 64), (2, 701, 96)))
    given = {"mask": rg.Causal(), "positions": rg.tail(nq, 701), "backend": rg.Native(invariant=invariant)}
    in_memory = [in_tensors(t, dtype) for t in (k, v)]
    whole = rg.attention(q.float(), *(t.widened(torch.float32) for t in in_memory), **given)
    before = torch.get_num_threads()
    for held in (in_memory, in_pages(k, v, dtype, 16), in_pages(k, v, dtype, 150)):
        for threads in (2, before):
            torch.set_num_threads(threads)
            with widenings() as widened:
                assert torch.equal(rg.attention(q, *held, **given), whole.to(dtype)) and not widened


@pytest.mark.parametrize("pages", [0, 16])
@pytest.mark.parametrize("nq", [1, 5, 20])
def test_bits_depend_on_no_number_of_threads(isa: str, nq: int, pages: int) -> None:
    """Of a few queries, whose keys are divided among threads."""
    q, k, v = torch.randn(2, 8, nq, 64), *(torch.randn(2, 2, 3000, 64) for _ in "kv")
    kept = in_pages(k, v, torch.float32, pages) if pages else tuple(in_tensors(t, torch.float32) for t in (k, v))
    given = {"mask": rg.Causal(), "positions": rg.tail(nq, 3000)}
    check_threads(lambda: rg.attention(q, *kept, **given))


def test_sequences_that_share_keys(isa: str) -> None:
    """Keys and values that were expanded over a batch, under queries of several heads and sequences."""
    for nq, heads in ((1, 6), (3, 2), (2, 64)):
        q, k, v = torch.randn(3, heads, nq, 16), torch.randn(1, 2, 70, 16), torch.randn(1, 2, 70, 8)
        held = [Int8Rows(*(each.expand(3, -1, -1, -1) for each in rounded(t)), torch.float32) for t in (k, v)]
        given = {"mask": rg.Causal() & rg.Lengths(keys=torch.tensor([70, 41, 1])), "positions": rg.tail(nq, 70)}
        with widenings() as widened:
            out = rg.attention(q, *held, **given)
        assert not widened
        wide = [t.widened(torch.float64) for t in held]
        torch.testing.assert_close(out.double(), rg.attention(q.double(), *wide, **given), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nk", [1, 7, 8, 9, 15, 16, 17, 127, 128, 129, 257, 513, 2049])
def test_chunks_and_parts_of_keys_at_every_edge(isa: str, nk: int) -> None:
    at = testing.frame(nq=3, nk=nk, batch=(1,), heads=6)
    for mask in (rg.Everything(), rg.Window(before=70, after=0)):
        for pages in (0, 1, 10, 16):
            case = testing.draw(at, key_heads=2, dk=9, dv=11, mask=mask, dropout=rg.Dropout(0.3, seed=5))
            compare(case, torch.float32, pages)


@pytest.mark.parametrize("width", [*range(1, 36), 63, 64, 65, 80, 127, 128, 129, 130])
def test_widths(isa: str, width: int) -> None:
    for nq in (1, 2):
        at = testing.frame(nq=nq, nk=70, batch=(1,), heads=3)
        for pages in (0, 4):
            compare(testing.draw(at, key_heads=1, dk=width, dv=131 - width), torch.bfloat16, pages)


def test_rows_lie_as_they_like(isa: str) -> None:
    """Heads beside rows, features that are no neighbours, scales with gaps: the same bits."""
    q, k, v = (torch.randn(4, h, n, 24) for h, n in ((8, 5), (2, 300), (2, 300)))
    held = [in_tensors(t, torch.float32) for t in (k, v)]
    beside = [t.numbers.transpose(1, 2).contiguous().transpose(1, 2) for t in held]
    gaps = [t.scales.repeat(1, 1, 1, 3)[..., 1:2] for t in held]
    turned = [t.numbers.mT.contiguous().mT for t in held]
    for backend in (None, rg.Native()):
        given = {"mask": rg.Causal(), "positions": rg.tail(5, 300), "backend": backend}
        whole = rg.attention(q, *held, **given)
        for numbers in (beside, turned):
            kv = [Int8Rows(*both, torch.float32) for both in zip(numbers, gaps, strict=True)]
            with widenings() as widened:
                assert torch.equal(rg.attention(q, *kv, **given), whole) and not widened


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_hidden_rows_never_leak(isa: str, bad: float) -> None:
    """A row that holds what is not finite is NaN where it is seen, and nothing where it is hidden."""
    q, k, v = (torch.randn(1, h, n, 19) for h, n in ((5, 1), (1, 150), (1, 150)))
    allowed = torch.rand(1, 5, 1, 150) > 0.3
    allowed[..., 70], allowed[:, 2, :, 70] = False, True
    for changed in ("k", "v"):
        spoiled = {"k": k.clone(), "v": v.clone()}
        spoiled[changed][..., 70, 3] = bad
        given = {"mask": rg.Dense(allowed), "backend": rg.Native()}
        clean, out = (
            rg.attention(q, *(in_tensors(t, torch.float32) for t in kv), **given) for kv in ((k, v), spoiled.values())
        )
        assert torch.equal(out[:, [0, 1, 3, 4]], clean[:, [0, 1, 3, 4]])
        assert out[:, 2].isnan().all()


def test_explain_says_why() -> None:
    q, x = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 70, 8)
    k, v = (in_tensors(x, torch.float32) for _ in range(2))
    scattered = rg.Where(lambda b, h, i, j: (i + j) % 3 > 0)
    for said, many, options in (
        ("read as it is, widened in registers, or a tile at a time for many queries", 1, {}),
        ("read as it is", 9, {}),
        ("read as it is", 1, {"backend": rg.Native(invariant=True)}),
        ("read as it is", 9, {"mask": scattered}),
        ("widened to float32: the backward reads ordinary tensors", 9, {"sink": torch.zeros(4, requires_grad=True)}),
        ("widened to float32: Cosine() prepares the keys", 1, {"score": rg.Cosine(1.0)}),
        ("widened to float32: it reads contiguous keys and values", 1, {"backend": rg.Tiled()}),
    ):
        plan = str(rg.explain(q.repeat(1, 1, many, 1), k, v, positions=rg.tail(3 * many, 70), **options))
        assert f"int8             {said}" in plan


def test_steps_of_a_cache_share_a_plan(isa: str) -> None:
    caches = (
        (rg.nn.GrowingCache(dtype=torch.int8), rg.nn.FixedCache(2, 2, 40, 16, 16, torch.int8)),
        (rg.nn.PagedCache(2, 2, 12, 4, 16, 16, torch.int8),),
    )
    plan_cache.clear()
    for n, kept in [(n, kept) for n, alike in enumerate(caches) for kept in alike]:
        for step in range(12):
            q, k, v = (torch.randn(2, h, 1, 16, dtype=torch.bfloat16) for h in (4, 2, 2))
            keys, values = kept.append(k, v)
            given = {"mask": rg.Causal(), "positions": kept.positions}
            with widenings() as widened:
                out = rg.attention(q, keys, values, **given)
            assert out.dtype == torch.bfloat16 and not widened
            assert torch.equal(out, rg.attention(q, keys, values, **given, backend=Unplanned())), step
        assert len(plan_cache.plans()) == n + 1


@pytest.mark.parametrize("numbers", [(1, 15, 16, 1, 40, 15), (16, 1, 16, 15, 1)])
@pytest.mark.parametrize("pages", [0, 16])
def test_a_plan_serves_any_number_of_queries(numbers: tuple[int, ...], pages: int) -> None:
    """Prompts and steps in any order."""
    plan_cache.clear()
    for nq in numbers:
        q, k, v = (torch.randn(2, h, n, 16) for h, n in ((2, nq), (2, 70), (2, 70)))
        held = in_pages(k, v, q.dtype, pages) if pages else [in_tensors(t, q.dtype) for t in (k, v)]
        given = {"mask": rg.Causal(), "positions": rg.tail(nq, 70)}
        for _ in range(2):
            with widenings() as widened:
                out = rg.attention(q, *held, **given)
            assert not widened
            assert torch.equal(out, rg.attention(q, *held, **given, backend=Unplanned()))
    assert len(plan_cache.plans()) == 1


@pytest.mark.parametrize("struct", [CallArguments, GradientArguments, FactArguments])
def test_kernels_that_do_not_read_int8_refuse_it(isa: str, struct: type[Struct]) -> None:
    """What Python never asks for."""
    x = torch.randn(1, 2, 70, 8)
    k, v = (in_tensors(x, torch.float32) for _ in range(2))

    def code(nq: int, **changed: Any) -> int:
        q = torch.randn(1, 4, nq, 8)
        problem = build_problem(q, k, v, rg.ScaledDot(), rg.Everything(), None, None)[0]
        args = lower(problem, lower_mask(problem, library().tile))
        call = arguments(args, **dict(zip(("out", "lse"), empty_results(args), strict=True)))
        for name, value in changed.items():
            setattr(call, name, value)
        given = call if struct is CallArguments else struct(call)
        return library().entry(struct)(ctypes.addressof(given), None)

    done, bad = CODES["REGARD_DONE"], CODES["REGARD_BAD_ARGUMENT"]
    assert code(1) == code(16) == code(1, invariant=1) == (done if struct is CallArguments else bad)
    assert code(1, v_scales=Operand()) == code(1, k_scales=Operand(), v_scales=Operand()) == bad
