"""Small random models of transformers' architectures: two layers, four heads, weights large enough to matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

VOCABULARY, N = 61, 13


@dataclass(frozen=True)
class Tiny:
    """The class of the model and of its configuration, what the configuration is asked for, how large weights are."""

    model: str
    config: str
    options: dict[str, Any]
    weights: float = 0.3

    def build(self, implementation: str) -> Any:
        """The same model for every implementation."""
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.options)
        config._attn_implementation = implementation
        model = getattr(transformers, self.model)(config).eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in model.parameters():
                if p.dim() > 1 and p.requires_grad:
                    p.normal_(0, self.weights, generator=generator)
        return model


_NAMED = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_PLAIN = {
    **_NAMED,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_GROUPED = {**_PLAIN, "num_key_value_heads": 2}
_WIDE = {**_GROUPED, "head_dim": 10}  # heads × width is not the hidden size
_WINDOW = {"sliding_window": 5}
_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
_GPT2 = {**_NAMED, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_DISTIL = {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 37, "n_layers": 2, "n_heads": 4}
_LATENT = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
_BOTH = {
    **_NAMED,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 37,
    "decoder_ffn_dim": 37,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
}
_T5 = {**_NAMED, "d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
_T5["relative_attention_max_distance"] = 9
_T5["relative_attention_num_buckets"] = 8
_VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "image_size": 12,
    "patch_size": 4,
}
_SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [2, 1], "num_heads": [2, 2], "window_size": 4}
_SPEECH = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "conv_dim": (16, 16),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}

_BARK = {"input_vocab_size": VOCABULARY, "output_vocab_size": VOCABULARY}

DECODERS = {
    "Llama": Tiny("LlamaForCausalLM", "LlamaConfig", _GROUPED),
    "Mistral": Tiny("MistralForCausalLM", "MistralConfig", {**_WIDE, **_WINDOW}),
    "Mixtral": Tiny("MixtralForCausalLM", "MixtralConfig", {**_GROUPED, "num_local_experts": 2}),
    "Qwen2": Tiny(
        "Qwen2ForCausalLM",
        "Qwen2Config",
        {**_GROUPED, **_WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "Qwen3": Tiny("Qwen3ForCausalLM", "Qwen3Config", _WIDE),
    "Gemma": Tiny("GemmaForCausalLM", "GemmaConfig", _WIDE),
    "Gemma2": Tiny(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**_WIDE, **_WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    ),
    "Gemma3": Tiny(
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**_WIDE, **_WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "GPT-2": Tiny("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "GPT-NeoX": Tiny("GPTNeoXForCausalLM", "GPTNeoXConfig", _PLAIN),
    "OPT": Tiny("OPTForCausalLM", "OPTConfig", {**_PLAIN, "ffn_dim": 37, "word_embed_proj_dim": 32}),
    "Phi": Tiny("PhiForCausalLM", "PhiConfig", _PLAIN),
    "Phi3": Tiny("Phi3ForCausalLM", "Phi3Config", {**_GROUPED, **_WINDOW}),
    "GPT-OSS": Tiny("GptOssForCausalLM", "GptOssConfig", {**_WIDE, **_WINDOW, **_EXPERTS}),
    "Llama4": Tiny(
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {**_GROUPED, "intermediate_size_mlp": 37, "num_local_experts": 2, "attention_chunk_size": 4, "head_dim": 8},
    ),
    "Starcoder2": Tiny("Starcoder2ForCausalLM", "Starcoder2Config", {**_GROUPED, **_WINDOW}),
    "Cohere": Tiny("CohereForCausalLM", "CohereConfig", _GROUPED),
    "Cohere2": Tiny("Cohere2ForCausalLM", "Cohere2Config", {**_GROUPED, **_WINDOW}),
    "OLMo2": Tiny("Olmo2ForCausalLM", "Olmo2Config", _GROUPED),
    "OLMo3": Tiny("Olmo3ForCausalLM", "Olmo3Config", {**_GROUPED, **_WINDOW}),
    "Granite": Tiny("GraniteForCausalLM", "GraniteConfig", {**_GROUPED, "attention_multiplier": 0.3}),
    "StableLM": Tiny("StableLmForCausalLM", "StableLmConfig", _GROUPED),
    "SmolLM3": Tiny("SmolLM3ForCausalLM", "SmolLM3Config", _GROUPED),
    "GLM": Tiny("GlmForCausalLM", "GlmConfig", {**_GROUPED, "head_dim": 8}),
    "BioGPT": Tiny("BioGptForCausalLM", "BioGptConfig", _PLAIN),
    "DeepSeek-V3": Tiny("DeepseekV3ForCausalLM", "DeepseekV3Config", {**_PLAIN, **_LATENT}),
}
ENCODERS = {
    "BERT": Tiny("BertForMaskedLM", "BertConfig", _PLAIN),
    "RoBERTa": Tiny("RobertaForMaskedLM", "RobertaConfig", _PLAIN),
    "DistilBERT": Tiny("DistilBertForMaskedLM", "DistilBertConfig", _DISTIL),
    "ELECTRA": Tiny("ElectraForMaskedLM", "ElectraConfig", {**_PLAIN, "embedding_size": 16}),
    "ALBERT": Tiny("AlbertForMaskedLM", "AlbertConfig", {**_PLAIN, "embedding_size": 16}),
    "ModernBERT": Tiny(
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {**_PLAIN, "local_attention": 6, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "ESM": Tiny("EsmForMaskedLM", "EsmConfig", {**_PLAIN, "mask_token_id": 3}),
    "EuroBERT": Tiny("EuroBertForMaskedLM", "EuroBertConfig", {**_GROUPED, "mask_token_id": 3}),
}
ENCODER_DECODERS = {
    "T5": Tiny("T5ForConditionalGeneration", "T5Config", _T5, weights=0.1),  # its scores are not scaled
    "BART": Tiny("BartForConditionalGeneration", "BartConfig", _BOTH),
    "Pegasus": Tiny("PegasusForConditionalGeneration", "PegasusConfig", _BOTH),
    "M2M100": Tiny("M2M100ForConditionalGeneration", "M2M100Config", _BOTH),
    "Whisper": Tiny(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            **_BOTH,
            "num_mel_bins": 8,
            "max_source_positions": 20,
            "max_target_positions": 32,
            "begin_suppress_tokens": None,
        },
    ),
}
PICTURES = {
    "ViT": Tiny("ViTModel", "ViTConfig", _VISION),
    "DeiT": Tiny("DeiTModel", "DeiTConfig", _VISION),
    "DINOv2": Tiny("Dinov2Model", "Dinov2Config", _VISION),
    "SigLIP": Tiny("SiglipVisionModel", "SiglipVisionConfig", _VISION),
    "BEiT": Tiny("BeitModel", "BeitConfig", {**_VISION, "use_relative_position_bias": True}),
    "Swin": Tiny("SwinModel", "SwinConfig", _SWIN),
}
SOUNDS = {
    "Wav2Vec2": Tiny("Wav2Vec2Model", "Wav2Vec2Config", _SPEECH),
    "HuBERT": Tiny("HubertModel", "HubertConfig", _SPEECH),
}
CLIP = Tiny(
    "CLIPModel",
    "CLIPConfig",
    {
        "text_config": {**_PLAIN, "projection_dim": 16},
        "vision_config": {**_VISION, "projection_dim": 16},
        "projection_dim": 16,
    },
)
# They compute with the mask that they asked for: some change it and then ask for attention, ...
CHANGING = {
    "Doge": Tiny("DogeForCausalLM", "DogeConfig", {**_GROUPED, "keep_window_size": 7}),
    "DeepSeek-V3.2": Tiny(
        "DeepseekV32ForCausalLM",
        "DeepseekV32Config",
        {**_PLAIN, **_LATENT, "index_topk": 5, "index_n_heads": 2, "index_head_dim": 8},
    ),
    "DeepSeek-V4": Tiny(
        "DeepseekV4ForCausalLM",
        "DeepseekV4Config",
        {
            **_NAMED,
            **_WINDOW,
            **{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64},
            **{"head_dim": 8, "q_lora_rank": 8, "o_lora_rank": 8, "o_groups": 2, "hc_mult": 2},
            **{"index_topk": 3, "index_n_heads": 2, "index_head_dim": 8},
            **{"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "num_hash_layers": 1},
            # layers that append a key for each 2, and for each 4 tokens
            "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
            "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        },
    ),
}
# ... others compute attention by themselves, with that mask, ...
COMPUTING = {
    "BigBird": Tiny("BigBirdModel", "BigBirdConfig", {**_PLAIN, "attention_type": "original_full", "sep_token_id": 3}),
    "ConvBERT": Tiny("ConvBertModel", "ConvBertConfig", {**_PLAIN, "embedding_size": 32}),
    "Canine": Tiny("CanineModel", "CanineConfig", {**_PLAIN, "downsampling_rate": 4, "num_hash_buckets": 64}),
    "BLIP": Tiny("BlipTextModel", "BlipTextConfig", {**_PLAIN, "sep_token_id": 3}),
    "MPNet": Tiny("MPNetModel", "MPNetConfig", _PLAIN),
    "Bloom": Tiny("BloomModel", "BloomConfig", {**_NAMED, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "XGLM": Tiny("XGLMModel", "XGLMConfig", {**_NAMED, "d_model": 32, "ffn_dim": 37, "num_layers": 2}),
}
# ... with one of their own, ...
SILENT = {
    "DeBERTa": Tiny("DebertaV2Model", "DebertaV2Config", _PLAIN),
    "XLNet": Tiny("XLNetModel", "XLNetConfig", {**_NAMED, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 37}),
    "LongT5": Tiny("LongT5EncoderModel", "LongT5Config", _T5),
}
SILENT_OTHERS = {
    "GPT": Tiny("OpenAIGPTModel", "OpenAIGPTConfig", _GPT2),
    "ProphetNet": Tiny(
        "ProphetNetModel",
        "ProphetNetConfig",
        {
            **_NAMED,
            "hidden_size": 32,
            "num_encoder_layers": 1,
            "num_decoder_layers": 1,
            "num_encoder_attention_heads": 4,
            "num_decoder_attention_heads": 4,
            "encoder_ffn_dim": 37,
            "decoder_ffn_dim": 37,
        },
    ),
    "WavLM": Tiny("WavLMModel", "WavLMConfig", _SPEECH),
    "Table Transformer": Tiny(
        "TableTransformerModel",
        "TableTransformerConfig",
        {
            **_BOTH,
            "num_queries": 5,
            "backbone_config": {"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
        },
    ),
}
# ... or not at all: they take the class of their attention from a table of their own.
CLOSED = {
    "GPT-J": Tiny("GPTJForCausalLM", "GPTJConfig", {**_GPT2, "rotary_dim": 4}),
    "Falcon": Tiny("FalconForCausalLM", "FalconConfig", _PLAIN),
    "GPT-Neo": Tiny(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {**_NAMED, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    ),
    "GIT": Tiny("GitForCausalLM", "GitConfig", {**_PLAIN, "vision_config": _VISION}),
}
# The same, of pictures, and one that no AutoModel loads.
CLOSED_OTHERS = {
    "Bark": Tiny(
        "BarkSemanticModel",
        "BarkSemanticConfig",
        {**_BARK, "num_layers": 2, "num_heads": 4, "hidden_size": 32, "block_size": 64},
    ),
    "SAM": Tiny(
        "SamVisionModel",
        "SamVisionConfig",
        {
            **_VISION,
            "output_channels": 16,
            "mlp_dim": 37,
            "window_size": 2,
            "global_attn_indexes": [1],
            "num_pos_feats": 8,
        },
    ),
    "Data2Vec": Tiny("Data2VecVisionModel", "Data2VecVisionConfig", _VISION),
}


def tokens(n: int = N, batch: int = 2) -> Tensor:
    """Random tokens (batch, n), none of them special."""
    return torch.randint(3, VOCABULARY, (batch, n), generator=torch.Generator().manual_seed(5))


def padded(side: str, n: int = N) -> Tensor:
    """A tokenizer's attention mask (2, n), 1 = a real token: the first sequence is shorter by four."""
    real = torch.ones(2, n, dtype=torch.int64)
    real[0, slice(0, 4) if side == "left" else slice(n - 4, n)] = 0
    return real
