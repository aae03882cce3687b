"""The norm of what the value of each key adds to a head's output."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.core.errors import ShapeError
from regard.core.shapes import listed


@torch.no_grad()
def value_norms(v: Tensor, weight: Tensor) -> Tensor:
    """‖v_j W^O_h‖ of each key and head, (*batch, h, nk): the norms of facts.Carried.

    v       the values (*batch, hk, nk, dv); query head i uses key head i // (h // hk)
    weight  W^O of each head, (h, dv, d_out); of regard.nn.MultiHeadAttention, out_proj.weight.T.unflatten(0, (h, dv))

    The bias of the output projection belongs to no head and to no key, and is not in it. float32, or float64 for
    float64 values. With W^O_h = R^T Q^T, its QR factorisation, the norm is ‖v_j R^T‖: memory is that of v for each
    query head. Raises ShapeError where the heads or widths do not fit.
    Source: Kobayashi et al. 2020 (arXiv 2004.10102), ‖f(x_j)‖ of eq. 4, whose values include their bias, as v does.

    >>> v = torch.tensor([[[3.0, 4.0], [1.0, 0.0]]])                    # one head, two keys
    >>> value_norms(v, torch.tensor([[[1.0, 0.0, 0.0], [0.0, 0.0, 2.0]]]))
    tensor([[8.5440, 1.0000]])
    """
    if v.dim() < 3 or weight.dim() != 3 or v.shape[-1] != weight.shape[1] or len(weight) % (v.shape[-3] or 1):
        raise ShapeError(
            f"v has shape {listed(v.shape)}, weight {listed(weight.shape)}; expected v (*batch, hk, nk, dv) and weight "
            "(h, dv, d_out), h a multiple of hk (grouped queries)."
        )
    dtype = torch.float64 if torch.float64 in (v.dtype, weight.dtype) else torch.float32
    triangle = torch.linalg.qr(weight.to(dtype).mT, mode="r").R  # (h, min(dv, d_out), dv)
    of_head = v.to(dtype).repeat_interleave(len(weight) // v.shape[-3], -3) if v.shape[-3] else v.to(dtype)
    return torch.linalg.vector_norm(of_head @ triangle.mT, dim=-1)
