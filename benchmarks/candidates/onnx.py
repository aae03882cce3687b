"""ONNX Runtime: the operators MultiHeadAttention and GroupQueryAttention (com.microsoft), and Attention of opset 23."""

from __future__ import annotations

from typing import Any

import onnxruntime
import torch
from onnx import TensorProto, helper
from torch import Tensor

from benchmarks.candidates import Unable, Way
from benchmarks.cases import WINDOW, Case
from benchmarks.inputs import Inputs

TYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bool: TensorProto.BOOL,
    torch.int32: TensorProto.INT32,
}
THREADS = [1]


def start(threads: int) -> str:
    THREADS[0] = threads
    return onnxruntime.__version__


def ways(case: Case, x: Inputs) -> list[Way]:
    if case.dtype == "bfloat16":
        raise Unable("its attention operators have no bfloat16 on a CPU")
    if case.what == "dropout":
        raise Unable("its attention operators have no dropout")
    if case.what == "window":
        return [_group(x, local_window_size=WINDOW)]
    if case.what == "ragged":
        q, k, v, real = x.padded()
        return [_multi(x, q, k, v, {"padding": real[:, 0, 0].int()}), _attention(x, q, k, v, _square(real, q))]
    q, k, v = x.four()
    if k.shape[1] != q.shape[1]:
        folded = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
        return [_attention(x, q, k, v, None), _multi(x, folded, k, v, {}, "MultiHeadAttention, groups folded")]
    if case.what == "causal":
        found = [_multi(x, q, k, v, {}, unidirectional=1), _attention(x, q, k, v, None, is_causal=1)]
        return [*found, _group(x)]
    if case.what == "bias":
        assert x.learned is not None
        return [_multi(x, q, k, v, {"bias": x.learned[None, None]}), _attention(x, q, k, v, x.learned)]
    if case.what == "bool":
        assert x.mask is not None
        return [_multi(x, q, k, v, {"bias": _added(x.mask, q)[None, None]}), _attention(x, q, k, v, x.mask)]
    if case.what == "padding":
        assert x.mask is not None
        return [_multi(x, q, k, v, {"padding": x.mask[:, 0, 0].int()}), _attention(x, q, k, v, _square(x.mask, q))]
    return [_multi(x, q, k, v, {}), _attention(x, q, k, v, None)]


def _added(mask: Tensor, q: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, torch.finfo(q.dtype).min)


def _square(mask: Tensor, q: Tensor) -> Tensor:
    """A padding mask for every query: the operator broadcasts no axis of queries."""
    return mask.expand(-1, -1, q.shape[2], -1)


def _rows(t: Tensor) -> Tensor:
    """(b, h, n, d) as (b, n, h d), the layout of com.microsoft."""
    return t.transpose(1, 2).flatten(2).contiguous()


def _multi(
    x: Inputs, q: Tensor, k: Tensor, v: Tensor, masks: dict[str, Tensor], name: str = "MultiHeadAttention", **given: int
) -> Way:
    heads = q.shape[1]
    feed = {"q": _rows(q), "k": _rows(k), "v": _rows(v), **masks}
    names = ["q", "k", "v", "", *(n if n in masks else "" for n in ("padding", "bias"))]
    run = _session("MultiHeadAttention", "com.microsoft", names, ["out"], feed, num_heads=heads, **given)
    return Way(name, run, lambda out: [_back(x, _heads(out, heads))])


def _group(x: Inputs, **given: int) -> Way:
    """Causal, with or without a window."""
    q, k, v = x.four()
    heads, n = q.shape[1], q.shape[2]
    feed = {"q": _rows(q), "k": _rows(k), "v": _rows(v)}
    feed["last"] = torch.full((q.shape[0],), n - 1, dtype=torch.int32)
    feed["total"] = torch.tensor([n], dtype=torch.int32)
    names, outs = ["q", "k", "v", "", "", "last", "total"], ["out", "past_k", "past_v"]
    given = {"num_heads": heads, "kv_num_heads": heads, **given}
    run = _session("GroupQueryAttention", "com.microsoft", names, outs, feed, **given)
    return Way("GroupQueryAttention", run, lambda out: [_back(x, _heads(out, heads))])


def _attention(x: Inputs, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **given: int) -> Way:
    feed = {"q": q, "k": k, "v": v} if mask is None else {"q": q, "k": k, "v": v, "mask": mask}
    run = _session("Attention", "", list(feed), ["out"], feed, **given)
    return Way("Attention of opset 23", run, lambda out: [_back(x, torch.from_numpy(out.numpy()))])


def _heads(out: Any, heads: int) -> Tensor:
    return torch.from_numpy(out.numpy()).unflatten(-1, (heads, -1)).transpose(1, 2)


def _back(x: Inputs, out: Tensor) -> Tensor:
    return x.packed(out) if x.case.what == "ragged" else out.reshape(x.case.batch, x.case.heads, -1, x.case.values)


def _session(kind: str, domain: str, names: list[str], outs: list[str], feed: dict[str, Tensor], **given: int) -> Any:
    """A model of one operation, its inputs and outputs bound to memory of ours; a function that runs it."""
    inputs = [helper.make_tensor_value_info(n, TYPES[t.dtype], list(t.shape)) for n, t in feed.items()]
    results = [helper.make_tensor_value_info(n, TYPES[feed["q"].dtype], None) for n in outs]
    node = helper.make_node(kind, names, outs, domain=domain, **given)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(
        helper.make_graph([node], "attention", inputs, results), opset_imports=opsets, ir_version=11
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS[0]
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    binding, arrays = session.io_binding(), {n: t.contiguous().numpy() for n, t in feed.items()}
    for name, array in arrays.items():
        binding.bind_cpu_input(name, array)
    for name in outs:
        binding.bind_output(name)

    keep = (session, arrays)  # the binding reads the arrays' own memory

    def run() -> Any:
        keep[0].run_with_iobinding(binding)
        return binding.get_outputs()[0]

    return run
