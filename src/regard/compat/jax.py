"""jax.nn.dot_product_attention, with its arguments, layout and masks, on regard: for JAX arrays, tensors and NumPy.

    from regard.compat.jax import dot_product_attention

JAX arrays may be traced: under jax.jit the kernels are called back from the compiled program, jax.grad and jax.vjp run
regard's backward, jax.vmap runs one call for each element. Tensors of torch and NumPy arrays are taken with the same
conventions, and answered in kind.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.core.arrays import answer_like, tensor
from regard.core.errors import ShapeError
from regard.core.shapes import listed
from regard.core.tracing import loaded
from regard.core.vjp import vjp
from regard.masks.peers import from_jax
from regard.runtime.binding import BoundCall
from regard.scores.algebra import Score
from regard.scores.modifiers import Bias
from regard.scores.similarity import ScaledDot


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any | None = None,
    mask: Any | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any | None = None,
    key_value_seq_lengths: Any | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """jax.nn.dot_product_attention: query (B, T, N, H), key and value (B, S, K, H) -> (B, T, N, H); B may be missing.

    bias, mask          broadcast to (B, N, T, S) with at most four axes; mask is boolean, True = may attend
    scale               default 1 / sqrt(H)
    is_causal           query i sees the keys 0 to i, also where T differs from S (aligned top-left)
    local_window_size   (left, right), keys besides the query's own, or one number for both; top-left too
    *_seq_lengths       (B,): queries and keys after them are padding; a padded query gives 0
    implementation      ignored: neither "xla" nor "cudnn" is used
    return_residual     (out, log-sum-exp (B, T, N)) in the dtype of key, without gradient

    K divides N; head i reads head i // (N // K). Differentiable in query, key, value and bias. Two differences: a query
    that sees nothing gives 0 and -inf, where jax.nn returns the mean of all values and its smallest float; and a NaN
    behind a mask does not leak. JAX arrays have first derivatives in reverse mode, and float64 if JAX has it enabled.
    Raises ShapeError, TypeError and ValueError for arguments that do not fit.
    Source: jax.nn.dot_product_attention, JAX 0.10.

    >>> q, k = torch.randn(2, 5, 8, 16), torch.randn(2, 7, 4, 16)
    >>> dot_product_attention(q, k, k, is_causal=True, local_window_size=(2, 0)).shape
    torch.Size([2, 5, 8, 16])
    """
    both = (local_window_size,) * 2 if isinstance(local_window_size, int) else local_window_size
    if _is_jax(query) and scale is not None:
        scale = float(scale)  # an array is no key of `_of_jax`
    options = _Options(scale, is_causal, None if both is None else (both[0], both[1]))
    arrays = (query, key, value, bias, mask, query_seq_lengths, key_value_seq_lengths)
    if _is_jax(query):
        out, residual = _of_jax(options)(*arrays)
    else:
        given: Any = (None if x is None else tensor(x, name) for x, name in zip(arrays, _NAMES, strict=True))
        answer = answer_like(query)
        out, residual = (answer(t) for t in _attend(options, *given))
    return (out, residual) if return_residual else out


class _Options(NamedTuple):
    """The arguments that are no arrays."""

    scale: float | None
    is_causal: bool
    window: tuple[int, int] | None


_NAMES = ("query", "key", "value", "bias", "mask", "query_seq_lengths", "key_value_seq_lengths")
_DIFFERENTIABLE = 4  # the first of them


def _attend(
    options: _Options,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    query_seq_lengths: Tensor | None,
    key_value_seq_lengths: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The output and the log-sum-exp, of tensors."""
    for name, t in (("query", query), ("key", key), ("value", value)):
        if t.dim() not in (3, 4) or t.dim() != query.dim():
            raise ShapeError(f"{name} has shape {listed(t.shape)}; expected (B, n, heads, H), or (n, heads, H) in all.")
    batched = query.dim() == 4
    q, k, v = (t.transpose(-3, -2) if batched else t.transpose(-3, -2)[None] for t in (query, key, value))
    given = from_jax(
        q.shape[2],
        k.shape[2],
        bias=bias,
        masks=() if mask is None else (mask,),
        is_causal=options.is_causal,
        local_window_size=options.window,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
    )
    score: Score = ScaledDot(options.scale)
    score = score if given.bias is None else score >> Bias(given.bias)
    call = BoundCall(q, k, v, score, given.mask, given.positions, None, None)
    with call.precision():
        out, stats = call.run_with_stats(None)
        out, lse = out.to(call.problem.dtype).transpose(1, 2), stats.lse.detach().to(key.dtype).transpose(1, 2)
    return (out, lse) if batched else (out[0], lse[0])


def _is_jax(x: Any) -> bool:
    jax = loaded("jax")
    return jax is not None and isinstance(x, jax.Array)


@functools.cache
def _of_jax(options: _Options) -> Callable[..., Any]:
    """The function of JAX arrays, which calls the kernels back from the host. One object for each set of options."""
    jax: Any = importlib.import_module("jax")

    def host(*arrays: Any) -> tuple[Any, ...]:
        with torch.no_grad():
            return tuple(_array(t) for t in _attend(options, *_tensors(arrays)))

    def host_backward(cotangent: Any, *arrays: Any) -> tuple[Any, ...]:
        tensors = _tensors(arrays)
        leaves = [t.requires_grad_() for t in tensors[:_DIFFERENTIABLE] if t is not None]
        with torch.enable_grad():
            out, _ = _attend(options, *tensors)
        found = zip(leaves, vjp([out], leaves, _tensors([cotangent])), strict=True)
        return tuple(_array(torch.zeros_like(t) if g is None else g) for t, g in found)

    def run(*arrays: Any) -> Any:
        query, key, value = arrays[:3]
        out = jax.ShapeDtypeStruct((*query.shape[:-1], value.shape[-1]), query.dtype)
        residual = jax.ShapeDtypeStruct(query.shape[:-1], key.dtype)
        return jax.pure_callback(host, (out, residual), *arrays, vmap_method="sequential")

    def forward(*arrays: Any) -> Any:
        return run(*arrays), arrays

    def backward(arrays: Any, cotangents: Any) -> Any:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[:_DIFFERENTIABLE] if x is not None]
        found = jax.pure_callback(host_backward, tuple(shapes), cotangents[0], *arrays, vmap_method="sequential")
        remaining = iter(found)
        first = [None if x is None else next(remaining) for x in arrays[:_DIFFERENTIABLE]]
        return (*first, *(None for _ in arrays[_DIFFERENTIABLE:]))

    differentiable = jax.custom_vjp(run)
    differentiable.defvjp(forward, backward)
    return lambda *arrays: differentiable(*(None if x is None else jax.numpy.asarray(x) for x in arrays))


def _tensors(arrays: Sequence[Any]) -> list[Any]:
    """The arguments of a callback as tensors over the same memory, which is not written to."""
    import numpy as np

    found: list[Any] = []
    for x in arrays:
        x = x if x is None else np.asarray(x)
        if x is None:
            found.append(None)
        elif x.dtype.name == "bfloat16":  # of ml_dtypes, which torch does not know
            found.append(tensor(x.view(np.int16), "a callback's array").view(torch.bfloat16))
        else:
            found.append(tensor(x, "a callback's array"))
    return found


def _array(t: Tensor) -> Any:
    """What a callback returns."""
    t = t.detach().contiguous()
    if t.dtype == torch.bfloat16:
        return t.view(torch.int16).numpy().view(importlib.import_module("jax").numpy.bfloat16)
    return t.numpy()
