"""DiffusionGemma: a decoder that reads the encoder's cache without an update, and all that a window has kept of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")
pytest.importorskip("transformers.models.diffusion_gemma", reason="needs a transformers that has DiffusionGemma")

from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion, DiffusionGemmaTextConfig, DynamicCache

from regard.compat.transformers import NAME, FixedCache, GrowingCache, PagedCache

CANVAS = 6
TEXT = DiffusionGemmaTextConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_global_key_value_heads=2,
    head_dim=8,
    global_head_dim=8,
    sliding_window=5,
    layer_types=["sliding_attention", "full_attention", "full_attention"],
    num_experts=2,
    top_k_experts=1,
    moe_intermediate_size=16,
)
VISION = {
    **{"model_type": "gemma4_vision", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8},
}
CACHES = {
    "DynamicCache": lambda config: DynamicCache(config=config),
    "growing": GrowingCache,
    "fixed": lambda config: FixedCache(config, capacity=200),
    "paged": lambda config: PagedCache(config, pages=100, page_size=4),
}


def build(implementation: str) -> Any:
    torch.manual_seed(0)
    config = DiffusionGemmaConfig(text_config=copy.deepcopy(TEXT), vision_config=VISION, canvas_length=CANVAS)
    config._attn_implementation = implementation
    model = DiffusionGemmaForBlockDiffusion(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.3)
    return model


def logits(model: Any, cache: Any, n: int, padded: bool) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 60, (2, n), generator=generator)
    canvas = torch.randint(3, 60, (2, CANVAS), generator=generator)
    real = torch.ones_like(ids)
    real[1, :2] = 0
    masks = {"attention_mask": real, "decoder_attention_mask": torch.cat([real, torch.ones_like(canvas)], 1)}
    with torch.no_grad():
        return model(ids, decoder_input_ids=canvas, past_key_values=cache, **(masks if padded else {})).logits


@pytest.mark.parametrize("implementation", [NAME, "sdpa"])
@pytest.mark.parametrize("cache", CACHES)
def test_with_each_cache(cache: str, implementation: str) -> None:
    """A prompt within the window, longer than it, and longer than the tiles of keys that are kept for it."""
    model, peer = build(implementation), build("sdpa")
    for n, padded in ((4, False), (4, True), (9, False), (9, True), (140, False), (140, True)):
        found = logits(model, CACHES[cache](model.config), n, padded)
        torch.testing.assert_close(found, logits(peer, None, n, padded), rtol=1e-4, atol=1e-4)
