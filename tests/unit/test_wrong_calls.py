"""Calls that people write who come from another library, or from memory, and what regard answers: a table to read.

Each line is a call and a part of its error. The error says what to write; `test_what_the_answers_advise_runs` runs some
of that.
"""

from __future__ import annotations

import re
import types
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import regard as rg
from regard.core.wrong_calls import answers_wrong_calls


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape)


NAMES: dict[str, Any] = {
    "rg": rg,
    "zeros": zeros,
    "block_mask": create_block_mask(lambda b, h, i, j: i >= j, None, None, 5, 5, device="cpu"),
    "q": zeros(2, 3, 5, 7),
    "x": zeros(2, 5, 12),
    "layer": rg.nn.MultiHeadAttention(12, heads=3),
    "one": rg.nn.Attention(12, 4, 4),
    "bool_mask": zeros(5, 5) > 0,
    "offsets": torch.tensor([0, 3, 5]),
    "score_mod": lambda s, b, h, i, j: s,
    "mask_mod": lambda b, h, i, j: i >= j,
    "cache": rg.nn.PagedCache(batch=1, heads=2, pages=4, page_size=4, dk=8, dv=8),
    "wide": zeros(1, 5, 8),
    "thin": zeros(1, 5, 6),
}

LAYERS = """
rg.nn.MultiHeadAttention(12, num_heads=3)  # MultiHeadAttention has no argument 'num_heads'; write heads=num_heads. regard.compat.torch.MultiheadAttention has the arguments of torch's layer.
rg.nn.MultiHeadAttention(embed_dim=12, num_heads=3)  # no arguments 'embed_dim', 'num_heads'; write d_model=embed_dim; write heads=num_heads.
rg.nn.MultiHeadAttention(12, 3, batch_first=True)  # no argument 'batch_first'; leave it out: inputs are (batch, n, d_model).
rg.nn.MultiHeadAttention(12, 3, kdim=8)  # no argument 'kdim'; write d_context=
rg.nn.MultiHeadAttention(12, 3, add_zero_attn=True)  # no argument 'add_zero_attn'; write sink=0.0.
rg.nn.MultiHeadAttention(12, 3, num_kv_heads=1)  # no argument 'num_kv_heads'; write key_heads=.
rg.nn.MultiHeadAttention(12, 3, head_dim=4)  # no argument 'head_dim'; write d_k=head_dim, d_v=head_dim.
rg.nn.MultiHeadAttention(12, 3, causal=True)  # the mask is an argument of the call: layer(x, mask=Causal()).
rg.nn.MultiHeadAttention(12, 3, rotory=None)  # no argument 'rotory'; did you mean rotary?
rg.nn.MultiHeadAttention(12, 3, colour=1)  # no argument 'colour'; it has d_model, heads, key_heads,
rg.nn.MultiHeadAttention(12)  # MultiHeadAttention needs heads; it has d_model, heads,
rg.nn.MultiHeadAttention(12, 3, 0.1)  # takes d_model and heads by position; the next argument is a float: name what follows.
rg.nn.MultiHeadAttention(12, heads=5)  # d_model=12 is no multiple of heads=5; give d_k and d_v.
rg.nn.Attention(12, 4, 4, num_heads=3)  # this is one head; MultiHeadAttention(d_model, heads) has several.
rg.nn.Attention(12)  # Attention needs d_k and d_v; it has d_model, d_k, d_v,
layer(x, x, x)  # keys and values are both made of context: layer(x, context), or layer(x) for self-attention.
layer(query=x, key=x, value=x)  # no arguments 'query', 'key', 'value'; the sequence that asks is x; keys and values are made of context
layer(x, key_padding_mask=zeros(2, 5) > 0)  # write mask=Dense(~key_padding_mask[:, None, None, :]): there True = padding
layer(x, attn_mask=bool_mask)  # write mask=Dense(~attn_mask) for booleans, which there say True = hidden
layer(x, attention_mask=zeros(2, 5))  # write mask=Dense(attention_mask.bool()[:, None, None, :]) where 1 = may attend
layer(x, is_causal=True)  # MultiHeadAttention.forward has no argument 'is_causal'; write mask=Causal().
layer(x, need_weights=True)  # layer.weights(x, ...) gives them.
layer(x, past_key_values=None)  # write cache=, a cache of regard.nn.
layer(x, score=rg.Dot())  # the score is an argument of the layer, not of the call.
layer(x, rg.Causal())  # context is a Causal; write mask=Causal().
layer(x, x, rg.Causal())  # takes x and context by position; the next argument is a Causal: write mask=Causal().
layer(x, mask=bool_mask)  # mask is a Tensor of bool; write Dense(mask), True = may attend.
layer.weights(x, x, x)  # weights takes x and context by position
layer(zeros(2, 5, 11))  # x has shape (2, 5, 11); expected (*batch, n, 12).
one(x, x, x)  # Attention.forward takes x and context by position
one(x, is_causal=True)  # Attention.forward has no argument 'is_causal'; write mask=Causal().
"""  # noqa: E501

