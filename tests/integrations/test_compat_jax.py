"""jax.nn.dot_product_attention on regard: against the library where it is installed, for tensors and JAX arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import regard as rg
from regard.compat.jax import dot_product_attention

BATCH, NQ, NK, HEADS, KEY_HEADS, WIDTH = 3, 7, 11, 6, 2, 8
BIAS = np.random.default_rng(1).normal(size=(1, HEADS, NQ, NK)).astype(np.float32)
MASK = np.random.default_rng(2).random((BATCH, 1, NQ, NK)) < 0.6
MASK[..., 0] = True
LENGTHS = {
    "query_seq_lengths": np.array([7, 2, 5], np.int32),
    "key_value_seq_lengths": np.array([1, 11, 4], np.int32),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "scale": {"scale": 0.3},
    "window": {"local_window_size": (3, 1)},
    "one number": {"local_window_size": 8, "is_causal": True},
    "mask": {"mask": MASK},
    "bias": {"bias": BIAS, "is_causal": True},
    "bias of one axis less": {"bias": BIAS[0]},
    "lengths": LENGTHS,
    "everything": {"bias": BIAS, "mask": MASK, "local_window_size": (12, 1), **LENGTHS},
}


@pytest.fixture
def jax() -> Any:
    return pytest.importorskip("jax")


def drawn(nk: int = NK) -> tuple[Any, Any, Any]:
    draw = np.random.default_rng(0)
    shapes = ((BATCH, NQ, HEADS, WIDTH), (BATCH, nk, KEY_HEADS, WIDTH), (BATCH, nk, KEY_HEADS, WIDTH))
    q, k, v = (draw.normal(size=shape).astype(np.float32) for shape in shapes)
    return q, k, v


def as_jax(jax: Any, options: dict[str, Any]) -> dict[str, Any]:
    return {name: jax.numpy.asarray(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_like_jax(jax: Any, options: dict[str, Any]) -> None:
    """Arrays of JAX, alone and compiled, their gradients, NumPy arrays and tensors."""
    given, own = as_jax(jax, options), drawn()
    theirs = jax.nn.dot_product_attention
    expected = theirs(*map(jax.numpy.asarray, own), **given)
    close(dot_product_attention(*map(jax.numpy.asarray, own), **given), expected)
    close(dot_product_attention(*own, **options), expected)
    tensors = {name: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
    found = dot_product_attention(*map(torch.from_numpy, own), **tensors)
    assert isinstance(found, torch.Tensor)
    close(found, expected)

    bias = given.pop("bias", None)
    leaves = (*map(jax.numpy.asarray, own), bias)
    leaves, which = (leaves, (0, 1, 2, 3)) if bias is not None else (leaves[:3], (0, 1, 2))

    def loss(attend: Any) -> Any:
        return jax.jit(jax.grad(lambda *x: (attend(*x, **given) * expected).sum(), which))(*leaves)

    for a, b in zip(loss(dot_product_attention), loss(theirs), strict=True):
        close(a, b)


def test_residual_batch_and_map(jax: Any) -> None:
    q, k, v = map(jax.numpy.asarray, drawn())
    out, lse = dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True, return_residual=True)
    close(out, expected[0]), close(lse, expected[1])
    alone = dot_product_attention(q[0], k[0], v[0], is_causal=True, return_residual=True)
    close(alone[0], out[0]), close(alone[1], lse[0])
    close(jax.vmap(lambda *x: dot_product_attention(*x, is_causal=True))(q, k, v), out)
    through = jax.grad(lambda q: dot_product_attention(q, k, v, return_residual=True)[1].sum())(q)
    assert not through.any()  # as jax.nn, which stops it


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_half_precision(jax: Any, name: str) -> None:
    own = [jax.numpy.asarray(x, name) for x in drawn()]
    expected = jax.nn.dot_product_attention(*own)
    found = dot_product_attention(*own)
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found.astype("float32"), expected.astype("float32"), atol=0.02, rtol=0.02)
    gradient = jax.grad(lambda q: dot_product_attention(q, *own[1:]).astype("float32").sum())(own[0])
    assert gradient.dtype == expected.dtype and bool(jax.numpy.isfinite(gradient).all())


def reference(q: Any, k: Any, v: Any, seen: torch.Tensor) -> torch.Tensor:
    k, v = (t.repeat_interleave(HEADS // KEY_HEADS, 2) for t in (k, v))
    s = torch.einsum("bihd,bjhd->bhij", q, k) / WIDTH**0.5
    p = s.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0)
    return torch.einsum("bhij,bjhd->bihd", p, v)


def test_tensors_by_definition() -> None:
    """Without JAX too; a row that sees nothing is 0."""
    q, k, v = (torch.from_numpy(x).double().requires_grad_() for x in drawn())
    i, j = torch.arange(NQ)[:, None], torch.arange(NK)
    length = torch.from_numpy(LENGTHS["key_value_seq_lengths"])
    seen = (j <= i) & (j >= i - 2) & (j < length[:, None, None, None])
    expected = reference(q, k, v, seen)
    options = {"is_causal": True, "local_window_size": (2, 5), "key_value_seq_lengths": length}
    out, lse = dot_product_attention(q, k, v, **options, return_residual=True)
    torch.testing.assert_close(out, expected)
    assert not lse.requires_grad and (lse == -torch.inf).any() and (out[0, 4:] == 0).all()
    pairs = (torch.autograd.grad(t.square().sum(), (q, k, v)) for t in (out, expected))
    torch.testing.assert_close(*pairs)


X = torch.zeros(2, 3, 4, 8)


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ((X, X[0], X), rg.ShapeError, r"key has shape \(3, 4, 8\); expected \(B, n, heads, H\)"),
        ((X, X, X, torch.zeros(1, 1, 1, 3, 3)), rg.ShapeError, r"bias has .* broadcasts to \(batch, heads, nq, nk\)"),
        ((X, X, X, None, torch.zeros(3, 3)), TypeError, "expected torch.bool"),
        ((X, X[:, :, :3], X[:, :, :3]), rg.ShapeError, "heads"),
        (("no array", X, X), TypeError, "query is a str"),
    ],
)
def test_refusals(given: tuple[Any, ...], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        dot_product_attention(*given)
