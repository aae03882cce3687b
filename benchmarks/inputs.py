"""The tensors of a case, the same in every process."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.cases import ARCHITECTURES, MODELS, PATCHED, PIECES, STEPPED, WINDOW, Case
from benchmarks.functions import TABLE, indices, mask_of
from regard.scores.buckets import T5Buckets

BUCKETS = T5Buckets(32, 128)
VOCABULARY = 512  # of the models that generate


@dataclass(frozen=True)
class Inputs:
    """q, k, v in the case's axes; in training also what is learned besides (bias, table or w), and a cotangent.

    Of a whole model q is what it reads: tokens, int64 (batch, n), or in patching numbers.
    """

    case: Case
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None = None  # booleans (n, n) or (b, 1, 1, n)
    learned: Tensor | None = None  # bias (n, n) or (1, h, n, n), table (buckets, h), w (hidden,)
    cotangent: Tensor | None = None

    def four(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v as (batch, heads, n, d), without a copy."""
        if self.q.dim() == 3:
            return self.q[:, None], self.k[:, None], self.v[:, None]
        return self.q.flatten(0, -4), self.k.flatten(0, -4), self.v.flatten(0, -4)

    def ids(self) -> Tensor:
        """The number of the sentence, or document, that each token of a packed batch belongs to."""
        if self.case.what == "unsorted":
            pieces = torch.arange(self.case.keys // self.case.size) // PIECES
            order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))
            return pieces[order].repeat_interleave(self.case.size)
        lengths = torch.tensor(self.case.lengths)
        return torch.repeat_interleave(torch.arange(len(lengths)), lengths)

    def visible(self, rows: Tensor) -> Tensor | None:
        """What some queries may see: booleans, broadcastable to (batch, heads, rows, nk)."""
        i, j, what = rows[:, None], torch.arange(self.case.keys), self.case.what
        if what in ("causal", "window"):
            return (i >= j) & (i - j < WINDOW) if what == "window" else i >= j
        if what in STEPPED:
            i = i + self.case.past
            seen = i >= j
            if what == "sliding":
                seen = seen & (i - j < self.case.size)
            return seen & self.real() if what == "left" else seen
        if what == "mixed":
            ends, new = torch.tensor(self.case.lengths).cumsum(0), torch.tensor(self.case.new)
            last = torch.cat([torch.arange(end - n, end) for end, n in zip(ends.tolist(), new.tolist(), strict=True)])[
                rows
            ]
            return (j <= last[:, None]) & (self.ids()[last][:, None] == self.ids())
        if what in ("ragged", "unsorted"):
            ids = self.ids()
            return ids[rows][:, None] == ids
        if what == "bool":
            assert self.mask is not None
            return self.mask[rows]
        seen = mask_of(self.case)
        if seen is not None:
            return seen(*indices(self.case, rows))
        return self.mask

    def real(self) -> Tensor:
        """The keys of prompts padded on the left that are no padding: booleans (batch, 1, 1, nk)."""
        padding = self.case.past - torch.tensor(self.case.lengths)
        return (torch.arange(self.case.keys) >= padding[:, None])[:, None, None]

    def dense(self) -> Tensor | None:
        """The mask written out, as the boolean argument of most peers."""
        return self.visible(torch.arange(self.case.shape[-2]))

    def apart(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Of mixed: the new queries, and all keys and values, of each sequence."""
        q = self.q.split(self.case.new, dim=2)
        k, v = (t.split(self.case.lengths, dim=2) for t in (self.k, self.v))
        return list(zip(q, k, v, strict=True))

    def padded(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The sentences of a packed batch one a row: (b, h, longest, d), and the mask (b, 1, 1, longest) of real keys.

        Zeros stand behind the short ones.
        """
        lengths = self.case.lengths

        def rows(t: Tensor) -> Tensor:
            parts = [part.transpose(0, 1) for part in t[0].split(lengths, dim=1)]
            return torch.nn.utils.rnn.pad_sequence(parts, batch_first=True).transpose(1, 2).contiguous()

        real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        return rows(self.q), rows(self.k), rows(self.v), real[:, None, None]

    def packed(self, out: Tensor) -> Tensor:
        """The real rows of a padded output (b, h, longest, dv), one sentence behind the other."""
        return torch.cat([row[:, :n] for row, n in zip(out, self.case.lengths, strict=True)], dim=1)[None]


def draw(case: Case) -> Inputs:
    """Normal numbers from a fixed seed, rounded to the case's dtype."""
    random, dtype = torch.Generator().manual_seed(0), getattr(torch, case.dtype)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random).to(dtype)

    if case.what in PATCHED:
        return Inputs(case, normal(*case.shape), normal(0), normal(0))
    if case.what in ARCHITECTURES:
        given = (
            torch.randint(3, VOCABULARY, case.shape, generator=random) if len(case.shape) == 2 else normal(*case.shape)
        )
        return Inputs(case, given, normal(0), normal(0))
    if case.what in MODELS:
        tokens = torch.randint(VOCABULARY, case.shape, generator=random)
        return Inputs(case, tokens, tokens[:0], tokens[:0])
    *lead, n, d = case.shape
    q = normal(*case.shape)
    if len(case.shape) > 3 and case.key_heads:
        lead[-1] = case.key_heads
    k, v = normal(*lead, case.keys, d), normal(*lead, case.keys, case.values)
    if case.what == "prefix":
        k[1:, :, : case.size], v[1:, :, : case.size] = k[:1, :, : case.size], v[:1, :, : case.size]
    if case.what == "int8":
        from regard.core.int8_rows import rounded  # older checkouts have none (--against)

        k, v = ((numbers * scales).to(dtype) for numbers, scales in map(rounded, (k, v)))
    mask = learned = cotangent = None
    if case.what == "bool":
        mask = torch.rand(n, n, generator=random) > 0.3
    if case.what == "padding":
        mask = (torch.arange(n) < torch.tensor(case.lengths)[:, None])[:, None, None]
    if case.what == "bias":
        learned = normal(n, n) if case.passes == "forward" else normal(1, case.heads, n, n)
    if case.what == "t5":
        learned = normal(BUCKETS.count, case.heads)
    if case.what == "additive":
        learned = normal(d) * d**-0.5
    if case.what == "learned table":
        learned = normal(2 * TABLE + 1, case.heads)
    if case.passes != "forward":
        cotangent = normal(*case.shape[:-1], case.values)
    return Inputs(case, q, k, v, mask, learned, cotangent)