CALLS = """
rg.attention(q, q, q, rg.Causal())  # the fourth is a Causal: write mask=Causal().
rg.attention(q, q, q, facts=())  # attention has no argument 'facts'; call look(q, k, facts=facts), with the mask
rg.attention(q, q, q, is_causal=True)  # attention has no argument 'is_causal'; write mask=Causal().
rg.attention(q, q, q, attn_mask=None, is_causal=True)  # no arguments 'attn_mask', 'is_causal'; write mask=Dense(attn_mask)
rg.attention(q, q, q, bias=zeros(5, 5))  # write score=ScaledDot() >> Bias(bias).
rg.attention(q, q, q, masks=rg.Causal())  # attention has no argument 'masks'; did you mean mask?
rg.attention(q, q, q, score_mod=score_mod)  # call regard.compat.torch.flex_attention, which takes it
rg.attention(q, q, q, block_mask=block_mask)  # write mask=Where(block_mask.mask_mod).
rg.attention(q, q, q, mask=block_mask)  # mask is a BlockMask; write Where(block_mask.mask_mod), or call regard.compat.torch.flex_attention
rg.attention(q, q, q, mask=mask_mod)  # mask is a function; write Where(fn), of fn(b, h, i, j) as in FlexAttention.
rg.attention(q, q, q, mask=bool_mask)  # mask is a Tensor of bool; write Dense(mask), True = may attend.
rg.attention(q, q, q, mask="causal")  # mask is a str; write Causal().
rg.attention(q, q, q, mask="diagonal")  # mask is a str; expected a Mask, such as Causal() or Where(fn).
rg.attention(q, q, q, mask=True)  # mask is a bool; expected a Mask, such as Causal() or Where(fn).
rg.attention(q, q, q, mask=None)  # mask is None; leave it out where every query may see every key, or write Everything().
rg.attention(q, q, q, mask=[[True]])  # mask is a list; write Dense(torch.tensor(...)), True = may attend.
rg.attention(q, q, q, mask=rg.Causal)  # mask is the class Causal, not one of its values; write Causal().
rg.attention(q, q, q, mask=rg.SoftCap(5))  # mask is a SoftCap; pass it as score=.
rg.attention(q, q, q, score=rg.Causal())  # score is a Causal; pass it as mask=.
rg.attention(q, q, q, score=rg.SoftCap(5))  # begin with a similarity, as in ScaledDot() >> SoftCap(cap=5.0).
rg.attention(q, q, q, score=rg.ScaledDot)  # score is the class ScaledDot, not one of its values; write ScaledDot().
rg.attention(q, q, q, score=score_mod)  # score is a function; call regard.compat.torch.flex_attention for a score_mod; a similarity fn(q, k) is Custom(fn).
rg.attention(q, q, q, score=zeros(5, 5))  # score is a Tensor of float32; numbers that are added to the scores are ScaledDot() >> Bias(tensor).
rg.attention(q, q, q, score=0.125)  # score is a float; a factor is ScaledDot(scale)
rg.attention(q, q, q, score=None)  # score is None; leave it out.
rg.attention(q, q, q, dropout=0.1)  # dropout is a float; write Dropout(0.1).
rg.attention(q, q, q, positions=3)  # positions is an int; expected head(nq, nk), tail(nq, nk) or Positions(q, k).
rg.attention(q, q, q, backend="cuda")  # backend is 'cuda'; expected a Backend, such as Tiled(), or None to choose.
rg.attention(q.int(), q.int(), q.int())  # q has dtype torch.int32; expected float16, bfloat16, float32 or float64
rg.attention_weights(q, q, q)  # attention_weights takes q and k by position; the next argument is a Tensor of float32: leave v out
rg.attention_weights(q, q, rg.Causal())  # attention_weights takes q and k by position; the next argument is a Causal: write mask=Causal().
rg.attention_weights(q, q, is_causal=True)  # attention_weights has no argument 'is_causal'; write mask=Causal().
rg.attention_weights(q, q, dropout=rg.Dropout(0.1))  # leave it out: scores and weights are those before dropout.
rg.attention_scores(q, q, q)  # attention_scores takes q and k by position; the next argument is a Tensor of float32: leave v out
rg.attention_scores(q, q, sink=0.0)  # it changes no score.
rg.attention_state(q, q, q, is_causal=True)  # attention_state has no argument 'is_causal'; write mask=Causal().
rg.attention_state(q, q)  # attention_state needs v; it has q, k, v, score,
rg.explain(q, q, q, scale=0.5)  # explain has no argument 'scale'; write score=ScaledDot(scale).
rg.explain(q, q, q, rg.Causal())  # explain takes q and k and v by position; the next argument is a Causal: write mask=Causal().
rg.attention_over(q, q, q)  # attention_over takes q and source by position; the next argument is a Tensor of float32: keys and values come together
rg.attention_over(q, k=q, v=q)  # write source=[(k, v)], the parts that keys and values come in.
"""  # noqa: E501

