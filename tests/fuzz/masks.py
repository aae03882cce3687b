"""Random masks, as plain parts."""

from __future__ import annotations

import torch
from torch import Tensor

from .call import Part
from .tensors import Size, Source

POSITIONAL = ("causal", "window", "prefix", "dilated", "retained", "where", "stride", "grid")


def draw_mask(s: Source, at: Size) -> Part:
    """No mask at all, one mask, or several joined by & | ~."""
    count = s.choice.choices((0, 1, 2, 3), (25, 45, 22, 8))[0]
    if count == 0:
        return Part("everything")
    mask = _one(s, at)
    for _ in range(count - 1):
        mask = Part(s.choice.choice(("and", "and", "or")), parts=(mask, _one(s, at)))
        mask = Part("not", parts=(mask,)) if s.maybe(0.15) else mask
    return mask


def _one(s: Source, at: Size) -> Part:
    kinds = {"causal": 22, "window": 14, "prefix": 8, "dilated": 5, "retained": 10, "where": 6, "stride": 2, "grid": 4}
    kinds = {} if at.unplaced else kinds
    kinds |= {"lengths": 14, "documents": 12, "dense": 14, "everything": 2}
    part = _leaf(s.choice.choices(list(kinds), list(kinds.values()))[0], s, at)
    return Part("not", parts=(part,)) if s.maybe(0.12) else part


def _leaf(kind: str, s: Source, at: Size) -> Part:
    reach = max(at.nq, at.nk, 1)
    if kind == "window":
        before, after = (None if s.maybe(0.2) else s.choice.randrange(min(reach, 40)) for _ in range(2))
        return Part(kind, numbers={"before": before, "after": after})
    if kind == "prefix":
        if s.maybe(0.5):
            return Part(kind, numbers={"n": s.choice.randrange(reach)})
        shape = () if s.maybe(0.2) else at.batch
        return Part(kind, {"n": s.integers(0, reach + 1, *shape)})
    if kind == "dilated":
        return Part(kind, numbers={"step": s.choice.choice((1, 2, 3, 7))})
    if kind == "where":
        return Part(kind, numbers={"i": s.choice.randrange(1, 7), "j": s.choice.randrange(1, 7)})
    if kind == "stride":
        return Part(kind, numbers={"n": s.choice.choice((1, 2, 4))})
    if kind == "grid":
        return Part(kind, numbers={"columns": s.choice.randrange(1, 20), "reach": s.choice.randrange(4)})
    if kind == "lengths":
        named = {"keys": at.nk, "queries": at.nq, "first": at.nk}
        chosen = s.choice.choice((("keys",), ("queries",), ("keys", "queries"), ("first",), ("keys", "first")))
        shape = () if s.maybe(0.1) else at.batch
        return Part(kind, {name: s.integers(0, named[name] + 1, *shape) for name in chosen})
    if kind == "documents":
        return Part(kind, _ids(s, at))
    if kind == "retained":
        return Part(kind, {"until": s.laid_out(_until(s, at))})
    if kind == "dense":
        shape = at.broadcast(s)
        allowed = s.integers(0, 100, *shape) < s.choice.choice((10, 50, 90, 99))
        return Part(kind, {"allowed": s.laid_out(allowed) if allowed.dim() else allowed})
    return Part(kind)


def _until(s: Source, at: Size) -> Tensor:
    """A position for each key: of all alike, of a sequence or of a head; in order, or as they come."""
    heads = (s.choice.choice((1, at.key_heads, at.heads)),) if at.headed and s.maybe(0.6) else ()
    q = torch.arange(at.nq) if at.positions is None else at.positions[0].flatten()
    least, largest = (int(q.min()), int(q.max())) if q.numel() else (0, 0)
    until = s.integers(least, largest + 3, *((*at.batch, *heads) if s.maybe(0.7) else ()), at.nk)
    return until.sort(-1).values if s.maybe(0.5) else until


def _ids(s: Source, at: Size) -> dict:
    count = s.choice.choice((1, 2, 3, 8))
    lead = at.batch if s.maybe(0.4) else ()
    q = s.integers(0, count, *lead, at.nq)
    k = s.integers(0, count + s.choice.randrange(2), *(at.batch if s.maybe(0.4) else ()), at.nk)
    if s.maybe(0.75):
        q, k = q.sort(-1).values, k.sort(-1).values
    same = at.nq == at.nk and s.maybe(0.6)
    return {"q_ids": q} if same else {"q_ids": q, "k_ids": k}
