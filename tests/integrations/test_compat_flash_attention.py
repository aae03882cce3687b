"""flash-attention's functions on regard, against its definition written out: the library itself needs a GPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import regard as rg
from regard.compat.flash_attention import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

BATCH, HEADS, KEY_HEADS, WIDTH = 3, 6, 2, 8
SLOPES = torch.rand(HEADS, dtype=torch.float64)
EACH = torch.rand(BATCH, HEADS, dtype=torch.float64)
CLOSE = {"rtol": 1e-10, "atol": 1e-10}

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "scale": {"softmax_scale": 0.3},
    "window": {"window_size": (2, 1)},
    "left": {"window_size": (2, -1)},
    "right": {"window_size": (-1, 1)},
    "causal window": {"causal": True, "window_size": (3, 5)},
    "softcap": {"softcap": 0.7, "alibi_slopes": SLOPES},
    "slopes": {"alibi_slopes": SLOPES, "causal": True},
    "slopes by sequence": {"alibi_slopes": EACH, "causal": True, "window_size": (4, -1)},
}


def randn(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=grad)


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """One sequence, q (nq, heads, d) and k (nk, hk, d), as the docstrings of flash_attn_interface.py have it."""
    nq, nk, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = (torch.stack([t[:, h // group] for h in range(q.shape[1])], 1) for t in (k, v))
    s = torch.einsum("ihd,jhd->hij", q, k) * (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale)
    if softcap > 0:
        s = softcap * torch.tanh(s / softcap)
    i, j = torch.arange(nq)[:, None] + nk - nq, torch.arange(nk)
    if alibi_slopes is not None:
        s = s - alibi_slopes[:, None, None] * (i - j).abs()
    left, right = window_size
    hidden = torch.zeros(nq, nk, dtype=torch.bool)
    hidden |= (j > i) if causal else hidden
    hidden |= (j > i + right) if right >= 0 else hidden
    hidden |= (j < i - left) if left >= 0 else hidden
    empty = hidden.all(-1)
    s = s.masked_fill(hidden, -math.inf).masked_fill(empty[:, None], 0)
    p = s.softmax(-1).masked_fill(empty[:, None], 0)
    lse = s.logsumexp(-1).masked_fill(empty, math.inf)
    return torch.einsum("hij,jhd->ihd", p, v), lse


def of_sequence(options: dict[str, Any], b: int) -> dict[str, Any]:
    """The options of one sequence of a batch."""
    slopes = options.get("alibi_slopes")
    return {**options, "alibi_slopes": slopes[b]} if slopes is not None and slopes.dim() == 2 else options


@pytest.mark.parametrize(("nq", "nk"), [(5, 11), (11, 5), (7, 7)])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_flash_attn_func(options: dict[str, Any], nq: int, nk: int) -> None:
    q = randn(BATCH, nq, HEADS, WIDTH, grad=True)
    k, v = (randn(BATCH, nk, KEY_HEADS, WIDTH, grad=True) for _ in range(2))
    expected = [reference(q[b], k[b], v[b], **of_sequence(options, b)) for b in range(BATCH)]
    out, lse, third = flash_attn_func(q, k, v, **options, return_attn_probs=True)
    found = flash_attn_func(q, k, v, **options)
    assert torch.equal(found, out) and found.is_contiguous() and third is None
    torch.testing.assert_close(out, torch.stack([o for o, _ in expected]), **CLOSE)
    torch.testing.assert_close(lse, torch.stack([l for _, l in expected]), **CLOSE)
    weight = torch.randn_like(out)
    ours = torch.autograd.grad((out * weight).sum(), (q, k, v))
    theirs = torch.autograd.grad((torch.stack([o for o, _ in expected]) * weight).sum(), (q, k, v))
    torch.testing.assert_close(ours, theirs, **CLOSE)


CU_Q, CU_K = torch.tensor([0, 2, 2, 9], dtype=torch.int32), torch.tensor([0, 6, 7, 11], dtype=torch.int32)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_flash_attn_varlen_func(options: dict[str, Any]) -> None:
    q, k, v = randn(9, HEADS, WIDTH, grad=True), randn(11, KEY_HEADS, WIDTH, grad=True), randn(11, KEY_HEADS, WIDTH)
    parts = [
        reference(q[i:m], k[j:n], v[j:n], **of_sequence(options, b))
        for b, ((i, m), (j, n)) in enumerate(
            zip(CU_Q.unfold(0, 2, 1).tolist(), CU_K.unfold(0, 2, 1).tolist(), strict=True)
        )
    ]
    expected, expected_lse = torch.cat([o for o, _ in parts]), torch.cat([l for _, l in parts], 1)
    out, lse, _ = flash_attn_varlen_func(q, k, v, CU_Q, CU_K, 7, 6, **options, return_attn_probs=True)
    torch.testing.assert_close(out, expected, **CLOSE)
    torch.testing.assert_close(lse, expected_lse, **CLOSE)
    weight = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad((o * weight).sum(), (q, k)) for o in (out, expected))
    torch.testing.assert_close(ours, theirs, **CLOSE)

    pool_k, pool_v, table = paged(k, v, CU_K)
    found = flash_attn_varlen_func(q, pool_k, pool_v, CU_Q, CU_K, 7, 6, **options, block_table=table)
    torch.testing.assert_close(found, expected, **CLOSE)


def paged(k: Tensor, v: Tensor, cu: Tensor, size: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of each sequence in pages of a pool that lie in any order; what is behind them is NaN."""
    table = torch.tensor([[5, 2], [0, 1], [4, 3]], dtype=torch.int32)
    pools = [torch.full((6, size, *t.shape[1:]), math.nan, dtype=t.dtype) for t in (k, v)]
    for b, (j, n) in enumerate(cu.unfold(0, 2, 1).tolist()):
        for row in range(n - j):
            for pool, t in zip(pools, (k, v), strict=True):
                pool[table[b, row // size], row % size] = t.detach()[j + row]
    return pools[0], pools[1], table


LENGTHS = torch.tensor([4, 0, 6], dtype=torch.int32)
PLACES: dict[str, dict[str, Any]] = {
    "own rows": {},
    "other rows": {"cache_batch_idx": torch.tensor([3, 0, 1], dtype=torch.int32)},
    "pages": {"block_table": torch.tensor([[5, 2], [0, 1], [4, 3]], dtype=torch.int32)},
    "padded in front": {"cache_leftpad": torch.tensor([2, 0, 3], dtype=torch.int32)},
}


@pytest.mark.parametrize("new", [0, 2])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_flash_attn_with_kvcache(options: dict[str, Any], place: dict[str, Any], new: int) -> None:
    table = place.get("block_table")
    shape = (6, 5, KEY_HEADS, WIDTH) if table is not None else (4, 10, KEY_HEADS, WIDTH)
    k_cache, v_cache = randn(*shape), randn(*shape)
    q, k, v = randn(BATCH, 2, HEADS, WIDTH), randn(BATCH, new, KEY_HEADS, WIDTH), randn(BATCH, new, KEY_HEADS, WIDTH)
    rows = place.get("cache_batch_idx", torch.arange(BATCH)) if table is None else table.long()
    held = [(t[rows] if table is None else t[rows].flatten(1, 2)).clone() for t in (k_cache, v_cache)]
    more = (k, v) if new else (None, None)
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, *more, cache_seqlens=LENGTHS, **place, **options, return_softmax_lse=True
    )
    for b in range(BATCH):
        first, n = int(place.get("cache_leftpad", torch.zeros(BATCH))[b]), int(LENGTHS[b])
        own = [torch.cat([t[b, first:n], added[b]]) for t, added in zip(held, (k, v), strict=True)]
        expected, expected_lse = reference(q[b], *own, **of_sequence(options, b))
        torch.testing.assert_close((out[b], lse[b]), (expected, expected_lse), **CLOSE)
        after = k_cache[rows[b]] if table is None else k_cache[rows[b]].flatten(0, 1)
        assert torch.equal(after[n : n + new], k[b]) and torch.equal(after[:n], held[0][b, :n])


@pytest.mark.parametrize("window", [torch.tensor([2, 1]), np.array([2, 1]), [np.int64(2), torch.tensor(1)]], ids=type)
def test_a_window_of_two_integers_in_whatever_holds_them(window: Any) -> None:
    q, k, cu = randn(BATCH, 5, HEADS, WIDTH), randn(BATCH, 7, KEY_HEADS, WIDTH), torch.tensor([0, 2, 5])
    rows = randn(5, HEADS, WIDTH)
    for call in (
        lambda w: flash_attn_func(q, k, k, window_size=w),
        lambda w: flash_attn_varlen_func(rows, rows, rows, cu, cu, 3, 3, window_size=w),
        lambda w: flash_attn_with_kvcache(q, k, k, window_size=w),
    ):
        assert call(window).equal(call((2, 1)))


@pytest.mark.parametrize("lengths", [[5, 7, 6], np.array([5, 7, 6])], ids=type)
def test_lengths_of_a_cache_in_whatever_holds_them(lengths: Any) -> None:
    q, k = randn(BATCH, 2, HEADS, WIDTH), randn(BATCH, 7, KEY_HEADS, WIDTH)
    expected = flash_attn_with_kvcache(q, k, k, cache_seqlens=torch.tensor([5, 7, 6]), causal=True)
    assert flash_attn_with_kvcache(q, k, k, cache_seqlens=lengths, causal=True).equal(expected)


def test_a_cache_of_one_length_or_full() -> None:
    q, cache = randn(BATCH, 3, HEADS, WIDTH), randn(BATCH, 7, KEY_HEADS, WIDTH)
    for given, n in ((5, 5), (None, 7)):
        out = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=given, causal=True)
        expected = flash_attn_func(q, cache[:, :n], cache[:, :n], causal=True)
        torch.testing.assert_close(out, expected, **CLOSE)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_of_new_tokens(interleaved: bool, causal: bool) -> None:
    """A pair turns by cos + i sin of its position; without a causal mask all queries stand at the first."""
    angle = torch.rand(12, 2, dtype=torch.float64)
    cache, q, k = randn(BATCH, 10, KEY_HEADS, WIDTH), randn(BATCH, 3, HEADS, WIDTH), randn(BATCH, 3, KEY_HEADS, WIDTH)

    def turned(x: Tensor, *, advance: bool) -> Tensor:
        at = LENGTHS.long()[:, None] + torch.arange(3) * advance
        pairs = x[..., :4].unflatten(-1, (2, 2))
        first, second = pairs.unbind(-1) if interleaved else pairs.unbind(-2)
        z = torch.complex(first, second) * torch.polar(torch.ones(()).double(), angle[at])[:, :, None]
        turn = torch.stack([z.real, z.imag], -1 if interleaved else -2).flatten(-2)
        return torch.cat([turn, x[..., 4:]], -1)

    both = [cache.clone(), cache.clone()]
    expected = flash_attn_with_kvcache(
        turned(q, advance=causal), *both, turned(k, advance=True), k, cache_seqlens=LENGTHS, causal=causal
    )
    mine = [cache.clone(), cache.clone()]
    cos, sin = angle.cos(), angle.sin()
    given = {"cache_seqlens": LENGTHS, "causal": causal, "rotary_interleaved": interleaved}
    out = flash_attn_with_kvcache(q, *mine, k, k, cos, sin, **given)
    torch.testing.assert_close(out, expected, **CLOSE)
    torch.testing.assert_close(mine, both, **CLOSE)


