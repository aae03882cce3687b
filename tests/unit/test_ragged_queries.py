"""Nested queries over the keys of a batch: each sequence as if alone, also through a PagedCache."""

from __future__ import annotations

import sys
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from regard.backends.native.ffi import runnable
from regard.nn import FixedCache, GrowingCache, PagedCache, RollingCache

exact = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
HEADS, KEY_HEADS, DK, DV, SIZE = 4, 2, 5, 7, 4
BEFORE = [3, 11, 0, 6, 2]  # tokens in the cache
NEW = [7, 1, 5, 0, 1]  # prefill, decode, a new sequence, nothing, decode
DOUBLE = torch.float64


def tokens(counts: list[int], heads: int, width: int, dtype: torch.dtype = DOUBLE) -> list[Tensor]:
    return [torch.randn(heads, n, width).to(dtype) for n in counts]


def jagged(parts: list[Tensor]) -> Tensor:
    """(batch, heads, n*, d) of (heads, n, d) each."""
    return rg.pack([t.transpose(0, 1) for t in parts]).nested().transpose(1, 2)


def parts_of(x: Tensor) -> list[Tensor]:
    return [t.transpose(0, 1) for t in x.transpose(1, 2).unbind()]


CALLS: dict[str, dict[str, Any]] = {
    "causal": {"mask": rg.Causal()},
    "window": {"mask": rg.Window(before=4, after=0)},
    "everything": {},
    "prefix": {"mask": rg.Causal() | rg.Prefix(2)},
    "where": {"mask": rg.Where(lambda b, h, i, j: (i + 2 * j) % 3 == 0)},
    "modifiers": {"mask": rg.Causal(), "score": rg.ScaledDot() >> rg.SoftCap(2.0) >> rg.Alibi(torch.rand(HEADS))},
    "sink": {"mask": rg.Causal(), "sink": torch.randn(HEADS)},
}


class Batch:
    """Sequences that stand in a cache, and the tokens that come next."""

    def __init__(self, dtype: torch.dtype = DOUBLE, new: list[int] = NEW) -> None:
        self.k, self.v = (
            tokens([a + b for a, b in zip(BEFORE, new, strict=True)], KEY_HEADS, d, dtype) for d in (DK, DV)
        )
        self.q, self.new = tokens(new, HEADS, DK, dtype), new
        self.cache = PagedCache(len(BEFORE), KEY_HEADS, 40, SIZE, DK, DV, dtype)
        self.cache.append(*(jagged([t[:, :n] for t, n in zip(x, BEFORE, strict=True)]) for x in (self.k, self.v)))
        self.later = [jagged([t[:, n:] for t, n in zip(x, BEFORE, strict=True)]) for x in (self.k, self.v)]

    def together(self, mask: rg.Mask = rg.Everything(), **options: Any) -> list[Tensor]:
        kv = self.cache.append(*self.later)
        at = self.cache.positions
        return parts_of(rg.attention(jagged(self.q), *kv, mask=mask & self.cache.mask, positions=at, **options))

    def alone(self, **options: Any) -> list[Tensor]:
        """One call a sequence."""
        calls = zip(self.q, self.k, self.v, strict=True)
        return [
            rg.attention(q[None], k[None], v[None], positions=rg.tail(q.shape[1], k.shape[1]), **options)[0]
            for q, k, v in calls
        ]


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("new", [NEW, [1, 1, 1, 1, 1], [2, 2, 2, 2, 2], [0, 0, 0, 0, 3], [0, 0, 0, 0, 0]], ids=str)
def test_each_sequence_is_as_if_alone(name: str, new: list[int]) -> None:
    batch = Batch(new=new)
    for found, true in zip(
        batch.together(**CALLS[name]), batch.alone(**CALLS[name], backend=rg.Reference()), strict=True
    ):
        exact(found, true)
    assert batch.cache.lengths.tolist() == [a + b for a, b in zip(BEFORE, new, strict=True)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_the_kernels_give_each_sequence_its_rows(name: str, dtype: torch.dtype) -> None:
    batch = Batch(dtype)
    rough = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}[dtype]
    for found, true in zip(batch.together(**CALLS[name]), batch.alone(**CALLS[name]), strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, true, rtol=0, atol=rough)


