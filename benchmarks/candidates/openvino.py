"""OpenVINO: its ScaledDotProductAttention in a model of one operation, in the precision of the case."""

from __future__ import annotations

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as op
from torch import Tensor

from benchmarks.candidates import Unable, Way
from benchmarks.cases import Case
from benchmarks.inputs import Inputs

TYPES = {
    torch.float32: (ov.Type.f32, "f32"),
    torch.bfloat16: (ov.Type.bf16, "bf16"),
    torch.float16: (ov.Type.f16, "f16"),
    torch.bool: (ov.Type.boolean, "boolean"),
}
CORE = ov.Core()
SETTINGS: dict[str, int | str] = {"NUM_STREAMS": 1}


def start(threads: int) -> str:
    SETTINGS["INFERENCE_NUM_THREADS"] = threads
    return ov.__version__.split("-")[0]


def ways(case: Case, x: Inputs) -> list[Way]:
    if case.what == "dropout":
        raise Unable("ScaledDotProductAttention has no dropout")
    (q, k, v), causal = x.four(), case.what == "causal"
    if case.what == "ragged":
        q, k, v, mask = x.padded()
        return [_way(f"padded, {kind}", x, [q, k, v, m], False) for kind, m in _masks(mask, q.dtype).items()]
    if case.what == "bias":
        assert x.learned is not None
        return [_way("float mask", x, [q, k, v, x.learned], False)]
    if case.what in ("bool", "padding", "window"):
        mask = x.dense()
        assert mask is not None
        return [_way(kind, x, [q, k, v, m], False) for kind, m in _masks(mask, q.dtype).items()]
    if k.shape[1] != q.shape[1]:
        folded = q.reshape(q.shape[0], k.shape[1], -1, q.shape[-1])
        return [
            _way("k, v broadcast", x, [q, k, v], causal),
            _way("groups folded into queries", x, [folded, k, v], causal),
        ]
    return [_way("SDPA", x, [q, k, v], causal)]


def _masks(mask: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    return {
        "boolean mask": mask,
        "float mask": torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf),
    }


def _way(name: str, x: Inputs, inputs: list[Tensor], causal: bool) -> Way:
    inputs = [t.contiguous() for t in inputs]
    parameters = [op.parameter(list(t.shape), TYPES[t.dtype][0]) for t in inputs]
    q, heads = parameters[0], inputs[0].shape[1]
    k, v = (_broadcast(parameters[n], inputs[n], heads) for n in (1, 2))
    node = op.scaled_dot_product_attention(q, k, v, *parameters[3:], causal=causal)
    settings = {**SETTINGS, "INFERENCE_PRECISION_HINT": TYPES[x.q.dtype][1]}
    request = CORE.compile_model(ov.Model([node], parameters, "attention"), "CPU", settings).create_infer_request()
    arrays = [_array(t) for t in inputs]
    for number, (array, t) in enumerate(zip(arrays, inputs, strict=True)):
        request.set_input_tensor(number, ov.Tensor(array, ov.Shape(list(t.shape)), TYPES[t.dtype][0]))

    def results(_: object) -> list[Tensor]:
        data = request.get_output_tensor(0).data
        out = torch.from_numpy(np.array(data).view(np.int16 if x.q.dtype == torch.bfloat16 else data.dtype))
        out = out.view(x.q.dtype) if x.q.dtype == torch.bfloat16 else out
        if x.case.what == "ragged":
            return [x.packed(out)]
        return [out.reshape(x.case.batch, x.case.heads, -1, x.case.values)]

    keep = (request, arrays)  # the request reads the arrays' own memory
    return Way(name, lambda: keep[0].infer(), results)


def _broadcast(parameter: ov.Node, t: Tensor, heads: int) -> ov.Node:
    """Key heads once for each query head of their group."""
    b, hk, n, d = t.shape
    if hk == heads:
        return parameter
    wide = op.broadcast(
        op.unsqueeze(parameter, op.constant(np.array(2))),
        op.constant(np.array([b, hk, heads // hk, n, d])),
        broadcast_spec="BIDIRECTIONAL",
    )
    return op.reshape(wide, op.constant(np.array([b, heads, n, d])), False)


def _array(t: Tensor) -> np.ndarray:
    return (t.view(torch.int16) if t.dtype == torch.bfloat16 else t).numpy()
