"""torch's fused kernels as a forward and a backward: the backward then reads what the forward found.

`scaled_dot_product_attention` is a choice between several kernels. Differentiated through a node of regard's own it
would run once more in the backward; here the kernel that it chooses is called itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.core.shapes import repeat_heads

_aten = torch.ops.aten
Tensors = tuple[Tensor, ...]


class FusedCall:
    """One call of a kernel, and what its backward needs besides tensors: it leads to none.

    Tensors are (batch, heads, n, d); each query sees all keys, or those up to its own. A kernel defines `forward`, for
    out and the tensors that its backward reads, and `backward`: both for as many heads of keys as of queries.
    """

    def __init__(self, causal: bool, scale: float | None) -> None:
        self.causal, self.scale = causal, scale
        self.lengths: tuple[int, ...] = ()  # the longest sequences, as some forwards tell their backward

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensors]:
        raise NotImplementedError

    def backward(self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Tensors) -> Tensors:
        raise NotImplementedError

    def gradients(self, g_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Tensors) -> Tensors:
        """The gradients of q, k and v, which may have fewer heads."""
        g = g_out.to(out.dtype).contiguous()
        wide = repeat_heads(k, q.shape[-3]), repeat_heads(v, q.shape[-3])
        found = self.backward(g, q, *wide, out, saved)
        return found[0], _of_groups(found[1], k), _of_groups(found[2], v)


class Flash(FusedCall):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensors]:
        found = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, self.causal, False, scale=self.scale)
        out, lse, _, _, *lengths, state, unused, _ = found
        self.lengths = tuple(lengths)
        return out, (lse, state, unused)

    def backward(self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Tensors) -> Tensors:
        lse, state, unused = saved
        back = _aten._scaled_dot_product_flash_attention_backward
        given = g, q, k, v, out, lse, None, None, *self.lengths, 0.0, self.causal, state, unused
        return back(*given, scale=self.scale)


class Cudnn(FusedCall):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensors]:
        run = _aten._scaled_dot_product_cudnn_attention
        out, lse, _, _, *lengths, seed, offset, _ = run(q, k, v, None, True, 0.0, self.causal, False, scale=self.scale)
        self.lengths = tuple(lengths)
        return out, (lse, seed, offset)

    def backward(self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Tensors) -> Tensors:
        back = _aten._scaled_dot_product_cudnn_attention_backward
        given = g, q, k, v, out, *saved, None, None, None, *self.lengths, 0.0, self.causal
        return back(*given, scale=self.scale)


class Efficient(FusedCall):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensors]:
        run = _aten._scaled_dot_product_efficient_attention
        out, *saved = run(q, k, v, None, True, 0.0, self.causal, scale=self.scale)
        return out, tuple(saved)

    def backward(self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Tensors) -> Tensors:
        back = _aten._scaled_dot_product_efficient_attention_backward
        of_all = (True, True, True, False)  # of q, k and v, not of a bias
        return back(g, q, k, v, None, out, *saved, 0.0, of_all, self.causal, scale=self.scale)[:3]


class FlashOnCpu(FusedCall):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensors]:
        run = _aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = run(q, k, v, 0.0, self.causal, scale=self.scale)
        return out, (lse,)

    def backward(self, g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, saved: Tensors) -> Tensors:
        back = _aten._scaled_dot_product_flash_attention_for_cpu_backward
        return back(g, q, k, v, out, *saved, 0.0, self.causal, scale=self.scale)


# By the device, and what torch answers to the question which kernel it takes; 0 is the formula.
KERNELS: dict[tuple[str, int], type[FusedCall]] = {
    ("cuda", 1): Flash,
    ("cuda", 2): Efficient,
    ("cuda", 3): Cudnn,
    ("cpu", 1): FlashOnCpu,
}


def fused_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensors, FusedCall] | None:
    """out, what the backward reads of tensors, and the rest; None where torch takes a kernel that is not known here.

    q is (batch, heads, n, d); k and v may have fewer heads.
    """
    if q.dim() != 4 or not q.shape[0] == k.shape[0] == v.shape[0]:
        return None
    wide = repeat_heads(k, q.shape[-3]), repeat_heads(v, q.shape[-3])
    choice = _aten._fused_sdp_choice(q.detach().requires_grad_(), *wide, None, 0.0, causal, scale=scale)
    kernel = KERNELS.get((q.device.type, choice))
    if kernel is None or (q.device.type == "cuda" and q.shape[-1] % 8):  # torch pads these
        return None
    call = kernel(causal, scale)
    return *call.forward(q, *wide), call


def _of_groups(g: Tensor, of: Tensor) -> Tensor:
    """The gradient of keys (of values) that several heads read, from that of each head."""
    heads = of.shape[-3]
    return g if g.shape[-3] == heads else g.unflatten(-3, (heads, -1)).sum(-3)
