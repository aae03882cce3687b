"""New keys and values, copied to the pages of a pool by the native kernels."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from itertools import accumulate
from struct import Struct as Packer

from torch import Tensor

from regard.backends.native.abi import AXES, Operand, PageWrite
from regard.backends.native.c_structs import address_of
from regard.backends.native.ffi import OPERAND_CODES, OTHER, chosen, failure, load
from regard.backends.native.launch import extent
from regard.core.tracing import functorch, watched

_WORDS = Packer(f"={ctypes.sizeof(PageWrite) // 8}q")  # all members have eight bytes
_NONE = (0,) * (AXES - 1)
assert ctypes.sizeof(Operand) // 8 == len(_NONE) + 7


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
    counts = array("q", lengths)
    offsets = None if new is None else array("q", accumulate(new, initial=0))
    write = _WORDS.pack(
        *(len(lengths), heads, k.shape[-2], dk, v.shape[-1], k.element_size()),
        *(word for t in (k, v) for word in _operand(t, () if new is None else (0,))),
        *(word for t in (key_pages, value_pages) for word in _operand(t, ())),
        *(page_size, pages, address_of(block_table), block_table.shape[1], counts.buffer_info()[0]),
        0 if offsets is None else offsets.buffer_info()[0],
    )
    if code := load(isa).entry("regard_write_pages")(write, None):
        raise failure(code)
    return True


def _operand(t: Tensor, lead: tuple[int, ...]) -> tuple[int, ...]:
    """The words of an Operand (lead, head, row, column), whatever the dtype; lead: the stride of an axis t lacks."""
    return address_of(t), *_NONE, *lead, *t.stride(), extent(t), OPERAND_CODES.get(t.dtype, OTHER)
