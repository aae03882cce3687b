"""Layers exported to ONNX: one node Attention each, and ONNX Runtime computes what the layer does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import regard as rg
from regard.backends.onnx import OnnxAttention
from regard.compat.onnx import export

pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch.onnx uses what torch deprecates
X = torch.randn(2, 6, 16)


class Masked(nn.Module):
    """A layer under one mask, or under the lengths that its call is given."""

    def __init__(self, mask: rg.Mask = rg.Everything(), **layer: Any) -> None:
        super().__init__()
        self.layer, self.mask = rg.nn.MultiHeadAttention(16, heads=4, **layer), mask

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        return self.layer(x, mask=self.mask if lengths is None else self.mask & rg.Lengths(keys=lengths))


T5 = rg.RelativeBias(torch.randn(8, 4), rg.T5Buckets(8, 16))
BIAS = rg.Bias(torch.randn(1, 4, 6, 6))
MODELS: dict[str, tuple[nn.Module, tuple[Tensor, ...]]] = {
    "plain": (Masked(), (X,)),
    "causal, grouped": (Masked(rg.Causal(), key_heads=2), (X,)),
    "window, rotary": (Masked(rg.Causal() & rg.Window(2, 0), rotary=rg.nn.Rotary(4)), (X,)),
    "slopes": (Masked(rg.Causal(), score=rg.ScaledDot() >> rg.Alibi(rg.Alibi.geometric(4))), (X,)),
    "cap": (Masked(score=rg.ScaledDot() >> rg.SoftCap(0.5)), (X,)),
    "table and bias": (Masked(rg.Window(2, 2), score=rg.Dot() >> T5 >> BIAS), (X,)),
    "lengths, one 0": (Masked(rg.Causal()), (X, torch.tensor([0, 4]))),
    "scale": (Masked(score=rg.ScaledDot(0.4)), (X,)),
}


@pytest.mark.parametrize("opset", [23, pytest.param(24, marks=pytest.mark.full)])
@pytest.mark.parametrize(("model", "given"), MODELS.values(), ids=MODELS.keys())
def test_a_runtime_computes_the_same(model: nn.Module, given: tuple[Tensor, ...], opset: int, tmp_path: Path) -> None:
    runtime: Any = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    program = export(model.eval(), given, opset_version=opset, verbose=False)
    assert [node.op_type for node in program.model.graph].count("Attention") == 1
    program.save(tmp_path / "model.onnx")
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    names = (one.name for one in session.get_inputs())
    (out,) = session.run(None, {name: t.numpy() for name, t in zip(names, given, strict=True)})
    np.testing.assert_allclose(out, model(*given).detach().numpy(), atol=1e-5)
    assert model.layer.backend is None  # as before


def test_any_length(tmp_path: Path) -> None:
    runtime: Any = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = Masked(rg.Causal(), rotary=rg.nn.Rotary(4)).eval()
    shapes = {"x": {1: torch.export.Dim("n", min=2, max=64)}}
    program = export(model, (X,), dynamic_shapes=shapes, verbose=False)
    program.save(tmp_path / "model.onnx")
    session = runtime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    for n in (2, 6, 17):
        x = torch.randn(2, n, 16)
        (out,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        np.testing.assert_allclose(out, model(x).detach().numpy(), atol=1e-5)


@pytest.mark.parametrize(("model", "given"), MODELS.values(), ids=MODELS.keys())
def test_torchs_definition_of_the_operator_agrees(model: Any, given: tuple[Tensor, ...]) -> None:
    """Without ONNX Runtime too."""
    expected = model.eval()(*given)
    model.layer.backend = OnnxAttention()
    try:
        found = model(*given)
    finally:
        model.layer.backend = None
    torch.testing.assert_close(found.nan_to_num(0) if "0" in str(given[1:]) else found, expected, atol=1e-5, rtol=1e-5)


Q = torch.randn(2, 4, 5, 8)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "sink": ({"sink": 0.0}, "no log-sum-exp"),
    "dropout": ({"dropout": rg.Dropout(0.5)}, "export in eval mode"),
    "similarity": ({"score": rg.Cosine()}, "the dot product, scaled by a number"),
    "learned scale": ({"score": rg.ScaledDot(torch.ones(4))}, "the dot product, scaled by a number"),
    "cap and mask": ({"score": rg.ScaledDot() >> rg.SoftCap(2.0), "mask": rg.Causal()}, "opset 23 caps masked scores"),
    "cap and bias": ({"score": rg.ScaledDot() >> rg.SoftCap(2.0) >> rg.Bias(torch.randn(5, 5))}, "opset 23 caps"),
}


def test_rows_that_see_nothing_and_what_is_hidden() -> None:
    """As everywhere in regard, though torch's definition of the operator answers NaN."""
    mask = rg.Lengths(queries=torch.tensor([3, 5]))
    out = rg.attention(Q, Q, Q, score=rg.ScaledDot() >> rg.Alibi(torch.ones(4)), mask=mask, backend=OnnxAttention())
    assert bool((out[0, :, 3:] == 0).all()) and out.isfinite().all()
    v = Q.clone()
    v[1, :, 4] = torch.inf
    with pytest.raises(rg.Unsupported, match="leak out of masked places"):
        rg.attention(Q, Q, v, mask=rg.Lengths(keys=torch.tensor([5, 4])), backend=OnnxAttention())


@pytest.mark.parametrize(("options", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_what_the_operator_lacks(options: dict[str, Any], said: str) -> None:
    with pytest.raises(rg.Unsupported, match=said):
        rg.attention(Q, Q, Q, backend=OnnxAttention(), **options)


def test_one_batch_axis_and_one_width() -> None:
    with pytest.raises(rg.Unsupported, match="values as wide as queries, 8, not 3"):
        rg.attention(Q, Q, Q[..., :3], backend=OnnxAttention())
    with pytest.raises(rg.Unsupported, match="has one batch axis; these tensors have 0"):
        rg.attention(Q[0, 0], Q[0, 0], Q[0, 0], backend=OnnxAttention())