VALUES = """
rg.Window(3)  # Window needs after; it has before, after. None is unbounded; a sliding window of w keys, the query's own included, is Window(before=w - 1, after=0), and w keys on either side are Window(before=w, after=w).
rg.Window()  # Window needs before and after. None is unbounded; a sliding window of w keys
rg.Window(size=3)  # Window has no argument 'size'; a sliding window of w keys, the query's own included, is Window(before=w - 1, after=0)
rg.Window(window_size=(3, 0))  # of flash-attention's (left, right), Window(before=left, after=right)
rg.Window(left=3, right=0)  # write before=left; write after=right.
rg.Window(3, 0, 1)  # Window takes before and after by position; the next argument is an int
rg.Window(1.5, 0)  # Window.before is a float; expected an integer, or None (unbounded).
rg.Causal(offset=3)  # leave it out. It compares positions: where the numbers of queries and keys differ, pass positions=tail(nq, nk) beside it.
rg.Causal(5)  # Causal takes no arguments, and an int is given.
rg.Dense(attn_mask=bool_mask)  # write Dense(mask) for booleans, True = may attend.
rg.Where(bool_mask)  # Where.fn is a Tensor of bool; write Dense(mask), True = may attend.
rg.Where(block_mask)  # Where.fn is a BlockMask; write Where(block_mask.mask_mod)
rg.Where(mask_mod=mask_mod)  # write Where(mask_mod).
rg.Lengths(lengths=[3, 5])  # write keys=lengths.
rg.Lengths(key_padding_mask=bool_mask)  # write keys=mask.sum(-1) where True = a real token and the padding is at the end
rg.Documents(cu_seqlens=offsets)  # offsets from 0 to the number of tokens become a mask by pack(x, cu_seqlens=offsets).mask.
rg.Documents()  # Documents needs q_ids; it has q_ids, k_ids. ids hold the number of its document for each token
rg.attention(q, q, q, mask=rg.Documents(offsets))  # Documents.q_ids has shape (3,); expected (5,) or (2, 5); offsets from 0 to the number of tokens become a mask by pack(x, cu_seqlens=offsets).mask.
rg.SoftCap(softcap=50)  # SoftCap has no argument 'softcap'; write SoftCap(cap). SoftCap(50) keeps the scores within ±50.
rg.SoftCap()  # SoftCap needs cap. SoftCap(50) keeps the scores within ±50.
rg.ScaledDot(softmax_scale=0.5)  # write ScaledDot(scale).
rg.Bilinear()  # Bilinear needs m. m is (dq, dk), or (heads, dq, dk); regard.nn.BilinearScore(dq, dk) learns it.
rg.Bias(0.5)  # (NumPy, or any with __dlpack__). bias broadcasts to (*batch, heads, nq, nk).
rg.Temperature()  # Temperature needs t. Temperature(2.0) divides the scores by 2.
rg.Prefix()  # Prefix needs n. With Prefix(4) every query sees the first 4 positions.
rg.Dilated()  # Dilated needs step. With Dilated(2) a query sees every second key, itself included.
rg.Dense("causal")  # allowed holds booleans, True = may attend, and broadcasts to (*batch, heads, nq, nk).
rg.nn.BilinearScore(8)  # BilinearScore needs d_k; it has d_q, d_k, heads, device, dtype. d_q and d_k are the widths of a query and of a key.
rg.nn.AdditiveScore(8)  # AdditiveScore needs d_k and hidden
rg.nn.AdditiveScore(8, 8, units=16)  # write hidden=.
rg.Alibi(num_heads=8)  # write slopes=Alibi.geometric(heads).
rg.Alibi()  # Alibi needs slopes; it has slopes, coordinates, query_coordinates. slopes are (heads,)
rg.Bias(attn_bias=zeros(5, 5))  # write Bias(tensor).
rg.Bilinear(weight=zeros(5, 5))  # write m=W, of shape (dq, dk).
rg.Dropout(dropout_p=0.1)  # write Dropout(p).
rg.Temperature(temperature=2.0)  # write Temperature(t).
rg.Additive(W_q=zeros(3, 8), W_k=zeros(3, 6), w_v=zeros(3))  # write w_q=W.T where W is an nn.Linear's weight, (h, dq); write w_k=W.T
rg.Additive(zeros(3, 8), zeros(3, 6))  # Additive needs w; it has w_q, w_k, w, b, activation. w_q is (dq, h), w_k (dk, h) and w (h,)
rg.attention_weights(wide, thin, score=rg.Additive(zeros(3, 8), zeros(3, 6), zeros(3)))  # Additive.w_q has shape (3, 8); expected (..., 8, 3); write w_q.T, as of an nn.Linear's weight.
rg.attention_weights(wide, thin, score=rg.Additive(zeros(8, 3), zeros(3, 6), zeros(3)))  # Additive.w_k has shape (3, 6); expected (..., 6, 3); write w_k.T, as of an nn.Linear's weight.
rg.attention_weights(wide, thin, score=rg.Additive(zeros(8, 3), zeros(5, 3), zeros(3)))  # Additive.w_k has shape (5, 3); expected (..., 6, 3).
rg.attention_weights(wide, thin, score=rg.Bilinear(zeros(6, 8)))  # Bilinear.m has shape (6, 8); q and k need (..., 8, 6); write m.T.
rg.attention_weights(wide, thin)  # ScaledDot compares equal widths; Bilinear(m), Additive(...) and Custom(fn) can relate unequal widths.
"""  # noqa: E501

