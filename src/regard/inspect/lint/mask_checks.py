"""What lint says of a mask: the wrong way round, on the wrong axis, ahead of its time."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from regard.core.region import Frame
from regard.core.shapes import count_of
from regard.inspect.lint.defect import Defect, first_place, of_heads
from regard.inspect.lint.pattern import STRIP, Pattern, in_any, leaked, pattern, written_out
from regard.masks.algebra import And, Cover, Everything, Mask
from regard.masks.dense import Dense
from regard.masks.ragged import Lengths

# Of the pairs beside the diagonal, how many an inverted mask of neighbours may show: at the borders of documents.
BESIDE = 0.25
# Future pairs that a causal mask lets through by mistake, as a share of the past ones: more of them are meant.
LEAK = 0.05


def empty_rows(visible: Tensor, mask: Mask, frame: Frame) -> Iterator[Defect]:
    """Queries that see no key, by the mask or by scores of -inf; those that Lengths says are padding apart."""
    empty = (visible == 0) & ~_padded_queries(mask, frame)
    if not frame.nk or not bool(empty.any()):
        return
    where, heads = of_heads(empty)
    count, total = int(where.sum()), where.numel()
    whole = where.all(-1)
    blind = int(whole.sum()) if whole.numel() > 1 else 0
    sequences = f" {blind} of {whole.numel()} sequences or heads {_sees(blind)} nothing at all." if blind else ""
    yield Defect(
        "empty rows",
        count,
        f"{count:,} of {count_of(total, 'query', ',')} {_sees(count)} no key (first: "
        f"{first_place(where, (*heads, 'query'))}).{sequences} The output and the gradients there are 0.",
        "If they are padding, say so and this goes: mask & Lengths(queries=lengths). If not, see how many keys each "
        "query has, look(q, k, ..., facts=(facts.Visible(),)) with the arguments of this call: an inverted mask, a "
        "length of 0, a bias of -inf, or queries that stand before every key (positions).",
    )


def _padded_queries(mask: Mask, frame: Frame) -> Tensor:
    """(*batch, 1, nq) or less: what the queries' lengths of a mask say is padding."""
    if isinstance(mask, And):
        return _padded_queries(mask.a, frame) | _padded_queries(mask.b, frame)
    row = torch.arange(frame.nq, device=frame.device, dtype=torch.int64)
    if isinstance(mask, Lengths) and mask.queries is not None:
        return (row >= mask.queries[..., None])[..., None, :]
    return torch.zeros_like(row, dtype=torch.bool)


def written_masks(mask: Mask, frame: Frame, placed: bool) -> Iterator[Defect]:
    """A mask that was made pair by pair. placed: whether queries and keys stand in one sequence."""
    if not written_out(mask) or 0 in (frame.nq, frame.nk):
        return
    seen = pattern(mask, frame)
    found = [*_inverted_padding(seen, frame), *_inverted_neighbours(seen, placed)]
    if not found:
        found = [*_wrong_axis(seen, frame), *_batch_as_queries(mask, seen, frame)]
    yield from found
    if placed and not found:
        yield from _leak(mask, seen, frame)


def _inverted_neighbours(seen: Pattern, placed: bool) -> Iterator[Defect]:
    """Each query has a key of its own that it may not see, and neighbours neither, or the future alone."""
    (queries, own_seen), (beside, beside_seen) = seen.own, seen.beside
    if not placed or queries < 2 or own_seen or not int(seen.keys_of_row.sum()):
        return
    future_alone = seen.past == 0 and seen.future > 0
    if not future_alone and beside_seen > BESIDE * beside:
        return
    shown = "only keys after their own position" if future_alone else "only distant keys"
    yield Defect(
        "inverted mask",
        queries,
        f"none of {queries:,} queries sees the key at its own position; they see {shown}.",
        "True means may attend here. A mask whose True (or 1) means masked, as attn_mask of nn.MultiheadAttention, is "
        "regard.masks.convert.from_blocked(mask), or ~mask.",
    )


def _inverted_padding(seen: Pattern, frame: Frame) -> Iterator[Defect]:
    """Read the other way round, each sequence has keys and the longest has all; as it is, one has none."""
    count = seen.rows_of_key
    alike = bool(((count == 0) | (count == frame.nq)).all())  # all queries of a sequence see the same keys
    keys = (count > 0).sum(-1)
    none = keys == 0
    if not alike or none.numel() < 2 or not none.any() or none.all() or (keys == frame.nk).any() or not any(seen.ends):
        return
    blind, total = int(none.sum()), none.numel()
    others = "the other one sees" if total - blind == 1 else "the others see"
    yield Defect(
        "inverted mask",
        blind,
        f"{blind:,} of {total:,} sequences {_sees(blind)} no key, and {others} only the {_end(seen)} keys: "
        "read the other way round, it is the padding mask of a batch.",
        "True means may attend here. A key_padding_mask of torch (True = padding) is "
        "regard.masks.convert.from_key_padding(mask); at the end alone, Lengths(keys=lengths) says it in numbers.",
    )


def _sees(count: int) -> str:
    return "sees" if count == 1 else "see"


def _end(seen: Pattern) -> str:
    return "first" if seen.ends[0] else "last"


