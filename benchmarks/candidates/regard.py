"""regard: the plain call, whatever the case; in decoding, what its caches are for."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

import regard as rg
from benchmarks.candidates import Way
from benchmarks.cases import DROPPED, MODELS, PATCHED, WINDOW, Case
from benchmarks.inputs import BUCKETS, Inputs
from benchmarks.models import model_way, packed_way
from benchmarks.passes import way
from benchmarks.patched import patched_ways
from benchmarks.stepping import Begin, Step, keys, query, steps


def forget() -> None:
    """Empties the cache of plans."""
    from regard.runtime import plan_cache  # other checkouts have it elsewhere (--against)

    plan_cache.clear()


def start(threads: int) -> str:
    torch.set_num_threads(threads)
    try:
        return version("regard")
    except PackageNotFoundError:
        return "from source"


def ways(case: Case, x: Inputs) -> list[Way]:
    if case.what in PATCHED:
        return patched_ways(x)
    if case.what == "sentences":
        return [model_way(x, "regard"), packed_way(x)]
    if case.what in MODELS:
        return [model_way(x, "regard")]
    if case.steps > 1:
        return _decoding(x)
    if case.what == "mixed":
        return [_one_call(x)]
    masks: dict[str, dict[str, Any]] = {
        "full": {},
        "causal": {"mask": rg.Causal()},
        "window": {"mask": rg.Window(before=WINDOW - 1, after=0)},
        "dropout": {"dropout": rg.Dropout(DROPPED, seed=7)},
    }
    if case.what == "bool":
        return [_way("Dense", x, mask=rg.Dense(x.mask))]
    if case.what in ("ragged", "unsorted"):
        return [_way("Documents", x, mask=rg.Documents(x.ids()))]
    if case.what == "padding":
        lengths = rg.Lengths(keys=torch.tensor(case.lengths))
        return [_way("Dense", x, mask=rg.Dense(x.mask)), _way("Lengths", x, mask=lengths)]
    return [_way("attention", x, **masks.get(case.what, {}))]


def _way(name: str, x: Inputs, **given: Any) -> Way:
    def attend(q: Tensor, k: Tensor, v: Tensor, learned: Tensor | None = None) -> Tensor:
        if x.case.what == "additive":
            return rg.attention(q, k, v, score=rg.Additive(None, None, learned))
        if x.case.what == "bias":
            return rg.attention(q, k, v, score=rg.ScaledDot() >> rg.Bias(learned))
        if x.case.what == "t5":
            return rg.attention(q, k, v, score=rg.ScaledDot() >> rg.RelativeBias(learned, BUCKETS))
        return rg.attention(q, k, v, **given)

    return way(name, x, attend)


PAGE = 128  # tokens of a page: a tile of the kernels


def _one_call(x: Inputs) -> Way:
    """A PagedCache of all sequences: the new tokens of all are appended at once, and read in one call."""
    case, sequences = x.case, x.apart()
    before = [n - m for n, m in zip(case.lengths, case.new, strict=True)]

    def nested(parts: list[Tensor]) -> Tensor:
        return rg.pack([t[0].transpose(0, 1) for t in parts]).nested().transpose(1, 2)

    pages = sum(-(-n // PAGE) for n in case.lengths)
    cache = rg.nn.PagedCache(len(before), x.k.shape[1], pages, PAGE, x.k.shape[-1], x.v.shape[-1], x.k.dtype)
    cache.append(*(nested([s[n][:, :, :m] for s, m in zip(sequences, before, strict=True)]) for n in (1, 2)))
    k, v = (nested([s[n][:, :, m:] for s, m in zip(sequences, before, strict=True)]) for n in (1, 2))
    q, lengths = nested([s[0] for s in sequences]), torch.tensor(before)

    def run() -> Tensor:
        keys, values = cache.append(k, v)
        return rg.attention(q, keys, values, mask=rg.Causal() & cache.mask, positions=cache.positions)

    def results(out: Any) -> list[Tensor]:
        return [out.values()[None]]

    return Way("PagedCache, one call", run, results, before=lambda: cache.crop(lengths))


def call_each(x: Inputs) -> Way:
    """A cache and a call for each sequence."""
    caches, new = [rg.nn.GrowingCache() for _ in x.case.new], x.case.new
    for cache, (_, k, v), n in zip(caches, x.apart(), new, strict=True):
        cache.append(k[:, :, : k.shape[2] - n], v[:, :, : k.shape[2] - n])

    def before() -> None:
        for cache, length, n in zip(caches, x.case.lengths, new, strict=True):
            cache.crop(length - n)

    later = [(q, k[:, :, -n:], v[:, :, -n:]) for (q, k, v), n in zip(x.apart(), new, strict=True)]

    def run() -> list[Tensor]:
        outs: list[Tensor] = []
        for cache, (q, k, v) in zip(caches, later, strict=True):
            keys, values = cache.append(k, v)
            outs.append(rg.attention(q, keys, values, mask=rg.Causal(), positions=cache.positions))
        return outs

    return Way("a cache and a call each", run, lambda outs: [torch.cat(outs, dim=2)], before=before)


def _decoding(x: Inputs) -> list[Way]:
    chosen: dict[str, dict[str, Callable[[Inputs], tuple[Begin, Step]]]] = {
        "growing": {"slices": sliced, "GrowingCache": cached},
        "sliding": {"slices": _within, "RollingCache": _rolling},
        "left": {"Documents": _left, "padding moved to the end, Lengths": _moved},
        "pages": {"PagedCache": _paged},
        "prefix": {"two states, merged": _merged},
    }
    return [steps(name, x, make, forget) for name, make in chosen[x.case.what].items()]


def sliced(x: Inputs, mask: rg.Mask = rg.Causal()) -> tuple[Begin, Step]:
    """All keys lie in one tensor; a step sees a slice of it."""

    def step(s: int) -> Tensor:
        n = keys(x, s)
        return rg.attention(query(x, s), x.k[:, :, :n], x.v[:, :, :n], mask=mask, positions=rg.tail(1, n))

    return tuple, step


def cached(x: Inputs) -> tuple[Begin, Step]:
    """A step appends its key and value to a cache, and reads all."""
    cache = rg.nn.GrowingCache()
    _fill(cache, x)
    return lambda: cache.crop(x.case.past), _appending(cache, x)


def _paged(x: Inputs) -> tuple[Begin, Step]:
    (batch, heads, n, dk), dv, size = x.k.shape, x.v.shape[-1], x.case.size
    cache = rg.nn.PagedCache(batch, heads, batch * -(-n // size), size, dk, dv, x.k.dtype)
    _fill(cache, x)
    return lambda: cache.crop(x.case.past), _appending(cache, x)


def _rolling(x: Inputs) -> tuple[Begin, Step]:
    cache = rg.nn.RollingCache(x.case.size)

    def begin() -> None:
        cache.reset()
        _fill(cache, x)

    return begin, _appending(cache, x)


def _fill(cache: rg.nn.KVCache, x: Inputs) -> None:
    cache.append(x.k[:, :, : x.case.past], x.v[:, :, : x.case.past])


def _appending(cache: rg.nn.KVCache, x: Inputs) -> Step:
    def step(s: int) -> Tensor:
        last = slice(keys(x, s) - 1, keys(x, s))
        k, v = cache.append(x.k[:, :, last], x.v[:, :, last])
        return rg.attention(query(x, s), k, v, mask=rg.Causal() & cache.mask, positions=cache.positions)

    return step


def _within(x: Inputs) -> tuple[Begin, Step]:
    return sliced(x, rg.Causal() & rg.Window(before=x.case.size - 1, after=0))


def _left(x: Inputs) -> tuple[Begin, Step]:
    """Padding belongs to another document than the query."""
    padding, own = (~x.real()[:, 0, 0]).long(), torch.zeros(len(x.q), 1, dtype=torch.int64)

    def step(s: int) -> Tensor:
        n = keys(x, s)
        return rg.attention(query(x, s), x.k[:, :, :n], x.v[:, :, :n], mask=rg.Documents(own, padding[:, :n]))

    return tuple, step


def _moved(x: Inputs) -> tuple[Begin, Step]:
    """Each sequence begins at key 0, and its padding stands behind its end."""
    lengths = torch.tensor(x.case.lengths)
    k, v = (
        torch.stack([row.roll(-(x.case.past - n), dims=-2) for row, n in zip(t, x.case.lengths, strict=True)])
        for t in (x.k, x.v)
    )

    def step(s: int) -> Tensor:
        n = keys(x, s)
        return rg.attention(query(x, s), k[:, :, :n], v[:, :, :n], mask=rg.Lengths(keys=lengths + s + 1))

    return tuple, step


def _merged(x: Inputs) -> tuple[Begin, Step]:
    """The prefix, which is read once for all sequences; then each sequence's own keys."""
    shared = x.case.size
    k, v = (t[:1, :, :shared].clone().expand(len(x.q), -1, -1, -1) for t in (x.k, x.v))

    def step(s: int) -> Tensor:
        q, own = query(x, s), slice(shared, keys(x, s))
        return (rg.attention_state(q, k, v) | rg.attention_state(q, x.k[:, :, own], x.v[:, :, own])).finish()[0]

    return tuple, step
