"""What other libraries call the arguments of attention layers, and what to write here instead."""

from __future__ import annotations

from typing import Any

from regard.core.wrong_calls import answers_wrong_calls
from regard.masks.algebra import Mask

# Names that are looked for in regard.nn.
_TORCHS = "it is torch's: torch.nn has it, and regard.nn has what attends"
NAMES = {
    **dict.fromkeys(
        ("SelfAttention", "CrossAttention"),
        "it is MultiHeadAttention(d_model, heads): layer(x) is self-attention, layer(x, context) cross-attention",
    ),
    **dict.fromkeys(
        ("AdditiveAttention", "BahdanauAttention"),
        "it is Attention(d_model, d_k, d_v, score=AdditiveScore(d_k, d_k, hidden))",
    ),
    **dict.fromkeys(
        ("BilinearAttention", "LuongAttention"), "it is Attention(d_model, d_k, d_v, score=BilinearScore(d_k, d_k))"
    ),
    **dict.fromkeys(
        ("TransformerEncoderLayer", "TransformerDecoderLayer", "Transformer", "TransformerEncoder"),
        "regard.patch(model) lets torch's own run on regard",
    ),
    **dict.fromkeys(("Linear", "Module", "LayerNorm", "Embedding", "Dropout", "RMSNorm"), _TORCHS),
    **dict.fromkeys(
        ("DynamicCache", "StaticCache", "Cache"), "it is GrowingCache, FixedCache, RollingCache or PagedCache"
    ),
    **dict.fromkeys(("RoPE", "RotaryEmbedding", "RotaryPositionalEmbeddings"), "it is Rotary(width)"),
}

# What other libraries call the sizes of a cache.
SIZES = {
    **dict.fromkeys(("max_batch_size", "batch_size"), "write batch="),
    **dict.fromkeys(("num_heads", "num_kv_heads", "key_heads", "n_heads"), "write heads=, those of the keys"),
    **dict.fromkeys(("max_cache_len", "max_length", "max_seq_len", "length"), "write capacity=, in tokens"),
    **dict.fromkeys(("num_pages", "num_blocks", "max_pages"), "write pages=, for all sequences together"),
    **dict.fromkeys(("block_size", "page_len"), "write page_size=, in tokens"),
    **dict.fromkeys(("head_dim", "dim", "d_k"), "write dk=head_dim, dv=head_dim"),
}
TORCH = "regard.compat.torch.MultiheadAttention has the arguments of torch's layer."

_SIZES = {
    **dict.fromkeys(("embed_dim", "dim", "hidden_size", "width", "d_embed"), "write d_model=embed_dim"),
    **dict.fromkeys(("num_heads", "n_heads", "nhead", "n_head", "num_attention_heads"), "write heads=num_heads"),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "n_kv_heads", "kv_heads"), "write key_heads="),
    **dict.fromkeys(("head_dim", "dim_head", "key_dim"), "write d_k=head_dim, d_v=head_dim"),
    **dict.fromkeys(("kdim", "vdim", "context_dim"), "write d_context=: keys and values are made of one context"),
    "batch_first": "leave it out: inputs are (batch, n, d_model)",
    **dict.fromkeys(("rope", "rotary_emb", "rotary_embedding", "pos_emb"), "write rotary=Rotary(d_k)"),
    "add_zero_attn": "write sink=0.0",
    "add_bias_kv": "it has no counterpart here",
    "qkv_bias": "write bias=",
    **dict.fromkeys(("attn_drop", "attn_dropout", "attention_dropout", "dropout_p"), "write dropout="),
    **dict.fromkeys(("causal", "is_causal", "mask"), "the mask is an argument of the call: layer(x, mask=Causal())"),
}
_ONE_HEAD = dict.fromkeys(
    ("num_heads", "n_heads", "heads", "nhead", "key_heads"),
    "this is one head; MultiHeadAttention(d_model, heads) has several",
)
_CALL = {
    "key_padding_mask": "write mask=Dense(~key_padding_mask[:, None, None, :]): there True = padding, here True = may "
    "attend; or mask=Lengths(keys=lengths)",
    "attn_mask": "write mask=Dense(~attn_mask) for booleans, which there say True = hidden; numbers that are added are "
    "a score of the layer: score=ScaledDot() >> Bias(attn_mask)",
    "attention_mask": "write mask=Dense(attention_mask.bool()[:, None, None, :]) where 1 = may attend",
    **dict.fromkeys(("is_causal", "causal"), "write mask=Causal()"),
    **dict.fromkeys(("need_weights", "average_attn_weights", "output_attentions"), "layer.weights(x, ...) gives them"),
    **dict.fromkeys(("query", "q", "hidden_states", "input"), "the sequence that asks is x"),
    **dict.fromkeys(
        ("key", "k", "value", "v", "memory", "encoder_hidden_states", "key_value_states"),
        "keys and values are made of context: layer(x, context), or layer(x) for self-attention",
    ),
    **dict.fromkeys(("position_ids", "cache_position"), "write positions=Positions(q, k)"),
    **dict.fromkeys(("past_key_values", "past_key_value", "layer_past"), "write cache=, a cache of regard.nn"),
    "score": "the score is an argument of the layer, not of the call",
    "dropout": "dropout is an argument of the layer, and applied in training",
}


def _beyond_context(x: Any) -> str:
    if isinstance(x, Mask):
        return f"write mask={x!r}"
    return "keys and values are both made of context: layer(x, context), or layer(x) for self-attention"


answers_sizes = answers_wrong_calls(_SIZES, TORCH)
answers_sizes_of_one_head = answers_wrong_calls({**_SIZES, **_ONE_HEAD})
answers_layer_calls = answers_wrong_calls(_CALL, TORCH, beyond=_beyond_context)
answers_look_calls = answers_wrong_calls(_CALL, callee="look", beyond=_beyond_context)
answers_weights_calls = answers_wrong_calls(_CALL, callee="weights", beyond=_beyond_context)