def _wrong_axis(seen: Pattern, frame: Frame) -> Iterator[Defect]:
    """Each row sees all keys or none: it hides queries."""
    rows = seen.keys_of_row
    heads: tuple[str, ...] = ()
    if rows.dim() > 1:
        rows, heads = of_heads(rows)
    none, every = rows == 0, rows == frame.nk
    if heads or frame.nk < 2 or not none.any() or not every.any() or not bool((none | every).all()):
        return
    blind = int(none.sum())
    yield Defect(
        "padding on the wrong axis",
        blind,
        f"{blind:,} of {rows.numel():,} queries {_sees(blind)} nothing, all others see every key (first: "
        f"{first_place(none, ('query',))}): the mask hides queries, and padded keys are seen.",
        "A padding mask (batch, nk) hides keys: Dense(mask[:, None, None, :]), not mask[:, None, :, None]; or "
        "Lengths(keys=lengths). If queries are meant, Lengths(queries=lengths) says so.",
    )


def _batch_as_queries(mask: Mask, seen: Pattern, frame: Frame) -> Iterator[Defect]:
    """Two axes, read as (nq, nk), of a batch that has as many sequences as queries: rows like lengths."""
    if not isinstance(mask, Dense) or mask.allowed.dim() != 2 or not frame.batch:
        return
    n, rows = math.prod(frame.batch), seen.keys_of_row
    if not n == frame.nq == mask.allowed.shape[0] > 1 or not any(seen.ends) or not bool((rows < frame.nk).any()):
        return
    steps = rows.diff(dim=-1)
    if bool((steps >= 0).all()) or bool((steps <= 0).all()):  # causal, or nothing that tells
        return
    yield Defect(
        "padding on the wrong axis",
        n,
        f"the mask {tuple(mask.allowed.shape)} is read as (nq, nk), and each of its rows is a sequence's length: the "
        f"{_end(seen)} {int(rows.min()):,} to {int(rows.max()):,} keys. The call has {n:,} sequences and {frame.nq:,} "
        "queries.",
        "If it is (batch, nk), write Dense(mask[:, None, None, :]), or Lengths(keys=mask.sum(-1)) if it pads at the "
        "end; if it is (nq, nk), Dense(mask[None, None]).",
    )


def _leak(mask: Mask, seen: Pattern, frame: Frame) -> Iterator[Defect]:
    """Nearly causal: a few keys behind the query are seen, or each row ends some keys too late."""
    if not seen.future or not seen.past:
        return
    q, k = frame.positions.q, frame.positions.k
    late = leaked(mask, frame)
    count, most = int(late.sum()), int(late.max())
    room = (k.max() - q).clamp(min=0).reshape(-1, frame.nq).amax(0)  # keys that stand behind each query, if all do
    shifted = seen.past == seen.all_past and most < int(room.max()) and bool((late == room.clamp(max=most)).all())
    if not shifted:
        late = leaked(mask, frame, everybodys=seen.rows_of_key == frame.nq)  # a prefix is meant
        count = int(late.sum())
        if not count or count > LEAK * seen.past:
            return
    how = f"every query sees {most} ahead" if shifted else f"the first is of query {int((late > 0).int().argmax())}"
    yield Defect(
        "future leak",
        count,
        f"{count_of(count, 'pair', ',')} {'looks' if count == 1 else 'look'} ahead, beside {seen.past:,} that "
        f"{'looks' if seen.past == 1 else 'look'} back; {how}.",
        "mask & Causal() hides what stands behind the query, by positions. torch.tril(x, 0) is causal, torch.tril(x, "
        "1) sees one key ahead. If it is meant, say so: Window(before=None, after=n), or Causal() | Documents(ids) "
        "for blocks that see themselves both ways.",
    )


def beyond(mask: Mask, within: Mask, frame: Frame) -> Iterator[Defect]:
    """Pairs that the mask shows and `within` hides."""
    if isinstance(within, Everything) or 0 in (frame.nq, frame.nk):
        return
    both = mask & ~within
    tiling = frame.tiling(STRIP, 4096)
    cover = both.cover(tiling)
    cover = cover.expand(*cover.shape[:-2], *tiling.shape).reshape(-1, *tiling.shape).amax(0)
    count, first = 0, ""
    for m, rows in enumerate(tiling.row_blocks):
        for n, cols in enumerate(tiling.col_blocks):
            if int(cover[m, n]) == Cover.NONE:
                continue
            seen = both.visible(frame.region(rows, cols))
            size = (rows.stop - rows.start, cols.stop - cols.start)
            seen = in_any(seen.expand(*seen.shape[:-2], *size))
            if not first and bool(seen.any()):
                i, j = seen.nonzero()[0].tolist()
                first = f"query {rows.start + i}, key {cols.start + j}"
            count += int(seen.sum())
    if not count:
        return
    yield Defect(
        "beyond " + repr(within),
        count,
        f"{count_of(count, 'pair', ',')} {'is' if count == 1 else 'are'} visible that {within!r} hides (first: "
        f"{first}).",
        f"mask & {within!r} hides them. Where positions decide, check positions= too: tail(nq, nk) if the queries are "
        "the last.",
    )
