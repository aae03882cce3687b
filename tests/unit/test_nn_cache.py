"""Layers with a cache: what they give for a sequence in chunks is what they give for the whole."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import regard as rg
from regard.call.hooks import AttentionCall, observing
from regard.nn import FixedCache, GrowingCache, KVCache, PagedCache, RollingCache

exact = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
DOUBLE = {"dtype": torch.float64}
WIDTH, HEADS, KEY_HEADS, BATCH, N, WINDOW = 12, 6, 2, 3, 13, 4

LAYERS = {
    "plain": {},
    "rotary": {"rotary": rg.nn.Rotary(2), "key_heads": KEY_HEADS, "d_v": 5},
    "every option": {
        "rotary": rg.nn.RotaryInterleaved(2),
        "qk_norm": nn.RMSNorm,
        "sink": 0.3,
        "score": rg.ScaledDot() >> rg.Alibi(torch.rand(HEADS, **DOUBLE)) >> rg.SoftCap(3.0),
        "dropout": 0.5,
    },
}


def layer_of(name: str) -> rg.nn.MultiHeadAttention:
    return rg.nn.MultiHeadAttention(WIDTH, HEADS, **{**DOUBLE, **LAYERS[name]}).eval()  # type: ignore[arg-type]


def cache_of(name: str, layer: rg.nn.MultiHeadAttention, batch: int = BATCH) -> KVCache:
    sizes = {"dk": layer.d_k, "dv": layer.d_v, **DOUBLE}
    if name == "fixed":
        return FixedCache(batch, layer.key_heads, N, **sizes)
    if name == "paged":
        return PagedCache(batch, layer.key_heads, 4 * batch, 4, **sizes)
    return GrowingCache() if name == "growing" else RollingCache(WINDOW)


def decoded(layer: nn.Module, cache: KVCache, x: Tensor, cuts: list[int]) -> Tensor:
    steps = pairwise([0, *cuts, x.shape[-2]])
    with torch.no_grad():
        return torch.cat([layer(x[..., a:b, :], mask=rg.Causal(), cache=cache) for a, b in steps], -2)


@pytest.mark.parametrize("cuts", [[], [9, 10, 11, 12], list(range(1, N)), [2, 2, 7]], ids=repr)
@pytest.mark.parametrize("cache", ["growing", "fixed", "rolling", "paged"])
@pytest.mark.parametrize("name", LAYERS)
def test_decoding_in_chunks_is_the_causal_pass(name: str, cache: str, cuts: list[int]) -> None:
    layer, x = layer_of(name), torch.randn(BATCH, N, WIDTH, **DOUBLE)
    mask = rg.Causal() & rg.Window(before=WINDOW - 1, after=None) if cache == "rolling" else rg.Causal()
    exact(decoded(layer, cache_of(cache, layer), x, cuts), layer(x, mask=mask))


@pytest.mark.parametrize("cache", ["growing", "fixed", "rolling", "paged"])
def test_one_sequence_needs_no_batch_axis(cache: str) -> None:
    layer, x = layer_of("rotary"), torch.randn(N, WIDTH, **DOUBLE)
    mask = rg.Causal() & rg.Window(before=WINDOW - 1, after=None) if cache == "rolling" else rg.Causal()
    exact(decoded(layer, cache_of(cache, layer, 1), x, [4, 5, 6]), layer(x, mask=mask))


def test_a_layer_of_one_head_has_a_cache_too() -> None:
    layer = rg.nn.Attention(WIDTH, 4, 3, d_out=5, rotary=rg.nn.Rotary(4), **DOUBLE)
    x, caches = torch.randn(BATCH, N, WIDTH, **DOUBLE), [GrowingCache() for _ in range(3)]
    exact(decoded(layer, caches[0], x, [4, 5, 6]), layer(x, mask=rg.Causal()))
    one = rg.nn.Attention(WIDTH, None, None, **DOUBLE)  # without a parameter there is no gradient to be lost
    steps = [one(x[:, i : i + 1], mask=rg.Causal(), cache=caches[1]) for i in range(N)]
    exact(torch.cat(steps, 1), one(x, mask=rg.Causal()))
    with torch.no_grad():
        steps = [layer.attend(x[:, i : i + 1], mask=rg.Causal(), cache=caches[2]) for i in range(N)]
    exact(torch.cat(steps, 1), layer.attend(x, mask=rg.Causal()))


def test_prompts_of_unequal_lengths_go_on_each_from_its_own_end() -> None:
    layer, lengths = layer_of("rotary"), [7, 2, 5]
    x, later = torch.randn(BATCH, 7, WIDTH, **DOUBLE), torch.randn(BATCH, 3, WIDTH, **DOUBLE)
    cache = cache_of("paged", layer)
    with torch.no_grad():
        layer(x, mask=rg.Causal(), cache=cache)
        cache.crop(torch.tensor(lengths))  # the prompts were padded at the end
        steps = torch.cat([layer(later[:, i : i + 1], mask=rg.Causal(), cache=cache) for i in range(3)], 1)
    for b, n in enumerate(lengths):
        exact(steps[b], layer(torch.cat([x[b, :n], later[b]]), mask=rg.Causal())[n:])


def test_who_observes_sees_the_cached_keys() -> None:
    layer, cache, seen = layer_of("rotary"), RollingCache(WINDOW), list[AttentionCall]()
    with observing(seen.append):
        decoded(layer, cache, torch.randn(BATCH, N, WIDTH, **DOUBLE), [9])
    call = seen[-1]
    assert call.k.shape[-2] == 13 and call.q.shape[-2] == 4
    assert call.mask == rg.Causal() & cache.mask and call.positions == rg.tail(4, 13)


def test_what_a_cache_knows_is_not_given_twice() -> None:
    layer, x = layer_of("plain"), torch.randn(BATCH, N, WIDTH, **DOUBLE)
    with torch.no_grad():
        for given in ({"context": x}, {"positions": rg.tail(N, N)}):
            with pytest.raises(ValueError, match=f"{next(iter(given))} and cache are both given; a cache holds"):
                layer(x, **given, cache=GrowingCache())
    cache = GrowingCache()
    with pytest.raises(ValueError, match=r"k requires a gradient, and a cache records none"):
        layer(x, mask=rg.Causal(), cache=cache)
    assert cache.length == 0


@pytest.mark.parametrize(
    "wrong",
    [{"mask": "causal"}, {"mask": rg.Dense(torch.ones(5, 5).bool())}, {"mask": rg.Lengths(torch.arange(7))}],
    ids=["no mask", "of other pairs", "of other sequences"],
)
@pytest.mark.parametrize("cache", ["growing", "fixed", "rolling", "paged"])
def test_a_call_that_raises_adds_no_tokens(cache: str, wrong: dict[str, Any]) -> None:
    """The caller passes the same tokens again, with another mask: they would stand in the cache twice."""
    layer, x = layer_of("rotary"), torch.randn(BATCH, N, WIDTH, **DOUBLE)
    ours, theirs = cache_of(cache, layer), cache_of(cache, layer)
    for a, b in pairwise([0, 6, 7, 9, N]):
        with torch.no_grad():
            with pytest.raises((TypeError, rg.ShapeError), match=r"mask is a str|has shape"):
                layer(x[:, a:b], cache=ours, **wrong)
            assert ours.length == theirs.length == a
            out, expected = (layer(x[:, a:b], mask=rg.Causal(), cache=each) for each in (ours, theirs))
        exact(out, expected)


def test_a_call_that_raises_leaves_each_sequence_its_length() -> None:
    layer, x = layer_of("plain"), torch.randn(BATCH, 5, WIDTH, **DOUBLE)
    cache = cache_of("paged", layer)
    with torch.no_grad():
        layer(x, mask=rg.Causal(), cache=cache)
        cache.crop(torch.tensor([5, 2, 0]))  # type: ignore[arg-type]
        with pytest.raises(rg.ShapeError, match=r"Dense\.allowed has shape"):
            layer(x[:, :2], mask=rg.Dense(torch.ones(3, 3).bool()), cache=cache)
    assert cache.lengths.tolist() == [5, 2, 0]


@pytest.mark.full
@pytest.mark.parametrize("cache", ["growing", "fixed", "rolling", "paged"])
def test_a_compiled_layer_decodes_like_itself(cache: str) -> None:
    torch.compiler.reset()
    layer, x = layer_of("rotary"), torch.randn(BATCH, N, WIDTH, **DOUBLE)
    graphs = CompileCounter()
    step = torch.compile(layer, backend=graphs)
    ours, theirs = cache_of(cache, layer), cache_of(cache, layer)
    steps = list(range(2, N))
    exact(decoded(step, ours, x, steps), decoded(layer, theirs, x, steps))
    assert graphs.frame_count < len(steps), "a graph was made for each length"
    assert ours.length == theirs.length == N
