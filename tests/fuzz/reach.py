"""What a NaN or an inf in q, k or v may reach, pair by pair. Imports nothing of regard.

"What is masked out leaks nowhere, NaN and inf included; a NaN that a query can see stays visible."
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .call import Call


def cleaned(call: Call) -> Call:
    """The same call with 0 where q, k or v are not finite: exact wherever nothing of that is seen."""
    known: dict[int, Tensor] = {}

    def clean(t: Tensor) -> Tensor:
        if id(t) not in known:
            known[id(t)] = t if bool(t.isfinite().all()) else t.masked_fill(~t.isfinite(), 0)
        return known[id(t)]

    return replace(call, q=clean(call.q), k=clean(call.k), v=clean(call.v), poisoned=False)


def reached(call: Call, visible: Tensor, scores: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """By result, where it may hold anything (True); and the rows of out that must hold a NaN, (*batch, h, nq).

    Results: out, lse, weights, scores, and the gradients "q", "k", "v" in their own shapes; "rest": whether any row is
    touched, so that every other gradient may hold anything.
    """
    q, k, v = (call.lift(t) for t in (call.q, call.k, call.v))
    group = call.heads // max(call.key_heads, 1)
    bad_q, bad_k, bad_v = (~t.isfinite().all(-1) for t in (q, k, v))
    bad_k, bad_v = (t.repeat_interleave(group, -2) for t in (bad_k, bad_v))
    scored = (bad_q & visible.any(-1)) | (visible & bad_k[..., None, :]).any(-1)
    touched = scored | (visible & bad_v[..., None, :]).any(-1)
    keys = (visible & touched[..., :, None]).any(-2)
    values = (visible & scored[..., :, None]).any(-2)
    weights = scored[..., None].expand(*scored.shape, call.nk)
    found = {
        "out": call.lower(touched[..., None].expand(*touched.shape, v.shape[-1]), 2),
        "lse": call.lower(scored, 1),
        "weights": call.lower(weights, 2),
        "scores": call.lower(visible & (bad_q[..., :, None] | bad_k[..., None, :]), 2),
        "q": _folded(call, touched, call.q),
        "k": _folded(call, keys.unflatten(-2, (call.key_heads, group)).any(-2), call.k),
        "v": _folded(call, values.unflatten(-2, (call.key_heads, group)).any(-2), call.v),
        "rest": touched.any(),
    }
    # by a bias of -inf a pair is hidden too: of such pairs nothing is demanded
    seen = visible & (scores > -torch.inf)
    nan_k = k.isnan().any(-1).repeat_interleave(group, -2)
    if call.score[0].kind == "additive" and not call.score[0].tensors["w"].shape[-1]:
        seen = torch.zeros_like(seen)  # no hidden feature reads q or k
    if call.score[0].kind == "bilinear" and not k.shape[-1]:
        seen = torch.zeros_like(seen)  # q M has no feature
    must = (q.isnan().any(-1) & seen.any(-1)) | (seen & nan_k[..., None, :]).any(-1)
    return found, call.lower(must, 1)


def _folded(call: Call, where: Tensor, like: Tensor) -> Tensor:
    """(*batch, heads, n) in the shape of q, k or v, whose batch axes may be shared."""
    where = call.lower(where, 1)[..., None]
    for axis, n in enumerate(like.shape[:-1]):
        if n == 1 and where.shape[axis] != 1:
            where = where.any(axis, keepdim=True)
    return where.expand(like.shape)
