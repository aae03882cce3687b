"""transformers' continuous batching: new tokens of many sequences over the pages of its cache, read where they lie."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import ContinuousBatchingManager
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.cache_allocators import FullAttentionCacheAllocator

from regard.api import attention
from regard.call.hooks import AttentionCall, notify
from regard.compat.transformers.models import NAME
from regard.compat.transformers.page_rows import PageRows, page_rows
from regard.core.deferred import written_out
from regard.core.dropout import Dropout
from regard.core.errors import Unsupported
from regard.core.positions import Positions
from regard.core.tracing import outside_of_graphs
from regard.core.wrong_calls import kind_of
from regard.masks.algebra import Mask
from regard.masks.between import Between
from regard.masks.positional import Causal
from regard.masks.ragged import Lengths
from regard.scores.algebra import Score


@dataclass(frozen=True, eq=False)
class Layout:
    """Where the keys of one forward lie, for the layers of one kind of attention (full, or with a sliding window).

    counts    new tokens of each sequence, int64 (batch,): their sum is `total`
    keys      keys that the new tokens of each sequence see, the new ones included: int64 (batch,)
    slots     the row of the cache that each key lies in, or will be written to, one sequence after another
    first     the position of the first of these keys of each sequence; None if it is not known
    page_size rows of a page
    window    keys that a query sees; None = all before it. Position p lies in row p % window of its sequence's pages
    """

    counts: Tensor
    keys: Tensor
    slots: Tensor
    first: Tensor | None
    page_size: int
    window: int | None

    @cached_property
    def sequence(self) -> Tensor:
        """The number of the sequence that each new token belongs to: (total,)."""
        return torch.arange(len(self.counts), device=self.counts.device, dtype=torch.int64).repeat_interleave(
            self.counts
        )

    @cached_property
    def begins(self) -> Tensor:
        """The index in `slots` of the first key of each sequence: (batch,)."""
        return self.keys.cumsum(0) - self.keys

    @cached_property
    def own(self) -> Tensor:
        """The index in `slots` of each new token's own key: (total,)."""
        tokens = torch.arange(len(self.sequence), device=self.counts.device, dtype=torch.int64)
        return (self.keys.cumsum(0) - self.counts.cumsum(0))[self.sequence] + tokens

    @cached_property
    def in_pages(self) -> Tensor:
        """Which sequences can read all their keys in the pages, once the new ones are written: booleans (batch,).

        With a window, a new token overwrites the key that has just left the window; an earlier new token of the same
        sequence may still see that key.
        """
        if self.window is None:
            return torch.ones_like(self.counts, dtype=torch.bool)
        return (self.counts == 1) if self.first is not None else torch.zeros_like(self.counts, dtype=torch.bool)

    @cached_property
    def pages(self) -> PagedPart | None:
        chosen = self.in_pages.nonzero().squeeze(-1)
        if not len(chosen):
            return None
        counts, keys, size = self.counts[chosen], self.keys[chosen], self.page_size
        page_starts = torch.arange(0, int(keys.max()), size, device=keys.device, dtype=torch.int64)
        offset = page_starts.expand(len(chosen), -1)
        if self.window is not None and self.first is not None:
            offset = (offset - self.first[chosen, None]) % self.window
        # behind the last page of a sequence: any of its pages
        offset = torch.minimum(offset, keys[:, None] - 1)
        table = (self.slots[self.begins[chosen, None] + offset] // size).int()
        rows = None if len(chosen) == len(self.counts) else self.in_pages[self.sequence].nonzero().squeeze(-1)
        within = self.own - self.begins[self.sequence]
        return PagedPart(rows, counts, keys, table, within if rows is None else within[rows])

    @cached_property
    def gathered(self) -> GatheredPart | None:
        return None if bool(self.in_pages.all()) else self.gather(~self.in_pages)

    def gather(self, chosen: Tensor) -> GatheredPart:
        """The sequences where `chosen` (batch,) is True, with copies of their keys."""
        rows = chosen[self.sequence].nonzero().squeeze(-1)
        of_keys = chosen.repeat_interleave(self.keys)
        # where a key stands among the chosen ones
        place = of_keys.long().cumsum(0) - 1
        own, start = self.own[rows], self.begins[self.sequence[rows]]
        new = place[own]
        if self.window is not None:
            start = torch.maximum(start, own + 1 - self.window)
        return GatheredPart(rows, self.slots[of_keys], new, Between(place[start].int(), (new + 1).int()))


@dataclass(frozen=True, eq=False)
class PagedPart:
    """Sequences whose keys are read in the pages of the cache.

    rows       which of the new tokens are theirs, (n,); None = all
    counts     new tokens of each of them
    keys       keys of each of them
    table      int32 (sequences, pages), as core.paged.Paged has it
    positions  of the new tokens among the keys of their sequence, (n,)
    """

    rows: Tensor | None
    counts: Tensor
    keys: Tensor
    table: Tensor
    positions: Tensor

    def attend(self, q: Tensor, rows: PageRows, pages: tuple[Tensor, Tensor], **options: Any) -> Tensor:
        """q (heads, n, dk), the cache's pages of keys and of values -> (n, heads, dv)."""
        most = int(self.keys.max())
        k, v = (rows.in_pages(of_one, self.table, most) for of_one in pages)
        lengths = Lengths(keys=self.keys)
        if q.shape[1] == len(self.counts):  # one new token each, which sees all keys
            return attention(q.transpose(0, 1)[:, :, None], k, v, mask=lengths, **options)[:, :, 0]
        offsets = nn.functional.pad(self.counts.cumsum(0), (1, 0))
        nested = torch.nested.nested_tensor_from_jagged(q, offsets, jagged_dim=2)
        at = Positions(self.positions, torch.arange(most, device=q.device, dtype=torch.int64))
        return attention(nested, k, v, mask=Causal() & lengths, positions=at, **options).values().transpose(0, 1)


@dataclass(frozen=True, eq=False)
class GatheredPart:
    """Sequences whose keys are copied from the cache, before new ones overwrite them.

    rows   which of the new tokens are theirs, (n,)
    slots  rows of the cache that hold their keys, (keys,)
    new    which of these keys are the new ones, (n,)
    mask   the keys that each new token sees
    """

    rows: Tensor
    slots: Tensor
    new: Tensor
    mask: Mask

    def copy(self, rows: PageRows, cached: Tensor, new: Tensor) -> Tensor:
        """Rows of the cache, and of all new tokens (total, heads, width) -> the keys (heads, keys, d)."""
        return rows.unpacked(cached.index_select(0, self.slots).index_copy_(0, self.new, new[self.rows]))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """q (heads, n, dk), k, v (key heads, keys, d) -> (n, heads, dv)."""
        return attention(q[None], k[None], v[None], mask=self.mask, **options)[0].transpose(0, 1)


# of each cache: the last forward's offsets of queries, and its layouts by kind of attention; layers share them
_LAYOUTS: WeakKeyDictionary[PagedAttentionCache, tuple[Tensor, dict[str, Layout]]] = WeakKeyDictionary()


@outside_of_graphs
def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score: Score,
    sink: Tensor | None,
    dropout: Dropout | None,
    cache: PagedAttentionCache,
    named: dict[str, Any],
) -> Tensor:
    """Writes the new keys and values of a layer to the cache; attention of the new queries, (1, total, heads, dv).

    query, key, value (1, heads, total, d) are the new tokens of all sequences, one sequence after another; `named` are
    the keywords that transformers passes beside the cache (PagedAttentionArgs). Tokens behind the last sequence are
    padding, for graphs of fixed sizes, and get 0.
    Raises Unsupported for a cache of another kind, and for a block table, which transformers makes for its own flash
    kernels alone.
    """
    if not isinstance(cache, PagedAttentionCache):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise Unsupported(
            f'attn_implementation="regard" cannot serve cache=...: it is {kind_of(cache)}; expected the '
            "PagedAttentionCache that model.generate_batch makes. Other caches belong to the model: past_key_values=."
        )
    if named.get("block_table") is not None:
        raise Unsupported(
            'attn_implementation="regard" finds the pages by read_index and write_index, and came with a block_table: '
            "pass max_blocks_per_request=0 in ContinuousBatchingConfig."
        )
    layer: int = module.layer_idx  # pyright: ignore[reportAssignmentType]
    allocator: Any = cache.layer_to_allocator[layer]
    layout = _layout(cache, allocator, named)
    # the class for sliding windows declines, since its rows are a ring; Layout reads that
    key_pages, value_pages = FullAttentionCacheAllocator.get_cache_for_block_table(allocator, layer)
    rows, both = page_rows(key_pages, key), (key_pages, value_pages)
    parts = [(of_one.flatten(0, 1), rows.packed(new[0])) for of_one, new in zip(both, (key, value), strict=True)]
    notify(lambda: _attention_call(module, query, score, sink, layout, rows, *parts[0]))
    gathered, pages = layout.gathered, layout.pages
    copies = None if gathered is None else [gathered.copy(rows, *part) for part in parts]
    write_index = named["write_index"][allocator.index]
    for cached, new in parts:
        cached.index_copy_(0, write_index, new[: len(write_index)])
    total = len(layout.sequence)
    options: dict[str, Any] = {"score": score, "sink": sink, "dropout": dropout}
    if copies is None and pages is not None and total == query.shape[2]:
        return pages.attend(query[0], rows, both, **options)[None]
    out = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
    if pages is not None:
        own = torch.arange(total, device=query.device, dtype=torch.int64) if pages.rows is None else pages.rows
        out[0, own] = pages.attend(query[0].index_select(1, own), rows, both, **options)
    if gathered is not None and copies is not None:
        out[0, gathered.rows] = gathered.attend(query[0].index_select(1, gathered.rows), *copies, **options)
    return out


