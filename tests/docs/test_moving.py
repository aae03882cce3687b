"""Every line of the table in docs/moving.md runs; "before" and "after" agree where the library runs on a CPU."""

from __future__ import annotations

import importlib
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard

PAGE = Path(__file__).resolve().parents[2] / "docs" / "moving.md"
ROW = re.compile(r"^\| (?P<name>[^|]+) \| `(?P<before>[^`]+)` \| `(?P<after>[^`]+)` \|$", re.MULTILINE)
ROWS = {found["name"]: (found["before"], found["after"]) for found in ROW.finditer(PAGE.read_text(encoding="utf-8"))}
# What a line needs besides torch, and lines whose library needs a GPU, or whose "before" is no call of it.
NEEDS = {"x-transformers": "x_transformers", "transformers": "transformers", "ONNX Attention": "onnx", "JAX": "jax"}
NEEDS |= {"Keras, layer": "keras", "Keras, function": "keras"}
AFTER_ALONE = ("flash-attention", "xFormers", "FlashInfer", "Equinox", "fairseq, ESPnet", "any model that calls torch")


def names(library: str | None) -> dict[str, Any]:
    """What the lines of the table use. As many heads as tokens, so that every layout fits."""
    n = 8
    q, k, v = torch.randn(3, 2, n, n, 16).unbind(0)
    found: dict[str, Any] = {"torch": torch, "regard": regard, "q": q, "k": k, "v": v, "n": n, "attn_bias": None}
    found["score_mod"] = lambda s, b, h, i, j: s - 0.5 * (i - j).abs()
    found["padding"] = torch.arange(n) >= torch.tensor([[5], [n]])
    found["mask"], found["allowed"] = ~found["padding"], torch.ones(n, n).tril().bool()
    found["model"] = torch.nn.TransformerEncoderLayer(16, 2)
    for module in ("regard.compat.torch", "regard.compat.flash_attention", "regard.compat.jax"):
        importlib.import_module(module)
    for module in ("regard.masks.convert", "regard.masks.peers"):
        found |= {name: x for name, x in vars(importlib.import_module(module)).items() if name.startswith("from_")}
    if library == "keras":
        os.environ.setdefault("KERAS_BACKEND", "torch")
    if library is not None:
        found[library] = pytest.importorskip(library)
    if library == "x_transformers":
        importlib.import_module("x_transformers.attend")
    if library == "keras":
        importlib.import_module("regard.compat.keras")
    if library == "jax":
        found |= {"j" + name: found["jax"].numpy.asarray(found[name].numpy()) for name in "qkv"}
    if library == "onnx":
        run = importlib.import_module("onnx.reference.ops.op_attention")._compute_attention
        found["onnx_attention"] = lambda *x, attn_mask: run(*(t.numpy() for t in x), attn_mask=attn_mask.numpy())[0]
    if library == "transformers":
        importlib.import_module("regard.compat.transformers")
        small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        found |= {"AutoModel": found[library].AutoModel, "config": found[library].BertConfig(**small)}
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ROWS)
def test_a_line_runs_and_agrees(name: str) -> None:
    (before, after), given = ROWS[name], names(NEEDS.get(name))
    found = eval(after, given)
    if isinstance(found, regard.compat.torch.patch.Patch):
        found.restore()
    assert found is not None
    if name in AFTER_ALONE:
        return
    expected = eval(before, given)
    if isinstance(expected, torch.nn.Module) or "layers" in before:
        assert isinstance(found, type(expected))
    else:
        np.testing.assert_allclose(np.asarray(found.tolist()), np.asarray(expected.tolist()), atol=1e-5)


def test_the_table_has_every_library() -> None:
    told = (*NEEDS, *AFTER_ALONE, "torch SDPA", "`nn.MultiheadAttention`", "flex_attention")
    assert set(ROWS) == set(told)
