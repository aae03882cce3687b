"""torch: scaled_dot_product_attention as a user calls it, and the better ways that an expert knows."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks.architectures import ways as ways_of_model
from benchmarks.candidates import Unable, Way
from benchmarks.candidates.eager import products
from benchmarks.cases import ARCHITECTURES, DROPPED, MODELS, PATCHED, WINDOW, Case
from benchmarks.inputs import BUCKETS, Inputs
from benchmarks.models import model_way
from benchmarks.passes import way
from benchmarks.patched import plain_way
from benchmarks.stepping import Begin, Step, keys, query, steps

FEW = 16  # queries up to which two plain products may be the faster


def start(threads: int) -> str:
    torch.set_num_threads(threads)
    return torch.__version__


def ways(case: Case, x: Inputs) -> list[Way]:
    if case.what in PATCHED:
        return [plain_way(x)]
    if case.what in ARCHITECTURES:
        return ways_of_model(x, "sdpa")
    if case.what in MODELS:
        return [model_way(x, "sdpa")]
    if case.steps > 1:
        return _decoding(x)
    special = {
        "bool": _masked,
        "padding": _masked,
        "window": _window,
        "ragged": _ragged,
        "unsorted": _unsorted,
        "mixed": _mixed,
        "additive": _additive,
        "bias": _bias,
        "t5": _t5,
        "dropout": _dropout,
    }
    if case.what in special:
        return special[case.what](x)
    causal = case.what == "causal"
    found = [way("SDPA", x, lambda q, k, v: sdpa(q, k, v, is_causal=causal))]
    if case.key_heads not in (None, case.heads):
        found = _grouped(x)
    if case.values != case.shape[-1]:
        found.append(way("q and k padded to dv", x, _widened))
    if len(case.shape) != 4:
        q, k, v = x.four()
        found.append(Way("as four axes", lambda: sdpa(q, k, v), lambda out: [out]))
    if case.shape[-2] <= FEW and case.what == "full" and case.passes == "forward" and len(case.shape) == 4:
        found.append(products("two products", x, 0.0))
    return found


def _grouped(x: Inputs) -> list[Way]:
    group, hk = x.case.heads // x.k.shape[1], x.k.shape[1]

    def copied(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sdpa(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))

    def folded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The heads of a group as so many queries of one head: nothing is hidden, so no query needs its place."""
        b, h, n, d = q.shape
        return sdpa(q.reshape(b, hk, group * n, d), k, v).reshape(b, h, n, -1)

    return [
        way("enable_gqa", x, lambda q, k, v: sdpa(q, k, v, enable_gqa=True)),
        way("k, v copied for each head", x, copied),
        way("groups folded into queries", x, folded),
    ]


def _widened(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Zeros behind q and k, so that all widths are equal and torch keeps to its fused path."""
    more = (0, v.shape[-1] - q.shape[-1])
    return sdpa(pad(q, more), pad(k, more), v, scale=q.shape[-1] ** -0.5)


def _float(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf)


def _masked(x: Inputs) -> list[Way]:
    assert x.mask is not None
    mask, added = x.mask, _float(x.mask, x.q.dtype)
    return [
        way("boolean mask", x, lambda q, k, v: sdpa(q, k, v, attn_mask=mask)),
        way("float mask", x, lambda q, k, v: sdpa(q, k, v, attn_mask=added)),
    ]


def _window(x: Inputs) -> list[Way]:
    mask, n = x.dense(), x.case.shape[-2]
    i, j = torch.arange(WINDOW)[:, None] + WINDOW, torch.arange(2 * WINDOW)
    band = _float((i >= j) & (i - j < WINDOW), x.q.dtype)
    bands = band.expand(n // WINDOW, 1, WINDOW, 2 * WINDOW).clone()
    bands[0, :, :, :WINDOW] = -torch.inf  # nothing lies before the first chunk

    def chunked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Chunks of queries, each with its own chunk of keys and the one before it."""
        cut = [t[0].unflatten(1, (-1, WINDOW)).transpose(0, 1) for t in (q, k, v)]
        with_last = [torch.cat([t.roll(1, 0), t], dim=2) for t in cut[1:]]
        return sdpa(cut[0], *with_last, attn_mask=bands).transpose(0, 1).flatten(1, 2)[None]

    return [
        way("boolean mask n × n", x, lambda q, k, v: sdpa(q, k, v, attn_mask=mask)),
        way("chunks of two windows", x, chunked),
    ]


def _ragged(x: Inputs) -> list[Way]:
    q, k, v, mask = x.padded()
    added = _float(mask, q.dtype)
    apart = list(zip(*(t.split(x.case.lengths, dim=2) for t in (x.q, x.k, x.v)), strict=True))
    return [
        Way("padded, boolean mask", lambda: sdpa(q, k, v, attn_mask=mask), lambda out: [x.packed(out)]),
        Way("padded, float mask", lambda: sdpa(q, k, v, attn_mask=added), lambda out: [x.packed(out)]),
        Way("a call a sentence", lambda: torch.cat([sdpa(*one) for one in apart], dim=2), lambda out: [out]),
    ]


def _mixed(x: Inputs) -> list[Way]:
    """A call a sequence, on keys that lie in one tensor each; one query sees them all, and needs no mask."""
    grouped = x.case.key_heads not in (None, x.case.heads)
    sequences = [tuple(t.contiguous() for t in one) for one in x.apart()]
    seen = [torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2]) for q, k, _ in sequences]
    added = [_float(mask, x.q.dtype) for mask in seen]

    def each(masks: list[Tensor]) -> list[Tensor]:
        return [
            sdpa(*one, attn_mask=None if len(mask) == 1 else mask, enable_gqa=grouped)
            for one, mask in zip(sequences, masks, strict=True)
        ]

    return [
        Way("a call each, boolean mask", lambda: each(seen), lambda outs: [torch.cat(outs, dim=2)]),
        Way("a call each, float mask", lambda: each(added), lambda outs: [torch.cat(outs, dim=2)]),
    ]