def _layout(cache: PagedAttentionCache, allocator: Any, named: dict[str, Any]) -> Layout:
    """The layout of this forward for the layers of one allocator: made by the first of them."""
    offsets: Tensor = named["cu_seq_lens_q"]
    known = _LAYOUTS.get(cache)
    if known is None or known[0] is not offsets:
        known = _LAYOUTS[cache] = offsets, {}
    layouts, kind = known[1], allocator.layer_type
    if kind not in layouts:
        layouts[kind] = _read_layout(allocator, offsets, named)
    return layouts[kind]


def _read_layout(allocator: Any, offsets: Tensor, named: dict[str, Any]) -> Layout:
    """The layout of this forward, from what transformers passes beside the cache."""
    counts, keys = offsets.diff().long(), named["cu_seq_lens_k"][allocator.layer_type].diff().long()
    real = counts > 0  # graphs of fixed sizes have empty sequences behind the others
    counts, keys = counts[real], keys[real]
    total, seen = int(counts.sum()), int(keys.sum())
    read, written = named["read_index"][allocator.index], named["write_index"][allocator.index][:total]
    window: int | None = getattr(allocator, "sliding_window", None)
    starts, at = counts.cumsum(0) - counts, named.get("position_ids")
    first = torch.zeros_like(keys) if window is None else None
    if at is not None and window is not None:
        first = at.flatten()[starts].long() + counts - keys
    slots = (read[:seen] if len(read) else written).clone()
    layout = Layout(counts, keys, slots, first, allocator.tokens_per_page, window)
    # a window's new keys have no slot to be read from: transformers writes them after it has read
    layout.slots[layout.own] = written
    return layout


def _attention_call(
    module: nn.Module,
    query: Tensor,
    score: Score,
    sink: Tensor | None,
    layout: Layout,
    rows: PageRows,
    cached: Tensor,
    new: Tensor,
) -> AttentionCall:
    """The call for observers: all sequences one after another, with a copy of their keys."""
    everything = layout.gather(torch.ones_like(layout.counts, dtype=torch.bool))
    keys = written_out(everything.copy(rows, cached, new))[None]
    return AttentionCall(
        module, query[:, :, : len(layout.sequence)], keys, score=score, mask=everything.mask, sink=sink
    )


def install() -> None:
    """Has transformers' manager of continuous batching take a model that runs on regard as it is.

    The manager knows its own implementations by name, and refuses or replaces all others.
    """
    own = ContinuousBatchingManager.switch_to_cb_friendly_attn

    @functools.wraps(own)
    def switch_to_cb_friendly_attn(self: Any, model: Any, auto_switch_to_flash: bool = True) -> None:
        if model.config._attn_implementation != NAME:
            own(self, model, auto_switch_to_flash)

    ContinuousBatchingManager.switch_to_cb_friendly_attn = switch_to_cb_friendly_attn