@pytest.mark.skipif(not runnable(), reason="needs the native kernels: no C++ compiler was found")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_invariant_rows_have_the_bits_of_one_call_a_sequence(dtype: torch.dtype) -> None:
    batch, options = Batch(dtype), {"mask": rg.Causal(), "backend": rg.Native(invariant=True)}
    for found, true in zip(batch.together(**options), batch.alone(**options), strict=True):
        assert torch.equal(found, true)


def test_dropout_is_that_of_the_padded_batch() -> None:
    """Bits of dropout belong to the batch element, the head and the positions: not to how many rows others have."""
    batch, drop = Batch(), rg.Dropout(0.4, seed=3)
    found = batch.together(rg.Causal(), dropout=drop)
    k, v = (
        torch.nn.utils.rnn.pad_sequence([t.transpose(0, 1) for t in x], batch_first=True).transpose(1, 2)
        for x in (batch.k, batch.v)
    )
    for b, (out, q) in enumerate(zip(found, batch.q, strict=True)):
        n, length = q.shape[1], batch.k[b].shape[1]
        repeated = q[None].expand(len(NEW), -1, -1, -1)
        at = rg.Positions(torch.arange(length - n, length), torch.arange(k.shape[2]))
        exact(out, rg.attention(repeated, k, v, mask=rg.Causal(), positions=at, dropout=drop)[b])


@pytest.mark.parametrize("headed", [True, False])
@pytest.mark.parametrize("batched", [False, True])
def test_gradients_are_those_of_one_call_a_sequence(headed: bool, batched: bool) -> None:
    """batched: the positions of keys have a batch axis, of one."""
    nk = 9
    q = [t.requires_grad_() for t in tokens(NEW, HEADS if headed else 1, DK)]
    k, v = (
        torch.randn(len(NEW), KEY_HEADS if headed else 1, nk, d, dtype=DOUBLE, requires_grad=True) for d in (DK, DV)
    )
    k.data[0, :, 8], v.data[0, :, 8] = torch.nan, torch.nan  # no query of sequence 0 sees it
    positions = [torch.arange(n) for n in NEW]
    at = rg.Positions(torch.cat(positions), torch.arange(nk)[None] if batched else torch.arange(nk))
    if headed:
        out = rg.attention(jagged(q), k, v, mask=rg.Causal(), positions=at)
        found = parts_of(out)
    else:
        out = rg.attention(rg.pack([t[0] for t in q]).nested(), k[:, 0], v[:, 0], mask=rg.Causal(), positions=at)
        found = [t[None] for t in out.unbind()]
    true = [
        rg.attention(
            one[None],
            k[b : b + 1],
            v[b : b + 1],
            mask=rg.Causal(),
            backend=rg.Reference(),
            positions=rg.Positions(positions[b], at.k),
        )[0]
        for b, one in enumerate(q)
    ]
    weights = [torch.randn_like(t) for t in true]
    grads = [
        torch.autograd.grad(sum((t * w).sum() for t, w in zip(outs, weights, strict=True)), [*q, k, v])
        for outs in (found, true)
    ]
    for one, other in zip((*found, *grads[0]), (*true, *grads[1]), strict=True):
        exact(one, other)


def test_what_belongs_to_a_batch_element_stays_with_it() -> None:
    """A score with a tensor for each sequence: values and gradients, on padded queries."""
    batch = Batch()
    kv = [t.written_out().requires_grad_() for t in batch.cache.append(*batch.later)]
    q, nk = [t.requires_grad_() for t in batch.q], kv[0].shape[2]
    bias = torch.randn(len(NEW), 1, 1, nk, dtype=DOUBLE, requires_grad=True)
    at, mask = batch.cache.positions, rg.Causal() & batch.cache.mask
    score = rg.ScaledDot() >> rg.Bias(bias)
    found = parts_of(rg.attention(jagged(q), *kv, score=score, mask=mask, positions=at))
    true = list[Tensor]()
    for b, one in enumerate(q):
        k, v = (t[b : b + 1, :, : batch.k[b].shape[1]] for t in kv)
        own = rg.ScaledDot() >> rg.Bias(bias[b : b + 1, ..., : k.shape[2]])
        tail = rg.tail(one.shape[1], k.shape[2])
        true.append(
            rg.attention(one[None], k, v, score=own, mask=rg.Causal(), positions=tail, backend=rg.Reference())[0]
        )
    weights = [torch.randn_like(t) for t in true]
    grads = [
        torch.autograd.grad(sum((t * w).sum() for t, w in zip(outs, weights, strict=True)), [*q, *kv, bias])
        for outs in (found, true)
    ]
    for one, other in zip((*found, *grads[0]), (*true, *grads[1]), strict=True):
        exact(one, other)


