"""torch's fused kernels as a forward and a backward: the backward then reads what the forward found.

`scaled_dot_product_attention` is a choice between several kernels. Differentiated through a node of regard's own it
would run once more in the backward; here the kernel that it chooses is called itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.core.shapes import repeat_heads

_aten = torch.ops.aten
Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Kernels:
    """A forward and its backward, of (batch, heads, n, d): each query sees all keys, or those up to its own.

    forward   (q, k, v, causal, scale) -> out, and what the backward reads besides: tensors, and numbers
    backward  (g_out, q, k, v, out, tensors, numbers, causal, scale) -> the gradients of q, k and v
    """

    forward: Callable[..., tuple[Tensor, Tensors, tuple[int, ...]]]
    backward: Callable[..., Tensors]


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensors, Any]:
    found = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    out, lse, _, _, most_q, most_k, state, unused, _ = found
    return out, (lse, state, unused), (most_q, most_k)


def _flash_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    saved: Tensors,
    most: Any,
    causal: bool,
    scale: float | None,
) -> Tensors:
    lse, state, unused = saved
    back = _aten._scaled_dot_product_flash_attention_backward
    return back(g, q, k, v, out, lse, None, None, *most, 0.0, causal, state, unused, scale=scale)


def _cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensors, Any]:
    found = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=scale)
    out, lse, _, _, most_q, most_k, seed, offset, _ = found
    return out, (lse, seed, offset), (most_q, most_k)


def _cudnn_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    saved: Tensors,
    most: Any,
    causal: bool,
    scale: float | None,
) -> Tensors:
    lse, seed, offset = saved
    back = _aten._scaled_dot_product_cudnn_attention_backward
    return back(g, q, k, v, out, lse, seed, offset, None, None, None, *most, 0.0, causal, scale=scale)


def _efficient(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensors, Any]:
    out, *saved = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal, scale=scale)
    return out, tuple(saved), ()


def _efficient_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Tensors, _: Any, causal: bool, scale: float | None
) -> Tensors:
    back = _aten._scaled_dot_product_efficient_attention_backward
    of_all = (True, True, True, False)  # of q, k and v, not of a bias
    return back(g, q, k, v, None, out, *saved, 0.0, of_all, causal, scale=scale)[:3]


def _of_cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> tuple[Tensor, Tensors, Any]:
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    return out, (lse,), ()


def _of_cpu_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    saved: Tensors,
    most: Any,
    causal: bool,
    scale: float | None,
) -> Tensors:
    back = _aten._scaled_dot_product_flash_attention_for_cpu_backward
    return back(g, q, k, v, out, *saved, 0.0, causal, scale=scale)


# By what torch answers, on a device, to the question which it takes. The formula, 0, has none here.
_FLASH, _EFFICIENT, _CUDNN = 1, 2, 3
KERNELS = {
    ("cuda", _FLASH): Kernels(_flash, _flash_backward),
    ("cuda", _EFFICIENT): Kernels(_efficient, _efficient_backward),
    ("cuda", _CUDNN): Kernels(_cudnn, _cudnn_backward),
    ("cpu", _FLASH): Kernels(_of_cpu, _of_cpu_backward),
}


@dataclass(frozen=True)
class FusedForward:
    """A forward that was made: what its backward needs besides tensors. It leads to none."""

    kernels: Kernels
    numbers: tuple[int, ...]
    causal: bool
    scale: float | None

    def gradients(self, g_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Tensors) -> Tensors:
        """The gradients of q, k and v, which may have fewer heads."""
        g = g_out.to(out.dtype).contiguous()
        wide = repeat_heads(k, q.shape[-3]), repeat_heads(v, q.shape[-3])
        found = self.kernels.backward(g, q, *wide, out, saved, self.numbers, self.causal, self.scale)
        return found[0], _of_groups(found[1], k), _of_groups(found[2], v)


def fused_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensors, FusedForward] | None:
    """out, what the backward reads of tensors, and the rest; None where torch takes a kernel that is not known here.

    q is (batch, heads, n, d); k and v may have fewer heads.
    """
    if q.dim() != 4 or not q.shape[0] == k.shape[0] == v.shape[0]:
        return None
    wide = repeat_heads(k, q.shape[-3]), repeat_heads(v, q.shape[-3])
    choice = _aten._fused_sdp_choice(q.detach().requires_grad_(), *wide, None, 0.0, causal, scale=scale)
    kernels = KERNELS.get((q.device.type, choice))
    if kernels is None or (q.device.type == "cuda" and q.shape[-1] % 8):  # torch pads these
        return None
    out, saved, numbers = kernels.forward(q, *wide, causal, scale)
    return out, saved, FusedForward(kernels, numbers, causal, scale)


def _of_groups(g: Tensor, of: Tensor) -> Tensor:
    """The gradient of keys (of values) that several heads read, from that of each head."""
    heads = of.shape[-3]
    return g if g.shape[-3] == heads else g.unflatten(-3, (heads, -1)).sum(-3)
