"""regard: the plain call, whatever the case; in decoding, what its caches are for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import regard as rg
from benchmarks.architectures import ways as ways_of_model
from benchmarks.candidates import Way
from benchmarks.cases import ARCHITECTURES, DROPPED, MODELS, PATCHED, WINDOW, Case
from benchmarks.functions import FUNCTIONS, Mod, mask_of, score_mod, score_of, term_of
from benchmarks.inputs import BUCKETS, Inputs
from benchmarks.models import model_way, packed_way
from benchmarks.passes import way
from benchmarks.patched import patched_ways
from benchmarks.stepping import Begin, Step, keys, query, steps
from regard.core.region import Region


def forget() -> None:
    """Empties the cache of plans."""
    from regard.runtime import plan_cache  # other checkouts have it elsewhere (--against)

    plan_cache.clear()


def forget_functions() -> None:
    """Empties all that is kept of functions too."""
    from regard.backends.native.programs import structure
    from regard.compat.torch import function_copies, translations

    forget()
    for kept in (structure._graphs, translations._kept, function_copies._copies, function_copies._templates):
        kept.clear()


def start(threads: int) -> str:
    torch.set_num_threads(threads)
    try:
        return version("regard")
    except PackageNotFoundError:
        return "from source"


def ways(case: Case, x: Inputs) -> list[Way]:
    if case.what in PATCHED:
        return patched_ways(x)
    if case.what in ARCHITECTURES:
        return ways_of_model(x, "regard")
    if case.what == "sentences":
        return [model_way(x, "regard"), packed_way(x)]
    if case.what in MODELS:
        return [model_way(x, "regard")]
    if case.steps > 1:
        return _decoding(x)
    if case.what == "mixed":
        return [_one_call(x)]
    if case.what in FUNCTIONS:
        own = of_region("Modifier, Where", x, None)
        return [own] if term_of(case) is not None else [_of_pair(x), own]
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


@dataclass(frozen=True)
class OfRegion(rg.Modifier):
    """A score of functions.py for a rectangle of pairs. learned: what it reads besides, or None."""

    fn: Mod
    learned: Tensor | None

    def modify(self, s: Tensor, at: Region) -> Tensor:
        index = at.b, at.h, at.row, at.col
        return self.fn(s, *index) if self.learned is None else self.fn(s, *index, self.learned)


def of_region(name: str, x: Inputs, backend: rg.Backend | None) -> Way:
    """The functions of a case as an Elementwise, a Modifier and a Where of one's own."""
    score, mask, term = score_of(x.case), mask_of(x.case), term_of(x.case)
    similarity = rg.ScaledDot() if term is None else rg.Elementwise(term)

    def attend(q: Tensor, k: Tensor, v: Tensor, learned: Tensor | None = None) -> Tensor:
        scored = similarity if score is None else similarity >> OfRegion(score, learned)
        seen = rg.Everything() if mask is None else rg.Where(mask)
        return rg.attention(q, k, v, score=scored, mask=seen, backend=backend)

    return _with_first(way(name, x, attend))


def _of_pair(x: Inputs) -> Way:
    """The same as FlexAttention takes them."""
    from regard.compat.torch import flex_attention

    mask, n = mask_of(x.case), x.case.shape[-2]
    block_mask = None if mask is None else create_block_mask(mask, None, x.case.heads, n, x.case.keys, device="cpu")

    def attend(q: Tensor, k: Tensor, v: Tensor, learned: Tensor | None = None) -> Tensor:
        return flex_attention(q, k, v, score_mod(x.case, learned), block_mask)

    return _with_first(way("flex_attention", x, attend))


def _with_first(made: Way) -> Way:
    """With the times of a call whose functions were never seen, and of the next one."""

    def parts() -> dict[str, float]:
        forget_functions()
        times = [time.perf_counter(), *((made.run(), time.perf_counter())[1] for _ in range(2))]
        return {"first": times[1] - times[0], "second": times[2] - times[1]}

    return replace(made, parts=parts)


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
        "int8": {
            "GrowingCache": cached,
            "GrowingCache, int8": _cached_int8,
            "PagedCache, int8": partial(_in_pages, size=PAGE, dtype=torch.int8),
        },
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
    return _growing(x, rg.nn.GrowingCache())


def _cached_int8(x: Inputs) -> tuple[Begin, Step]:
    return _growing(x, rg.nn.GrowingCache(dtype=torch.int8))


def _growing(x: Inputs, cache: rg.nn.GrowingCache) -> tuple[Begin, Step]:
    _fill(cache, x)
    return lambda: cache.crop(x.case.past), _appending(cache, x)


def _paged(x: Inputs) -> tuple[Begin, Step]:
    return _in_pages(x, x.case.size, x.k.dtype)


def _in_pages(x: Inputs, size: int, dtype: torch.dtype) -> tuple[Begin, Step]:
    (batch, heads, n, dk), dv = x.k.shape, x.v.shape[-1]
    cache = rg.nn.PagedCache(batch, heads, batch * -(-n // size), size, dk, dv, dtype)
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
