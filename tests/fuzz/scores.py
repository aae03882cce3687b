"""Random scores, as plain parts: one similarity, and modifiers in any order."""

from __future__ import annotations

import torch

from .call import Part
from .tensors import Size, Source

HUGE = (1e2, -1e2, 1e4, -1e4, -1e9, "min / 2", "min")


def draw_kind(s: Source, equal: bool) -> str:
    """The kind of a similarity of queries and keys, whose widths are equal or not."""
    kinds = {"bilinear": 10, "additive": 20}
    kinds |= {"scaled dot": 40, "dot": 10, "cosine": 8, "distance": 9, "custom": 1, "product": 4} if equal else {}
    return s.choice.choices(list(kinds), list(kinds.values()))[0]


def draw_similarity(s: Source, kind: str, at: Size, dq: int, dk: int) -> Part:
    """A similarity of that kind, of queries of width dq and keys of width dk."""
    if kind == "scaled dot":
        return _with_number(s, at, kind, "scale", None if s.maybe(0.7) else s.choice.choice((0.3, 1.0, -0.2, 0.0)))
    if kind == "cosine":
        return _with_number(s, at, kind, "scale", s.choice.choice((1.0, 5.0, -3.0)))
    if kind == "distance":
        return _with_number(s, at, kind, "gamma", s.choice.choice((0.5, 0.05, 2.0, -0.1)))
    if kind == "bilinear":
        lead = s.choice.choice(((), (), (at.heads,), (1,)))
        return Part(kind, {"m": at.parameter(s, s.normal(*lead, dq, dk) / max(dq, 1) ** 0.5)})
    if kind == "product":
        w = s.normal(*s.choice.choice(((), (at.heads, 1, 1))))
        return Part(kind, {"w": w.to(s.choice.choice((at.dtype, torch.float32)))}, {"cap": s.choice.choice((0.5, 6.0))})
    if kind == "custom":
        return Part(kind, {"w": s.normal(dq).to(s.choice.choice((at.dtype, torch.float32)))})
    return _additive(s, at, dq, dk) if kind == "additive" else Part(kind)


def _with_number(s: Source, at: Size, kind: str, name: str, number: float | None) -> Part:
    if s.maybe(0.65):
        return Part(kind, numbers={name: number})
    shape = at.per_head(s)
    return Part(kind, {name: at.parameter(s, s.normal(*shape).abs() * (number or 0.4) + 0.1)})


def _additive(s: Source, at: Size, dq: int, dk: int) -> Part:
    hidden = s.choice.choice((1, 2, 3, 5, 8, 13, 16, 17, 32, 33))
    sides = {"w_q": (dq, at.heads), "w_k": (dk, at.key_heads)}
    if s.maybe(0.45):  # one side or both are projected already: their width is the hidden one
        bare = s.choice.choice((("w_q",), ("w_k",), ("w_q", "w_k")))
        hidden = dq if "w_q" in bare else dk
        bare = bare if len(bare) == 1 or dq == dk else bare[:1]
        sides = {name: side for name, side in sides.items() if name not in bare}
    lead = {heads: s.choice.choice(((), (), (heads,), (1,))) for heads in {at.heads, at.key_heads}}
    tensors = {}
    for name, (width, heads) in sides.items():
        tensors[name] = at.parameter(s, s.normal(*lead[heads], width, hidden) / max(width, 1) ** 0.5)
    each = s.choice.choice(((), (), (at.heads,), (1,)))
    tensors["w"] = at.parameter(s, s.normal(*each, hidden))
    if s.maybe(0.5):
        shared = not sides and s.maybe(0.5)  # one tensor in two roles
        tensors["b"] = tensors["w"] if shared else at.parameter(s, s.normal(*each, hidden))
    activation = s.choice.choice(("tanh", "tanh", "sigmoid", "leaky relu"))
    slope = {"slope": s.choice.choice((0.0, 0.2, 1.0))} if activation == "leaky relu" else {}
    return Part("additive", tensors, {"activation": activation, **slope})


def draw_elementwise(s: Source, at: Size, width: int) -> Part:
    """A sum over features of one of build.FEATURES, with a number for each feature, each head, both or all."""
    shape = s.choice.choice(((), (width,), (1, width), (at.heads, width), (at.heads, 1)))
    kind, w = s.choice.choice(("distance", "square", "leaky relu")), s.normal(*shape) / max(width, 1) ** 0.5
    return Part("elementwise", {"w": at.parameter(s, w)}, {"function": kind})


def draw_modifiers(s: Source, at: Size) -> tuple[Part, ...]:
    count = s.choice.choices((0, 1, 2, 3, 4), (42, 32, 15, 8, 3))[0]
    kinds = {"soft cap": 22, "alibi": 0 if at.unplaced else 16, "points": 9, "bias": 36, "temperature": 3}
    kinds["near"] = 0 if at.unplaced else 5
    kinds["relative"] = 0 if at.unplaced else 16
    drawn = s.choice.choices(list(kinds), list(kinds.values()), k=count)
    parts, huge = [], s.maybe(0.5)
    for n, kind in enumerate(drawn):
        # -inf and huge numbers only where no later step multiplies them or brings them back
        plain = any(later in ("temperature", "soft cap") for later in drawn[n + 1 :])
        parts.append(_bias(s, at, plain, huge) if kind == "bias" else _modifier(kind, s, at))
        huge = huge and kind != "bias"
    return tuple(parts)


