"""The sizes of a small decoder with grouped heads, under the names of Llama, Mistral and Gemma."""

from __future__ import annotations

from typing import Any

from tiny_models import VOCABULARY

SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "tie_word_embeddings": False,  # tied, large random weights repeat the last token for ever
}
