"""The random call of a seed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import oracle
from .call import Call, Part
from .masks import draw_mask
from .scores import (
    draw_division,
    draw_elementwise,
    draw_kind,
    draw_log_distance,
    draw_modifiers,
    draw_power_distance,
    draw_similarity,
)
from .tensors import FLOATING, Size, Source

EDGES = (15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129, 191, 192, 193)
WIDTHS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 63, 64, 65, 80)
FARTHEST = 150.0  # coordinates of points: with larger ones, no dtype tells which of two keys is nearer
WORK = 40_000  # pairs of queries and keys over all heads; fewer where each pair has features of its own


def draw(seed: int) -> Call:
    """The call of a seed: the same on every machine."""
    call, at = _draw_first(seed)
    call = _with_added(Source.of(seed + 2), call, at, draw_log_distance)
    call = _with_added(Source.of(seed + 5), call, at, draw_power_distance)
    return _with_features(Source.of(seed + 6), _with_division(Source.of(seed + 3), call, at), at)


def draw_first(seed: int) -> Call:
    """The call of a seed without the parts that were added later, so that earlier states of regard know all of it."""
    return _draw_first(seed)[0]


def _with_added(s: Source, call: Call, at: Size, draw_modifier: Callable[[Source, Size], Part]) -> Call:
    """The call, sometimes with one more modifier at the end, where it may follow what is there."""
    if at.unplaced or not s.maybe(0.15) or call.score[-1].kind == "soft cap":
        return call
    added = replace(call, score=(*call.score, draw_modifier(s, at)))
    named = added.floats().keys() - call.floats().keys()
    return replace(added, needs=(*call.needs, *(name for name in sorted(named) if call.needs and s.maybe(0.75))))


def _with_division(s: Source, call: Call, at: Size) -> Call:
    """The call, sometimes with a temperature: before what is added, or at the end where there is no bias."""
    if not s.maybe(0.12):
        return call
    kinds = [part.kind for part in call.score]
    n = len(kinds) if "bias" not in kinds and s.maybe(0.3) else 1 + (kinds[1:2] == ["soft cap"] and s.maybe(0.5))
    return _with_part(s, call, (*call.score[:n], draw_division(s, at), *call.score[n:]), "divided")


def _with_features(s: Source, call: Call, at: Size) -> Call:
    """The call, sometimes with a sum over features in place of its similarity."""
    width = call.q.shape[-1]
    if width != call.k.shape[-1] or not s.maybe(0.08):
        return call
    return _with_part(s, call, (draw_elementwise(s, at, width), *call.score[1:]), "elementwise")


def _with_part(s: Source, call: Call, score: tuple[Part, ...], kind: str) -> Call:
    """The call with another score; tensors of its new part, of that kind, may require gradients where others do."""
    wanted = {id(call.floats()[name]) for name in call.needs}  # names hold the places of parts
    made = replace(call, score=score, needs=())
    kept = [name for name, t in made.floats().items() if id(t) in wanted]
    new = (name for name in made.floats() if name.startswith(kind) and kept and s.maybe(0.75))
    return replace(made, needs=(*kept, *new))


def _draw_first(seed: int) -> tuple[Call, Size]:
    s = Source.of(seed)
    dq = _width(s)
    dk = dq if s.maybe(0.85) else _width(s)
    kind = draw_kind(s, dq == dk)
    at, dims = _size(s, WORK // {"additive": 12, "distance": 1 + dq // 8}.get(kind, 1))
    call = Call(
        *_inputs(s, at, dims, dq, dk, FARTHEST if kind == "distance" else math.inf),
        score=(draw_similarity(s, kind, at, dq, dk), *draw_modifiers(s, at)),
        mask=draw_mask(s, at),
        positions=at.positions,
        placed=at.placed,
        sink=_sink(s, at),
        backend=_backend(s, at),
        isa=s.choice.randrange(12) if s.maybe(0.3) else None,
    )
    call = _poisoned(s, call) if s.maybe(0.25) else call
    whole = call.poisoned
    call = replace(call, **{name: s.laid_out(getattr(call, name), expand=not whole) for name in "qkv"})
    call = _shared(s, call)
    needs = tuple(name for name in call.floats() if s.maybe(0.75)) if s.maybe(0.55) else ()
    return replace(call, needs=needs), at


def _width(s: Source) -> int:
    return 0 if s.maybe(0.01) else s.choice.choice(WIDTHS)


def _count(s: Source) -> int:
    """How many queries or keys."""
    kind = s.choice.choices(range(6), (4, 10, 36, 25, 20, 5))[0]
    return (
        0,
        1,
        s.choice.randrange(1, 21),
        s.choice.randrange(21, 71),
        s.choice.choice(EDGES),
        s.choice.randrange(71, 201),
    )[kind]


def _size(s: Source, work: int) -> tuple[Size, int]:
    """A size of at most so many pairs, and how many axes the caller's tensors have."""
    dims = s.choice.choices((2, 3, 4, 5, 6), (8, 12, 62, 15, 3))[0]
    nq = _count(s)
    nk = nq if s.maybe(0.5) else _count(s)
    key_heads, group = (s.choice.choice((1, 1, 2, 3, 4)), s.choice.choice((1, 1, 1, 2, 3, 8))) if dims > 3 else (1, 1)
    batch = tuple(s.choice.choice((1, 2, 2, 3, 5)) for _ in range(dims - 3 if dims > 3 else dims - 2))
    while math.prod(batch) * key_heads * group * nq * nk > work:
        if max(batch, default=1) > 1:
            batch = tuple(max(1, n - 1) for n in batch)
        elif group > 1:
            group -= 1
        elif key_heads > 1:
            key_heads -= 1
        else:
            nq, nk = (nq, nk) if nq * nk <= work else (nq // 2, nk // 2)
    if s.maybe(0.02) and batch:
        batch = (0, *batch[1:])
    if s.maybe(0.005) and dims > 3:
        key_heads = 0
    dtype = s.choice.choices(FLOATING, (45, 20, 18, 17))[0]
    unplaced = nq != nk and s.maybe(0.15)
    at = Size(batch, key_heads * group, key_heads, nq, nk, dims > 3, dtype, None, "given", unplaced)
    return (at if unplaced or (nq == nk and s.maybe(0.6)) else _placed(s, at)), dims


def _placed(s: Source, at: Size) -> Size:
    """The same with positions: the first, the last, or any."""
    nq, nk = at.nq, at.nk
    kind = s.choice.choices(("head", "tail", "shifted", "sorted", "any", "each"), (15, 35, 15, 10, 15, 10))[0]
    first = {"tail": nk - nq, "shifted": s.choice.randrange(-20, 20)}.get(kind, 0)
    q, k = torch.arange(first, first + nq), torch.arange(nk)
    if kind in ("sorted", "any", "each"):
        most = 2 * max(nq, nk, 1)
        q = s.integers(0, most, *(at.batch if kind == "each" and s.maybe(0.7) else ()), nq)
        k = s.integers(0, most, *(at.batch if kind == "each" and s.maybe(0.7) else ()), nk)
        k = k.sort(-1).values if kind == "sorted" or (kind == "each" and s.maybe(0.5)) else k
        q = q.int() if s.maybe(0.1) else q
    if s.maybe(0.02):
        q, k = q.long() + (1 << 40), k + (1 << 40)
        kind = "given"
    return replace(at, positions=(q, k), placed=kind if kind in ("head", "tail") else "given")


def _inputs(s: Source, at: Size, dims: int, dq: int, dk: int, most: float) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, numbers up to `most`; sometimes one of them is shared by all of an axis of the batch."""
    dv = dk if s.maybe(0.5) else _width(s)
    shapes = ((at.heads, at.nq, dq), (at.key_heads, at.nk, dk), (at.key_heads, at.nk, dv))
    made = []
    for shape in shapes:
        shared = s.maybe(0.06)
        batch = tuple(1 if shared and s.maybe(0.7) else n for n in at.batch)
        made.append(s.values((*batch, *(shape if at.headed else shape[1:]))).clamp(-most, most).to(at.dtype))
    # q and k alone, as attention_weights takes them, have the whole batch between them
    if torch.broadcast_shapes(*(t.shape[: len(at.batch)] for t in made[:2])) != at.batch:
        made[0] = made[0].expand(*at.batch, *made[0].shape[len(at.batch) :]).clone()
    if s.maybe(0.25) and dv:
        made[2][..., 0] = 1  # then the output is 1 there, whatever the scores
    return tuple(made)


def _shared(s: Source, call: Call) -> Call:
    """One tensor as keys and values, or as all three."""
    if call.k.shape == call.v.shape and s.maybe(0.1):
        call = replace(call, v=call.k)
    return replace(call, k=call.q) if call.q.shape == call.k.shape and call.v is not call.k and s.maybe(0.08) else call


def _poisoned(s: Source, call: Call) -> Call:
    """NaN and inf in q, k and v: where nobody can see them, or (more rarely) anywhere."""
    seen = oracle.visible(call.mask, call).expand(*call.batch, call.heads, call.nq, call.nk)
    group = call.heads // max(call.key_heads, 1)
    rows = seen.any(-1)
    keys = seen.any(-2).unflatten(-2, (call.key_heads, group)).any(-2)
    anywhere = s.maybe(0.3)
    what = s.choice.choice((torch.nan, torch.nan, torch.inf, -torch.inf))
    found = {}
    for name, used in (("q", rows), ("k", keys), ("v", keys)):
        t = getattr(call, name)
        free = s.integers(0, 100, *used.shape) < 4 if anywhere else ~used
        if t.shape[:-2] != call.lower(used, 1).shape[:-1] or s.maybe(0.2):
            continue
        at = call.lower(free, 1)[..., None]
        some = at & (s.integers(0, 3, *t.shape) == 0) if s.maybe(0.3) else at
        found[name] = t.masked_fill(some, what)
    return replace(call, poisoned=True, **found)


def _sink(s: Source, at: Size) -> Tensor | float | None:
    if s.maybe(0.7):
        return None
    if s.maybe(0.2):
        return s.choice.choice((0.0, 3.0, -50.0))
    shape = s.choice.choice(((at.heads,), (at.heads,), (), (1,), (*at.batch, at.heads)))
    sink = at.parameter(s, s.normal(*shape))
    return sink if sink.dtype != torch.float64 or at.dtype == torch.float64 else sink.float()


def _backend(s: Source, at: Size) -> tuple[Any, ...] | None:
    kind = s.choice.choices((None, "native", "tiled", "reference"), (52, 16, 22, 10))[0]
    if kind == "native":
        invariant = s.maybe(0.35)
        return None if at.dtype == torch.float64 else ("native", invariant)
    if kind == "tiled":
        return "tiled", *(None if s.maybe(0.2) else s.choice.choice((1, 2, 3, 7, 16, 31, 64, 100)) for _ in range(2))
    return None if kind is None else (kind,)