def test_half_precision_runs_natively_and_drops() -> None:
    q, k = torch.randn(2, 5, 4, 16).bfloat16(), torch.randn(2, 9, 2, 16).bfloat16()
    out = flash_attn_func(q, k, k, causal=True)
    expected = torch.stack(
        [reference(a.float(), b.float(), b.float(), causal=True)[0] for a, b in zip(q, k, strict=True)]
    )
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, atol=0.02, rtol=0.02)
    assert not torch.equal(flash_attn_func(q, k, k, 0.5), flash_attn_func(q, k, k))
    assert int(flash_attn_func(q, k, k, 1.0).count_nonzero()) == 0


Q, K = torch.zeros(2, 3, 4, 8), torch.zeros(2, 5, 4, 8)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: flash_attn_func(Q[0], K, K), rg.ShapeError, r"q has shape \(3, 4, 8\); expected \(batch, n, heads, d"),
        (lambda: flash_attn_func(Q, K, K, 0.1, return_attn_probs=True), rg.Unsupported, "pattern of dropout"),
        (lambda: flash_attn_func(Q, K, K, window_size=(-2, 0)), ValueError, "left=-2"),
        (
            lambda: flash_attn_func(Q, K, K, window_size=(1.5, 0)),
            TypeError,
            r"window_size is \(1.5, 0\); expected two int",
        ),
        (lambda: flash_attn_func(Q, K, K, window_size=(1, 2, 3)), TypeError, "expected two integers"),
        (lambda: flash_attn_with_kvcache(Q, K, K, cache_seqlens=torch.ones(2)), TypeError, "cache_seqlens has dtype"),
        (lambda: flash_attn_func(Q, K[:, :, :3], K[:, :, :3]), rg.ShapeError, "heads"),
        (lambda: flash_attn_varlen_func(Q[0], K, K, CU_Q, CU_K, 1, 1), rg.ShapeError, r"expected \(total, heads, d\)"),
        (lambda: flash_attn_with_kvcache(Q, K, K, Q, Q, cache_seqlens=3), ValueError, "room for 5 tokens; 6 were"),
        (lambda: flash_attn_with_kvcache(Q, K, K, rotary_cos=Q, rotary_sin=Q), ValueError, "without k"),
        (
            lambda: flash_attn_with_kvcache(Q, K, K, Q, Q, Q, Q, 0, cache_leftpad=torch.zeros(2)),
            rg.Unsupported,
            "rotate q and k before",
        ),
    ],
)
def test_refusals(call: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()


def many(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


POOL, SLOPES, TABLE = torch.zeros(6, 4, 4, 8), torch.rand(2, 4), torch.zeros(1, 2, dtype=torch.int32)
PACKED = torch.zeros(7, 4, 8)


def packed(cu: Tensor, cu_k: Tensor | None = None, **given: Any) -> Tensor:
    k = POOL if "block_table" in given else PACKED
    return flash_attn_varlen_func(PACKED, k, k, cu, cu if cu_k is None else cu_k, 1, 1, **given)


@pytest.mark.parametrize("slopes", [None, SLOPES])
@pytest.mark.parametrize(
    ("cu", "error"),
    [
        (many(0, 3, 8), rg.ShapeError),
        (many(0, 3, 6), rg.ShapeError),
        (many(1, 3, 7), ValueError),
        (many(-1, 3, 7), ValueError),
        (many(0, 1 << 30, 7), ValueError),
    ],
)
def test_totals_that_do_not_fit(cu: Tensor, error: type[Exception], slopes: Tensor | None) -> None:
    """Slices of packed rows would leave out what is beyond their end."""
    with pytest.raises(error, match="cu_seqlens_q"):
        packed(cu, alibi_slopes=slopes)


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (
            lambda: flash_attn_func(Q, K, K, alibi_slopes=torch.rand(3, 4)),
            rg.ShapeError,
            r"expected \(4,\) or \(2",
        ),
        (lambda: packed(many(0, 3, 7), alibi_slopes=torch.rand(3, 4)), rg.ShapeError, "alibi_slopes has shape"),
        (lambda: packed(many(0, 3, 7), many(0, 3, 5, 7), alibi_slopes=SLOPES), rg.ShapeError, "expected as many"),
        (lambda: packed(many(0, 3, 7), block_table=many(0, 1).view(1, 2)), rg.ShapeError, "block_table has shape"),
        (lambda: packed(many(0, 3, 7), block_table=many(0, 9).view(2, 1)), rg.ShapeError, "of 6 pages, does not have"),
        (lambda: packed(many(0, 1, 7), block_table=many(0, 1).view(2, 1)), rg.ShapeError, "room for 4 rows"),
        (lambda: stepped(cache_batch_idx=many(0, 1 << 33)), ValueError, "cache_batch_idx is"),
        (lambda: stepped(cache_batch_idx=many(0, -1)), ValueError, "0 to 5"),
        (lambda: stepped(cache_batch_idx=many(0)), rg.ShapeError, "cache_batch_idx has shape"),
        (lambda: stepped(block_table=many(0, 1).view(1, 2)), rg.ShapeError, r"expected \(2, most pages\)"),
        (lambda: stepped(block_table=many(0, 1 << 32).view(2, 1)), rg.ShapeError, "a page that the pool"),
        (lambda: stepped(block_table=many(0, -1).view(2, 1)), rg.ShapeError, "a page that the pool"),
        (lambda: stepped(many(-1, 2)), ValueError, "lengths of 0 or more"),
        (lambda: stepped(many(1, 2, 3)), rg.ShapeError, "cache_seqlens has shape"),
        (lambda: stepped(rotary_cos=torch.ones(2, 4), rotary_sin=torch.ones(2, 4)), rg.ShapeError, "position 3 is rot"),
        (lambda: stepped(rotary_cos=torch.ones(9, 4)), ValueError, "rotary_cos is given without rotary_sin"),
        (
            lambda: stepped(rotary_cos=torch.ones(9, 4), rotary_sin=torch.ones(9, 1)),
            rg.ShapeError,
            r"rotary_sin \(9, 1\)",
        ),
        (lambda: stepped(rotary_cos=torch.ones(9, 5), rotary_sin=torch.ones(9, 5)), rg.ShapeError, "at most 8 featur"),
        (lambda: stepped(v=None), ValueError, "k is given without v"),
        (lambda: stepped(k=None), ValueError, "v is given without k"),
        (lambda: stepped(k=torch.ones(2, 1, 1, 8)), rg.ShapeError, "k has shape"),
        (lambda: stepped(v=torch.ones(1, 1, 4, 8)), rg.ShapeError, "v has shape"),
        (lambda: stepped(v=torch.ones(2, 2, 4, 8)), rg.ShapeError, "v has shape"),
        (lambda: stepped(k=torch.ones(2, 1, 4, 1)), rg.ShapeError, "as k_cache of shape"),
        (lambda: stepped(k=torch.ones(2, 4, 8)), rg.ShapeError, "k has shape"),
        (lambda: stepped(q=torch.ones(2, 1, 4, 6)), rg.ShapeError, "6"),
        (lambda: stepped(q=torch.ones(2, 1, 3, 8)), ValueError, "heads"),
        (lambda: stepped(window_size=(-2, 0)), ValueError, "left=-2"),
        (lambda: stepped(cache_leftpad=many(0, 0, 0)), rg.ShapeError, "Lengths.first has shape"),
        (lambda: stepped(alibi_slopes=torch.rand(3, 4)), rg.ShapeError, "alibi_slopes has shape"),
        (lambda: stepped(alibi_slopes=torch.rand(2, 3)), rg.ShapeError, "alibi_slopes has shape"),
        (lambda: flash_attn_func(Q, K[:1], K[:1], alibi_slopes=SLOPES), rg.ShapeError, "expected as many sequences"),
        (lambda: stepped(v=torch.ones(2, 1, 4, 8).half()), TypeError, "v has dtype torch.float16, v_cache"),
        (
            lambda: flash_attn_with_kvcache(Q, K[:1].expand_as(K), K, Q, Q, cache_seqlens=0),
            ValueError,
            "k_cache repeats one row",
        ),
        (lambda: flash_attn_with_kvcache(Q, K, K[:, :1]), rg.ShapeError, "k_cache and v_cache have shapes"),
        (
            lambda: flash_attn_varlen_func(PACKED, POOL, POOL[:, :2], many(0, 7), many(0, 4), 7, 4, block_table=TABLE),
            rg.ShapeError,
            "k and v have shapes",
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(call: Any, error: type[Exception], said: str) -> None:
    before = POOL.clone()
    with pytest.raises(error, match=said):
        call()
    assert torch.equal(POOL, before)


def stepped(lengths: Tensor | None = None, **given: Any) -> Tensor:
    """A step of two sequences that would write ones to the pool."""
    new, seqlens = torch.ones(2, 1, 4, 8), many(1, 3) if lengths is None else lengths
    given = {"q": new, "k": new, "v": new, **given}
    return flash_attn_with_kvcache(given.pop("q"), POOL, POOL, cache_seqlens=seqlens, causal=True, **given)


def test_slopes_of_each_sequence_with_dropout() -> None:
    """The weights of each sequence are dropped, in packed sequences too; without dropout they are those of the call."""
    q, k = randn(BATCH, 5, HEADS, WIDTH), randn(BATCH, 5, KEY_HEADS, WIDTH)
    slopes, cu = torch.rand(BATCH, HEADS), torch.arange(0, 5 * BATCH + 1, 5)
    whole = flash_attn_func(q, k, k, causal=True, alibi_slopes=slopes)
    for p in (0.0, 0.5):
        out = flash_attn_func(q, k, k, p, causal=True, alibi_slopes=slopes)
        packed = (t.flatten(0, 1) for t in (q, k, k))
        rows = flash_attn_varlen_func(*packed, cu, cu, 5, 5, p, causal=True, alibi_slopes=slopes)
        for found in (out, rows.unflatten(0, (BATCH, 5))):
            assert found.isfinite().all() and torch.equal(found, whole) == (p == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (8, 0)}], ids=str)
@pytest.mark.parametrize("behind", [-1, 4, 10**6])
def test_a_table_may_say_anything_behind_the_pages_of_a_sequence(
    dtype: torch.dtype, options: dict[str, Any], behind: int
) -> None:
    k, v = torch.randn(2, 4, 16, 2, 8, dtype=dtype).unbind(0)
    q, lengths = torch.randn(2, 1, 4, 8, dtype=dtype), many(20, 9)
    tables = [torch.tensor([[0, 1], [2, other]], dtype=torch.int32) for other in (behind, 3)]
    found, right = (flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, block_table=t, **options) for t in tables)
    torch.testing.assert_close(found, right, rtol=0, atol=0)


def test_an_empty_batch_may_have_slopes_for_each_sequence() -> None:
    none, slopes = torch.zeros(0, 3, 4, 8), torch.rand(0, 4)
    assert flash_attn_func(none, none, none, alibi_slopes=slopes).shape == (0, 3, 4, 8)
    assert flash_attn_with_kvcache(none, POOL, POOL, alibi_slopes=slopes).shape == (0, 3, 4, 8)
    packed_none = none.flatten(0, 1)
    out = flash_attn_varlen_func(packed_none, packed_none, packed_none, many(0), many(0), 0, 0, alibi_slopes=slopes)
    assert out.shape == (0, 4, 8)
