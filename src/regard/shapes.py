"""Shapes and dtypes: the few questions that every room asks about tensors."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
FLOATING = (*HALF, torch.float32, torch.float64)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are kept in: float32 for float16, bfloat16 and float32; float64 for float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def widen(x: Tensor) -> Tensor:
    """x in its accumulation dtype."""
    return x.to(accumulator(x.dtype))


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """(*batch, hk, n, d) as (*batch, heads, n, d): query head i reads key head i // (heads // hk)."""
    return x if x.shape[-3] == heads else x.repeat_interleave(heads // x.shape[-3], dim=-3)


def sum_groups(x: Tensor, key_heads: int) -> Tensor:
    """The adjoint of repeat_heads: (*batch, h, n, d) summed over each group to (*batch, key_heads, n, d)."""
    if x.shape[-3] == key_heads:
        return x
    return x.unflatten(-3, (key_heads, x.shape[-3] // key_heads)).sum(-3)


def blocks(n: int, size: int) -> list[slice]:
    """0..n cut into slices of `size`, the last one shorter."""
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def branchless(*tensors: Tensor) -> bool:
    """Whether Python may not look at values: under torch.func transforms, on the meta device, in a graph."""
    return functorch() or graphed(*tensors) or any(t.is_meta for t in tensors)


def graphed(*tensors: Tensor) -> bool:
    """Whether the call becomes part of a graph (torch.compile, torch.export, torch.jit.trace, make_fx), or has fake
    tensors.
    """
    if torch.compiler.is_compiling() or (watched() and _traced()):
        return True
    fake = sys.modules.get("torch._subclasses.fake_tensor")  # whoever holds one has loaded it
    return fake is not None and any(isinstance(t, fake.FakeTensor) for t in tensors)


def watched() -> bool:
    """Whether torch.jit.trace or a TorchDispatchMode sees each operation of torch: no kernel called by address."""
    return scripted() or _dispatch_modes() > 0 or _early_modes() > 0


def scripted() -> bool:
    """Whether torch.jit.trace records the call: sizes are then tensors of one number."""
    return torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]


def _traced() -> bool:
    """Whether who watches is a tracer of torch's own: jit.trace, make_fx, FakeTensorMode, functionalization."""
    if scripted() or _early_modes() > 0:
        return True
    return any(torch._C._get_dispatch_mode(key) is not None for key in _TRACERS)  # pyright: ignore[reportPrivateUsage]


_dispatch_modes = torch._C._len_torch_dispatch_stack  # pyright: ignore[reportPrivateUsage]
_early_modes = torch._ops._len_torch_dispatch_stack_pre_dispatch  # pyright: ignore[reportPrivateUsage]
_KEYS = torch._C._TorchDispatchModeKey  # pyright: ignore[reportPrivateUsage]
_TRACERS = (_KEYS.PROXY, _KEYS.FAKE, _KEYS.FUNCTIONAL)


def symbolic(*sizes: int) -> bool:
    """Whether one of them has no fixed value: a dynamic axis of torch.compile, torch.export or make_fx."""
    shapes = sys.modules.get("torch.fx.experimental.symbolic_shapes")  # whoever makes symbols has loaded it
    if shapes is None or scripted():
        return False
    return not all(shapes.has_static_value(n) for n in sizes)


def functorch() -> bool:
    """Whether a torch.func transform (vmap, grad, jvp, ...) is under way."""
    # torch.autograd.Function asks the same question of torch in the same way.
    return torch._C._are_functorch_transforms_active()  # pyright: ignore[reportPrivateUsage]


def finite(*tensors: Tensor) -> bool:
    """Whether every element is known to be finite. False where nobody may look."""
    return not branchless(*tensors) and all(bool(t.isfinite().all()) for t in tensors)


def exact(device: str) -> AbstractContextManager[Any]:
    """Where autocast, if that device has one, is off: sums are kept in the dtype that they are given."""
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def listed(shape: torch.Size | tuple[int, ...]) -> str:
    """A shape as messages show it: (2, 3, 5)."""
    return str(tuple(shape))
