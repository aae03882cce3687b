"""Arguments that do not fit, and names of other libraries, at every part of regard, and the answers: a table to read.

Each line is a call and a part of its error, as in test_wrong_calls.py. The calls are those of people who guess: other
names, numbers as texts, shapes that do not match, a model where a tensor belongs.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import regard as rg
import regard.compat.torch as ct
from regard.demo.model import load
from test_wrong_calls import NAMES, rows, zeros


def recorded() -> list[Any]:
    with rg.record(NAMES["layer"], facts=rg.Report.FACTS) as tape:
        NAMES["layer"](NAMES["x"])
    return tape.calls


def record_nothing() -> list[Any]:
    with rg.record(NAMES["layer"]) as tape:
        pass
    return tape.calls


def record_and_report() -> rg.Report:
    with rg.record(NAMES["layer"]) as tape:
        NAMES["layer"](NAMES["x"])
    return rg.Report.of(tape.calls, title="a", model="b")


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    calls = recorded()
    own = {"torch": torch, "ct": ct, "zeros": zeros, "model": load(), "tape_calls": calls}
    made = {"report": rg.Report.of(calls, title="a", model="b"), "record_nothing": record_nothing}
    return {**NAMES, **own, **made, "record_and_report": record_and_report}


TENSORS = """
rg.attention(q)  # attention needs k and v; write attention(q, k, v), or attention(x, x, x) for self-attention.
rg.attention(q, q)  # attention needs v; write attention(q, k, v), or attention(x, x, x) for self-attention.
rg.attention(q, v=q)  # attention needs k; write attention(q, k, v)
rg.attention()  # attention needs q, k and v; write attention(q, k, v)
rg.attention([q], [q], [q])  # q is a list; expected a torch tensor or an array (NumPy, or any with __dlpack__): write torch.stack(...), or p = pack(...) and p.values, p.mask for sequences of unequal lengths.
rg.attention(rg.pack([q[0, 0]]), q, q)  # q is a Packed; expected a torch tensor or an array (NumPy, or any with __dlpack__): pass its values (for attention, heads before tokens) and mask=x.mask.
rg.attention(q, rg.nn.GrowingCache(), q)  # k is a GrowingCache; expected a torch tensor or an array (NumPy, or any with __dlpack__): pass what it returns, *cache.append(k, v), and positions=cache.positions.
rg.attention_state(q, q, q) | rg.attention_state(q[:, :, :3], q, q)  # | merges States of the same queries and other keys; their o have shapes (2, 3, 5, 7) and (2, 3, 3, 7).
rg.nn.MultiHeadAttention.from_torch(torch.nn.Linear(3, 3))  # from_torch: layer is a Linear; expected torch.nn.MultiheadAttention.
rg.nn.PagedCache(2, 4, 20, 4, 8, 8).crop([3.5, 4])  # crop: a length is 3.5; expected an integer.
rg.nn.MultiHeadAttention(4, heads=2)(rg.pack([zeros(2, 4)]))  # x is a Packed; expected a tensor (*batch, n, 4): pass its values (for attention, heads before tokens) and mask=x.mask.
rg.attention([[1.0]], [[1.0]], [[1.0]])  # q is a list; expected a torch tensor or an array (NumPy, or any with __dlpack__): write torch.tensor(...).
rg.attention(q, q.double(), q)  # k has dtype torch.float64, q has torch.float32; expected one dtype: convert with .to(...).
rg.attention(q, q, q.half())  # v has dtype torch.float16, q has torch.float32; expected one dtype: convert with .to(...).
rg.attention(q, q[..., :4], q)  # q has width 7, k has width 4; ScaledDot compares equal widths; Bilinear(m), Additive(...) and Custom(fn) can relate unequal widths.
rg.attention(q, q, q[:, :, :3])  # v has 3 values, k has 5 keys; expected one value a key.
rg.attention(q, q[:1].expand(3, 3, 5, 7), q)  # the batch axes differ: q (2,), k (3,), v (2,); expected equal ones, or 1 where they are shared.
rg.attention(q, q[:, :2], q[:, :2])  # k has 2 heads, q has 3; q's heads must be a multiple of k's (grouped queries). If the axes are (batch, n, heads, d), with 5 heads, as flash-attention has them, write
rg.attention(q[0, 0, 0], q[0, 0, 0], q[0, 0, 0])  # q has shape (7,); expected (*batch, heads, n, d), (batch, n, d) or (n, d).
rg.attention(q.to("meta"), q, q)  # k is on cpu, q on meta; expected one device: move with .to(...).
rg.attention(q.bool(), q.bool(), q.bool())  # q has dtype torch.bool; expected float16, bfloat16, float32 or float64: convert with .to(...).
rg.attention(q.to(torch.complex64), q.to(torch.complex64), q.to(torch.complex64))  # q has dtype torch.complex64; expected float16, bfloat16, float32 or float64: convert with .to(...).
rg.attention(q[:, :, :3], q, q, mask=rg.Causal())  # 3 queries meet 5 keys under Causal(), and their positions are not given. Pass
"""  # noqa: E501

MASKS = """
rg.attention(q, q, q, mask=rg.Dense(zeros(5, 4) > 0))  # Dense.allowed has shape (5, 4); expected one that broadcasts to (2, 3, 5, 5); a padding mask (batch, nk) is Dense(mask[:, None, None, :]), or Lengths(keys=mask.sum(-1))
rg.attention(q, q, q, mask=rg.Dense(zeros(5, 5)))  # Dense.allowed has dtype torch.float32; expected torch.bool, True = may attend: a float mask added to the scores is score=... >> Bias(mask); 0 and 1 become a mask by
rg.attention(q, q, q, mask=rg.Dense(zeros(2, 5) > 0))  # Dense.allowed has shape (2, 5); expected one that broadcasts to (2, 3, 5, 5); a padding mask (batch, nk) is Dense(mask[:, None, None, :]), or Lengths(keys=mask.sum(-1))
rg.attention(q, q, q, mask=rg.Where(lambda b, h, i, j: i > j and j > 0))  # Where.fn asks whether a tensor of many pairs is true; write &, | and ~ for and, or and not, and torch.where for if.
rg.attention(q, q, q, mask=rg.pack([zeros(5, 4)]))  # mask is a Packed; write x.mask, the mask that it has.
rg.attention(q, q, q, mask=rg.nn.GrowingCache())  # mask is a GrowingCache; write x.mask, the mask that it has.
rg.attention(q, q, q, mask=rg.Dense([[True]]))  # Dense.allowed is a list; expected a torch tensor or an array (NumPy, or any with __dlpack__): write torch.tensor(...).
rg.attention(q, q, q, mask=rg.Lengths(torch.tensor([3, 5, 2])))  # Lengths.keys has shape (3,); expected a number a sequence, (2,).
rg.attention(q, q, q, mask=rg.Lengths(torch.tensor([3, 9])))  # Lengths.keys holds 3 to 9; expected numbers from 0 to 5.
rg.attention(q, q, q, mask=rg.Lengths(torch.tensor([3.0, 5.0])))  # Lengths.keys has dtype torch.float32; expected integers.
rg.attention(q, q, q, mask=rg.Lengths(5))  # Lengths.keys is an int; expected a number for each sequence: write [5, ...], or torch.full((batch,), 5).
rg.attention(q, q, q, mask=rg.Window(-1, 0))  # Window(before=-1): expected a count of keys besides the query's own, or None (unbounded).
rg.attention(q, q, q, mask=rg.Window(before="3", after=0))  # Window.before is a str; expected an integer, or None (unbounded).
rg.attention(q, q, q, mask=rg.Prefix(2.5))  # Prefix.n is 2.5, a float; expected an integer, or an integer tensor (*batch).
rg.attention(q, q, q, mask=rg.Dilated(0))  # Dilated(step=0): expected a step of 1 or more.
rg.attention(q, q, q, mask=rg.Documents([0, 0, 1, 1, 1]))  # Documents.q_ids is a list; expected a torch tensor or an array (NumPy, or any with __dlpack__): write torch.tensor(...).
rg.attention(q, q, q, mask=rg.Documents(torch.tensor([0, 0, 1])))  # Documents.q_ids has shape (3,); expected (5,) or (2, 5).
rg.attention(q, q, q, mask=rg.Retained(torch.zeros(5)))  # Retained.until has dtype torch.float32; expected integers.
rg.attention(q, q, q, mask=rg.Retained(torch.ones(5) > 0))  # Retained.until has dtype torch.bool; expected integers. Booleans that say which keys stay for all queries are Dense(kept[:, None, None, :]).
rg.attention(q, q, q, mask=rg.Retained([5] * 5))  # Retained.until is a list; expected a torch tensor or an array (NumPy, or any with __dlpack__): write torch.tensor(...).
rg.attention(q, q, q, mask=rg.Retained(torch.arange(3)))  # Retained.until has shape (3,); expected (5,) or (2, 5) or (2, g, 5) where g divides the 3 heads: a position for each key.
rg.attention(q, q, q, mask=rg.Retained(torch.ones(2, 2, 5).long()))  # Retained.until has shape (2, 2, 5); expected (5,) or (2, 5) or (2, g, 5) where g divides the 3 heads: a position for each key.
rg.attention(q, q, q, mask=rg.Where(lambda i, j: i >= j))  # Where.fn cannot be called as fn(b, h, i, j): too many positional arguments. Write it as in Where(lambda b, h, i, j: i >= j).
rg.attention(q, q, q, mask=rg.Where(lambda b, h, i, j: (i - j).float()))  # Where.fn returned torch.float32; expected a boolean tensor, True = may attend.
rg.attention(q, q, q, mask=rg.Where(lambda b, h, i, j: True))  # Where.fn returned bool; expected a boolean tensor, True = may attend.
rg.attention(q, q, q, mask=(rg.Causal(), rg.Window(1, 0)))  # mask is a tuple; write Causal() & Window(before=1, after=0) for the keys that all of them let through, | for any.
"""  # noqa: E501

SCORES = """
rg.attention(q, q, q, score=rg.ScaledDot(scale="0.5"))  # ScaledDot.scale is a str; expected a number, or a tensor of one number a head.
rg.attention(q, q, q, score=rg.ScaledDot(scale=zeros(5)))  # ScaledDot.scale has shape (5,); expected () or one number a head, (3,).
rg.attention(q, q, q, score="dot")  # score is a str; expected a Score, such as ScaledDot(), or Custom(fn).
rg.attention(q, q, q, score=rg.Dot)  # score is the class Dot, not one of its values; write Dot().
rg.attention(q, q, q, score=rg.ScaledDot() >> rg.Bias(zeros(4, 5)))  # Bias.bias has shape (4, 5); expected one that broadcasts to (2, 3, 5, 5).
rg.attention(q, q, q, score=rg.ScaledDot() >> rg.Bias([1, 2]))  # Bias.bias is a list; expected a torch tensor or an array (NumPy, or any with __dlpack__): write torch.tensor(...).
rg.attention(q, q, q, score=rg.ScaledDot() >> rg.Alibi(0.5))  # Alibi.slopes is a float; expected a torch tensor or an array (NumPy, or any with __dlpack__). slopes are (heads,): Alibi.geometric(heads) are those of the paper.
rg.Additive(8, 8, 16)  # w_q is (dq, h), w_k (dk, h) and w (h,): Additive(w_q, w_k, w)
rg.attention(q, q, q, score=rg.ScaledDot() >> rg.SoftCap(0))  # SoftCap(cap=0.0): expected a finite number above 0.
rg.attention(q, q, q, score=rg.ScaledDot() >> rg.SoftCap(-3))  # SoftCap(cap=-3.0): expected a finite number above 0.
rg.attention(q, q, q, score=rg.ScaledDot() >> rg.SoftCap("50"))  # SoftCap.cap is a str; expected a number, or a tensor of one number a head.
rg.attention(q, q, q, score=rg.ScaledDot() >> rg.Temperature(0))  # Temperature(t=0.0): expected a finite number above 0.
rg.attention(q, q, q, score=rg.Bilinear(zeros(3, 3)))  # Bilinear.m has shape (3, 3); q and k need (..., 7, 7).
rg.Custom(lambda q, k, w: q @ k.mT, zeros(4))  # Custom.tensors is a Tensor of float32; expected a tuple: write (w,) for one tensor w.
rg.Custom(lambda q, k, w: q @ k.mT, 3.0)  # Custom.tensors is a float; expected a tuple: write (w,) for one tensor w.
rg.Elementwise(lambda q, k, w: q * k * w, tensors=zeros(4))  # Elementwise.tensors is a Tensor of float32; expected a tuple: write (w,) for one tensor w.
rg.attention(q, q, q, score=rg.nn.AdditiveScore(7, 7, 4))  # score is an AdditiveScore; a module that makes a score is called: score=module(); a similarity fn(q, k) is Custom(fn).
rg.Elementwise(lambda q, k: q * k * zeros(8))  # Elementwise.fn raises an error for some of the features (The size of tensor a (3) must match the size of tensor b (8) at non-singleton dimension 3). It is called with a few of them at a time: pass tensors with a number for each feature along, as in Elementwise(lambda q, k, w: ..., tensors=(w,)).
rg.attention(q, q, q, score=rg.Custom(lambda q: q))  # Custom.fn cannot be called as fn(q, k): too many positional arguments. Write it as in Custom(lambda q, k: q @ k.mT).
rg.attention(q, q, q, score=rg.Custom(lambda q, k: q))  # Custom.fn returned (2, 3, 1, 7) for q (2, 3, 1, 7) and k (2, 3, 1, 7); expected (2, 3, 1, 1).
"""  # noqa: E501

OTHER_ARGUMENTS = """
rg.attention(q, q, q, dropout=rg.Dropout(1.5))  # Dropout(p=1.5): expected a probability from 0 to 1.
rg.attention(q, q, q, dropout=rg.Dropout)  # dropout is the class Dropout, not one of its values; expected Dropout(p), or None.
rg.attention(q, q, q, dropout=torch.nn.Dropout(0.1))  # dropout is a Dropout; expected Dropout(p), or None.
rg.attention(q, q, q, dropout=True)  # dropout is a bool; expected Dropout(p), or None.
rg.attention(q, q, q, sink="0")  # sink is a str; expected a number, or a tensor of one number a head.
rg.attention(q, q, q, sink=True)  # sink is a bool; expected a number, or a tensor of one number a head.
rg.attention(q, q, q, sink=zeros(4))  # sink has shape (4,); expected a logit a head, (3,), or (2, 3).
rg.attention(q, q, q, positions=rg.tail(5, 7))  # positions.k has shape (7,); expected (5,) or (2, 5).
rg.attention(q, q, q, positions="tail")  # positions is a str; expected head(nq, nk), tail(nq, nk) or Positions(q, k).
rg.attention(q, q, q, backend=rg.Native)  # backend is the class Native, not one of its values; write backend=Native().
rg.attention(q.double(), q.double(), q.double(), backend=rg.Native())  # backend Native() cannot run this call: dtype float64; it has float32, bfloat16, float16.
rg.attention(q, q, q, backend="native")  # backend is 'native'; expected a Backend, such as Tiled(), or None to choose.
rg.attention(q, q, q, backend=rg.Sdpa(), score=rg.ScaledDot() >> rg.SoftCap(5))  # backend Sdpa() cannot run this call: it serves cuda tensors; these are on cpu.
rg.attention(q, q, q, enable_gqa=True)  # attention has no argument 'enable_gqa'; leave it out: k and v may have fewer heads than q wherever these divide q's.
rg.attention(query=q, key=q, value=q)  # attention has no arguments 'query', 'key', 'value'; write q=query; write k=key; write v=value.
rg.attention(Q=q, K=q, V=q)  # attention has no arguments 'Q', 'K', 'V'; write q=query; write k=key; write v=value.
rg.attention(q, q, q, need_weights=True)  # attention has no argument 'need_weights'; call attention_weights(q, k, ...) for them.
rg.attention(q, q, q, dim=-1)  # attention has no argument 'dim'; it has score, mask, positions, sink, dropout and backend.
rg.attention(q, q, q, out=q)  # attention has no argument 'out'; it has score, mask, positions, sink, dropout and backend.
"""  # noqa: E501

VALUES = """
rg.tail(1.5, 5)  # 1.5 positions: expected an integer.
rg.Prefix(2**70)  # Prefix(n=1180591620717411303424): expected a number from -2^62 to 2^62.
rg.Prefix(-(2**62) - 1)  # Prefix(n=-4611686018427387905): expected a number from -2^62 to 2^62.
rg.Dilated(2**64)  # Dilated(step=18446744073709551616): expected a number from -2^62 to 2^62.
rg.Lengths(keys=[3, 2**70])  # Lengths.keys holds 1180591620717411303424; expected integers of 64 bits.
rg.tail(-1, 5)  # -1 positions from 6 on: expected 0 or more.
rg.Positions(3, 5)  # Positions.q is an int; expected an integer tensor (n,) or (*batch, n).
rg.Dropout(torch.tensor([0.1, 0.2]))  # Dropout.p has shape (2,); expected one number from 0 to 1.
rg.attention_weights(q, q, rows=slice(0, 2))  # rows is a slice; expected integers, (r,): a tensor, a list or a range.
rg.attention_weights(q, q, rows=[None])  # rows is a list; expected integers, (r,): a tensor, a list or a range.
rg.tail(1, [True])  # tail: nk is [True]; expected integers: a list of numbers, or a tensor.
rg.Dropout("0.1")  # Dropout.p is a str; expected a number from 0 to 1.
rg.Dropout()  # Dropout needs p; it has p, seed.
rg.Dropout(0.1, seed="a")  # Dropout.seed is a str; expected an integer, or None.
rg.Custom()  # Custom needs fn; it has fn, tensors, footprint.
rg.RelativeBias()  # RelativeBias needs table and buckets. table is (buckets.count, heads).
rg.Cosine(dim=-1)  # Cosine has no argument 'dim'; leave it out: features are the last axis.
rg.LeakyReLU(negative_slope=0.1)  # LeakyReLU has no argument 'negative_slope'; write LeakyReLU(slope=negative_slope).
"""

LAYERS = """
rg.nn.MultiHeadAttention()  # MultiHeadAttention needs d_model and heads; it has d_model, heads, key_heads, d_k, d_v, d_context, d_out, bias, score, rotary, qk_norm, sink, dropout, backend, parallel,
rg.nn.MultiHeadAttention(d_model=12, n_heads=3)  # MultiHeadAttention has no argument 'n_heads'; write heads=num_heads.
rg.nn.MultiHeadAttention(12, "3")  # MultiHeadAttention.heads is a str; expected an integer.
rg.nn.MultiHeadAttention(12.0, 3)  # MultiHeadAttention.d_model is a float; expected an integer.
rg.nn.MultiHeadAttention(12, 0)  # heads=0; expected 1 or more.
rg.nn.MultiHeadAttention(12, 3, key_heads=2)  # heads=3, key_heads=2; expected heads to be a multiple of key_heads.
rg.nn.MultiHeadAttention(12, 3, dropout=2)  # Dropout(p=2): expected a probability from 0 to 1.
rg.nn.MultiHeadAttention(12, 3, sink=True)  # sink is a bool; expected a number, or a tensor of one number a head.
rg.nn.MultiHeadAttention(32, 4, score=rg.SoftCap(5))  # score SoftCap(cap=5.0) begins with a modifier; begin with a similarity, as in ScaledDot() >> SoftCap(cap=5.0).
rg.nn.MultiHeadAttention(32, 4, dropout=rg.Dropout(0.1))  # Dropout.p is a Dropout; expected a number from 0 to 1.
rg.nn.MultiHeadAttention(32, 4, rope=True)  # write rotary=Rotary(d_k).
rg.nn.MultiHeadAttention(12, 3, rotary=True)  # rotary is a bool; expected a Rotary, such as Rotary(4), or None.
rg.nn.MultiHeadAttention(12, 3, score="dot")  # score is a str; expected a Score, or a module that returns one when called.
layer()  # MultiHeadAttention.forward needs x; it has x, context, mask, positions, cache.
layer(x.numpy())  # x is a ndarray of float32; expected a tensor (*batch, n, 12).
layer([1, 2])  # x is a list; expected a tensor (*batch, n, 12).
layer(x[0, 0])  # x has shape (12,); expected (*batch, n, 12).
layer(x.long())  # x has dtype torch.int64; expected torch.float32, as this layer's weights: embed token ids first.
layer(x.double())  # x has dtype torch.float64; expected torch.float32, as this layer's weights: convert with .to(...).
layer(x, zeros(2, 5, 11))  # context has shape (2, 5, 11); expected (*batch, m, 12) with the batch axes of x, which has shape (2, 5, 12).
layer(x, mask="causal")  # mask is a str; write Causal().
layer(x, mask=rg.Dense(zeros(4, 4) > 0))  # Dense.allowed has shape (4, 4); expected one that broadcasts to (2, 3, 5, 5); a padding mask (batch, nk) is Dense(mask[:, None, None, :]), or Lengths(keys=mask.sum(-1))
layer(x, cache=3)  # cache is an int; expected a cache of regard.nn, such as GrowingCache(), or None.
layer(x, cache={})  # cache is a dict; expected a cache of regard.nn, such as GrowingCache(), or None.
layer.weights()  # weights needs x; it has x, context, mask, positions, rows.
layer(x, attention_mask=None)  # MultiHeadAttention.forward has no argument 'attention_mask'; write mask=Dense(attention_mask.bool()[:, None, None, :]) where 1 = may attend.
layer(x, use_cache=True)  # MultiHeadAttention.forward has no argument 'use_cache'; did you mean cache?
layer(x, output_attentions=True)  # MultiHeadAttention.forward has no argument 'output_attentions'; layer.weights(x, ...) gives them.
rg.nn.MultiHeadAttention(16, heads=2, qk_norm=torch.nn.LayerNorm(8))  # qk_norm is a LayerNorm; expected a class, or a function that makes it of a width.
rg.nn.PagedCache()  # PagedCache needs batch and heads and pages and page_size and dk and dv; it has batch, heads, pages, page_size, dk, dv, dtype, device.
rg.nn.PagedCache(batch=1, heads=2, pages=0, page_size=4, dk=8, dv=8)  # PagedCache.pages is 0; expected 1 or more.
rg.nn.PagedCache(batch=-1, heads=2, pages=3, page_size=4, dk=8, dv=8)  # PagedCache.batch is -1; expected 0 or more.
rg.nn.PagedCache(batch=1, heads=2, pages=3, page_size=4.5, dk=8, dv=8)  # PagedCache.page_size is 4.5; expected an integer.
rg.nn.RollingCache()  # RollingCache needs window; it has window, dtype.
rg.nn.RollingCache(window=0)  # RollingCache.window is 0; expected 1 or more.
rg.nn.RollingCache(window=2**70)  # RollingCache.window is 1180591620717411303424; expected less than 2^62.
rg.nn.FixedCache(2, 2, -1, 8, 8)  # FixedCache.capacity is -1; expected 0 or more.
rg.nn.FixedCache(2, 2, 2**70, 8, 8)  # FixedCache.capacity is 1180591620717411303424; expected less than 2^62.
rg.nn.FixedCache("2", 2, 8, 8, 8)  # FixedCache.batch is '2'; expected an integer.
rg.nn.FixedCache(2, 2, 8, 8, 8, torch.bool)  # FixedCache(dtype=torch.bool): expected the dtype of keys and values, one of torch.float16, torch.bfloat16, torch.float32, torch.float64, or torch.int8, which rounds them.
rg.nn.PagedCache(2, 2, 8, 4, 8, 8, torch.int32)  # PagedCache(dtype=torch.int32): expected the dtype of keys and values, one of torch.float16,
rg.nn.GrowingCache().next_positions(-1)  # next_positions: n is -1; expected 0 or more.
rg.nn.GrowingCache().next_positions(1.5)  # next_positions: n is 1.5; expected an integer.
rg.nn.PagedCache(1, 2, 3, 4, 8, 8).next_positions(-1)  # next_positions: n is -1; expected 0 or more.
rg.nn.FixedCache()  # FixedCache needs batch and heads and capacity and dk and dv; it has batch, heads, capacity, dk, dv, dtype, device.
rg.nn.GrowingCache(12)  # GrowingCache(dtype=12): expected None, which keeps tokens in their own dtype, or torch.int8, which rounds them; convert tokens with .to(...) before they are appended.
rg.nn.Rotary()  # Rotary needs width; it has width, base.
rg.nn.Rotary(7)  # Rotary(width=7): expected an even number of features, which rotate in pairs.
rg.nn.AttentionPooling(8, 4)(torch.randn(2, 3, 8), mask=torch.ones(2, 3).bool())  # mask is a Tensor of bool; expected a Mask: Lengths(keys=counts) for bags of unlike sizes, Dense(mask[:, None, None]) of booleans (batch, n).
rg.nn.MultiHeadAttention(32, 4, rotary=rg.nn.Rotary(8))(torch.randn(1, 3, 32), positions=torch.arange(3))  # positions is a Tensor of int64; 
rg.nn.AttentionPooling()  # AttentionPooling needs d_model and hidden; it has d_model, hidden, heads, bias, device, dtype.
"""  # noqa: E501

LOOK = """
rg.record("gpt2")  # record has a str; expected the model, an nn.Module: with rg.record(model) as tape: model(x).
rg.facts.Entropy(q, q)  # Entropy takes no queries and keys; they are look's: rg.look(q, k, facts=(Entropy(),)).
rg.facts.Map(q, q)  # Map.rows is a Tensor of float32; expected an integer.
rg.testing.check_mask(rg.Causal)  # mask is the class Causal, not one of its values; write Causal().
rg.testing.check_mask(lambda b, h, i, j: i >= j)  # mask is a function
rg.testing.check_score(rg.SoftCap)  # score is the class SoftCap, not one of its values; write SoftCap(...).
rg.record(model).calls  # a recording has no 'calls' before it is run: with rg.record(model) as tape: model(x), and the tape has them.
rg.record(model)["0"]  # a recording has no calls before it is run: with rg.record(model) as tape: model(x), and the tape has them.
rg.look()  # look takes what it looks at by position: look(model, text, tokenizer=...), look(layer, x) or look(q, k).
rg.look("hello")  # look begins with 'hello', a str; expected a model that its own library has loaded: look(model, text, tokenizer=tokenizer); or tensors: look(q, k).
rg.look(model=3)  # look takes what it looks at by position: look(model, text, tokenizer=...), look(layer, x) or look(q, k); 'model' came by name.
rg.look(model, "abc", tokens="abc")  # look has no argument 'tokens'; pass tokenizer=, which names them; of a recording: Report.of(tape.calls, tokens=...).
rg.look(model, torch.tensor([0.5, 1.5]))  # a Tensor of float32 came for ByteTransformer; expected a text, with tokenizer=..., or its token ids. look also takes an image
rg.look(model, input_ids=torch.tensor([1, 2]))  # look has no argument 'input_ids'; pass the ids by position: look(model, ids).
rg.look("gpt2", "hello")  # look begins with 'gpt2', a str; expected a model that its own library has loaded: look(model, text, tokenizer=tokenizer); or tensors: look(q, k).
rg.look(torch.nn.Linear(3, 3), zeros(2, 3))  # a Tensor of float32 came for Linear; expected a text, with tokenizer=..., or its token ids. look also takes an image, and the input of a layer of regard.nn: look(layer, x).
rg.look(q, q).entropy  # 'FactResults' object has no attribute 'entropy'; an answer is read by its fact: seen[Entropy()], seen[MaxScore()].
rg.look(q, q, facts="entropy")  # facts holds a str; expected facts, such as Entropy().
rg.look(q, q, facts=rg.facts.Entropy)  # facts is the class Entropy; expected a tuple of values: facts=(Entropy(),).
rg.look(q, q, facts=[rg.facts.Entropy])  # facts holds the class Entropy, not one of its values; write Entropy().
rg.look(q, q, facts=(rg.facts.Top(0),))  # Top(k=0): expected 1 key or more.
rg.look(q, q, facts=(rg.facts.Top(10**9),))  # Top(k=1000000000) has room for 1000000000 keys of each query; expected at most the 5 there are.
rg.look(q, q, facts=(rg.facts.Map(0, 3),))  # Map(rows=0, cols=3): expected 1 cell or more each way.
rg.look(q, q, facts=(rg.facts.Rows([9]),))  # Rows.rows holds [9]; there are 5 queries.
rg.look(q, q, facts=(rg.facts.Rows(),))  # Rows needs rows.
rg.look(q, q, facts=(rg.facts.Mass(torch.arange(5) * 10**9),))  # Mass.groups holds 4000000000, and the answer has a column for each number from 0 to that; of 5 keys expected groups that are numbered one after another: torch.unique(groups, return_inverse=True)[1].
rg.look(q, q)[rg.facts.Received()]  # 'Received() was not computed; this look has Entropy(), MaxScore().'
rg.look(q, q, facts=None)  # facts is None; expected a tuple of facts, such as facts=(Entropy(),).
rg.look(q, q, facts=(f for f in [rg.facts.Entropy()]))  # facts is a generator; expected a tuple of facts
rg.facts.Map(2.5, 3)  # Map.rows is 2.5; expected an integer.
rg.facts.ScoreMap(2, "3")  # ScoreMap.cols is '3'; expected an integer.
rg.facts.Received.last(1.5)  # Received.last: count is 1.5; expected an integer.
rg.facts.Mass.first(1.5)  # Mass.first: count is 1.5; expected an integer.
rg.facts.Quantised(1.5)  # Quantised.limit is 1.5; expected an integer.
rg.facts.Top()  # Top needs k.
rg.facts.Top("3")  # Top.k is a str; expected a number of keys.
rg.facts.Within(-1, 0)  # Within(before=-1)
rg.attention_over(q, [(q[:, :1], q[:, :1]), (q, q)])  # have 3 heads, those before them 1; expected as many.
rg.pack(zeros(5, 8), cu_seqlens=torch.tensor([0, 4, 3, 5]))  # lengths [4, -1, 2]: expected 0 or more; running totals, cu_seqlens, never fall.
rg.sources.Arrays(q[0, 0], q[0, 0], size=2.5).parts()  # Arrays(size=2.5): expected a number of keys a part, or None to choose.
rg.facts.Within()  # Within needs before and after.
rg.facts.Histogram(0)  # Histogram.edges is an int; expected a tuple of numbers, the bins' limits.
rg.facts.Columns(3)  # Columns.columns has dtype torch.int64, shape (); expected integers, (r,).
rg.record()  # record needs model; it has model, facts, layers.
record_nothing()  # nothing was recorded: no module of MultiHeadAttention ran in the block, on the thread that opened it. Call the model inside the block; what worker threads run
rg.rollout([])  # calls is empty; expected one call or more, first layer first.
rg.rollout("tape")  # calls holds a str; expected the calls of a recording: with rg.record(model, facts=(rg.facts.Inputs(),)) as tape: model(x), then rg.rollout(tape).
rg.lint()  # lint needs q and k and v; it has q, k, v, score, mask, positions, sink, within.
rg.lint(model)  # lint needs k and v; it has q, k, v, score, mask, positions, sink, within.
rg.lint(layer)  # lint needs k and v; it has q, k, v, score, mask, positions, sink, within.
"""  # noqa: E501

HEADS = """
rg.heads.probe()  # probe needs model; it has model, length, seed, among.
rg.heads.probe(layer)  # MultiHeadAttention has no embedding to draw tokens of; pass among=, the ids to draw.
rg.heads.probe(model, length=0)  # length=0: expected 8 to 256, the tokens that there are to draw. Pass length=256, or more token ids as among=.
rg.heads.probe(model, length="64")  # length is a str; expected an integer, or None.
rg.heads.probe(model, 64)  # probe takes model by position; the next argument is an int: name what follows.
rg.heads.contributions(model)  # contributions needs given; it has model, given, tokenizer, token, at.
rg.heads.contributions(model, [1, 2], token="x")  # token is a str; expected an integer, or None.
rg.heads.contributions(model, [1, 2], token=999)  # token=999: ByteTransformer has tokens 0 to 255.
rg.heads.ablation(torch.nn.Linear(3, 3), zeros(2, 3))  # a Tensor of float32 came for Linear; expected a text
rg.heads.ablation(model, [1])  # the text has 1 token; expected 2 or more.
rg.heads.ablation(torch.nn.Linear(3, 3), [1, 2])  # Linear has no nn.Embedding and cannot read token ids (mat1 and mat2
rg.look(torch.nn.Linear(3, 3), [1, 2])  # expected a model that reads a text. record sees any module on its own input
rg.heads.circuits(model, [1, 2]).ov("L9H9")  # there is no head L9H9; this model has layers 0 to 3, heads 0 to 3.
rg.heads.circuits(model, [1, 2]).ov("3")  # '3' is no head; expected a label such as L3H1 (layer 3, head 1), decoder L3H1, or 3,1.
rg.heads.circuits(model, [1, 2]).qk("L0H0", k=0)  # k=0; expected 1 to 256, the number of tokens.
rg.heads.carried(model)  # carried needs given; it has model, given, tokenizer.
"""  # noqa: E501

SOURCES = """
rg.pack(x, lengths=[3, 9])  # lengths [3, 9]; expected 0 to 5, the padded length of x.
rg.pack(x, lengths=[3, 2.0])  # lengths is [3, 2.0]; expected integers: a list of numbers, or a tensor.
rg.pack(x, lengths=torch.tensor([3]))  # x has shape (2, 5, 12), lengths (1,); expected (batch, n, ...) and (batch,).
rg.pack(x, cu_seqlens=torch.tensor([0, 3]))  # lengths [3] do not divide 2 tokens; expected their sum.
rg.pack(x, attention_mask=bool_mask)  # pack has no argument 'attention_mask'; write lengths=mask.sum(-1), where the padding is at the end.
rg.patch("bert")  # model is a str; expected an nn.Module, or None for every call of this process.
rg.sources.Chunks(3)  # Chunks.parts is an int; expected a list or an iterator of (k, v) or (k, v, positions), or a function that returns one.
rg.sources.Safetensors("nowhere.safetensors")  # there is no file nowhere.safetensors; Safetensors reads what safetensors' save_file writes.
rg.sources.Arrays("nowhere.npy", q)  # there is no file nowhere.npy; Arrays reads what numpy.save writes, or takes the arrays themselves.
rg.attention_over(q, [])  # the source Chunks(0 parts) gave no part; expected one at least. An iterator that was read before gives nothing: pass a list, or a function that returns a new iterator.
rg.attention_over(q, [q, q])  # part 0 of Chunks is a Tensor of float32; expected (k, v) or (k, v, positions).
rg.attention_over(q, "file.npy")  # Chunks.parts is 'file.npy', a name; expected a list of (k, v). A file is Arrays(k, v) of numpy's .npy files, or Safetensors(path).
rg.attention_over(q, (q, q))  # Chunks.parts is one pair (k, v); expected a list of them: [(k, v)].
rg.explain_over(q, q, q)  # explain_over takes q and source by position; the next argument is a Tensor of float32: keys and values come together, as one source: [(k, v), ...].
"""  # noqa: E501

NAMES_OF_OTHERS = """
rg.mha  # it is regard.nn.MultiHeadAttention(d_model, heads), and regard.compat.torch.MultiheadAttention has torch's arguments.
rg.multi_head_attention_forward  # did you mean nn.MultiHeadAttention?
rg.Sinks  # the first n keys, seen beside a window, are mask=regard.Causal() & (regard.Window(before=w - 1, after=0) | regard.Prefix(n)), and learned sinks are sink=
rg.KeyPadding  # it is regard.Lengths(keys=lengths), or regard.Dense(mask[:, None, None, :]).
rg.top_keys  # it is regard.facts.Top(k), a fact for look and record.
rg.facts.TopK  # it is Top(k), which answers with TopKeys.
rg.nn.BahdanauAttention  # it is Attention(d_model, d_k, d_v, score=AdditiveScore(d_k, d_k, hidden)).
rg.compat.xformers  # regard.masks.peers.from_xformers makes a mask of an attn_bias, for regard.attention.
rg.compat.flexattention  # module 'regard.compat' has no attribute 'flexattention'
rg.weights  # it is regard.attention_weights(q, k).
rg.Padding  # it is regard.Lengths(keys=lengths), or regard.Dense(mask[:, None, None, :]).
rg.CausalWindow  # a sliding window of w keys, the query's own included, is regard.Window(before=w - 1, after=0).
rg.bias  # did you mean Bias?
rg.Rope  # it is regard.nn.Rotary(width).
rg.Softmax  # it is part of regard.attention; regard.attention_weights(q, k) gives the weights.
rg.cross_attention  # it is regard.nn.MultiHeadAttention(d_model, heads), and regard.compat.torch.MultiheadAttention has torch's arguments.
rg.self_attention  # it is regard.nn.MultiHeadAttention(d_model, heads), and regard.compat.torch.MultiheadAttention has torch's arguments.
rg.Relative  # did you mean RelativeBias?
rg.visualize  # it is regard.look(model, "a text", tokenizer=tokenizer), whose report has .save("page.html").
rg.head_view  # it is regard.look(model, "a text", tokenizer=tokenizer), whose report has .save("page.html").
rg.load  # regard loads no models: load one with its own library, and pass it to regard.look or regard.patch.
rg.ablate  # did you mean heads.ablation?
rg.probe  # did you mean heads.probe?
rg.Entropy  # it is regard.facts.Entropy, a fact for look and record; regard.entropy(q, k) is differentiable.
rg.nn.SelfAttention  # it is MultiHeadAttention(d_model, heads): layer(x) is self-attention, layer(x, context) cross-attention.
rg.nn.CrossAttention  # it is MultiHeadAttention(d_model, heads): layer(x) is self-attention, layer(x, context) cross-attention.
rg.nn.TransformerEncoderLayer  # regard.patch(model) lets torch's own run on regard.
rg.nn.Linear  # it is torch's: torch.nn has it, and regard.nn has what attends.
rg.nn.DynamicCache  # it is GrowingCache, FixedCache, RollingCache or PagedCache.
rg.nn.RotaryEmbedding  # it is Rotary(width).
"""  # noqa: E501

TORCHS = """
ct.scaled_dot_product_attention(q, q, q, attn_mask=rg.Causal())  # attn_mask is a Causal; expected a tensor: call regard.attention(q, k, v, mask=Causal()).
ct.scaled_dot_product_attention(q, q, q, attn_mask=bool_mask, is_causal=True)  # attn_mask and is_causal are both given; pass the one mask that has both.
ct.flex_attention(q, q, q, mask_mod)  # score_mod cannot be called as fn(score, b, h, i, j): too many positional arguments.
ct.flex_attention(q, q, q, block_mask=rg.Causal())  # block_mask is a Causal; call regard.attention(q, k, v, mask=...), which takes it.
ct.flex_attention(q, q, q, score_mod=rg.SoftCap(5))  # score_mod is a SoftCap; call regard.attention(q, k, v, score=...), which takes it.
"""  # noqa: E501

TABLES = (
    TENSORS,
    MASKS,
    SCORES,
    OTHER_ARGUMENTS,
    VALUES,
    LAYERS,
    LOOK,
    HEADS,
    SOURCES,
    NAMES_OF_OTHERS,
    TORCHS,
)


@pytest.mark.parametrize(("call", "said"), rows(*TABLES))
def test_what_does_not_fit_is_named(call: str, said: str, names: dict[str, Any]) -> None:
    errors = (TypeError, ValueError, AttributeError, LookupError, OSError, RuntimeError)
    with pytest.raises(errors, match=re.escape(said)):
        eval(call, dict(names))
