"""New keys and values, copied to the pages of a pool by the native kernels."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from regard.backends.native.abi import PageWrite
from regard.backends.native.bind import bind
from regard.backends.native.ffi import chosen, load
from regard.core.tracing import functorch, watched


def write_pages(
    k: Tensor,
    v: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    block_table: Tensor,
    lengths: Sequence[int],
    new: Sequence[int] | None = None,
) -> bool:
    """Copies k (batch, heads, n, dk) and v (.., dv) to rows lengths[b] and those behind it of each sequence b.

    new: how many rows each sequence gets, where these differ: k is then (heads, n, dk), v (heads, n, dv), the rows of
    one sequence behind those of another.
    The pools (pages, heads, page_size, d) and block_table (batch, room), int32, are contiguous. Of one dtype each.
    Returns whether it was done: not where there are no kernels, for tensors elsewhere than on the CPU, or where
    somebody watches the operations of torch.
    """
    isa = chosen()
    if isa is None or not (type(k) is Tensor and type(v) is Tensor and k.is_cpu and v.is_cpu):
        return False
    if k.is_neg() or v.is_neg() or watched() or functorch():
        return False
    pages, heads, page_size, dk = key_pages.shape
    counts = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    sizes = {"page_size": page_size, "pages": pages, "room": block_table.shape[1]}
    write = PageWrite(len(lengths), heads, k.shape[-2], dk, v.shape[-1], k.element_size(), **sizes)
    pools = {"k_pages": key_pages, "v_pages": value_pages, "block_table": block_table, "lengths": counts}
    offsets = None
    if new is not None:
        offsets = torch.tensor([0, *accumulate(new)], dtype=torch.int64, device="cpu")
    bind(write, {"k": k, "v": v, **pools, "offsets": offsets})
    load(isa).run(write)
    return True
