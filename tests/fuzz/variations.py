"""A call varied: other numbers in its tensors, other memory, numbers in the place of tensors. Nothing of regard."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .call import Call, Part
from .tensors import Source


def with_other_numbers(call: Call, s: Source) -> Call:
    """A call of the same dtypes, shapes and strides, with as many queries and keys, whose tensors hold other numbers.

    A float is a part of one that the tensor holds. An integer lies between those that it holds (in a mask: between 0
    and the largest), so that regard takes this call too.
    """
    positions = call.positions
    if positions is not None and call.placed == "given":
        positions = tuple(_other(p, s, int(p.min()) if p.numel() else 0) for p in positions)
    if call.by_length:
        positions = _tail_positions(call, s)
    known: dict[int, Tensor] = {}

    def once(t: Tensor) -> Tensor:
        if id(t) not in known:
            known[id(t)] = _other(t, s, 0)
        return known[id(t)]

    return replace(call.map(once), mask=call.mask.map(once), positions=positions)


def _other(t: Tensor, s: Source, least: int) -> Tensor:
    """Other numbers in a memory of the same strides; integers that never decrease still do not."""
    if not t.numel():
        return t.clone()
    made = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
    memory = torch.as_strided(made, (made.untyped_storage().nbytes() // t.element_size(),), (1,))
    if t.dtype not in (torch.int32, torch.int64):
        memory.copy_(t.reshape(-1)[s.integers(0, t.numel(), len(memory))])
        if t.is_floating_point():
            memory.mul_(s.choice.uniform(0.5, 0.9))
        return made
    memory.copy_(s.integers(min(least, int(t.max())), int(t.max()) + 1, len(memory)))
    ordered = t.dim() and 0 not in t.stride() and bool((t.diff(dim=-1) >= 0).all())
    return made.copy_(made.sort(-1).values) if ordered else made


def with_fewer_tokens(call: Call, s: Source) -> Call:
    """The call of the first queries and keys, some or all, as a sequence is before it grows; it writes into the masks.

    The call itself where something else holds a number for each token, or regard does not count the positions.
    """
    counted = call.placed in ("head", "tail") or (call.positions is None and call.nq == call.nk)
    parts = (*call.score, *call.mask.every())
    whole = any(part.kind in ("bias", "points", "dense") or part.numbers.get("buckets") == "grid" for part in parts)
    whole = whole or any(part.kind == "documents" and "k_ids" not in part.tensors for part in parts)
    lengths = [part.tensors for part in call.mask.every() if part.kind == "lengths"]
    shared = any(0 in t.stride() for tensors in lengths for t in tensors.values())
    if not counted or whole or shared or not call.pairs or call.q is call.k or call.q is call.v:
        return call
    nq, nk = s.choice.randrange(1, call.nq + 1), s.choice.randrange(1, call.nk + 1)
    nq, nk = (nq, nk) if call.positions is not None else (min(nq, nk), min(nq, nk))
    for tensors in lengths:
        for name, t in tensors.items():
            t.clamp_(max=nq if name == "queries" else nk)
    k = call.k[..., :nk, :]
    fewer = replace(
        call,
        q=call.q[..., :nq, :],
        k=k,
        v=k if call.v is call.k else call.v[..., :nk, :],
        mask=_first_of_tokens(call.mask, nq, nk),
    )
    if call.positions is None:
        return fewer
    q = torch.arange(nq) + (nk - nq if call.placed == "tail" else 0)
    return replace(fewer, positions=_tail_positions(fewer, s) if call.by_length else (q, torch.arange(nk)))


def _first_of_tokens(part: Part, nq: int, nk: int) -> Part:
    """A mask whose numbers of each query and key are cut to the first ones."""
    if part.kind not in ("documents", "retained"):
        return replace(part, parts=tuple(_first_of_tokens(inside, nq, nk) for inside in part.parts))
    counts = {"q_ids": nq, "k_ids": nk, "until": nk}
    return replace(part, tensors={name: t[..., : counts[name]] for name, t in part.tensors.items()})


def laid_out(call: Call, s: Source) -> Call:
    """The same call, its operands with gaps, expanded, at odd addresses: those of score, mask and sink, the positions.

    One that is expanded has the same number all along an axis.
    """
    known = {id(t): t for t in (call.q, call.k, call.v)}  # these are laid out when they are drawn

    def once(t: Tensor) -> Tensor:
        if id(t) not in known:
            tries = (s.laid_out(t, contiguous=5) for _ in range(3 if t.dim() and t.numel() else 0))
            known[id(t)] = next((made for made in tries if not made.is_contiguous()), t)
        return known[id(t)]

    positions = call.positions
    if positions is not None and call.placed == "given":
        positions = tuple(map(once, positions))
    return replace(call.map(once), mask=call.mask.map(once), positions=positions)


def decoding(call: Call, s: Source) -> Call:
    """The same queries, keys and values with the positions and masks of a caller who decodes, often by a plain score.

    Positions are those of rg.head and rg.tail, of tail by the length of each sequence, or tensors. Lengths are lists of
    numbers, or tensors of any strides.
    """
    if not call.pairs or any(part.numbers.get("buckets") == "grid" for part in call.score):  # it has so many cells
        return call
    kinds = s.choice.choice((("lengths",), ("lengths",), ("causal",), ("window",), ("documents",), ("retained",)))
    kinds = ("lengths", *kinds) if kinds != ("lengths",) and s.maybe(0.6) else kinds
    first, *rest = (_mask(kind, call, s) for kind in kinds)
    if call.q.shape[-1] == call.k.shape[-1] and s.maybe(0.6):
        call = replace(call, score=(Part("scaled dot", numbers={"scale": None}),))
        call = replace(call, needs=tuple(name for name in call.needs if name in call.floats()))
    q, k = torch.arange(call.nq), torch.arange(call.nk)
    placed = s.choice.choice(("head", "tail", "given", "by length" if len(call.batch) == 1 else "tail"))
    positions = (q, k) if placed == "head" else (q + call.nk - call.nq, k)
    if placed == "by length":
        placed, positions = "tail", _tail_positions(call, s)
    return replace(call, mask=Part("and", parts=(first, *rest)) if rest else first, positions=positions, placed=placed)


def _mask(kind: str, call: Call, s: Source) -> Part:
    if kind == "lengths":
        listed = {"listed": True} if len(call.batch) == 1 and s.maybe(0.4) else {}
        found = {}
        for name in s.choice.choice((("keys",), ("keys",), ("first",), ("keys", "first"))):
            numbers = s.integers(0, call.nk + 1, *call.batch)
            found[name] = s.laid_out(numbers, contiguous=20) if call.batch else numbers
        return Part(kind, found, listed)
    if kind == "retained":
        return Part(kind, {"until": s.integers(0, call.nk + 2, *call.batch, call.nk)})
    if kind == "documents":
        return Part(kind, {"q_ids": s.integers(0, 3, call.nq), "k_ids": s.integers(0, 3, call.nk).sort().values})
    return Part(kind, numbers={"before": s.choice.randrange(20), "after": 0} if kind == "window" else {})


def _tail_positions(call: Call, s: Source) -> tuple[Tensor, Tensor]:
    """The queries at the ends of sequences of random lengths, one of which has all keys: (batch, nq) and (nk,)."""
    (batch,) = call.batch
    lengths = s.integers(0, call.nk + 1, batch)
    lengths[s.choice.randrange(batch)] = call.nk
    return lengths[:, None] - call.nq + torch.arange(call.nq), torch.arange(call.nk)