def test_a_cache_holds_what_each_sequence_was_given() -> None:
    batch = Batch()
    kv = batch.cache.append(*batch.later)
    for held, parts in zip(kv, (batch.k, batch.v), strict=True):
        for b, part in enumerate(parts):
            assert torch.equal(held[b, :, : part.shape[1]], part)
    used = sum(-(-(a + b) // SIZE) for a, b in zip(BEFORE, NEW, strict=True))
    assert batch.cache.free_pages == 40 - used
    assert batch.cache.positions.q.tolist() == [t for a, n in zip(BEFORE, NEW, strict=True) for t in range(a, a + n)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, DOUBLE], ids=str)
def test_rows_are_written_as_torch_writes_them(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel and by operations of torch, also values whose features are no neighbours."""

    def filled() -> PagedCache:
        torch.manual_seed(0)
        batch = Batch(dtype)
        k, v = batch.later
        packed = rg.pack([t.transpose(0, 1) for t in parts_of(v)])
        apart = packed.values.repeat_interleave(2, -1)[..., ::2]
        later = torch.nested.nested_tensor_from_jagged(apart, packed.cu_seqlens.long()).transpose(1, 2)
        batch.cache.append(k, later)
        return batch.cache

    ours = filled()
    monkeypatch.setattr("regard.nn.cache.paged.write_pages", lambda *_: False)
    theirs = filled()
    assert torch.equal(ours.key_pages, theirs.key_pages) and torch.equal(ours.value_pages, theirs.value_pages)
    assert ours.key_pages.count_nonzero() == DK * KEY_HEADS * sum(BEFORE + NEW)


def test_a_sequence_without_new_tokens_copies_no_shared_page() -> None:
    cache = PagedCache(1, KEY_HEADS, 3, SIZE, DK, DV, DOUBLE)
    cache.append(*(torch.randn(1, KEY_HEADS, 2, d, dtype=DOUBLE) for d in (DK, DV)))
    cache.reorder(torch.tensor([0, 0]))
    cache.append(*(jagged(tokens([0, 1], KEY_HEADS, d)) for d in (DK, DV)))
    assert cache.free_pages == 1 and cache.block_table[:, 0].tolist() == [0, 1]
    with pytest.raises(ValueError, match="append: 2 more pages are needed, 1 of 3 are free"):
        cache.append(*(jagged(tokens([7, 0], KEY_HEADS, d)) for d in (DK, DV)))
    assert cache.lengths.tolist() == [2, 3] and cache.free_pages == 1


def test_explain_says_what_is_run() -> None:
    batch = Batch(torch.float32)
    kv = batch.cache.append(*batch.later)
    plan = rg.explain(jagged(batch.q), *kv, mask=rg.Causal() & batch.cache.mask, positions=batch.cache.positions)
    assert dict(plan.facts)["nested"] == "14 queries of 4 sequences in one call; above, the longest"
    plan = rg.explain(jagged(batch.q), *kv, mask=batch.cache.mask, backend=rg.Tiled())
    assert dict(plan.facts)["nested"] == (
        "14 queries of 4 sequences in 3 calls, one a number of queries; above, the last"
    )
    dense = [t.written_out() for t in kv]
    plan = rg.explain(jagged(batch.q), *dense, mask=batch.cache.mask, backend=rg.Tiled())
    assert dict(plan.facts)["nested"].startswith("14 queries of 4 sequences in 4 calls, one a sequence")
    plan = rg.explain(jagged(batch.q), *kv, mask=batch.cache.mask, dropout=rg.Dropout(0.5))
    assert (
        dict(plan.facts)["nested"]
        == "14 queries of 5 sequences in one call, padded to 35, since dropout is drawn for a padded batch"
    )
    assert "queries=int64[5]" in dict(plan.facts)["mask"]  # rows that pad cost nothing where a block has no others


def test_wrong_arguments_are_refused() -> None:
    batch = Batch()
    kv = batch.cache.append(*batch.later)
    q = jagged(batch.q)
    with pytest.raises(rg.ShapeError, match=r"under a mask or a score that compares positions.*cache\.positions"):
        rg.attention(q, *kv, mask=rg.Causal())
    with pytest.raises(rg.ShapeError, match=r"q is nested with 5 sequences, k has shape \(1, 2, 12, 5\)"):
        rg.attention(q, *(t[:1] for t in kv))
    with pytest.raises(rg.ShapeError, match=r"positions.q has shape \(14, 1\).*concatenated sequences, \(14,\)"):
        rg.attention(q, *kv, positions=rg.Positions(batch.cache.positions.q[:, None], batch.cache.positions.k))
    at = batch.cache.positions
    for wrong in (at.k[:-1], torch.arange(at.k.shape[-1] + 1)):  # the kernels would read behind its end, or not to it
        with pytest.raises(
            rg.ShapeError, match=rf"positions.k has shape \({len(wrong)},\); expected .*\({kv[0].shape[-2]}"
        ):
            rg.attention(q, *kv, mask=rg.Causal() & batch.cache.mask, positions=rg.Positions(at.q, wrong))
    ks, vs = (jagged(tokens([1, 2], KEY_HEADS, d)) for d in (DK, DV))
    with pytest.raises(rg.ShapeError, match=r"k has lengths \[1, 2\].*one for each of 5 sequences"):
        batch.cache.append(ks, vs)
    with pytest.raises(TypeError, match=r"v is not nested"):
        batch.cache.append(batch.later[0], torch.zeros(5, KEY_HEADS, 1, DV, dtype=DOUBLE))
    with pytest.raises(TypeError, match=r"k, its sequences one behind another, has dtype torch.float32"):
        batch.cache.append(*(t.float() for t in batch.later))
    for other in (GrowingCache(), RollingCache(4), FixedCache(5, KEY_HEADS, 20, DK, DV, DOUBLE)):
        with pytest.raises(TypeError, match="use PagedCache"):
            other.append(*batch.later)


def test_keys_of_numpy_are_read_as_tensors_are() -> None:
    q, (k, v) = jagged(tokens(NEW, HEADS, DK)), (torch.randn(len(NEW), KEY_HEADS, 9, d).double() for d in (DK, DV))
    out, expected = rg.attention(q, k.numpy(), v.numpy()), rg.attention(q, k, v)
    assert all(map(torch.equal, parts_of(out), parts_of(expected)))


@pytest.mark.parametrize("nested_keys", [False, True], ids=["q", "q, k and v"])
def test_a_call_enters_the_package_once(nested_keys: bool) -> None:
    q, (k, v) = jagged(tokens(NEW, HEADS, DK)), (torch.randn(len(NEW), KEY_HEADS, 9, d).double() for d in (DK, DV))
    if nested_keys:
        k, v = (jagged(tokens(NEW, KEY_HEADS, d)) for d in (DK, DV))
    entered: list[str] = []

    def see(frame: FrameType, event: str, _: Any) -> None:
        by = None if frame.f_back is None else frame.f_back.f_code.co_filename
        if event == "call" and by == api and "/regard/sequences/" in frame.f_code.co_filename:
            entered.append(frame.f_code.co_name)

    before, api = sys.getprofile(), rg.attention.__code__.co_filename
    sys.setprofile(see)
    try:
        rg.attention(q, k, v)
    finally:
        sys.setprofile(before)
    assert entered == ["attend"]


def test_lengths_of_the_whole_call_that_are_too_large_for_one_of_its_parts() -> None:
    """A sequence whose first key lies behind its last one sees none, also where its queries are fewer."""
    q = torch.nested.nested_tensor_from_jagged(torch.randn(4, 2, 8), torch.tensor([0, 1, 4])).transpose(1, 2)
    k = torch.randn(2, 2, 10, 8)
    mask = rg.Lengths(keys=torch.tensor([4, 9]), first=torch.tensor([5, 2]), queries=torch.tensor([2, 2]))
    found = rg.attention(q, k, k, mask=mask).unbind()
    padded = torch.stack([torch.nn.functional.pad(one, (0, 0, 0, 3 - one.shape[1])) for one in q.unbind()])
    right = rg.attention(padded, k, k, mask=mask)
    for one, whole in zip(found, right, strict=True):
        torch.testing.assert_close(one, whole[:, : one.shape[1]])
    assert not found[0].any()
    for wrong in ({"queries": [2, 4]}, {"first": [2, 11]}, {"keys": [11, 3]}):
        with pytest.raises(rg.ShapeError, match="expected numbers from 0 to"):
            rg.attention(q, k, k, mask=rg.Lengths(**{name: torch.tensor(n) for name, n in wrong.items()}))
