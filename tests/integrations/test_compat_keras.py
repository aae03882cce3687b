"""Keras' function and layer on regard, against the library where it is installed, on its torch backend."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

import regard as rg

os.environ.setdefault("KERAS_BACKEND", "torch")
keras: Any = pytest.importorskip("keras")
kit: Any = pytest.importorskip("regard.compat.keras")
# Keras' own conversion of its variables, with torch and NumPy 2
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")

BATCH, T, S, WIDTH = 3, 5, 7, 12
ALLOWED = torch.rand(BATCH, T, S) < 0.6
ALLOWED[..., 0] = True
BUT_ONE = (torch.arange(S) != 1).expand(BATCH, T, S)
REAL = torch.arange(S) < torch.tensor([[3], [7], [5]])
FUNCTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"mask": ALLOWED[:, None], "scale": 0.3},
    "integer mask": {"mask": ALLOWED[:, None].int()},
    "both masks": {"mask": ALLOWED[:, None], "is_causal": True},
    "bias": {"bias": torch.randn(1, 4, T, S)},
}


@pytest.mark.parametrize("options", FUNCTION.values(), ids=FUNCTION.keys())
def test_dot_product_attention(options: dict[str, Any]) -> None:
    q, k, v = (torch.randn(BATCH, n, heads, 8, requires_grad=True) for n, heads in ((T, 4), (S, 2), (S, 2)))
    found, expected = (f(q, k, v, **options) for f in (kit.dot_product_attention, keras.ops.dot_product_attention))
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (found, expected))
    torch.testing.assert_close(*gradients, atol=1e-4, rtol=1e-4)


LAYER: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "causal": ({}, {"use_causal_mask": True}),
    "mask": ({"value_dim": 5, "output_shape": 9}, {"attention_mask": ALLOWED}),
    "mask of a head": ({}, {"attention_mask": ALLOWED[:, None].expand(-1, 2, -1, -1).clone()}),
    "mask for all": ({}, {"attention_mask": ALLOWED[0]}),
    "padding": ({}, {"value_mask": REAL, "key_mask": REAL}),
    "everything": (
        {"use_bias": False, "sliding_window": 3, "use_gate": True},
        {"attention_mask": BUT_ONE, "value_mask": REAL, "use_causal_mask": True},
    ),
}


@pytest.mark.parametrize(("made", "called"), LAYER.values(), ids=LAYER.keys())
def test_layer(made: dict[str, Any], called: dict[str, Any]) -> None:
    ours, theirs = (
        f(num_heads=2, key_dim=6, **made) for f in (kit.MultiHeadAttention, keras.layers.MultiHeadAttention)
    )
    x, y = torch.randn(BATCH, T, WIDTH), torch.randn(BATCH, S, WIDTH)
    theirs(x, y), ours(x, y)
    ours.set_weights(theirs.get_weights())
    found, expected = (layer(x, y, return_attention_scores=True, **called) for layer in (ours, theirs))
    torch.testing.assert_close(found, expected)
    alone = ours(x, y, **called)
    assert torch.equal(alone, found[0])
    parameters = [[w.value for w in layer.trainable_weights] for layer in (ours, theirs)]
    pairs = zip((alone, theirs(x, y, **called)), parameters, strict=True)
    torch.testing.assert_close(
        *(torch.autograd.grad(out.square().sum(), own) for out, own in pairs), atol=1e-4, rtol=1e-4
    )


def test_dropout_in_training_alone() -> None:
    layer = kit.MultiHeadAttention(2, 6, dropout=0.5)
    x = torch.randn(BATCH, T, WIDTH)
    assert torch.equal(layer(x, x), layer(x, x)) and not torch.equal(layer(x, x, training=True), layer(x, x))


def test_a_model_is_saved_and_loaded(tmp_path: Any) -> None:
    inputs = keras.Input((None,), dtype="int32")
    x = keras.layers.Embedding(10, WIDTH, mask_zero=True)(inputs)
    model = keras.Model(inputs, kit.MultiHeadAttention(2, 6)(x, x))
    tokens = np.array([[1, 2, 0, 0, 0], [3, 4, 5, 6, 7]], np.int32)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.layers[-1]) is kit.MultiHeadAttention
    torch.testing.assert_close(loaded(tokens), model(tokens))
    alone = model(tokens[:1, :2])  # padding is not seen, and sees nothing
    torch.testing.assert_close(model(tokens)[:1, :2], alone)
    assert not model(tokens)[0, 2:].any()


def test_refusals() -> None:
    x = torch.randn(2, 3, 4, 8)
    with pytest.raises(rg.Unsupported, match="attn_logits_soft_cap: Keras ignores it"):
        kit.dot_product_attention(x, x, x, attn_logits_soft_cap=5.0)
    with pytest.raises(rg.Unsupported, match="attention over several axes"):
        kit.MultiHeadAttention(2, 6, attention_axes=(1, 2))(x, x)


OTHER = """
import numpy as np, regard as rg, keras, regard.compat.keras as kit
x = keras.random.normal((2, 3, 4, 8))
ours, theirs = (f(x, x, x, is_causal=True) for f in (kit.dot_product_attention, keras.ops.dot_product_attention))
assert type(ours) is type(theirs)
np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), atol=1e-5)
try:
    kit.MultiHeadAttention(2, 6)
except rg.Unsupported as error:
    print(error)
"""


@pytest.mark.parametrize("backend", ["jax", "numpy"])
def test_other_backends(backend: str) -> None:
    pytest.importorskip("jax")
    done = subprocess.run(
        [sys.executable, "-c", OTHER],
        env={**os.environ, "KERAS_BACKEND": backend},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert f"Keras runs on '{backend}'; set KERAS_BACKEND to one of torch" in done.stdout, done.stderr
