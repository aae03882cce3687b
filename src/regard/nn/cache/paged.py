"""PagedCache: sequences of unequal lengths, whose keys and values lie in pages of one pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

import regard.core.arrays as arrays
from regard.backends.native.direct import write_page_rows
from regard.backends.native.pages import write_pages
from regard.core.arrays import any_nested
from regard.core.deferred import written_out
from regard.core.errors import ShapeError
from regard.core.paged import Paged, gather_rows
from regard.core.positions import Positions, counted
from regard.core.shapes import count_of
from regard.core.tracing import outside_of_graphs
from regard.core.wrong_calls import answers_wrong_calls
from regard.masks.algebra import Everything, Mask
from regard.masks.ragged import Lengths, lengths_of_keys
from regard.nn.cache.base import KVCache, check_tokens, read_before_tokens, writable
from regard.nn.cache.block_tables import BlockTables
from regard.nn.cache.forms import Dtypes, form_of
from regard.nn.cache.nested_tokens import FLATTENED, flattened
from regard.nn.elsewhere import SIZES
from regard.sequences.jagged import numbered


class PagedCache(KVCache):
    """Keys and values in a pool of `pages` pages of `page_size` tokens each, allocated once, that sequences share.

    key_pages    (pages, heads, page_size, dk)
    value_pages  (pages, heads, page_size, dv)
    key_scales   float32 (pages, heads, page_size, 1) with dtype=torch.int8, else None; value_scales is alike
    block_table  int32 (batch, most pages of a sequence): the pages of each sequence in order, -1 after its last
    lengths      int64 (batch): tokens of each sequence

    Token t of sequence b is row t % page_size of page block_table[b, t // page_size]. A page may stand in the tables of
    several sequences: `reorder` copies tables, not pages, so that beams, or many continuations of one prompt, hold
    their common tokens once. A page that several sequences read is copied when one of them writes to it.

    `append` adds n tokens to every sequence, or a different number to each: see there. crop(lengths) turns a batch of
    prompts that are padded at the end into one of ragged lengths; from then on `positions` has a row for each sequence,
    and `mask` hides the keys after its end. crop with a length of 0 frees a sequence for a new one.

    The result of `append` has the shape (batch, heads, most tokens, d) and refers to the pages: the native kernels read
    the pages in place, and give the bits of a contiguous cache. Any other reader (another backend, a gradient, a graph,
    an operation of torch) first gathers all keys or values into a contiguous tensor; `explain` says so. An append that
    needs more pages than are free raises ValueError, and adds nothing. dtype and device as in torch.zeros; torch.int8
    rounds each token of any floating dtype once, when it is appended. See KVCache for the rest.
    Source: Kwon et al. 2023, PagedAttention (arXiv 2309.06180).

    >>> cache = PagedCache(batch=2, heads=8, pages=6, page_size=4, dk=64, dv=64)
    >>> prompts = torch.randn(2, 8, 7, 64)  # of 7 tokens and of 3, padded
    >>> keys, values = cache.append(prompts, prompts)
    >>> cache.crop(torch.tensor([7, 3]))
    >>> cache.block_table, cache.free_pages
    (tensor([[ 0,  1],
            [ 2, -1]], dtype=torch.int32), 3)
    >>> k, q = torch.randn(2, 2, 8, 1, 64)
    >>> rg.attention(q, *cache.append(k, k), mask=rg.Causal() & cache.mask, positions=cache.positions).shape
    torch.Size([2, 8, 1, 64])
    >>> cache.lengths
    tensor([8, 4])
    """

    @answers_wrong_calls(SIZES)
    def __init__(
        self,
        batch: int,
        heads: int,
        pages: int,
        page_size: int,
        dk: int,
        dv: int,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        given = {"batch": batch, "heads": heads, "dk": dk, "dv": dv}
        batch, heads, dk, dv = (arrays.size(n, f"PagedCache.{name}") for name, n in given.items())
        pages = arrays.size(pages, "PagedCache.pages", 1)
        page_size = arrays.size(page_size, "PagedCache.page_size", 1)
        self._form = form_of(dtype, type(self).__name__)
        with torch.inference_mode(False):  # a pool made in inference mode could be written in no other mode
            # zeros: what is gathered from behind a sequence's end is hidden, but finite
            # A head's pages follow one another in memory, as they are read.
            self._pools = tuple(
                torch.zeros(heads, pages, page_size, width, dtype=kept, device=device).transpose(0, 1)
                for width, kept in self._form.shapes(dk, dv, dtype)
            )
        self._tables = BlockTables(batch, pages, page_size)
        self._appended: int | list[int] = 0  # tokens of the last append, or of each sequence where it was nested
        self._dtypes: Dtypes | None = None  # of the last append's keys and values

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Adds the next tokens, as every cache does; nested tensors add a different number to each sequence.

        Jagged nested k (batch, hk, n*, dk) and v (batch, hk, n*, dv) hold any number of tokens a sequence, 0 included.
        The result is read by nested queries with as many rows per sequence; if the sequences got unequal numbers of
        tokens, `positions.q` has a number for each of these rows, one sequence after another, (total,).
        """
        if torch.compiler.is_dynamo_compiling():
            return self._gathered(k, v)
        tables, pools, form = self._tables, self._pools, self._form
        n = form.write_pages(tables.spare, tables.lengths, tables.tensor, pools, k, v)
        new = self._write(k, v) if n is None else [n] * len(tables.lengths)
        tables.advance(new)
        self._appended = new if k.is_nested else k.shape[-2]
        self._dtypes = k.dtype, v.dtype
        return self._read(self._dtypes)

    def read(self) -> tuple[Tensor, Tensor]:
        if torch.compiler.is_dynamo_compiling():
            return self._gathered()
        if self._dtypes is None:
            raise read_before_tokens()
        return self._read(self._dtypes)

    def _read(self, dtypes: Dtypes) -> tuple[Tensor, Tensor]:
        # torch.export: a graph reads no pages
        kind = gather_rows if torch.compiler.is_compiling() else Paged
        return self._form.read([kind(pool, self._tables.tensor, self.length) for pool in self._pools], dtypes)

    @outside_of_graphs
    def _gathered(self, *tokens: Tensor) -> tuple[Tensor, Tensor]:
        """append of k and v, or read: no graph can follow the tables, or read pages."""
        keys, values = self.append(*tokens) if tokens else self.read()
        return written_out(keys), written_out(values)

    def _write(self, k: Tensor, v: Tensor) -> list[int]:
        """Copies new keys and values to their pages, once they are checked and pages are taken; how many of each."""
        tables, pools, nested = self._tables, self._pools, any_nested(k, v)
        if nested:
            k, v, new = flattened(k, v, len(tables.lengths))
            self._form.check(pools, (self.key_pages.shape[1],), k, v, FLATTENED)
        else:
            check_tokens(k, v)
            self._form.check(pools, (len(tables.lengths), self.key_pages.shape[1]), k, v)
            new = [k.shape[-2]] * len(tables.lengths)
        kept = self._form.kept(k, v)
        copied = tables.reserve(new)
        try:
            for shared, own in copied:
                for pages in pools:
                    pages[own] = pages[shared]
            for n in range(0, len(pools), 2):
                self._copy(kept[n], pools[n], kept[n + 1], pools[n + 1], new, nested)
        except BaseException:
            tables.crop(tables.lengths)  # gives back the pages that were taken
            raise
        return new

    def _copy(self, k: Tensor, keys: Tensor, v: Tensor, values: Tensor, new: list[int], nested: bool) -> None:
        """Copies new rows to the pages of two pools."""
        tables = self._tables
        lengths, table, counts = tables.lengths, tables.tensor, new if nested else None
        if not nested and write_page_rows(tables.spare, lengths, table, k, keys, v, values) is not None:
            return
        # a graph calls no kernel by address
        if torch.compiler.is_compiling() or not write_pages(k, v, keys, values, table, lengths, counts):
            self._index(((k, keys), (v, values)), new)

    def _index(self, parts: tuple[tuple[Tensor, Tensor], ...], new: list[int]) -> None:
        """Copies new rows to their pages, by operations of torch."""
        tables, device = self._tables, self.key_pages.device
        sequence, at = numbered(new, torch.tensor(tables.lengths, dtype=torch.int64, device="cpu"))
        page = tables.tensor.long()[sequence, at // self.page_size].to(device)
        row = (at % self.page_size).to(device)
        for t, pages in parts:
            tokens = t.transpose(-3, -2)  # (batch, n, heads, d), or nested (total, heads, d)
            pages[page, :, row] = tokens.reshape(-1, *tokens.shape[-2:])

    def reorder(self, indices: Tensor) -> None:
        indices = arrays.indices(indices, "indices")
        chosen: list[int] = arrays.existing(indices, len(self._tables.lengths), "indices", "sequences").tolist()
        self._tables.reorder(chosen)
        self._forget()
        if isinstance(self._appended, list):
            self._appended = [self._appended[b] for b in chosen]

    def crop(self, length: int | Sequence[int] | Tensor) -> None:
        """Removes all tokens after the first `length`, a number or one for each sequence, (batch,)."""
        had = self._tables.lengths
        if isinstance(length, Tensor) and length.dim():
            wanted: list[int] = arrays.indices(length, "length").tolist()
        elif isinstance(length, (list, tuple)):
            wanted = [arrays.whole_number(n, "crop: a length") for n in length]
        else:
            wanted = [arrays.whole_number(length, "crop: length")] * len(had)
        if len(wanted) != len(had):
            raise ShapeError(
                f"crop: {count_of(len(wanted), 'length')}; expected one for each of {count_of(len(had), 'sequence')}."
            )
        if any(not 0 <= left <= most for left, most in zip(wanted, had, strict=True)):
            raise ValueError(f"crop: lengths {wanted}; the cache has {had}, expected from 0 to these.")
        self._tables.crop(wanted)
        self._forget()
        self._appended = 0

    def remove_last(self, n: int) -> None:
        n, lengths = arrays.size(n, "remove_last: n"), self._tables.lengths
        if n > min(lengths, default=n):
            raise ValueError(f"remove_last({n}): the cache has sequences of {lengths} tokens.")
        self.crop(torch.tensor([length - n for length in lengths], dtype=torch.int64, device="cpu"))

    def reset(self) -> None:
        self.crop(0)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._pools = writable(self._pools)

    def _forget(self) -> None:
        """Has torch refuse gradients through pages that were read, and may now be overwritten."""
        increment_version(self._pools)

    @property
    def key_pages(self) -> Tensor:
        return self._pools[0]

    @property
    def value_pages(self) -> Tensor:
        return self._pools[1]

    @property
    def key_scales(self) -> Tensor | None:
        return self._pools[2] if len(self._pools) > 2 else None

    @property
    def value_scales(self) -> Tensor | None:
        return self._pools[3] if len(self._pools) > 2 else None

    @property
    def page_size(self) -> int:
        return self._tables.page_size

    @property
    def block_table(self) -> Tensor:
        tables = self._tables.tables
        most = max(map(len, tables), default=0)
        rows = [table + [-1] * (most - len(table)) for table in tables]
        return torch.tensor(rows, dtype=torch.int32, device="cpu").reshape(len(rows), most)

    @property
    def free_pages(self) -> int:
        """The number of free pages of the pool."""
        return self._tables.free

    @property
    def length(self) -> int:
        return max(self._tables.lengths, default=0)

    @property
    def lengths(self) -> Tensor:
        return torch.tensor(self._tables.lengths, dtype=torch.int64, device=self.key_pages.device)

    @property
    def positions(self) -> Positions:
        return self._positions_of_graph() if torch.compiler.is_dynamo_compiling() else self._positions()

    def _positions(self) -> Positions:
        lengths, new, device = self._tables.lengths, self._appended, self.key_pages.device
        if isinstance(new, list) and len(set(new)) > 1:
            at = [t for length, n in zip(lengths, new, strict=True) for t in range(length - n, length)]
            q = torch.tensor(at, device=device, dtype=torch.int64)
            return Positions(q, torch.arange(self.length, device=device, dtype=torch.int64))
        n = new if isinstance(new, int) else max(new, default=0)
        first = self.length - n if self._even else tuple([length - n for length in lengths])
        return counted((first, n), (0, self.length), device)

    @outside_of_graphs
    def _positions_of_graph(self) -> Positions:
        """The same; numbers of each sequence as tensors, since a graph would have a constant or a symbol for each."""
        at = self._positions()
        return at if self._even else Positions(at.q, at.k)

    @property
    def mask(self) -> Mask:
        return self._mask_of_graph() if torch.compiler.is_dynamo_compiling() else self._mask()

    def _mask(self) -> Mask:
        if self._even:
            return Everything()
        on_cpu = self.key_pages.is_cpu
        return lengths_of_keys(tuple(self._tables.lengths)) if on_cpu else Lengths(keys=self.lengths)

    @outside_of_graphs
    def _mask_of_graph(self) -> Mask:
        return Everything() if self._even else Lengths(keys=self.lengths)

    @outside_of_graphs
    def next_positions(self, n: int) -> Tensor:
        ahead = torch.arange(arrays.size(n, "next_positions: n"), device=self.key_pages.device, dtype=torch.int64)
        return self.length + ahead if self._even else self.lengths[:, None] + ahead

    @property
    def _even(self) -> bool:
        """Whether all sequences are of one length, so that positions and masks need no tensors."""
        return len(set(self._tables.lengths)) < 2
