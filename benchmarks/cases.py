"""What is measured: named calls in groups, for inference and for training. candidates/ says how they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

WINDOW = 256  # keys that a query of a window sees, its own included
DROPPED = 0.1


@dataclass(frozen=True)
class Case:
    """One call: q (*batch, heads, nq, d) or (batch, n, d), k and v (..., key heads, nk, d or dv).

    what: full, causal, window, bool (a mask n × n), bias (a float mask n × n), padding (a mask (b, 1, 1, n)), ragged
    (sentences, packed one behind the other), dropout; in training also t5 (a table of relative biases), additive.
    lengths: of the sequences, where what is padding or ragged. passes: forward, backward or both. only: who takes part,
    () for everybody.
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
    def pairs(self) -> int:
        """The visible pairs of query and key, of all heads. A mask of booleans counts in full: it skips nothing."""
        n = self.shape[-2]
        if self.what == "ragged":
            return self.heads * sum(length * length for length in self.lengths)
        if self.what == "padding":
            return self.heads * n * sum(self.lengths)
        seen = n * self.keys
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
        """Of keys and values: what decoding is bound by."""
        size = torch.empty((), dtype=getattr(torch, self.dtype)).element_size()
        return self.batch * (self.key_heads or self.heads) * self.keys * (self.shape[-1] + self.values) * size


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
TABLES = {"inference": INFERENCE, "training": TRAINING}