INSPECTION = """
rg.look(q)  # look needs k; it has q, k, facts,
rg.look(q, q, q)  # look takes q and k by position; the next argument is a Tensor of float32: leave v out, if that is it
rg.look(q, q, is_causal=True)  # look has no argument 'is_causal'; write mask=Causal().
rg.look(layer)  # look needs x; it has layer, x, context,
rg.look(layer, x, is_causal=True)  # look has no argument 'is_causal'; write mask=Causal().
rg.look(layer, x, x, x)  # keys and values are both made of context: layer(x, context), or layer(x) for self-attention.
rg.lint(q, q)  # lint needs v; it has q, k, v, score,
rg.lint(q, q, q, causal=True)  # lint has no argument 'causal'; write mask=Causal().
rg.entropy(q, q, q)  # entropy takes q and k by position; the next argument is a Tensor of float32: leave v out
rg.max_score(q, q, causal=True)  # max_score has no argument 'causal'; write mask=Causal().
rg.record(layer, fact=()).__enter__()  # record has no argument 'fact'; did you mean facts?
rg.record("bert").__enter__()  # record has a str; expected the model, an nn.Module
rg.monitor(3)  # monitor has an int; expected the model, an nn.Module.
rg.rollout(q)  # calls holds a Tensor of float32; expected the calls of a recording
rg.unpack(q)  # packed is a Tensor of float32; expected a Packed, which pack(...) makes.
rg.pack(x)  # give lengths (batch,) if it is (batch, n, ...), padded at the end, or cu_seqlens (batch + 1,)
rg.patch(3)  # model is an int; expected an nn.Module, or None for every call of this process.
rg.nn.Rotary(dim=8)  # Rotary has no argument 'dim'; write width=, the features that are rotated.
rg.nn.Rotary(8, rope_theta=1e6)  # Rotary has no argument 'rope_theta'; write base=theta.
rg.nn.AttentionPooling(12, 8, num_heads=2)  # AttentionPooling has no argument 'num_heads'; write heads=num_heads.
rg.Prefix(prefix_length=3)  # Prefix has no argument 'prefix_length'; write Prefix(n).
rg.PowerDistance(slope=1.0)  # PowerDistance has no argument 'slope'; write weight=.
rg.PowerDistance(1.0)  # PowerDistance needs power; it has weight, power.
rg.LogDistance(r2=1.0)  # LogDistance has no argument 'r2'; write rate=.
rg.Retained(evicted=offsets)  # Retained has no argument 'evicted'; write until=positions.
rg.Dilated(dilation=2)  # Dilated has no argument 'dilation'; write Dilated(step).
rg.Custom(3)  # Custom.fn is an int; expected a function of q and k, which gives their scores.
"""

