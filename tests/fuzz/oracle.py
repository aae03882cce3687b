"""What the documentation says about a call: scores, masks and softmax written out, every pair of them held.

Written from README.md, docs/ and the public docstrings alone; imports nothing of regard. `acc` is the dtype in which
everything is computed: float64 for the exact answer, the call's own accumulation dtype for what a plain evaluation of
the same formula gets. `r` is called on intermediate results: `Roundings` perturbs them as roundings would.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .call import Call, Part
from .roundings import UNROUNDED, PerturbedSoftmax, Roundings, Unrounded


@dataclass(frozen=True)
class Answer:
    """out, lse, weights in the caller's axes; scores (-inf where hidden) and visible (*batch, h, nq, nk).

    r: what has been done to intermediate results, to do it to those of what is computed from the answer.
    """

    out: Tensor
    lse: Tensor
    weights: Tensor
    scores: Tensor
    visible: Tensor
    r: Unrounded


def attend(call: Call, acc: torch.dtype, r: Unrounded = UNROUNDED) -> Answer:
    """Attention by its definition: out = softmax(masked scores, the sink beside them) · V."""
    shape = (*call.batch, call.heads, call.nq, call.nk)
    seen = visible(call.mask, call).expand(shape)
    s = scores(call, acc, r).expand(shape).masked_fill(~seen, -math.inf)
    v = _repeated(call.lift(call.v).to(acc), call.heads)
    logits = s if call.sink is None else torch.cat([s, _sink(call, acc)], -1)
    empty = (logits == -math.inf).all(-1, keepdim=True)
    logits = logits.masked_fill(empty, 0)
    if isinstance(r, Roundings) and not r.twice:
        p, lse, out = PerturbedSoftmax.apply(logits, v, r)
    else:
        p = r.softmax(logits)[..., : call.nk]
        lse, out = torch.logsumexp(logits, -1) if logits.shape[-1] else logits.sum(-1), p @ v
    p, out = p.masked_fill(empty, 0), out.masked_fill(empty, 0)
    lse = lse.masked_fill(empty[..., 0], -math.inf)
    return Answer(call.lower(out, 2), call.lower(lse, 1), call.lower(p, 2), s, seen, r)


def _sink(call: Call, acc: torch.dtype) -> Tensor:
    """The logit of the sink for every query: (*batch, heads, nq, 1)."""
    logit = torch.as_tensor(call.sink).to(acc)
    return logit.expand(*call.batch, call.heads)[..., None, None].expand(*call.batch, call.heads, call.nq, 1)


def _repeated(x: Tensor, heads: int) -> Tensor:
    """Query head i reads key head i // (heads // key heads)."""
    return x if x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], -3)


def positions(call: Call) -> tuple[Tensor, Tensor]:
    """Positions as (*batch, 1, nq, 1) and (*batch, 1, 1, nk), or without the batch."""
    q, k = call.positions or (torch.arange(call.nq), torch.arange(call.nk))
    return q[..., None, :, None], k[..., None, None, :]


def _pairs(call: Call, t: Tensor) -> Tensor:
    """What broadcasts to the caller's (*batch, heads, nq, nk), with the head axis that the caller may lack."""
    return t if call.headed or t.dim() < 3 else t.unsqueeze(-3)


# scores


def scores(call: Call, acc: torch.dtype, r: Unrounded) -> Tensor:
    """The similarity, then the modifiers, in the order in which they are written."""
    first, *modifiers = call.score
    s = r(_similarity(first, call, acc, r))
    for part in modifiers:
        s = r(_modified(part, call, s, {name: t.to(acc) for name, t in part.tensors.items()}, r))
    return s


def _similarity(part: Part, call: Call, acc: torch.dtype, r: Unrounded) -> Tensor:
    q, k = call.lift(call.q).to(acc), call.lift(call.k).to(acc)
    t = {name: x.to(acc) for name, x in part.tensors.items()}
    if part.kind == "additive":
        return _additive(part, q, k, t, call.heads, r)
    q, k = r(q), r(_repeated(k, call.heads))
    if part.kind == "elementwise":
        return _elementwise(part, q, k, t["w"], r)
    if part.kind == "dot":
        return r.product(q, k)
    if part.kind == "scaled dot":
        scale = (
            1 / math.sqrt(max(q.shape[-1], 1)) if part.numbers.get("scale", 0) is None else _scalar(part, t, "scale")
        )
        return r.product(q, k) * scale
    if part.kind == "bilinear":
        return r.product(r(q @ t["m"]), k)
    if part.kind == "cosine":
        return (r(_unit(q)) @ r(_unit(k)).mT) * _scalar(part, t, "scale")
    if part.kind == "distance":
        return _distance(_scalar(part, t, "gamma"), q, k, r)
    if part.kind == "product":
        cap = part.numbers["cap"]
        return cap * r(torch.tanh(r.product(q, k) / cap)) + t["w"]
    if part.kind == "custom":
        return r.product(r((q * t["w"]).sin()), k)
    raise AssertionError(part.kind)


