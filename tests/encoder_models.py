"""Every text encoder of transformers, built small: its configuration with small numbers under the names that it has."""

from __future__ import annotations

import copy
from typing import Any

import torch

from causal_models import SMALL, SPECIAL, has
from tiny_models import VOCABULARY

# Of what AutoModel knows besides, the text models that can run packed.
BESIDES = {
    "bert-generation": "BertGenerationEncoder",
    "embedding_gemma2_text": "EmbeddingGemma2TextModel",
    "openai_privacy_filter": "OpenAIPrivacyFilterModel",
    "splinter": "SplinterModel",
    "tipsv2_text_model": "Tipsv2TextModel",
}
_TOKENS = {"mask_token_id": 3, "sep_token_id": 3, "cls_token_id": 1}
# What a configuration needs besides; None = its own default.
_SPECIAL: dict[str, dict[str, Any]] = {
    **{kind: SPECIAL[kind] for kind in ("reformer", "roc_bert", "xmod")},
    "funnel": {"num_hidden_layers": None, "block_sizes": [1, 1], "d_head": 8},
    "esmc": {"num_key_value_heads": None, "head_dim": None},
    "squeezebert": {"embedding_size": 32},
}

_PICTURES = "its part for pictures is large; its text model has a type of its own here, or is ModernBERT's"
# Types that the sweep leaves out.
NOT_BUILT = {
    "luke": "its embeddings of entities are large by default",
    "modernvbert": _PICTURES,
    "neomme": "what its configuration wants was not found out",
    "perceiver": "is no stack of layers over tokens, and large by default",
    "t5gemma": "is built of the configurations of an encoder and a decoder; its layers are those of a decoder",
    "ultravbert": _PICTURES,
}
# Types that packed(model) refuses: they compute attention by themselves, add to the scores what is made for the padded
# batch, mix tokens otherwise (convolutions, Fourier transforms), or have a decoder.
REFUSED = (
    *("bart", "big_bird", "clip_text_model", "convbert", "deberta", "deberta-v2", "emu3", "flaubert", "fnet", "funnel"),
    *("ibert", "layoutlm", "llama4", "longformer", "mbart", "megatron-bert", "mllama", "molmo2_text", "mpnet", "mra"),
    *("mt5", "mvp", "nystromformer", "reformer", "rembert", "roformer", "squeezebert", "t5", "tapas", "umt5", "xlm"),
    *("xmod", "yoso"),
)


def encoder_types() -> dict[str, str]:
    """The types that AutoModelForMaskedLM or AutoModelForTextEncoding knows, and BESIDES: each with its class."""
    from transformers.models.auto import modeling_auto as auto

    masked, encoding = auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES, auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES
    return {**masked, **encoding, **BESIDES}


def build(kind: str, implementation: str = "eager") -> Any:
    """The model of a type, its weights the same for every implementation, and large enough to matter."""
    import transformers

    model_class = getattr(transformers, encoder_types()[kind])
    default = model_class.config_class()
    given = {name: value for name, value in (SMALL | _TOKENS).items() if has(default, name)} | _SPECIAL.get(kind, {})
    config = model_class.config_class(**{name: value for name, value in given.items() if value is not None})
    config._attn_implementation = implementation
    with torch.device("meta"):  # what a name is missing for is large, and would take minutes
        count = sum(p.numel() for p in model_class(copy.deepcopy(config)).parameters())
    assert count < 4_000_000, f"{count} parameters"
    torch.manual_seed(0)
    model = model_class(config).eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(0, 0.2, generator=generator)
    assert config.get_text_config().vocab_size == VOCABULARY
    return model
