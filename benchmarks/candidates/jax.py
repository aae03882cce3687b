"""JAX: jax.nn.dot_product_attention, jitted, on arrays (batch, n, heads, d), its own layout."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import Tensor

from benchmarks.candidates import Unable, Way
from benchmarks.cases import WINDOW, Case
from benchmarks.inputs import Inputs

MOST = 1 << 31  # bytes that the scores of all heads, which it writes out, may take


def start(threads: int) -> str:
    return jax.__version__


def ways(case: Case, x: Inputs) -> list[Way]:
    if case.what == "dropout":
        raise Unable("jax.nn.dot_product_attention has no dropout")
    q, k, v = x.four()
    given: dict[str, Any] = {"is_causal": case.what in ("causal", "window")}
    arrays: dict[str, Any] = {}
    if case.what == "window":
        given["local_window_size"] = (WINDOW - 1, 0)
    if case.what in ("bool", "padding"):
        mask = x.dense()
        assert mask is not None
        arrays["mask"] = jnp.asarray(mask.expand(*(1,) * (4 - mask.dim()), *mask.shape).numpy())
    if case.what == "bias":
        assert x.learned is not None
        arrays["bias"] = jnp.asarray(x.learned[None, None].numpy())
    if case.what == "ragged":
        q, k, v, real = x.padded()
        arrays["mask"] = jnp.asarray(real.numpy())
    if q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * 4 > MOST:
        raise Unable("it writes out the scores, more than 2 GB here")
    if k.shape[-1] != v.shape[-1]:  # it wants equal widths
        given["scale"] = q.shape[-1] ** -0.5
        q, k = (torch.nn.functional.pad(t, (0, v.shape[-1] - t.shape[-1])) for t in (q, k))
    attend = jax.jit(lambda *t, **masks: jax.nn.dot_product_attention(*t, **masks, **given))
    inputs = [_array(t) for t in (q, k, v)]

    def show(out: Any) -> list[Tensor]:
        made = torch.from_numpy(jnp.asarray(out, jnp.float32).__array__().copy()).transpose(1, 2)
        return [x.packed(made) if case.what == "ragged" else made]

    return [Way("dot_product_attention", lambda: attend(*inputs, **arrays).block_until_ready(), show)]


def _array(t: Tensor) -> Any:
    return jnp.asarray(t.transpose(1, 2).float().numpy()).astype(str(t.dtype).removeprefix("torch."))
