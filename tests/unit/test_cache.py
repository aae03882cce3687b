"""Caches of keys and values: decoding in any chunks is the whole at once, whatever is kept and however."""

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
from torch.utils._python_dispatch import TorchDispatchMode

import regard as rg
from needed import needs_kernels
from regard.backends.native.ffi import library
from regard.nn import FixedCache, GrowingCache, KVCache, PagedCache, RollingCache
from regard.nn.cache.rolling import TILE

exact = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
BATCH, HEADS, KEY_HEADS, N, DK, DV, WINDOW = 3, 6, 2, 23, 5, 7, 4

# of a dtype and the number of tokens that must fit
CACHES: dict[str, Callable[..., KVCache]] = {
    "growing": lambda dtype, n=N: GrowingCache(),
    "fixed": lambda dtype, n=N: FixedCache(BATCH, KEY_HEADS, n, DK, DV, dtype),
    "rolling": lambda dtype, n=N: RollingCache(WINDOW),
    "paged": lambda dtype, n=N: PagedCache(BATCH, KEY_HEADS, (n // 5 + 1) * BATCH, 5, DK, DV, dtype),
}
MASKS = {
    "causal": rg.Causal(),
    "window": rg.Causal() & rg.Window(before=WINDOW - 1, after=0),
    "sinks": rg.Causal() & (rg.Window(before=WINDOW - 1, after=0) | rg.Prefix(2)),
}
WINDOWED = rg.Window(before=WINDOW - 1, after=None)


def tensors(dtype: torch.dtype = torch.float64, n: int = N) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (HEADS, n, DK), (KEY_HEADS, n, DK), (KEY_HEADS, n, DV)
    q, k, v = (torch.randn(BATCH, *shape).to(dtype) for shape in shapes)
    return q, k, v


def decode(
    cache: KVCache, q: Tensor, k: Tensor, v: Tensor, cuts: list[int], mask: rg.Mask, **options: object
) -> Tensor:
    parts = []
    for a, b in pairwise([0, *cuts, q.shape[-2]]):
        seen = cache.append(k[..., a:b, :], v[..., a:b, :])
        both = {"mask": mask & cache.mask, "positions": cache.positions}
        parts.append(rg.attention(q[..., a:b, :], *seen, **both, **options))
    assert cache.length == q.shape[-2]
    return torch.cat(parts, -2)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", CACHES)
@settings(max_examples=25)
@given(cuts=st.lists(st.integers(0, N), max_size=N).map(sorted))
def test_any_chunking_is_the_whole(name: str, mask: str, cuts: list[int]) -> None:
    q, k, v = tensors()
    whole = rg.attention(q, k, v, mask=MASKS[mask] & WINDOWED if name == "rolling" else MASKS[mask])
    exact(decode(CACHES[name](q.dtype), q, k, v, cuts, MASKS[mask]), whole)


@pytest.mark.parametrize("cuts", [[7, 8, 9, 139, 140, 300], list(range(1, 600, 3)), [590]], ids=["few", "many", "one"])
def test_a_rolling_cache_that_forgets_is_the_whole(cuts: list[int]) -> None:
    q, k, v = tensors(n=600)
    whole = rg.attention(q, k, v, mask=rg.Causal() & WINDOWED)
    exact(decode(RollingCache(WINDOW), q, k, v, cuts, rg.Causal()), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", ["causal", "window"])
@pytest.mark.parametrize("name", ["growing", "fixed", "paged", "rolling"])
def test_invariant_kernels_give_the_same_bits(name: str, mask: str, dtype: torch.dtype) -> None:
    n = 331
    q, k, v = tensors(dtype, n)
    backend = rg.Native(invariant=True)
    whole = rg.attention(q, k, v, mask=MASKS[mask] & WINDOWED if name == "rolling" else MASKS[mask], backend=backend)
    for cuts in ([7, 8, 9, 139, 140, 300], list(range(1, n))):
        found = decode(CACHES[name](dtype, n), q, k, v, cuts, MASKS[mask], backend=backend)
        assert torch.equal(found, whole)


@pytest.mark.parametrize("name", CACHES)
def test_half_precision_and_alibi(name: str) -> None:
    q, k, v = tensors(torch.bfloat16)
    options = {"score": rg.ScaledDot() >> rg.Alibi(torch.rand(HEADS))}
    mask = MASKS["window"]
    whole = rg.attention(q.float(), k.float(), v.float(), mask=mask, **options)
    found = decode(CACHES[name](q.dtype), q, k, v, [7, 8, 9, 15], mask, **options)
    assert found.dtype == torch.bfloat16
    plain = rg.attention(q, k, v, mask=mask, backend=rg.Reference(), **options)
    assert (found - whole).abs().max() <= 2 * (plain - whole).abs().max()


@pytest.mark.parametrize("name", CACHES)
def test_beams_continue_what_they_chose(name: str) -> None:
    q, k, v = tensors()
    chosen, later = torch.tensor([2, 0, 2]), torch.tensor([1, 1, 0])
    cache = CACHES[name](q.dtype)
    decode(cache, q[..., :9, :], k[..., :9, :], v[..., :9, :], [4], rg.Causal())
    history = [t[..., :9, :] for t in (k, v)]
    for a, indices in ((9, chosen), (10, later), (13, chosen)):
        cache.reorder(indices)
        history = [torch.cat([old[indices], t[..., a : a + 3, :]], -2) for old, t in zip(history, (k, v), strict=True)]
        seen = cache.append(k[..., a : a + 3, :], v[..., a : a + 3, :])
        mask = rg.Causal() & cache.mask
        out = rg.attention(q[..., a : a + 3, :], *seen, mask=mask, positions=cache.positions)
        exact(out, rg.attention(q[..., a : a + 3, :], *history, mask=mask, positions=rg.tail(3, history[0].shape[-2])))


@pytest.mark.parametrize("name", CACHES)
def test_beams_may_become_more_or_fewer(name: str) -> None:
    _, k, v = tensors()
    cache = CACHES[name](k.dtype)
    cache.append(k[..., :7, :], v[..., :7, :])
    cache.reorder(torch.tensor([1, -1, 1, 0, 0]))
    assert cache.lengths.tolist() == [7] * 5
    new = (t[..., 7:8, :].mean(0, keepdim=True).expand(5, -1, -1, -1) for t in (k, v))
    keys, values = cache.append(*new)
    n = keys.shape[-2] - 1
    assert torch.equal(keys[..., :-1, :], k[..., 7 - n : 7, :][[1, 2, 1, 0, 0]])
    assert torch.equal(values[..., :-1, :], v[..., 7 - n : 7, :][[1, 2, 1, 0, 0]])
    cache.reorder(torch.tensor([2]))
    assert cache.lengths.tolist() == [8]


@pytest.mark.parametrize("name", CACHES)
def test_what_was_cropped_is_as_if_it_never_came(name: str) -> None:
    q, k, v = tensors()
    whole = rg.attention(q, k, v, mask=MASKS["window"])
    cache = CACHES[name](q.dtype)
    cut = partial(decode, mask=MASKS["window"])
    decode_to = 9
    cut(cache, q[..., :decode_to, :], k[..., :decode_to, :], v[..., :decode_to, :], [5])
    for draft in (1, 3, 7):  # as in speculative decoding: some tokens, then all but one are taken back
        wrong = torch.randn(BATCH, KEY_HEADS, draft, DK + DV, dtype=q.dtype).split([DK, DV], -1)
        cache.append(*wrong)
        cache.crop(decode_to)
        assert cache.length == decode_to and cache.positions.q.numel() == 0
        step = slice(decode_to, decode_to + 1)
        seen = cache.append(k[..., step, :], v[..., step, :])
        out = rg.attention(q[..., step, :], *seen, mask=MASKS["window"], positions=cache.positions)
        exact(out, whole[..., step, :])
        decode_to += 1
    cache.crop(0)
    assert cache.length == 0
    exact(cut(cache, q, k, v, [2, 12]), whole)
    cache.reset()
    assert cache.length == 0
    exact(cut(cache, q, k, v, [17]), whole)


def test_a_crop_says_where_it_cannot_go() -> None:
    _, k, v = tensors()
    for name in CACHES:
        cache = CACHES[name](k.dtype)
        cache.append(k[..., :7, :], v[..., :7, :])
        for length in (-1, 8):
            with pytest.raises(ValueError, match="crop"):
                cache.crop(length)
    rolling = RollingCache(WINDOW)
    for _ in range(400):
        rolling.append(k[..., :1, :], v[..., :1, :])
    said = r"crop\(5\): the next token would read keys from position 0 on, and those before \d+ are forgotten"
    with pytest.raises(ValueError, match=said):
        rolling.crop(5)
    assert rolling.length == 400


@pytest.mark.parametrize("name", CACHES)
def test_a_crop_takes_one_integer_and_keeps_no_tensor(name: str) -> None:
    _, k, v = tensors()
    cache = CACHES[name](k.dtype)
    cache.append(k[..., :7, :], v[..., :7, :])
    for wrong in (2.5, "3", None, torch.tensor(2.0)):
        with pytest.raises(TypeError, match=r"crop: length is .*; expected an integer"):
            cache.crop(wrong)
    if name != "paged":
        with pytest.raises(rg.ShapeError, match=r"crop: length has shape \(3,\)"):
            cache.crop(torch.tensor([6, 5, 6]))
    length = torch.tensor(6)
    cache.crop(length)
    length += 1  # of the caller
    assert cache.length == 6 and cache.append(k[..., :1, :], v[..., :1, :])[0].shape[-2] <= 7
    assert cache.length == 7
    with pytest.raises(TypeError, match=r"RollingCache.window is 2.5; expected an integer"):
        RollingCache(2.5)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", CACHES)
def test_what_is_no_dense_tensor_is_refused(name: str) -> None:
    _, k, v = tensors()
    for dtype in (k.dtype, torch.int8):
        cache = CACHES[name](dtype)
        cache.append(k[..., :2, :], v[..., :2, :])
        for wrong, said in (
            (k[..., :1, :].numpy(), "k is a ndarray of float64"),
            (k[..., :1, :].to_sparse(), "torch.sparse_coo"),
        ):
            with pytest.raises(TypeError, match=said):
                cache.append(wrong, v[..., :1, :])
        assert cache.length == 2


@pytest.mark.full
def test_growth_of_100_000_steps_copies_less_than_twice_what_is_held() -> None:
    cache, copied, place = GrowingCache(), 0, None
    k, v = torch.zeros(1, 1), torch.zeros(1, 1)
    for held in range(100_000):
        keys, _ = cache.append(k, v)
        if keys.data_ptr() != place:
            copied, place = copied + held, keys.data_ptr()
        assert copied < 2 * (held + 1)
    assert cache.length == 100_000 and copied > 50_000


class Copied(TorchDispatchMode):
    """Counts the numbers that any operation of torch writes to memory of its own, or copies."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in ("slice", "narrow", "empty", "alias", "detach"):
            self.numbers += out.numel()
        return out


@pytest.mark.parametrize(
    ("make", "most"), [(GrowingCache, 3), (partial(RollingCache, 16), 2)], ids=["growing", "rolling"]
)
def test_a_step_copies_its_own_token_and_seldom_others(make: Callable[[], KVCache], most: int) -> None:
    cache, n = make(), 1000
    token = torch.ones(1, 2, 1, 3), torch.ones(1, 2, 1, 5)
    per_token = sum(t.numel() for t in token)
    steps = []
    for _ in range(n):
        with Copied() as seen:
            cache.append(*token)
        steps.append(seen.numbers)
    assert n * per_token <= sum(steps) < most * n * per_token
    assert sum(step == per_token for step in steps) > 0.9 * n  # itself alone


def test_a_rolling_cache_holds_a_window_in_bounded_memory() -> None:
    cache, n = RollingCache(WINDOW), 600
    for i in range(n):
        t = torch.full((1, 1, 1, 1), float(i))
        keys, values = cache.append(t, t)
        held = list(range(max(0, i - WINDOW + 1) // TILE * TILE, i + 1))
        assert keys.flatten().tolist() == values.flatten().tolist() == held == cache.positions.k.tolist()
        assert cache.positions.q.tolist() == [i]
        assert keys.untyped_storage().nbytes() <= 2 * (WINDOW + TILE) * 4
    many = torch.arange(float(n), float(n + 500)).reshape(1, 1, 500, 1)
    keys, _ = cache.append(many, many)
    assert keys.flatten().tolist() == cache.positions.k.tolist() == list(range(n // TILE * TILE, n + 500))
    keys, _ = cache.append(many[..., :1, :], many[..., :1, :])
    assert keys.untyped_storage().nbytes() <= 2 * (WINDOW + TILE) * 4


def test_a_rolling_cache_that_keeps_can_come_back() -> None:
    q, k, v = tensors(n=900)
    whole = rg.attention(q, k, v, mask=rg.Causal() & WINDOWED)
    cache = RollingCache(WINDOW)
    cache.append(k[..., :300, :], v[..., :300, :])
    cache.keep()
    for back in (300, 310):  # each crop moves the point that it can come back to
        for i in range(back, back + 400):
            cache.append(k[..., i : i + 1, :] + 1, v[..., i : i + 1, :])
        cache.crop(back)
        seen = cache.append(k[..., back : back + 10, :], v[..., back : back + 10, :])
        out = rg.attention(q[..., back : back + 10, :], *seen, mask=rg.Causal() & cache.mask, positions=cache.positions)
        exact(out, whole[..., back : back + 10, :])
    cache.reset()
    assert cache.length == 0


def test_a_call_that_failed_moves_no_point_to_come_back_to() -> None:
    layer, x, window = rg.nn.MultiHeadAttention(8, heads=2), torch.randn(1, 900, 8), rg.Causal()
    cache, undisturbed = RollingCache(WINDOW), RollingCache(WINDOW)
    with torch.no_grad():
        for kept in (cache, undisturbed):
            layer(x[:, :300], mask=window, cache=kept)
            kept.keep()
            for i in range(300, 400):
                layer(x[:, i : i + 1], mask=window, cache=kept)
        with pytest.raises(rg.ShapeError):
            layer(x[:, :1], mask=rg.Dense(torch.ones(7, 7) > 0), cache=cache)
        for kept in (cache, undisturbed):
            for i in range(400, 800):
                layer(x[:, i : i + 1], mask=window, cache=kept)
            kept.crop(300)
        outputs = [layer(x[:, 300:310], mask=window, cache=kept) for kept in (cache, undisturbed)]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("name", CACHES)
def test_the_first_key_of_the_next_append(name: str) -> None:
    cache, (_, k, v) = CACHES[name](torch.float64, 300), tensors(n=300)
    for a, b in pairwise([0, 1, 131, 132, 270, 300]):
        first = cache.first_key
        cache.append(k[..., a:b, :], v[..., a:b, :])
        assert first == int(cache.positions.k[0])
    assert (cache.first_key > 0) == (name == "rolling")


@needs_kernels
def test_a_rolling_cache_forgets_whole_tiles() -> None:
    assert library().tile[1] == TILE


def test_a_window_has_a_key() -> None:
    with pytest.raises(ValueError, match=r"RollingCache.window is 0; expected 1 or more"):
        RollingCache(0)


def test_a_full_cache_says_so_and_stays_as_it_was() -> None:
    _, k, v = tensors()
    fixed, paged = FixedCache(BATCH, KEY_HEADS, 8, DK, DV, k.dtype), PagedCache(BATCH, KEY_HEADS, 5, 5, DK, DV, k.dtype)
    for cache, said in (
        (fixed, r"append: 4 more tokens do not fit, the cache has 5 of 8\. Give it a larger capacity"),
        (paged, r"append: 3 more pages are needed, 2 of 5 are free\. Crop or drop sequences"),
    ):
        cache.append(k[..., :5, :], v[..., :5, :])
        with pytest.raises(ValueError, match=said):
            cache.append(k[..., 5:9, :], v[..., 5:9, :])
        assert cache.length == 5 and cache.positions == rg.tail(5, 5)
        keys, values = cache.append(k[..., :0, :], v[..., :0, :])
        assert torch.equal(keys, k[..., :5, :]) and torch.equal(values, v[..., :5, :])
    fixed.append(k[..., 5:8, :], v[..., 5:8, :])
    assert fixed.length == fixed.capacity == 8


@pytest.mark.parametrize("name", CACHES)
def test_tokens_that_do_not_fit_are_refused(name: str) -> None:
    _, k, v = tensors()
    cache = CACHES[name](k.dtype)
    cache.append(k[..., :2, :], v[..., :2, :])
    for bad_k, bad_v, error, said in (
        (k, v[..., :3, :], rg.ShapeError, "a value for each key"),
        (k[0, 0, 0], v[0, 0, 0], rg.ShapeError, "a value for each key"),
        (k[:1], v[:1], rg.ShapeError, rf"k has shape \(1, 2, 23, 5\); this cache holds \({BATCH}, 2, n, 5\)"),
        (k[0], v[0], rg.ShapeError, "k has shape .* this cache holds"),
        (k[..., :3], v, rg.ShapeError, "k has shape .* this cache holds"),
        (k, v[..., :3], rg.ShapeError, "v has shape .* this cache holds"),
        (k.float(), v.float(), TypeError, r"k has dtype torch.float32, this cache torch.float64: convert with"),
        (k, v.to("meta"), ValueError, "v is on meta, this cache on cpu"),
    ):
        with pytest.raises(error, match=said):
            cache.append(bad_k, bad_v)
    with pytest.raises(IndexError, match=r"indices holds \[0, 3\]; there are 3 sequences"):
        cache.reorder(torch.tensor([0, 3]))
    with pytest.raises(TypeError, match="indices has dtype"):
        cache.reorder(torch.tensor([0.5]))
    assert cache.length == 2
    flat = GrowingCache()
    flat.append(k[0, 0], v[0, 0])
    with pytest.raises(rg.ShapeError, match="have no batch axis"):
        flat.reorder(torch.tensor([0]))


@pytest.mark.parametrize("name", CACHES)
def test_gradients_are_refused_where_they_would_be_lost(name: str) -> None:
    _, k, v = tensors()
    cache = CACHES[name](k.dtype)
    for needs in (k, v):
        needs.requires_grad_()
        with pytest.raises(ValueError, match=r"requires a gradient, and a cache records none\. Generate under"):
            cache.append(k, v)
        assert cache.length == 0
        with torch.no_grad():
            cache.append(k, v)
        cache.reset()
        needs.requires_grad_(False)


@pytest.mark.parametrize("name", CACHES)
def test_inference_mode_and_no_grad_may_alternate(name: str) -> None:
    q, k, v = tensors()
    with torch.inference_mode():
        cache = CACHES[name](q.dtype)
    whole = rg.attention(q, k, v, mask=MASKS["window"])
    modes, outs = (torch.inference_mode, torch.no_grad, torch.enable_grad), []
    for i in range(N):
        with modes[i % 3]():
            seen = cache.append(k[..., i : i + 1, :].clone(), v[..., i : i + 1, :].clone())
            outs.append(rg.attention(q[..., i : i + 1, :], *seen, mask=MASKS["window"], positions=cache.positions))
            if i % 4 == 3:
                cache.reorder(torch.arange(BATCH))
    exact(torch.cat([out.clone() for out in outs], -2), whole)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3, 2)])
@pytest.mark.parametrize("make", [GrowingCache, partial(RollingCache, WINDOW)], ids=["growing", "rolling"])
def test_axes_are_those_of_the_first_append(make: Callable[[], KVCache], lead: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(*lead, N, d, dtype=torch.float64) for d in (DK, DK, DV))
    cache = make()
    assert cache.lengths.shape == ()
    exact(decode(cache, q, k, v, [1, 2, 3, 11], MASKS["window"]), rg.attention(q, k, v, mask=MASKS["window"]))
    assert torch.equal(cache.lengths, torch.full(lead[:-1] if len(lead) > 1 else lead, N))


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_is_copied_and_pickled_with_what_it_holds(name: str) -> None:
    _, k, v = tensors(n=20)
    cache = CACHES[name](k.dtype, 20)
    cache.append(k[..., :11, :], v[..., :11, :])
    twins = copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))
    assert repr(cache) == f"{type(cache).__name__}(length=11)"
    for t in range(11, 20):  # a fourth page of five, for which the tables have room
        seen = cache.append(k[..., t : t + 1, :], v[..., t : t + 1, :])
        for twin in twins:
            assert twin.length == t
            found = twin.append(k[..., t : t + 1, :], v[..., t : t + 1, :])
            assert all(map(torch.equal, found, seen)) and twin.positions == cache.positions


@pytest.mark.parametrize("name", ["growing", "fixed", "rolling"])
def test_positions_are_numbers_until_somebody_asks(name: str) -> None:
    _, k, v = tensors()
    cache = CACHES[name](k.dtype)
    for n in (7, 3, 1):
        before = cache.next_positions(n)
        cache.append(k[..., :n, :], v[..., :n, :])
        at = cache.positions
        assert at.span is not None and not {"q", "k"} & at.__dict__.keys()
        assert torch.equal(at.q, before) and at.k.tolist()[-1] == cache.length - 1
