"""Retained, whose numbers the kernels compare with positions, against the dense definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from fact_checks import hold, looked
from kernel_checks import check
from needed import needs_kernels
from regard import facts, testing
from regard.backends.native.ffi import chosen, load
from regard.backends.native.lower_mask import lower_mask
from regard.backends.native.tile_counts import count_tiles
from regard.call.of_part import mask_of_part
from regard.call.part import QueriesAndKeys
from regard.parallel.call_on_heads import mask_of_heads
from regard.parallel.heads import HeadShare
from regard.runtime import plan_cache

pytestmark = needs_kernels

FRAMES = {
    "blocks": testing.frame(nq=151, nk=331, batch=(3,), heads=4),
    "few rows": testing.frame(nq=5, nk=331, batch=(3,), heads=4),
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def pieces(at: rg.core.region.Frame) -> Tensor:
    """Whole tiles that none, all or some of the queries see."""
    ends = torch.tensor([0, 1 << 40, at.nk - at.nq // 2, at.nk - 3])
    return ends[torch.arange(at.nk) // 128 % 4]


def mixed(at: rg.core.region.Frame) -> Tensor:
    """Neighbours with different ends; some hidden from all, some never evicted, the farthest numbers among them."""
    n = torch.arange(at.nk)
    ends = at.nk - at.nq + n * 37 % (at.nq + 5)
    return ends.masked_fill(n % 11 == 0, -(1 << 63)).masked_fill(n % 7 == 0, (1 << 63) - 1)


def each(at: rg.core.region.Frame) -> Tensor:
    """Of each batch element others."""
    return torch.stack([mixed(at), pieces(at), mixed(at).flip(0)])


def of_key_heads(at: rg.core.region.Frame) -> Tensor:
    one = each(at)
    return torch.stack([one, one.flip(-1)], 1)


def of_heads(at: rg.core.region.Frame) -> Tensor:
    one = of_key_heads(at)
    return torch.cat([one, one.roll(5, -1)], 1)


def strided(at: rg.core.region.Frame) -> Tensor:
    """Numbers that lie apart, of heads that share them."""
    return torch.stack([each(at), each(at)], -1)[..., 0][:, None].expand(-1, 4, -1)


KINDS = {f.__name__: f for f in (pieces, mixed, each, of_key_heads, of_heads, strided)}


def retained(kind: str, at: rg.core.region.Frame) -> rg.Retained:
    return rg.Retained(KINDS[kind](at))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", FRAMES)
def test_values_and_gradients(isa: str, size: str, kind: str, dtype: torch.dtype) -> None:
    at = FRAMES[size]
    seen = retained(kind, at)
    case = testing.draw(at, key_heads=2, dk=17, dv=11, mask=rg.Causal() & seen)
    assert {"until", "q_at", "last"} <= lower_mask(case.problem, (64, 128)).keys() | {"q_at"}
    check(case, dtype)
    capped = rg.ScaledDot() >> rg.SoftCap(5.0) >> rg.Alibi(torch.linspace(0.1, 0.4, 4))
    lengths = rg.Lengths(keys=torch.tensor([331, 0, 170]))
    check(testing.draw(at, dk=24, dv=19, score=capped, mask=seen & rg.Causal() & lengths, sink=True), dtype)
    dense = rg.Dense(torch.rand(at.nq, at.nk) < 0.7)
    check(testing.draw(at, dk=16, dv=19, mask=seen & dense, dropout=rg.Dropout(0.3, seed=3)), dtype)


@pytest.mark.parametrize("name", ["or", "not", "documents", "where", "twice"])
@pytest.mark.parametrize("size", FRAMES)
def test_joined_to_other_masks(isa: str, size: str, name: str) -> None:
    at = FRAMES[size]
    seen, ids = retained("of_key_heads", at), torch.arange(at.nk) * 3 % 5
    masks = {
        "or": rg.Window(9, 0) | seen,
        "not": rg.Causal() & ~seen,
        "documents": seen & rg.Causal() & rg.Documents(ids[-at.nq :], ids),
        "where": seen & rg.Where(lambda b, h, i, j: (i + 2 * j + h) % 3 != 0),
        "twice": seen & retained("mixed", at),
    }
    check(testing.draw(at, key_heads=2, dk=17, dv=11, mask=masks[name]))


@pytest.mark.full
@pytest.mark.parametrize("size", FRAMES)
def test_additive_scores(isa: str, size: str) -> None:
    at = FRAMES[size]
    score = rg.Additive(None, None, torch.randn(16, dtype=torch.float64) / 4)
    check(testing.draw(at, key_heads=2, dk=16, dv=7, score=score, mask=rg.Causal() & retained("of_heads", at)))


@pytest.mark.parametrize("kind", KINDS)
def test_facts(isa: str, kind: str) -> None:
    wanted = (facts.Visible(), facts.Entropy(), facts.Top(3), facts.Received(), facts.Readers(), facts.Map(5, 7))
    case = testing.draw(FRAMES["blocks"], key_heads=2, mask=rg.Causal() & retained(kind, FRAMES["blocks"]), sink=True)
    assert {looked(case.leaves(torch.float32), wanted).way(fact) for fact in wanted} == {"the native kernels"}
    hold(case, wanted, torch.float32)


def test_tiles_are_skipped_and_seen_whole_by_the_bounds_alone() -> None:
    queries, keys = load(chosen() or "").tile
    at = rg.core.region.Frame.of(3 * queries, 3 * keys, positions=rg.head(3 * queries, 3 * keys))
    until = torch.tensor([0, queries, 1 << 40]).repeat_interleave(keys)  # none, the first block, all see a tile

    def counts() -> tuple[int, ...]:
        return count_tiles(testing.draw(at, mask=rg.Retained(until)).leaves(torch.float32).problem)[:]

    assert counts() == (3 + 2, 0, 3 + 1, 0)
    until[keys + 5] = queries + 3
    assert counts() == (3 + 1, 0, 3 + 1, 1)


def test_positions_of_any_kind() -> None:
    at = FRAMES["blocks"]
    seen = rg.Causal() & retained("of_key_heads", at)
    places = (rg.tail(151, [331, 200, 151]), rg.Positions(torch.arange(151) * 3 - 40, torch.arange(331)))
    q, k, v = (torch.randn(3, h, n, 8, requires_grad=True) for h, n in ((4, 151), (2, 331), (2, 331)))
    for place in (*places, *places):
        given: dict[str, Any] = {"mask": seen, "positions": place}
        results = [rg.attention(q, k, v, **given, backend=b) for b in (None, rg.Reference())]
        grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in results]
        torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("needs", [False, True])
def test_a_plan_serves_new_numbers_and_new_lengths(needs: bool) -> None:
    plan_cache.clear()
    kept = []
    for n in (151, 151, 151, 152, 163, 152, 151):
        q, k, v = (torch.randn(3, h, n, 8, requires_grad=needs) for h in (4, 2, 2))
        seen = rg.Causal() & rg.Retained(torch.randint(0, 2 * n, (3, 2, n)))
        out, right = rg.attention(q, k, v, mask=seen), rg.attention(q, k, v, mask=seen, backend=rg.Reference())
        torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-5)
        if needs:
            grads = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, right)]
            torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)
        kept.append(sum(plan is not None for plan in plan_cache._plans.values()))
    assert kept[0] == 1 and kept == [1, 1, 1, 2, 3, 3, 3]


def test_decoding_against_a_cache_in_pages() -> None:
    cache = rg.nn.PagedCache(2, 2, 64, 16, 8, 8)
    whole = [torch.randn(2, h, 70, 8) for h in (4, 2, 2)]
    until = torch.randint(0, 90, (2, 2, 70))
    for a, b in ((0, 50), (50, 51), (51, 54), (54, 70)):
        q, k, v = (t[:, :, a:b] for t in whole)
        keys, values = cache.append(k, v)
        mask = rg.Causal() & rg.Retained(until[..., :b])
        out = rg.attention(q, keys, values, mask=mask, positions=cache.positions)
        right = rg.attention(
            q, *(t[:, :, :b] for t in whole[1:]), mask=mask, positions=rg.tail(b - a, b), backend=rg.Reference()
        )
        torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_ragged_queries_are_one_list(causal: bool) -> None:
    q = torch.nested.nested_tensor_from_jagged(torch.randn(94, 4, 8), torch.tensor([0, 3, 93, 94])).transpose(1, 2)
    k, v = torch.randn(3, 2, 331, 8), torch.randn(3, 2, 331, 8)
    at = rg.Positions(torch.cat([torch.arange(n) + 331 - n for n in (3, 90, 1)]), torch.arange(331))
    seen = rg.Retained(torch.randint(200, 340, (3, 2, 331)))
    mask = rg.Causal() & seen if causal else seen
    told = dict(rg.explain(q, k, v, mask=mask, positions=at).facts)
    assert "94 queries of 3 sequences in one call;" in told["nested"]
    for out, row, n in zip(rg.attention(q, k, v, mask=mask, positions=at).unbind(), range(3), (3, 90, 1), strict=True):
        alone = mask.with_tensors(iter([seen.until[row : row + 1]]))
        queries = q.unbind()[row][None]
        right = rg.attention(
            *(queries, k[row : row + 1], v[row : row + 1]),
            **{"mask": alone, "positions": rg.tail(n, 331), "backend": rg.Reference()},
        )
        torch.testing.assert_close(out, right[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_shards_of_heads_and_of_keys_read_the_numbers(kind: str) -> None:
    at = FRAMES["blocks"]
    mask, q, k, v = rg.Causal() & retained(kind, at), *(torch.randn(3, 4, n, 8) for n in (151, 331, 331))
    for share in (HeadShare(1, 2, 4, (1, 2)), HeadShare(3, 1, 4, (3,))):
        some = slice(share.first, share.first + share.count)
        given = {"mask": mask_of_heads(mask, share), "positions": at.positions}
        out = rg.attention(q[:, some], k[:, some], v[:, some], **given)
        right = rg.attention(q, k, v, mask=mask, positions=at.positions, backend=rg.Reference())[:, some]
        torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-5)
    for part in (
        QueriesAndKeys(range(20, 151), range(100, 300), 151, 331),
        QueriesAndKeys(None, torch.arange(0, 331, 3), 151, 331),
    ):
        rows = slice(None) if part.rows is None else slice(20, 151)
        of = mask_of_part(mask, part)
        place = rg.Positions(at.positions.q[rows], part.of_keys(at.positions.k))
        given = {"positions": place, "mask": of}
        keys = [part.of_keys(t, -2) for t in (k, v)]
        case = rg.explain(q[:, :, rows], *keys, **given)
        assert "compared with positions" in dict(case.facts)["mask as"]
        out = rg.attention(q[:, :, rows], *keys, **given)
        right = rg.attention(q[:, :, rows], *keys, **given, backend=rg.Reference())
        torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-5)
        dense = part.of_pairs(mask.on(151, 331, batch=(3,), heads=4, positions=at.positions).dense(), at)
        written = rg.attention(q[:, :, rows], *keys, mask=rg.Dense(dense), backend=rg.Reference())
        torch.testing.assert_close(right, written)


def test_a_row_has_the_same_bits_alone(isa: str) -> None:
    at = FRAMES["blocks"]
    q, k, v = torch.randn(3, 4, 151, 19), torch.randn(3, 4, 331, 19), torch.randn(3, 4, 331, 7)
    for kind in ("pieces", "of_heads"):
        given: dict[str, Any] = {"mask": retained(kind, at), "backend": rg.Native(invariant=True)}
        whole = rg.attention(q, k, v, **given, positions=at.positions)
        for rows in (slice(0, 1), slice(66, 68), slice(64, 131)):
            place = rg.Positions(at.positions.q[rows], at.positions.k)
            part = rg.attention(q[:, :, rows], k, v, **given, positions=place)
            assert torch.equal(part, whole[:, :, rows]), (kind, rows)


@pytest.mark.full
def test_graphs_hold_numbers_and_no_table() -> None:
    def f(q: Tensor, k: Tensor, v: Tensor, until: Tensor) -> Tensor:
        return rg.attention(q, k, v, mask=rg.Causal() & rg.Retained(until))

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True, dynamic=True)
    for n, lead in ((151, (3, 2)), (163, (3, 2)), (163, ())):
        q, k, v = (torch.randn(3, h, n, 8, requires_grad=True) for h in (4, 2, 2))
        until = torch.randint(0, 2 * n, (*lead, n))
        found, expected = compiled(q, k, v, until), f(q, k, v, until)
        torch.testing.assert_close(found, expected)
        grads = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (found, expected)]
        torch.testing.assert_close(*grads)


def test_explain_says_how_it_is_read() -> None:
    x = torch.randn(1, 2, 40, 8)
    told = dict(rg.explain(x, x, x, mask=rg.Causal() & rg.Retained(torch.arange(40) + 9), backend=rg.Native()).facts)
    assert told["mask as"] == "a number for each key, compared with positions and an interval of keys for each query"


CHANGING = {  # positions of calls of the same lengths
    "a step further": [rg.Positions(torch.tensor([n]), torch.arange(16)) for n in (0, 3, 4, 9, 15)],
    "other ends": [rg.tail(1, 16), rg.head(1, 16), rg.tail(1, 16)],
    "other lengths of sequences": [rg.tail(1, [16, 5]), rg.tail(1, [16, 9]), rg.tail(1, [3, 16])],
}


@needs_kernels
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(
    "beside", [rg.Causal(), rg.Window(3, 0), rg.Causal() & rg.Lengths(keys=torch.tensor([16, 11]))]
)
@pytest.mark.parametrize("name", CHANGING)
def test_a_plan_reads_the_positions_of_each_call(name: str, beside: rg.Mask, learned: bool) -> None:
    mask = beside & rg.Retained(torch.arange(16) * 5 % 13 + 3)
    for positions in CHANGING[name]:
        q, k, v = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 16, 8), torch.randn(2, 2, 16, 8)
        q.requires_grad_(learned)
        double = [t.detach().double().requires_grad_(learned) for t in (q, k, v)]
        right = rg.attention(*double, mask=mask, positions=positions, backend=rg.Reference())
        out = rg.attention(q, k, v, mask=mask, positions=positions)
        torch.testing.assert_close(out.double(), right, rtol=1e-4, atol=1e-5)
        if learned:
            (g,), (expected, *_) = (
                torch.autograd.grad(x.square().sum(), q_) for x, q_ in ((out, q), (right, double[:1]))
            )
            torch.testing.assert_close(g.double(), expected, rtol=1e-4, atol=1e-5)
