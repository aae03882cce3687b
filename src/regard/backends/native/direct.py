"""The functions of native/python/: what a plan does at each call, in C++, and the calls that need no Python at all."""

from __future__ import annotations

import ctypes
import sysconfig
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

import regard.core.tracing as tracing
import regard.core.value as value
from regard.backends.native.ffi import python_calls, runnable
from regard.core.int8_rows import Int8Rows
from regard.core.paged import Paged
from regard.core.positions import Positions
from regard.masks.ragged import Lengths

Int8Buffer = tuple[Tensor, Tensor]  # numbers and scales


class Direct(NamedTuple):
    """The functions of native/python/calls.cpp and append.h, which say what they take.

    attend        the output of a call, or of one with gradients what autograd needs; None: no plan is remembered for it
    bind          fills in a plan's struct for a call; out, or None where the plan does not serve such a call
    set_operands  fills in the operands of a struct: their addresses and strides; how many it could: see bind.bind
    differentiate  the gradients of q, k and v, from a backward plan's struct
    write_rows    copies the keys and values of a step to a cache; None: it copied nothing
    round_rows    rounds the keys or values of a step to int8; None: it rounded nothing
    write_rounded_rows  rounds those of a step to the int8 of a cache; None: it rounded nothing
    write_page_rows  what write_rows does, to the pages of a cache
    write_rounded_page_rows  what write_rounded_rows does, to the pages of a cache
    remember      lets attend() find a plan
    forget        as if nothing had been remembered
    """

    attend: Callable[..., Any]
    bind: Callable[..., Tensor | None]
    set_operands: Callable[..., int]
    differentiate: Callable[..., tuple[Tensor | None, ...] | int | None]
    write_rows: Callable[..., int | None]
    round_rows: Callable[..., Tensor | None]
    write_rounded_rows: Callable[..., int | None]
    write_page_rows: Callable[..., int | None]
    write_rounded_page_rows: Callable[..., int | None]
    remember: Callable[..., None]
    forget: Callable[[], None]


@cache
def direct() -> Direct:
    """The functions, loaded; there must be kernels."""
    handle = python_calls()
    handle.regard_start.argtypes, handle.regard_start.restype = (ctypes.py_object,), ctypes.py_object
    functions = handle.regard_start(
        (
            Tensor.__dlpack_c_exchange_api__,  # pyright: ignore
            *(Tensor, torch.nn.Parameter, Positions, Paged, Int8Rows),
            *(Tensor.is_neg, torch.empty_like, partial(torch.empty_like, dtype=torch.float32), Tensor.new_empty),
            *(
                torch.get_num_threads,
                torch.is_grad_enabled,
                tracing.GUARDS,
                forward_ad,
                torch.empty(0, dtype=torch.float32, device="cpu"),
            ),
            *(value.NAMES, torch.dtype, tuple, Lengths, torch.int64),
        )
    )
    return Direct(*functions)


def shortcut() -> Callable[..., Any] | None:
    """attend() of native/python/; None without kernels, and where several threads may run Python at once, which it is
    not made for."""
    return None if not runnable() or sysconfig.get_config_var("Py_GIL_DISABLED") else direct().attend


def write_rows(row: int, k: Tensor, keys: Tensor, v: Tensor, values: Tensor) -> bool:
    """Copies k (*lead, n, dk) to the rows from `row` on of keys (*lead, capacity, dk), and v to those of values.

    Returns whether it was done: in 1 µs, where torch's operations take 6. Not done, and nothing written: for tensors
    that do not fit, need gradients, are larger than 64 kB or not on the CPU, in graphs, where somebody watches the
    operations of torch, and where there are no kernels.
    """
    if torch.compiler.is_compiling() or not runnable():
        return False
    return direct().write_rows(row, k, keys, v, values) is not None


def round_rows(x: Tensor) -> tuple[Tensor, Tensor] | None:
    """core.int8_rows.rounded of a few rows of float32 or bfloat16, to the bit; None where torch must do it.

    In 3 µs, where torch's operations take 40. Not where write_rows would not write either.
    """
    if torch.compiler.is_compiling() or not runnable() or not isinstance(x, Tensor) or x.dim() < 2:  # pyright: ignore
        return None
    numbers = torch.empty(x.shape, dtype=torch.int8, device="cpu")
    scales = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device="cpu")
    return None if direct().round_rows(x, numbers, scales) is None else (numbers, scales)


def write_rounded_rows(row: int, k: Tensor, keys: Int8Buffer, v: Tensor, values: Int8Buffer) -> bool:
    """Rounds k (*lead, n, dk) to the rows from `row` on of a buffer, and v (*lead, n, dv): see round_rows.

    A buffer has int8 numbers (*lead, capacity, d) and float32 scales (*lead, capacity, 1). Returns whether it was done;
    else nothing is written.
    """
    if torch.compiler.is_compiling() or not runnable():
        return False
    return direct().write_rounded_rows(row, k, *keys, v, *values) is not None


def write_page_rows(
    most: int, lengths: list[int], block_table: Tensor, k: Tensor, keys: Tensor, v: Tensor, values: Tensor
) -> int | None:
    """Copies k (batch, heads, n, dk) and v (batch, heads, n, dv) behind the lengths[b] rows of each sequence b.

    Row t of sequence b is row t % page_size of page block_table[b, t // page_size], int32 (batch, room), of keys
    (pages, heads, page_size, dk) and of values. Returns n, or None where nothing was written: where n is more than
    `most`, where the table names no page for a row, and where write_rows would not write either.
    """
    if torch.compiler.is_compiling() or not runnable():
        return None
    return direct().write_page_rows(most, lengths, block_table, k, keys, v, values)


def write_rounded_page_rows(
    most: int, lengths: list[int], block_table: Tensor, k: Tensor, keys: Int8Buffer, v: Tensor, values: Int8Buffer
) -> int | None:
    """The same, rounded to int8: see round_rows and write_page_rows.

    keys, values: int8 numbers (pages, heads, page_size, d) and float32 scales (pages, heads, page_size, 1).
    """
    if torch.compiler.is_compiling() or not runnable():
        return None
    return direct().write_rounded_page_rows(most, lengths, block_table, k, *keys, v, *values)
