"""Inputs for the doctor's run of a model of transformers: random tokens, some of them padding, a picture or a sound."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.core.shapes import count_of
from regard.inspect.reading import positions, text_part

TOKENS, PADDING, NEW = 32, 5, 8  # of a sequence; of those, padding; generated after them


def random_inputs(model: Any) -> tuple[dict[str, Tensor], Tensor | None]:
    """What the model reads, and which of its tokens are real."""
    random = torch.Generator().manual_seed(0)
    name, config = model.main_input_name, model.config
    if name == "input_ids":
        ids = torch.randint(
            4,
            config.get_text_config().vocab_size,
            (2, token_count(model)),
            generator=random,
            dtype=torch.int64,
            device="cpu",
        )
        real = torch.ones_like(ids)
        real[1, -PADDING:] = 0
        feed = {"input_ids": ids, "attention_mask": real}
        if hasattr(model, "text_model") and hasattr(model, "vision_model"):  # CLIP and its like
            shape = _shape("pixel_values", config.vision_config)
            feed["pixel_values"] = torch.randn(*shape, generator=random, dtype=torch.float32, device="cpu")
        if config.is_encoder_decoder:
            return {**feed, "decoder_input_ids": ids[:, :NEW]}, None
        return feed, real
    shape = _shape(name, config)
    feed = {name: torch.randn(*shape, generator=random, dtype=torch.float32, device="cpu")}
    if config.is_encoder_decoder:
        feed["decoder_input_ids"] = torch.randint(
            4, config.vocab_size, (shape[0], NEW), generator=random, dtype=torch.int64, device="cpu"
        )
    return feed, None


def token_count(model: Any) -> int:
    """How many tokens the model reads: TOKENS, or fewer where they, and those generated after them, need positions."""
    limit = positions(text_part(model))
    if limit is None:
        return TOKENS
    new = NEW if model.can_generate() and not model.config.is_encoder_decoder else 0
    if limit - new <= PADDING:
        raise ValueError(
            f"{type(model).__name__} has positions for {count_of(limit, 'token')}; the doctor needs "
            f"{PADDING + 1 + new} or more."
        )
    return min(TOKENS, limit - new)


def _shape(name: str, config: Any) -> tuple[int, ...]:
    if name == "pixel_values":
        size = config.image_size
        height, width = (size, size) if isinstance(size, int) else size
        return 1, getattr(config, "num_channels", 3), height, width
    if name == "input_values":
        return 1, 16000  # a second of sound
    if name == "input_features" and hasattr(config, "max_source_positions"):
        return 1, config.num_mel_bins, 2 * config.max_source_positions
    raise ValueError(f"the doctor has no {name} to give to this model; it has tokens, pictures and sounds.")