def _elementwise(part: Part, q: Tensor, k: Tensor, w: Tensor, r: Unrounded) -> Tensor:
    """The sum over features of one function of build.FEATURES; partial sums may be larger than the sum is."""
    q, k, w = q[..., :, None, :], k[..., None, :, :], w[:, None, None] if w.dim() > 1 else w
    kind = part.numbers["function"]
    if kind == "leaky relu":
        terms = w * torch.nn.functional.leaky_relu(r(q + k), 0.2)
    else:
        terms = -r(q - k).abs() * w if kind == "distance" else -(r((q - k) * w).square())
    terms = r(terms.expand(*terms.shape[:-1], q.shape[-1]))
    return r.sum(terms)


def _distance(gamma: Any, q: Tensor, k: Tensor, r: Unrounded) -> Tensor:
    """-gamma |q - k|². With roundings, as documented: of one product about a centre, of all that is near to it."""
    near = -gamma * r((q[..., :, None, :] - k[..., None, :, :]).square().sum(-1))
    if not isinstance(r, Roundings) or 0 in near.shape:
        return near
    sizes = [_squares(q, k, t.detach().median(-2, keepdim=True).values) * gamma for t in (q, k)]
    near_both = torch.stack([size.detach().abs() for size in sizes]).amax(0) <= 2.0**14
    size = torch.maximum(*(size.detach() for size in sizes))
    centre = k.detach().median(-2, keepdim=True).values
    q, k = r(q - centre), r(k - centre)
    about = gamma * (2 * r.product(q, k) - r(q.square().sum(-1))[..., :, None] - r(k.square().sum(-1))[..., None, :])
    return torch.where(near_both, about + r.of(size) - size, near)


def _squares(q: Tensor, k: Tensor, centre: Tensor) -> Tensor:
    """|q - c|² + |k - c|² of each pair."""
    return (q - centre).square().sum(-1)[..., :, None] + (k - centre).square().sum(-1)[..., None, :]


def _additive(part: Part, q: Tensor, k: Tensor, t: dict[str, Tensor], heads: int, r: Unrounded) -> Tensor:
    """w · f(q w_q + k w_k + b), f of the sums of every pair."""
    q, k = r(q), r(k)
    q = r(q @ t["w_q"]) if "w_q" in t else q
    k = _repeated(r(k @ t["w_k"]) if "w_k" in t else k, heads)
    q = r(q + t["b"].unsqueeze(-2)) if "b" in t else q
    x = q[..., :, None, :] + k[..., None, :, :]
    slope = part.numbers.get("slope")
    act = {"tanh": torch.tanh, "sigmoid": torch.sigmoid}.get(part.numbers["activation"])
    hidden = torch.nn.functional.leaky_relu(r(x), slope) if act is None else r(r.slope(act(x), x), 1.0)
    return (hidden * r(t["w"])[..., None, None, :]).sum(-1)


def _scalar(part: Part, t: dict[str, Tensor], name: str) -> Tensor | float:
    """A number, or a tensor () or (heads,), shaped to multiply scores."""
    if name not in t:
        return part.numbers[name]
    return t[name][..., None, None] if t[name].dim() else t[name]


def _unit(x: Tensor) -> Tensor:
    """x over its length; the zero vector stays 0."""
    length = x.square().sum(-1, keepdim=True)
    zero = length == 0
    return (x / length.masked_fill(zero, 1).sqrt()).masked_fill(zero, 0)


def _modified(part: Part, call: Call, s: Tensor, t: dict[str, Tensor], r: Unrounded) -> Tensor:
    if part.kind == "soft cap":
        cap = _scalar(part, t, "cap")
        return cap * r(torch.tanh(s / cap))
    if part.kind == "alibi":
        i, j = positions(call)
        return s - _scalar(part, t, "slopes") * (i - j).abs().to(s.dtype)
    if part.kind == "log distance":
        i, j = positions(call)
        penalty = torch.log1p(_scalar(part, t, "rate") * (i - j).abs().to(s.dtype))
        return s - _scalar(part, t, "weight") * r(penalty)
    if part.kind == "power distance":
        i, j = positions(call)
        distance = (i - j).abs().to(s.dtype)
        raised = torch.where(distance == 0, 0, distance.clamp(min=1) ** _scalar(part, t, "power"))
        return s - _scalar(part, t, "weight") * r(raised)
    if part.kind == "points":
        q = t.get("query_coordinates", t["coordinates"])
        square = r((q[:, None, :] - t["coordinates"][None, :, :]).square().sum(-1))
        near = square == 0
        return s - _scalar(part, t, "slopes") * square.masked_fill(near, 1).sqrt().masked_fill(near, 0)
    if part.kind == "bias":
        return s + _pairs(call, t["bias"])
    if part.kind == "relative":
        bucket = _buckets(part.numbers, *positions(call))
        table = t["table"].expand(-1, call.heads)
        return s + table[bucket, torch.arange(call.heads)[:, None, None]]
    if part.kind == "near":
        (i, j), reach = positions(call), t["table"].shape[1] // 2
        near = t["table"][torch.arange(call.heads)[:, None, None], (i - j).clamp(-reach, reach) + reach]
        return r(s * torch.sigmoid(t["gate"])[..., None, None]) + near
    if part.kind == "divided":
        return s / _scalar(part, t, "t")
    if part.kind == "temperature":
        return s * t["log"].exp()[..., None, None]
    raise AssertionError(part.kind)


