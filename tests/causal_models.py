"""Every causal class of transformers, built small: its configuration with small numbers under the names that it has."""

from __future__ import annotations

import copy
from typing import Any

import torch

from tiny_models import VOCABULARY

SMALL: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    **{"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "max_position_embeddings": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "n_inner": 37, "n_positions": 64},
    **{"d_model": 32, "d_ff": 40, "d_kv": 8, "d_inner": 37, "ffn_dim": 37, "ffn_hidden_size": 40, "emb_dim": 32},
    **{"decoder_layers": 2, "encoder_layers": 1, "decoder_attention_heads": 4, "encoder_attention_heads": 4},
    **{"decoder_ffn_dim": 37, "encoder_ffn_dim": 37, "word_embed_proj_dim": 32, "embedding_size": 16, "n_ctx": 64},
    **{"n_head": 4, "n_layer": 2, "num_heads": 4, "num_layers": 2, "n_heads": 4, "n_layers": 2, "dim": 32},
    **{"hidden_dim": 40, "rotary_dim": 4, "adapter_size": 8, "num_codebooks": 2, "intermediate_size_mlp": 37},
    # windows shorter than what is generated
    **{"sliding_window": 6, "attention_window": 6, "attention_window_size": 6, "local_attention": 6},
    # experts
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2},
    **{"moe_topk": 2, "moe_k": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1},
    **{"moe_intermediate_size": 16, "expert_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    # latent keys and values, and their index of chosen keys
    **{"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    **{"o_lora_rank": 8, "o_groups": 2, "index_head_dim": 8, "index_n_heads": 2, "index_topk": 6},
    **{"hc_mult": 2, "num_hash_layers": 1, "num_nextn_predict_layers": 0, "num_mtp_layers": 0},
    # layers without attention, and how many layers have it
    **{"mamba_d_state": 4, "mamba_d_conv": 2, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2},
    **{"mamba_n_groups": 1, "mamba_chunk_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_dt_rank": 4},
    **{"mamba_headdim": 16, "state_size": 4, "conv_kernel": 2, "n_groups": 1, "chunk_size": 8, "lru_width": 32},
    **{"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{"linear_conv_kernel_dim": 2, "full_attention_interval": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
    **{"global_head_dim": 8, "num_global_key_value_heads": 2},
    **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY},
}
# What a configuration needs besides, or instead; None = its own default.
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _LINEAR,
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v4": {
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
    },
    "falcon": {"head_dim": None},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]},
    "git": {"vision_config": {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 32}},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 6},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "moshi": {"ffn_dim": 38},
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_5_text": _LINEAR,
    "qwen3_next": _LINEAR,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_shape": [8, 8], "axial_pos_embds_dim": [16, 16]},
    "roc_bert": {
        "shape_vocab_size": 61,
        "pronunciation_vocab_size": 61,
        "shape_embed_dim": 8,
        "pronunciation_embed_dim": 8,
    },
    "xlnet": {"max_position_embeddings": None},
    "zaya": {"num_experts_per_tok": 1},
    "xmod": {"default_language": "en_XX"},
}
for _kind in ("qwen3_5", "qwen3_5_moe"):
    SPECIAL[_kind] = SPECIAL[f"{_kind}_text"]


_PICTURES = (
    "its default parts for pictures or sound are large; its text model has a type of its own here, or is Llama's"
)
_CONFIG = "what its configuration wants was not found out"
# Types that the sweep leaves out.
NOT_BUILT = {
    **dict.fromkeys(("fuyu", "gemma3", "gemma4", "gemma4_unified", "got_ocr2", "phi4_multimodal"), _PICTURES),
    "moss_transcribe_diarize": _PICTURES,
    "gemma3n": "its part for pictures needs timm",
    "blt": "has four models inside, large by default",
    **dict.fromkeys(("cohere_compass_text", "dbrx", "kimi_linear", "qwen4_exp", "qwen4_exp_text"), _CONFIG),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), "reads the cache of another model"),
    **dict.fromkeys(("musicgen", "musicgen_melody"), "eager cannot generate either from a prompt of one codebook"),
    **dict.fromkeys(("prophetnet", "xlstm", "zamba2"), "eager cannot generate either with this small configuration"),
    "zamba": "ties weights by layers that two layers do not have",
}
# Types that do not generate eager's tokens, and the beginning of the sentence that says why. All others do.
REFUSED = {"inkling2_text": 'attn_implementation="regard" cannot serve sinks=...'}


def model_types() -> dict[str, str]:
    """Every type of model that AutoModelForCausalLM knows, with its class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def build(kind: str, implementation: str) -> Any:
    """The model of a type, its weights the same for every implementation, and large enough to matter."""
    import transformers

    model_class = getattr(transformers, model_types()[kind])
    config = copy.deepcopy(configuration(model_class.config_class, kind))
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
    return model


def configuration(config_class: Any, kind: str) -> Any:
    default = config_class()
    given = {name: value for name, value in SMALL.items() if has(default, name)}
    if "kv_lora_rank" in given:  # heads of keys are made of the latent, and head_dim is what is rotated
        given |= {"num_key_value_heads": 4, "head_dim": 4}
    if getattr(default, "is_decoder", None) is False:
        given["is_decoder"] = True
    given |= SPECIAL.get(kind, {})
    return config_class(**{name: value for name, value in given.items() if value is not None})


def has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # differs from layer to layer
        return True
