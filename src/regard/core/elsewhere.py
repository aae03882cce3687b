"""What other libraries call their arguments and classes, and what to write here instead."""

COMPAT = "regard.compat has functions with the arguments of torch, flash-attention, Keras and JAX."

# What the functions of other libraries take, and what to write here.
ARGUMENTS = {
    "attn_mask": "write mask=Dense(attn_mask) for booleans, True = may attend (nn.MultiheadAttention means the "
    "opposite: Dense(~attn_mask)), and score=ScaledDot() >> Bias(attn_mask) for numbers that are added",
    "key_padding_mask": "write mask=Dense(~key_padding_mask[:, None, None, :]): there True = padding, here True = may "
    "attend; or mask=Lengths(keys=lengths)",
    "attention_mask": "write mask=Dense(attention_mask.bool()[:, None, None, :]) where 1 = may attend",
    "is_causal": "write mask=Causal()",
    "causal": "write mask=Causal()",
    "window_size": "write mask=Window(before=left, after=right)",
    "scale": "write score=ScaledDot(scale)",
    "softmax_scale": "write score=ScaledDot(softmax_scale)",
    "softcap": "write score=ScaledDot() >> SoftCap(softcap)",
    "alibi_slopes": "write score=ScaledDot() >> Alibi(alibi_slopes)",
    "attn_bias": "write score=ScaledDot() >> Bias(attn_bias)",
    "dropout_p": "write dropout=Dropout(dropout_p)",
    "enable_gqa": "leave it out: k and v may have fewer heads than q wherever these divide q's",
    "num_heads": "heads are an axis of q, k and v: (batch, n, h * d) becomes (batch, h, n, d) by "
    "x.unflatten(-1, (num_heads, -1)).transpose(1, 2); or use regard.nn.MultiHeadAttention(width, heads)",
    "need_weights": "call attention_weights(q, k, ...) for them",
    "facts": "call look(q, k, facts=facts), with the mask and the score of the call",
    "return_lse": "call attention_state(q, k, v, ...).finish() for (out, lse)",
    "block_mask": "write mask=Where(block_mask.mask_mod)",
    "score_mod": "call regard.compat.torch.flex_attention, which takes it, or write it as a Modifier",
    "mask_mod": "write mask=Where(mask_mod)",
    "bias": "write score=ScaledDot() >> Bias(bias)",
    "position_bias": "write score=ScaledDot() >> Bias(position_bias)",
    "temperature": "write score=ScaledDot() >> Temperature(temperature)",
    "s_aux": "write sink=s_aux",
    "return_weights": "call attention_weights(q, k, ...) for them",
    "cu_seqlens_q": "write mask=pack(q, cu_seqlens=cu_seqlens_q).mask",
    "cu_seqlens": "write mask=pack(q, cu_seqlens=cu_seqlens).mask",
    **dict.fromkeys(("query", "query_states", "Q"), "write q=query"),
    **dict.fromkeys(("key", "key_states", "K"), "write k=key"),
    **dict.fromkeys(("value", "value_states", "V"), "write v=value"),
    "training": "leave dropout=None out of training",
}