def _unsorted(x: Inputs) -> list[Way]:
    ids = x.ids()
    places = [(ids == one).nonzero().squeeze(1) for one in ids.unique()]

    def gathered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        for at in places:
            out[:, :, at] = sdpa(q[:, :, at], k[:, :, at], v[:, :, at])
        return out

    return [way("a call a document, gathered", x, gathered)]


def _decoding(x: Inputs) -> list[Way]:
    if x.case.what == "left":
        return [steps("boolean mask", x, _left), steps("float mask", x, _left_added)]
    if x.case.key_heads in (None, x.case.heads):
        return [steps("slices", x, _sliced)]
    return [steps("enable_gqa", x, _sliced), steps("groups folded into queries", x, _folded_slices)]


def _sliced(x: Inputs) -> tuple[Begin, Step]:
    """One query that sees a slice of the keys needs no mask."""
    grouped = x.case.key_heads not in (None, x.case.heads)

    def step(s: int) -> Tensor:
        n = keys(x, s)
        seen = slice(max(0, n - x.case.size) if x.case.what == "sliding" else 0, n)
        return sdpa(query(x, s), x.k[:, :, seen], x.v[:, :, seen], enable_gqa=grouped)

    return tuple, step


def _folded_slices(x: Inputs) -> tuple[Begin, Step]:
    def step(s: int) -> Tensor:
        n, q = keys(x, s), query(x, s)
        b, h, _, d = q.shape
        return sdpa(q.reshape(b, x.k.shape[1], -1, d), x.k[:, :, :n], x.v[:, :, :n]).reshape(b, h, 1, -1)

    return tuple, step


def _left(x: Inputs) -> tuple[Begin, Step]:
    return _under(x, x.real())


def _left_added(x: Inputs) -> tuple[Begin, Step]:
    return _under(x, _float(x.real(), x.q.dtype))


def _under(x: Inputs, mask: Tensor) -> tuple[Begin, Step]:

    def step(s: int) -> Tensor:
        n = keys(x, s)
        return sdpa(query(x, s), x.k[:, :, :n], x.v[:, :, :n], attn_mask=mask[..., :n])

    return tuple, step


def _bias(x: Inputs) -> list[Way]:
    return [way("float mask", x, lambda q, k, v, bias: sdpa(q, k, v, attn_mask=bias))]


def _t5(x: Inputs) -> list[Way]:
    n = torch.arange(x.case.shape[-2])
    index = BUCKETS.index(n[:, None], n)
    return [way("bias as mask", x, lambda q, k, v, t: sdpa(q, k, v, attn_mask=t[index].movedim(-1, 0)[None]))]


def _dropout(x: Inputs) -> list[Way]:
    return [way("SDPA", x, lambda q, k, v: sdpa(q, k, v, dropout_p=DROPPED)), products("two products", x, DROPPED)]


def _additive(x: Inputs) -> list[Way]:
    raise Unable("SDPA has no additive score")
