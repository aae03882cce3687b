"""Requests for continuous batching, small models that answer them, and what happens around each forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.model_runner import ModelRunner

import served_models
from tiny_models import Tiny

VOCABULARY, NEW = 97, 12
SHAPE = served_models.SHAPE | {"vocab_size": VOCABULARY, "head_dim": 10, "max_position_embeddings": 128}
HYBRID: dict[str, Any] = {
    "sliding_window": 13,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
MODELS = {
    "grouped": Tiny("LlamaForCausalLM", "LlamaConfig", SHAPE),
    "every head": Tiny("LlamaForCausalLM", "LlamaConfig", SHAPE | {"num_key_value_heads": 4}),
    "window": Tiny("MistralForCausalLM", "MistralConfig", SHAPE | {"sliding_window": 11}),
    "window of pages": Tiny("MistralForCausalLM", "MistralConfig", SHAPE | {"sliding_window": 16}),
    "hybrid": Tiny("Gemma3ForCausalLM", "Gemma3TextConfig", SHAPE | HYBRID),
    "soft cap": Tiny("Gemma2ForCausalLM", "Gemma2Config", SHAPE | HYBRID),
    "sinks": Tiny(
        "GptOssForCausalLM", "GptOssConfig", SHAPE | HYBRID | {"num_local_experts": 2, "num_experts_per_tok": 1}
    ),
}
LENGTHS = (5, 1, 40, 17, 23, 3, 61, 9)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    made = [torch.randint(3, VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]
    return [*made, [*made[2][:32], 9, 8, 7]]  # the last begins as the third does


def batching(kind: Any = ContinuousBatchingConfig, **options: Any) -> Any:
    """Pages of 8 tokens; at most 32 tokens a forward, so that longer prompts come in parts."""
    sizes = {"num_blocks": 64, "max_batch_tokens": 32, "page_size": 8, "auto_switch_to_flash": False}
    return kind(**(sizes | options))


def greedy(**options: Any) -> GenerationConfig:
    plain = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    return GenerationConfig(**(plain | options))


@contextmanager
def each_forward(monkeypatch: pytest.MonkeyPatch, around: Any) -> Iterator[None]:
    """Opens around(data) for each forward, in the thread of the manager."""
    own = ModelRunner.compute_batch

    def compute_batch(self: Any, model: Any, data: dict[str, Any]) -> None:
        with around(data):
            own(self, model, data)

    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "compute_batch", compute_batch)
        yield
