"""Masks as other libraries take them: booleans of their shape and polarity, or arguments. See also masks.convert."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.core.errors import Unsupported
from regard.core.positions import Positions
from regard.masks.algebra import And, Everything, Mask
from regard.masks.peers import four_axes
from regard.masks.positional import Causal, Window
from regard.masks.ragged import Documents


class FlashMask(NamedTuple):
    """The arguments causal= and window_size= of flash-attention."""

    causal: bool
    window_size: tuple[int, int]


def to_flash(mask: Mask) -> FlashMask:
    """The mask as flash-attention's arguments, where the queries are the last ones: Everything, Causal, Window and `&`.

    Raises Unsupported for any other mask; documents are its cu_seqlens (to_cu_seqlens).

    >>> to_flash(Causal() & Window(before=3, after=None))
    FlashMask(causal=True, window_size=(3, -1))
    """
    if isinstance(mask, And):
        a, b = to_flash(mask.a), to_flash(mask.b)
        bounds = [[n for n in side if n >= 0] for side in zip(a.window_size, b.window_size, strict=True)]
        left, right = (min(side) if side else -1 for side in bounds)
        return FlashMask(a.causal or b.causal, (left, right))
    if type(mask) is Window:  # by type: a subclass may mean something else
        before, after = (-1 if n is None else n for n in (mask.before, mask.after))
        return FlashMask(False, (before, after))
    if type(mask) in (Causal, Everything):
        return FlashMask(type(mask) is Causal, (-1, -1))
    raise Unsupported(f"flash-attention has no argument for {mask!r}; expected Everything, Causal, Window or their &.")


def to_cu_seqlens(documents: Documents) -> tuple[Tensor, Tensor]:
    """cu_seqlens_q and cu_seqlens_k, int32 (sequences + 1,), of packed documents.

    Raises ValueError if the tokens of a document are not contiguous and in order.

    >>> to_cu_seqlens(Documents(torch.tensor([0, 1, 1])))
    (tensor([0, 1, 3], dtype=torch.int32), tensor([0, 1, 3], dtype=torch.int32))
    """
    both = documents.q_ids, documents.keys
    if any(ids.dim() != 1 or bool((ids.diff() < 0).any()) for ids in both):
        raise ValueError(f"{documents!r}: expected (n,) numbers that never decrease.")
    names, at = torch.cat(both).unique(return_inverse=True)
    counts = (torch.bincount(part, minlength=len(names)) for part in at.split([len(ids) for ids in both]))
    q, k = (pad(count.cumsum(0), (1, 0)).int() for count in counts)
    return q, k


def to_allowed(
    mask: Mask,
    nq: int,
    nk: int | None = None,
    *,
    batch: int | None = None,
    heads: int = 1,
    positions: Positions | None = None,
) -> Tensor:
    """The mask as booleans with four axes (batch or 1, heads or 1, nq, nk), True = may attend.

    This is the convention of torch's SDPA, jax.nn, Keras, ONNX and x-transformers; for Equinox take [0] or [0, 0] of
    it. batch, heads: those of the call, if the mask differs between sequences or heads by at.b or at.h; a batch that
    its tensors have needs no naming.

    >>> to_allowed(Causal(), 2).shape
    torch.Size([1, 1, 2, 2])
    """
    view = mask.on(nq, nk, batch=None if batch is None else (batch,), heads=heads, positions=positions)
    return four_axes(view.dense(), "mask")


def to_mha(mask: Mask, nq: int, nk: int, *, batch: int, heads: int, positions: Positions | None = None) -> Tensor:
    """The mask as attn_mask of torch.nn.MultiheadAttention: True = may NOT attend, (nq, nk) or (batch * heads, nq, nk).

    >>> to_mha(Causal(), 3, 3, batch=2, heads=4).shape
    torch.Size([3, 3])
    >>> to_mha(rg.Lengths(keys=torch.tensor([1, 3])), 3, 3, batch=2, heads=4).shape
    torch.Size([8, 3, 3])
    """
    blocked = ~to_allowed(mask, nq, nk, batch=batch, heads=heads, positions=positions)
    alike = blocked.shape[:2] == (1, 1)
    return blocked[0, 0] if alike else blocked.expand(batch, heads, nq, nk).flatten(0, 1)