OPERATORS = """
rg.ScaledDot() + rg.SoftCap(5)  # scores are joined by >> alone; ScaledDot() meets a SoftCap: write ScaledDot() >> SoftCap(cap=5.0).
rg.ScaledDot() | rg.SoftCap(5)  # write ScaledDot() >> SoftCap(cap=5.0).
rg.ScaledDot() & rg.SoftCap(5)  # write ScaledDot() >> SoftCap(cap=5.0).
rg.SoftCap(5) + rg.ScaledDot()  # write ScaledDot() >> SoftCap(cap=5.0).
rg.ScaledDot() * 2  # ScaledDot() meets an int: a factor is ScaledDot(scale), and Temperature(2) divides the scores by 2.
2 * rg.ScaledDot()  # a factor is ScaledDot(scale)
rg.ScaledDot() / 2  # Temperature(2) divides the scores by 2.
rg.ScaledDot() + zeros(5, 5)  # numbers that are added to the scores are ScaledDot() >> Bias(tensor).
zeros(5, 5) + rg.ScaledDot()  # numbers that are added to the scores are ScaledDot() >> Bias(tensor).
rg.ScaledDot() & rg.Causal()  # ScaledDot() meets a Causal: pass it as mask=.
rg.ScaledDot() >> rg.Causal()  # >> joins scores; after ScaledDot() comes a Causal: pass it as mask=.
rg.ScaledDot() >> rg.SoftCap  # comes the class SoftCap, not one of its values: write SoftCap(...).
rg.ScaledDot() >> score_mod  # comes a function: call regard.compat.torch.flex_attention for a score_mod
rg.ScaledDot() >> 5  # comes an int: a factor is ScaledDot(scale)
rg.Causal() + rg.Window(1, 1)  # masks are joined by &, | and ~ alone; Causal() meets a Window: write a & b for the keys that both let through
rg.Causal() * rg.Window(1, 1)  # masks are joined by &, | and ~ alone
rg.Causal() - rg.Window(1, 1)  # a & ~b for those of a alone
rg.Causal() >> rg.SoftCap(5)  # a score is passed as score=.
rg.Causal() & bool_mask  # & and | join masks; one side is a Tensor of bool: write Dense(mask), True = may attend.
rg.Causal() & block_mask  # one side is a BlockMask: write Where(block_mask.mask_mod)
rg.Causal() & mask_mod  # one side is a function: write Where(fn), of fn(b, h, i, j) as in FlexAttention.
rg.Causal() & rg.Window  # one side is the class Window, not one of its values: write Window(...).
rg.Causal() | rg.Dot()  # one side is a Dot: pass it as score=.
rg.Causal() and rg.Window(1, 1)  # `and`, `or` and `not` would take one side; write &, | and ~.
"""  # noqa: E501