# Names that are looked for in regard itself.
_LAYER = (
    "it is regard.nn.MultiHeadAttention(d_model, heads), and regard.compat.torch.MultiheadAttention has torch's "
    "arguments"
)
_CALL = "it is regard.attention(q, k, v)"
_GROUPED = (
    f"{_CALL} with fewer heads in k and v than in q, and regard.nn.MultiHeadAttention(d_model, heads, key_heads=...)"
)
_SDPA = f"{_CALL}, and regard.compat.torch.scaled_dot_product_attention has torch's arguments"
_FLASH = f"{_CALL}, and regard.compat.flash_attention has flash_attn_func and flash_attn_varlen_func"
_MASK_MOD = "it is regard.Where(mask_mod), and regard.compat.torch.flex_attention takes a BlockMask"
_WINDOW = "a sliding window of w keys, the query's own included, is regard.Window(before=w - 1, after=0)"
_CACHE = "the caches are regard.nn.GrowingCache, FixedCache, RollingCache and PagedCache"
_PADDING = "it is regard.Lengths(keys=lengths), or regard.Dense(mask[:, None, None, :])"
_LOOK = 'it is regard.look(model, "a text", tokenizer=tokenizer), whose report has .save("page.html")'
_LOAD = "regard loads no models: load one with its own library, and pass it to regard.look or regard.patch"
_SINKS = (
    "the first n keys, seen beside a window, are mask=regard.Causal() & (regard.Window(before=w - 1, after=0) | "
    "regard.Prefix(n)), and learned sinks are sink=, a number for each head"
)
NAMES = {
    "demo": "it is a command, written in a terminal: regard demo",
    **dict.fromkeys(("MultiHeadAttention", "MHA", "SelfAttention", "CrossAttention"), _LAYER),
    "Attention": f"{_CALL}, and the layer of one head is regard.nn.Attention",
    **dict.fromkeys(("attn", "attend"), _CALL),
    **dict.fromkeys(("sdpa", "scaled_dot_product_attention", "dot_product_attention"), _SDPA),
    **dict.fromkeys(("flash_attention", "flash_attn_func", "flash_attn_varlen_func", "flash_attn"), _FLASH),
    **dict.fromkeys(("BlockMask", "create_block_mask", "mask_mod"), _MASK_MOD),
    "flex_attention": "it is regard.compat.torch.flex_attention",
    "score_mod": "regard.compat.torch.flex_attention takes one; here it is a regard.Modifier",
    "ring_attention": "it is regard.parallel.ring_attention",
    **dict.fromkeys(("CausalMask", "is_causal"), "it is mask=regard.Causal()"),
    **dict.fromkeys(("SlidingWindow", "SlidingWindowMask", "WindowMask", "sliding_window"), _WINDOW),
    **dict.fromkeys(("Sink", "Sinks", "AttentionSink", "AttentionSinks", "StreamingLLM"), _SINKS),
    "LocalAttention": "w keys on either side are mask=regard.Window(before=w, after=w)",
    **dict.fromkeys(("Padding", "PaddingMask", "KeyPadding", "key_padding_mask"), _PADDING),
    **dict.fromkeys(
        ("BlockDiagonal", "BlockDiagonalMask", "DocumentMask"),
        "it is regard.Documents(ids), or regard.pack(sequences).mask",
    ),
    **dict.fromkeys(("ScaledDotProduct", "DotProduct"), "it is regard.ScaledDot(), or regard.Dot() without the scale"),
    "Bahdanau": "it is regard.Additive(w_q, w_k, w)",
    "Luong": "it is regard.Bilinear(m), or regard.Dot()",
    **dict.fromkeys(("RoPE", "RotaryEmbedding"), "it is regard.nn.Rotary(width)"),
    **dict.fromkeys(("KVCache", "DynamicCache", "StaticCache", "Cache"), _CACHE),
    **dict.fromkeys(("Sliding", "CausalWindow", "CausalSlidingWindow", "LocalMask"), _WINDOW),
    **dict.fromkeys(("visualize", "visualise", "view", "head_view", "model_view", "show", "attention_patterns"), _LOOK),
    **dict.fromkeys(("load", "load_model", "from_pretrained"), _LOAD),
    "Entropy": "it is regard.facts.Entropy, a fact for look and record; regard.entropy(q, k) is differentiable",
    **dict.fromkeys(("TopKeys", "TopK"), "it is regard.facts.Top(k), a fact for look and record"),
    "softmax": "it is part of regard.attention; regard.attention_weights(q, k) gives the weights",
    **dict.fromkeys(("GQA", "MQA", "GroupedQueryAttention", "MultiQueryAttention"), _GROUPED),
    **dict.fromkeys(("weights", "attention_map", "attention_matrix"), "it is regard.attention_weights(q, k)"),
    "compare": "it is a method of a report: regard.look(model, a).compare(regard.look(model, b))",
    "plot": "it is a method of a report: regard.look(model, text).plot()",
}