def _buckets(numbers: dict[str, Any], i: Tensor, j: Tensor) -> Tensor:
    """The row of the table for each pair, by the papers' own formulas."""
    kind = numbers["buckets"]
    if kind == "clipped":
        return (j - i).clamp(-numbers["before"], numbers["after"]) + numbers["before"]
    if kind == "grid":
        height, width = numbers["height"], numbers["width"]
        down, right = i // width - j // width, i % width - j % width
        return (down + height - 1) * (2 * width - 1) + right + width - 1
    size, reach, ahead = numbers["size"], numbers["reach"], j - i
    if kind == "t5 causal":
        return _t5(-ahead.clamp(max=0), size, reach)
    return (ahead > 0) * (size // 2) + _t5(ahead.abs(), size // 2, reach)


def _t5(distance: Tensor, size: int, reach: int) -> Tensor:
    """T5's _relative_position_bucket: half the buckets exact, the rest logarithmic, in float32 as published."""
    exact = size // 2
    large = torch.log(distance.clamp(min=1).float() / exact) / math.log(reach / exact) * (size - exact)
    return torch.where(distance < exact, distance, (exact + large.long()).clamp(max=size - 1))


# masks


def visible(part: Part, call: Call) -> Tensor:
    """True where the query may see the key: broadcasts to (*batch, heads, nq, nk)."""
    t, numbers, (i, j) = part.tensors, part.numbers, positions(call)
    row, col = torch.arange(call.nq)[:, None], torch.arange(call.nk)
    if part.kind == "everything":
        return torch.ones(call.nq, call.nk, dtype=torch.bool)
    if part.kind == "and":
        return visible(part.parts[0], call) & visible(part.parts[1], call)
    if part.kind == "or":
        return visible(part.parts[0], call) | visible(part.parts[1], call)
    if part.kind == "not":
        return ~visible(part.parts[0], call)
    if part.kind == "causal":
        return j <= i
    if part.kind == "window":
        before, after = numbers["before"], numbers["after"]
        near = torch.ones_like(j <= i)
        near = near if before is None else near & (i - j <= before)
        return near if after is None else near & (j - i <= after)
    if part.kind == "prefix":
        return j < (t["n"][..., None, None, None] if "n" in t else numbers["n"])
    if part.kind == "dilated":
        return (i - j) % numbers["step"] == 0
    if part.kind == "lengths":
        seen = torch.ones(call.nq, call.nk, dtype=torch.bool)
        seen = seen & (col < t["keys"][..., None, None, None]) if "keys" in t else seen
        seen = seen & (col >= t["first"][..., None, None, None]) if "first" in t else seen
        return seen & (row < t["queries"][..., None, None, None]) if "queries" in t else seen
    if part.kind == "documents":
        return t["q_ids"][..., None, :, None] == t.get("k_ids", t["q_ids"])[..., None, None, :]
    if part.kind == "retained":
        until = t["until"]
        if until.dim() < len(call.batch) + 2:
            return i < until[..., None, None, :]
        return i < until.repeat_interleave(call.heads // max(until.shape[-2], 1), -2)[..., None, :]
    if part.kind == "dense":
        return _pairs(call, t["allowed"])
    if part.kind == "where":
        b = torch.arange(math.prod(call.batch)).reshape(*call.batch, 1, 1, 1)
        h = torch.arange(call.heads)[:, None, None]
        return (i * numbers["i"] + j * numbers["j"] + h + b) % 7 < 4
    if part.kind == "grid":
        columns, reach = numbers["columns"], numbers["reach"]
        return ((i // columns - j // columns).abs() <= reach) & ((i % columns - j % columns).abs() <= reach)
    if part.kind == "stride":
        return (j % numbers["n"] == 0) | (i == j)
    raise AssertionError(part.kind)
