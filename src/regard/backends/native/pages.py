"""New keys and values, copied to the pages of a pool by the native kernels."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from struct import Struct as Packer

from torch import Tensor

from regard.backends.native.abi import AXES, Operand, PageWrite
from regard.backends.native.ffi import chosen, failure, load
from regard.core.tracing import functorch, watched

_WORDS = Packer(f"={ctypes.sizeof(PageWrite) // 8}q")  # all members have eight bytes
_NONE = (0,) * (AXES - 1)
assert ctypes.sizeof(Operand) // 8 == len(_NONE) + 5


def write_pages(
    k: Tensor, v: Tensor, key_pages: Tensor, value_pages: Tensor, block_table: Tensor, lengths: Sequence[int]
) -> bool:
    """Copies k (batch, heads, n, dk) and v (.., dv) to rows lengths[b] and those behind it of each sequence b.

    The pools (pages, heads, page_size, d) and block_table (batch, room), int32, are contiguous. Of one dtype each.
    Returns whether it was done: not where there are no kernels, for tensors elsewhere than on the CPU, or where
    somebody watches the operations of torch.
    """
    isa = chosen()
    if isa is None or not _plain(k, v, key_pages, value_pages) or watched() or functorch():
        return False
    pages, heads, page_size, dk = key_pages.shape
    counts = array("q", lengths)
    write = _WORDS.pack(
        *(len(lengths), heads, k.shape[-2], dk, v.shape[-1], k.element_size()),
        *(word for t in (k, v, key_pages, value_pages) for word in (t.data_ptr(), *_NONE, *t.stride())),
        *(page_size, pages, block_table.data_ptr(), block_table.shape[1], counts.buffer_info()[0]),
    )
    if code := load(isa).entry("regard_write_pages")(write, None):
        raise failure(code)
    return True


def _plain(*tensors: Tensor) -> bool:
    """Whether they lie in memory as torch says."""
    return all(type(t) is Tensor and t.is_cpu and not t.is_neg() for t in tensors)