def draw_log_distance(s: Source, at: Size) -> Part:
    """A penalty by the logarithm of the distance: numbers, or tensors, for each head or for all."""
    tensors, numbers = {}, {}
    for name, size in (("weight", 1.0), ("rate", s.choice.choice((0.01, 1.0, 50.0)))):
        if s.maybe(0.35):
            numbers[name] = size * s.choice.choice((0.0, 0.5, 2.0))
        else:
            tensors[name] = at.parameter(s, s.normal(*at.per_head(s)).abs() * size)
    return Part("log distance", tensors, numbers)


def draw_power_distance(s: Source, at: Size) -> Part:
    """A penalty by a power of the distance, from 0.2 to 2: numbers, or tensors, for each head or for all."""
    tensors, numbers, size = {}, {}, s.choice.choice((0.001, 0.05, 0.5))
    if s.maybe(0.35):
        numbers["weight"] = size * s.choice.choice((0.0, 0.5, 2.0))
    else:
        tensors["weight"] = at.parameter(s, s.normal(*at.per_head(s)).abs() * size)
    if s.maybe(0.35):
        numbers["power"] = s.choice.choice((0.25, 0.7, 1.0, 1.5, 2.0))
    else:
        tensors["power"] = at.parameter(s, s.normal(*at.per_head(s)).abs().add(0.2).clamp(max=2))
    return Part("power distance", tensors, numbers)


def draw_division(s: Source, at: Size) -> Part:
    """Scores divided by a temperature: a number, or one a head or for all."""
    if s.maybe(0.3):
        return Part("divided", numbers={"t": s.choice.choice((0.25, 0.7, 1.0, 3.0, 20.0))})
    return Part("divided", {"t": at.parameter(s, (s.normal(*at.per_head(s)) * 0.5).exp())})


def _modifier(kind: str, s: Source, at: Size) -> Part:
    if kind == "soft cap":
        cap = s.choice.choice((0.5, 2.0, 30.0, 50.0))
        if s.maybe(0.6):
            return Part(kind, numbers={"cap": cap})
        return Part(kind, {"cap": at.parameter(s, s.normal(*at.per_head(s)).abs() * cap + 0.5)})
    if kind in ("alibi", "points"):
        slopes = at.parameter(s, s.normal(*at.per_head(s)).abs() * s.choice.choice((0.02, 0.3)))
        if kind == "alibi":
            return Part(kind, {"slopes": slopes})
        dims, own = s.choice.choice((1, 2, 2, 3, 4, 5)), at.nq != at.nk or s.maybe(0.5)
        spread = s.choice.choice((1.0, 10.0))
        points = {"coordinates": at.parameter(s, s.normal(at.nk, dims) * spread)}
        points |= {"query_coordinates": at.parameter(s, s.normal(at.nq, dims) * spread)} if own else {}
        return Part(kind, {"slopes": slopes, **points})
    if kind == "temperature":
        return Part(kind, {"log": at.parameter(s, s.normal(at.heads) * 0.3)})
    if kind == "near":
        reach = s.choice.randrange(1, 9)
        return Part(kind, {"gate": s.normal(at.heads), "table": at.parameter(s, s.normal(at.heads, 2 * reach + 1))})
    numbers, count = _buckets(s, at)
    table = s.normal(count, s.choice.choice((1, at.heads)))
    return Part(kind, {"table": at.parameter(s, table)}, numbers)


def _buckets(s: Source, at: Size) -> tuple[dict, int]:
    cells = [int(p.max()) for p in at.positions or () if p.numel()]
    low = [int(p.min()) for p in at.positions or () if p.numel()]
    most = max([at.nq, at.nk, 1, *(n + 1 for n in cells)])
    kinds = ["clipped", "clipped", "t5", "t5 causal"] + (["grid"] if min([0, *low]) == 0 and most < 2000 else [])
    kind = s.choice.choice(kinds)
    if kind == "clipped":
        before, after = s.choice.randrange(12), s.choice.randrange(12)
        return {"buckets": kind, "before": before, "after": after}, before + after + 1
    if kind == "grid":
        width = s.choice.randrange(1, 12)
        height = -(-most // width)
        return {"buckets": kind, "height": height, "width": width}, (2 * height - 1) * (2 * width - 1)
    size = s.choice.choice((4, 8, 32)) if kind == "t5" else s.choice.choice((2, 3, 8, 32))
    reach = s.choice.choice((size + 1, 40, 128))
    return {"buckets": kind, "size": size, "reach": reach}, size


def _bias(s: Source, at: Size, plain: bool, huge: bool) -> Part:
    """A bias of any shape; unless `plain`, with -inf in places; where `huge`, with a large offset in whole rows."""
    shape = at.broadcast(s)
    x = s.normal(*shape) * s.choice.choice((0.3, 1, 3))
    dtype = s.choice.choice((at.dtype, at.dtype, torch.float32, torch.float64))
    offset = s.choice.choice(HUGE[:4] if plain else HUGE) if huge and s.maybe(0.35) else 0.0
    if offset:
        least = torch.finfo(dtype if dtype != torch.float64 else torch.float32).min
        offset = {"min": least, "min / 2": least / 2}.get(offset, offset)
        offset = offset if abs(offset) <= -least else least
        rows = s.integers(0, 2, *shape[:-1], 1).bool() if shape and s.maybe(0.5) else torch.ones(()).bool()
        x = torch.where(rows, x * (s.maybe(0.5)) + offset, x).clamp(min=least)
    if not plain and x.numel() and s.maybe(0.3):
        gone = s.integers(0, 100, *shape) < s.choice.choice((3, 30, 70))
        if shape and s.maybe(0.3):
            gone = gone.any(-1, keepdim=True).expand(shape)
        x = x.masked_fill(gone, -torch.inf)
    x = x.to(dtype)
    return Part("bias", {"bias": s.laid_out(x) if x.dim() and x.numel() else x})
