"""Caches of int8: rounded once, when a token is appended; then attention of the numbers that they hold, exactly."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import regard as rg
from regard.core.deferred import written_out
from regard.core.int8_rows import Int8Rows, rounded
from regard.nn import FixedCache, GrowingCache, KVCache, PagedCache, RollingCache

exact = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
BATCH, HEADS, KEY_HEADS, N, DK, DV, WINDOW = 3, 6, 2, 23, 5, 7, 4
INT8 = torch.int8
CACHES: dict[str, Callable[[], KVCache]] = {
    "growing": lambda: GrowingCache(dtype=INT8),
    "fixed": lambda: FixedCache(BATCH, KEY_HEADS, N, DK, DV, INT8),
    "rolling": lambda: RollingCache(WINDOW, dtype=INT8),
    "paged": lambda: PagedCache(BATCH, KEY_HEADS, (N // 5 + 1) * BATCH, 5, DK, DV, INT8),
}
WINDOWED = rg.Window(before=WINDOW - 1, after=None)


def tensors(dtype: torch.dtype = torch.float64, n: int = N) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (HEADS, n, DK), (KEY_HEADS, n, DK), (KEY_HEADS, n, DV)
    q, k, v = (torch.randn(BATCH, *shape).to(dtype) for shape in shapes)
    return q, k, v


def held(x: Tensor) -> Tensor:
    """The numbers that a cache holds of x, in float64."""
    numbers, scales = rounded(x)
    return numbers.double() * scales.double()


def decode(cache: KVCache, q: Tensor, k: Tensor, v: Tensor, cuts: list[int], **options: object) -> Tensor:
    parts = []
    for a, b in pairwise([0, *cuts, q.shape[-2]]):
        seen = cache.append(k[..., a:b, :], v[..., a:b, :])
        both = {"mask": rg.Causal() & cache.mask, "positions": cache.positions}
        parts.append(rg.attention(q[..., a:b, :], *seen, **both, **options))
    return torch.cat(parts, -2)


def whole(name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = rg.Causal() & WINDOWED if name == "rolling" else rg.Causal()
    return rg.attention(q.double(), held(k), held(v), mask=mask, backend=rg.Reference())


@pytest.mark.parametrize("name", CACHES)
@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, N), max_size=N).map(sorted))
def test_any_chunking_is_attention_of_the_rounded_numbers(name: str, cuts: list[int]) -> None:
    q, k, v = tensors()
    exact(decode(CACHES[name](), q, k, v, cuts), whole(name, q, k, v))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", [None, rg.Tiled(), rg.Reference()], ids=repr)
@pytest.mark.parametrize("name", CACHES)
def test_nothing_but_the_output_is_rounded_to_the_dtype(
    name: str, backend: rg.Backend | None, dtype: torch.dtype
) -> None:
    q, k, v = tensors(dtype)
    out, truth = decode(CACHES[name](), q, k, v, [7, 8, 9, 20], backend=backend), whole(name, q, k, v)
    assert out.dtype == dtype
    allowed = torch.finfo(dtype).eps * truth.abs() / 2 + 2e-6
    assert ((out.double() - truth).abs() <= allowed).all()


@pytest.mark.parametrize("score", [rg.Cosine(2.0), rg.ScaledDot(torch.rand(HEADS)), rg.Distance(0.3)], ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_that_prepare_keys_see_the_products(score: rg.Score, dtype: torch.dtype) -> None:
    q, k, v = tensors(dtype)
    out = decode(GrowingCache(dtype=INT8), q, k, v, [22], score=score)
    truth = rg.attention(q.double(), held(k), held(v), score=score, mask=rg.Causal(), backend=rg.Reference())
    allowed = torch.finfo(dtype).eps * truth.abs() / 2 + 1e-5
    assert ((out.double() - truth).abs() <= allowed).all()


@pytest.mark.parametrize("name", CACHES)
def test_bits_depend_on_no_order_of_appends(name: str) -> None:
    _, k, v = tensors(torch.float32)
    read = []
    for cuts in ([], [1, 2, 3, 9], list(range(1, N))):
        cache = CACHES[name]()
        for a, b in pairwise([0, *cuts, N]):
            seen = cache.append(k[..., a:b, :], v[..., a:b, :])
        read.append([written_out(part)[..., -WINDOW:, :] for t in seen for part in (t.numbers, t.scales)])
    for others in read[1:]:
        assert all(map(torch.equal, read[0], others))


@pytest.mark.parametrize("name", CACHES)
def test_crop_reorder_copy_and_reset(name: str) -> None:
    q, k, v = tensors()
    cache, chosen = CACHES[name](), torch.tensor([2, 0, 2])
    cache.append(k[..., :9, :], v[..., :9, :])
    cache.append(k[..., 20:22, :], v[..., 20:22, :])
    cache.crop(9)
    cache.reorder(chosen)
    for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache):
        history = [torch.cat([t[chosen, :, :9], t[..., 9:12, :]], -2) for t in (k, v)]
        seen = twin.append(k[..., 9:12, :], v[..., 9:12, :])
        out = rg.attention(q[..., 9:12, :], *seen, mask=rg.Causal() & twin.mask, positions=twin.positions)
        full = torch.cat([q[..., :9, :], q[..., 9:12, :]], -2)
        exact(out, whole(name, full, *history)[..., 9:, :])
    cache.reset()
    exact(decode(cache, q, k, v, [17]), whole(name, q, k, v))


def test_memory_is_about_half_of_bfloat16() -> None:
    x = torch.randn(1, 8, 100, 64, dtype=torch.bfloat16)
    plain, small = GrowingCache(), GrowingCache(dtype=INT8)
    plain.append(x, x)
    small.append(x, x)
    bytes_of = [sum(t.nbytes for t in cache._buffers or ()) for cache in (small, plain)]
    assert bytes_of[0] / bytes_of[1] == (64 + 4) / 128


def test_a_gradient_of_the_queries_passes() -> None:
    q, k, v = tensors(torch.float64)
    cache = GrowingCache(dtype=INT8)
    seen = cache.append(k, v)
    asked = q.clone().requires_grad_()
    rg.attention(asked, *seen, mask=rg.Causal()).square().sum().backward()
    other = q.clone().requires_grad_()
    rg.attention(other, held(k), held(v), mask=rg.Causal()).square().sum().backward()
    assert asked.grad is not None
    exact(asked.grad, other.grad)


@pytest.mark.full  # torch's compiler takes seconds for each graph
@pytest.mark.parametrize("name", ["growing", "fixed", "paged"])
def test_compiled_steps(name: str) -> None:
    """A graph widens the keys: the numbers are the same."""
    q, k, v = tensors(torch.float32)
    torch.compiler.reset()

    @torch.compile(backend="eager")
    def step(cache: KVCache, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = cache.append(k, v)
        return rg.attention(q, *seen, mask=rg.Causal() & cache.mask, positions=cache.positions)

    cache = CACHES[name]()
    with torch.no_grad():
        out = torch.cat([step(cache, *(t[..., i : i + 1, :] for t in (q, k, v))) for i in range(5)], -2)
    truth = whole(name, *(t[..., :5, :] for t in (q, k, v)))
    torch.testing.assert_close(out.double(), truth, rtol=0, atol=2e-6)


def test_one_head_without_an_axis() -> None:
    q, k, v = (t[:, 0] for t in tensors())
    cache = GrowingCache(dtype=INT8)
    exact(decode(cache, q, k, v, [3, 4]), rg.attention(q, held(k), held(v), mask=rg.Causal()))
    flat = GrowingCache(dtype=INT8)
    exact(decode(flat, q[0], k[0], v[0], [3, 4]), rg.attention(q[0], held(k[0]), held(v[0]), mask=rg.Causal()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_unequal_numbers_of_tokens(dtype: torch.dtype) -> None:
    """Nested tokens and queries: each sequence is attention of its own rounded numbers."""
    cache = PagedCache(3, KEY_HEADS, 12, 4, DK, DV, INT8)
    history: list[list[tuple[Tensor, Tensor]]] = [[], [], []]
    for counts in ([6, 9, 2], [1, 3, 1], [1, 2, 4]):
        q, k, v = ([torch.randn(n, h, d).to(dtype) for n in counts] for h, d in ((6, DK), (2, DK), (2, DV)))
        nested = [rg.pack(parts).nested().transpose(1, 2) for parts in (q, k, v)]
        seen = cache.append(*nested[1:])
        out = rg.attention(nested[0], *seen, mask=rg.Causal() & cache.mask, positions=cache.positions)
        for b, found in enumerate(out.unbind()):
            history[b].append((k[b], v[b]))
            keys, values = (torch.cat(parts).transpose(0, 1)[None] for parts in zip(*history[b], strict=True))
            at = rg.tail(counts[b], keys.shape[-2])
            query = q[b].transpose(0, 1)[None].double()
            truth = rg.attention(query, held(keys), held(values), mask=rg.Causal(), positions=at)[0]
            eps = torch.finfo(dtype).eps if dtype != torch.float64 else 0
            assert ((found.double() - truth).abs() <= eps * truth.abs() / 2 + 2e-6).all()


def test_pages_that_beams_share_are_copied_with_their_scales() -> None:
    q, k, v = tensors()
    cache = PagedCache(BATCH, KEY_HEADS, 16, 4, DK, DV, INT8)
    cache.append(k[..., :6, :], v[..., :6, :])
    cache.reorder(torch.tensor([1, 1, 1]))
    assert cache.key_scales is not None and cache.key_scales.shape == (16, KEY_HEADS, 4, 1)
    keys, values = (torch.cat([t[[1, 1, 1], :, :6], t[..., 6:8, :]], -2) for t in (k, v))
    seen = cache.append(k[..., 6:8, :], v[..., 6:8, :])
    out = rg.attention(q[..., 6:8, :], *seen, mask=rg.Causal(), positions=cache.positions)
    exact(out, whole("paged", q[..., :8, :], keys, values)[..., 6:, :])


def test_what_returns_is_int8_and_said_so() -> None:
    q, k, v = tensors(torch.float32)
    cache = GrowingCache(dtype=INT8)
    keys, values = cache.append(k, v)
    assert type(keys) is Int8Rows and type(values) is Int8Rows and keys.dtype == torch.float32
    said = str(rg.explain(q, keys, values, mask=rg.Causal(), backend=rg.Tiled()))
    assert "int8             widened to float32: it reads contiguous keys and values" in said


def test_errors_of_bad_input() -> None:
    for make, name in ((GrowingCache, "GrowingCache"), (partial(RollingCache, WINDOW), "RollingCache")):
        with pytest.raises(ValueError, match=rf"{name}\(dtype=torch\.bfloat16\): expected None, .* or torch\.int8"):
            make(dtype=torch.bfloat16)
    _, k, v = tensors(torch.float32)
    for name, make in CACHES.items():
        cache = make()
        with pytest.raises(TypeError, match=r"k has dtype torch\.int64; rows are rounded to int8 from"):
            cache.append(k.long(), v.long())
        cache.append(k[..., :2, :], v[..., :2, :])
        for bad_k, bad_v, error, said in (
            (k, v[..., :3, :], rg.ShapeError, "a value for each key"),
            (k[..., :3], v, rg.ShapeError, "k has shape .* this cache holds"),
            (k, v.to("meta"), ValueError, "v is on meta, this cache on cpu"),
            (k, v.long(), TypeError, "v has dtype"),
            (k.clone().requires_grad_(), v, ValueError, "requires a gradient, and a cache records none"),
        ):
            with pytest.raises(error, match=said):
                cache.append(bad_k, bad_v)
        assert cache.length == 2, name