MISSING = """
rg.MultiHeadAttention  # it is regard.nn.MultiHeadAttention(d_model, heads), and regard.compat.torch.MultiheadAttention has torch's arguments.
rg.MultiheadAttention  # it is regard.nn.MultiHeadAttention(d_model, heads)
rg.Attention  # it is regard.attention(q, k, v), and the layer of one head is regard.nn.Attention.
rg.sdpa  # it is regard.attention(q, k, v), and regard.compat.torch.scaled_dot_product_attention has torch's arguments.
rg.scaled_dot_product_attention  # it is regard.attention(q, k, v)
rg.flash_attn_func  # regard.compat.flash_attention has flash_attn_func and flash_attn_varlen_func.
rg.flex_attention  # it is regard.compat.torch.flex_attention.
rg.create_block_mask  # it is regard.Where(mask_mod), and regard.compat.torch.flex_attention takes a BlockMask.
rg.SlidingWindow  # is regard.Window(before=w - 1, after=0).
rg.CausalMask  # it is mask=regard.Causal().
rg.compare  # it is a method of a report: regard.look(model, a).compare(regard.look(model, b)).
rg.KVCache  # the caches are regard.nn.GrowingCache, FixedCache, RollingCache and PagedCache.
rg.RoPE  # it is regard.nn.Rotary(width).
rg.Softcap  # module 'regard' has no attribute 'Softcap'; did you mean SoftCap?
rg.ALiBi  # did you mean Alibi?
rg.causal  # did you mean Causal?
rg.atention  # did you mean attention
rg.attention_weight  # did you mean attention_weights
rg.Rotary  # did you mean nn.Rotary?
rg.Paged  # did you mean nn.PagedCache?
rg.GrowingCache  # did you mean nn.GrowingCache?
rg.Received  # did you mean facts.Received
rg.ablation  # did you mean heads.ablation?
rg.Chunks  # did you mean sources.Chunks?
rg.nn.MultiheadAttention  # module 'regard.nn' has no attribute 'MultiheadAttention'; did you mean MultiHeadAttention
rg.nn.RotaryInterleave  # did you mean RotaryInterleaved
rg.facts.entropy  # did you mean Entropy
rg.heads.contribution  # did you mean contributions
rg.sources.SafeTensors  # did you mean Safetensors?
cache.get_seq_length()  # a PagedCache is the cache of one layer of regard.nn, layer(x, cache=cache)
cache.is_compileable  # pass past_key_values=GrowingCache(model.config)
rg.nn.GrowingCache().layers  # a GrowingCache is the cache of one layer of regard.nn
"""  # noqa: E501


def rows(*tables: str) -> list[Any]:
    """A parameter for each line, `call  # a part of the answer`."""
    lines = [line.split("  # ") for line in "".join(tables).splitlines() if line]
    return [pytest.param(call, said, id=call) for call, said in lines]


@pytest.mark.parametrize(("call", "said"), rows(LAYERS, CALLS, VALUES, INSPECTION, OPERATORS, MISSING))
def test_a_wrong_call_is_told_what_to_write(call: str, said: str) -> None:
    with pytest.raises((TypeError, ValueError, AttributeError), match=re.escape(said)):
        eval(call, dict(NAMES))


def test_what_the_answers_advise_runs() -> None:
    q, x, padding = NAMES["q"], NAMES["x"], zeros(2, 5) > 0
    packed = zeros(5, 12)
    NAMES["layer"](x, mask=rg.Dense(~padding[:, None, None, :]))
    NAMES["layer"](packed, mask=rg.pack(packed, cu_seqlens=NAMES["offsets"]).mask)
    rg.attention(q, q, q, mask=rg.Where(NAMES["block_mask"].mask_mod), dropout=rg.Dropout(0.1))
    rg.attention(q, q, q, score=rg.ScaledDot() >> rg.Alibi(rg.Alibi.geometric(3)))
    rg.attention_over(q, [(q, q)])
    w_q, w_k = zeros(3, 8), zeros(3, 6)
    rg.attention_weights(NAMES["wide"], NAMES["thin"], score=rg.Additive(w_q.T, w_k.T, zeros(3)))


def test_modules_that_the_answers_name_exist() -> None:
    import regard.compat.flash_attention as flash
    import regard.compat.torch as theirs
    import regard.core.elsewhere as elsewhere

    assert {"flash_attn_func", "flash_attn_varlen_func"} <= vars(flash).keys()
    said = " ".join([*elsewhere.NAMES.values(), *elsewhere.ARGUMENTS.values()])
    for name in re.findall(r"regard\.compat\.torch\.(\w+)", said):
        assert isinstance(vars(theirs)[name], (types.FunctionType, type))
    for name in re.findall(r"regard\.((?!compat|parallel)\w+(?:\.[A-Z]\w+)?)", said):
        part, _, inner = name.partition(".")
        assert hasattr(getattr(rg, part), inner) if inner else hasattr(rg, part)


def test_errors_of_the_callee_itself_pass_unchanged() -> None:
    @answers_wrong_calls({"size": "write width=size"})
    def box(width: int) -> int:
        return width + "one"  # type: ignore[operator]

    with pytest.raises(TypeError, match="unsupported operand"):
        box(3)


def test_names_that_python_looks_for_get_no_advice() -> None:
    with pytest.raises(AttributeError, match=r"^module 'regard' has no attribute '__wrapped__'$"):
        rg.__wrapped__  # noqa: B018
    assert not hasattr(NAMES["cache"], "__cuda_array_interface__")
