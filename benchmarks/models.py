"""Whole models: a random Llama that generates, greedily, and MiniLM that embeds sentences."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from benchmarks.candidates import Way
from benchmarks.cases import Case
from benchmarks.inputs import VOCABULARY, Inputs

SAME = 1e-5  # how far an embedding may be from float64's, relatively
EVERY = 10  # sentences, of which one is compared


def model_way(x: Inputs, implementation: str) -> Way:
    """The model of the case with this implementation of attention in transformers."""
    import regard.compat.transformers  # noqa: F401 - registers the name

    if x.case.what == "sentences":
        embed = _minilm(implementation)
        return Way(implementation, lambda: _encode(embed, x.case), lambda out: [out])
    model = llama(implementation, getattr(torch, x.case.dtype))

    def run() -> Tensor:
        return _generate(model, x)

    def parts() -> dict[str, float]:
        return {"attention": _attention_seconds(run, implementation)}

    return Way(implementation, run, lambda out: [out], parts=parts)


def packed_way(x: Inputs) -> Way:
    """The case of sentences by a model that runs packed."""
    from regard.compat.transformers import packed

    embed = _minilm("sdpa")
    packed(embed)
    return Way("packed", lambda: _encode(embed, x.case), lambda out: [out])


def llama(implementation: str, dtype: torch.dtype) -> Any:
    """Four layers, 8 heads, 4 of keys, d = 64, with numbers from a fixed seed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
    heads: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096}
    # large weights: those of a fresh model give logits that hardly differ, and heads that see all keys alike
    config = LlamaConfig(**sizes, **heads, vocab_size=VOCABULARY, initializer_range=0.1, bos_token_id=None)
    state = torch.random.get_rng_state()
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(dtype).eval()
    torch.random.set_rng_state(state)
    model.set_attn_implementation(implementation)
    return model


def _generate(model: Any, x: Inputs) -> Tensor:
    """The tokens that follow, (batch, size)."""
    count = x.case.size
    given: dict[str, Any] = {"attention_mask": torch.ones_like(x.q), "do_sample": False, "pad_token_id": 0}
    given |= {"max_new_tokens": count, "eos_token_id": None, "disable_compile": True}
    return model.generate(x.q, **given, cache_implementation=x.case.what)[:, -count:]


def _attention_seconds(run: Any, implementation: str) -> float:
    """What a run spends in the function that the model's layers call for attention; masks are made elsewhere."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function, spent = ALL_ATTENTION_FUNCTIONS[implementation], 0.0

    def timed(*given: Any, **named: Any) -> Any:
        nonlocal spent
        start = time.perf_counter()
        out = function(*given, **named)
        spent += time.perf_counter() - start
        return out

    ALL_ATTENTION_FUNCTIONS[implementation] = timed
    try:
        run()
    finally:
        del ALL_ATTENTION_FUNCTIONS[implementation]  # of this object alone: the registered function shows again
    return spent


@dataclass
class Greedy:
    """What greedy generation must be: each token has the largest logit, by the eager model in float64.

    The error of a token is how far its logit is below the largest, over the spread of logits: 0 where they are the same
    tokens. The limit is the error of the eager model's logits in the case's dtype, `worse` times.
    """

    x: Inputs
    worse: float

    def error(self, results: list[Tensor]) -> float:
        """The largest of all tokens (batch, size); infinite where there are more or fewer."""
        (tokens,) = results
        if tokens.shape != (len(self.x.q), self.x.case.size):
            return float("inf")
        text = torch.cat([self.x.q, tokens], dim=1)[:, :-1]
        logits = self._logits(self._exact, text)[:, -tokens.shape[1] :]
        below = logits.amax(-1) - logits.gather(-1, tokens[..., None]).squeeze(-1)
        return float(below.max() / logits.std())

    @cached_property
    def limit(self) -> float:
        exact, plain = (self._logits(model, self.x.q) for model in (self._exact, llama("eager", self._dtype)))
        return self.worse * float((plain - exact).std() / exact.std())

    @cached_property
    def _exact(self) -> Any:
        return llama("eager", self._dtype).double()

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.x.case.dtype)

    @staticmethod
    def _logits(model: Any, text: Tensor) -> Tensor:
        with torch.no_grad():
            return model(text, use_cache=False).logits


@dataclass
class Vectors:
    """What embeddings must be: those of the eager model in float64, of one sentence in EVERY."""

    case: Case
    limit: float = SAME

    def error(self, results: list[Tensor]) -> float:
        right = self._right
        return float((results[0][::EVERY].double() - right).square().mean().sqrt() / right.square().mean().sqrt())

    @cached_property
    def _right(self) -> Tensor:
        return _minilm("eager").double().encode(sentences(self.case)[::EVERY], convert_to_tensor=True)


def _minilm(implementation: str) -> Any:
    from sentence_transformers import SentenceTransformer

    from regard.compat.folder import folder_of

    options = {"attn_implementation": implementation}
    return SentenceTransformer(str(folder_of("minilm")), local_files_only=True, device="cpu", model_kwargs=options)


def _encode(embed: Any, case: Case) -> Tensor:
    """Vectors of all sentences: sentence-transformers sorts those that it is given at once, and takes 32 at a time."""
    texts, size = sentences(case), case.size or case.shape[0]
    parts = [texts[first : first + size] for first in range(0, len(texts), size)]
    return torch.cat([embed.encode(part, convert_to_tensor=True) for part in parts])


def sentences(case: Case) -> list[str]:
    """Random words, 3 to shape[1] of them, the short sentences more than the long ones, in any order."""
    (count, most), draw = case.shape, random.Random(0)
    words = ("attention", "is", "a", "mean", "of", "values", "whose", "weights", "come", "from", "queries", "keys")
    lengths = [3 + (most - 3) * n * n // max(1, (count - 1) ** 2) for n in range(count)]
    draw.shuffle(lengths)
    return [" ".join(draw.choices(words, k=length)) for length in lengths]
