"""routes: torch's attention functions, and what stands in their places while a patch is in place."""

from __future__ import annotations

import functools
import importlib
import threading
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional

from regard.backends.native.ffi import runnable, why_not_built
from regard.compat.torch.flex import flex_attention, why_left_flex
from regard.compat.torch.holders import Holder, Holders
from regard.compat.torch.multihead import multi_head_attention_forward
from regard.compat.torch.scripting import scripts_as
from regard.compat.torch.sdpa import scaled_dot_product_attention
from regard.core.tracing import constant_in_graphs, functorch, watched
from regard.masks.causal_bias import is_causal_bias

# the functions that torch's modules, and models, call: by name, torch's and regard's
HOMES: dict[str, ModuleType] = {
    "scaled_dot_product_attention": functional,
    "multi_head_attention_forward": functional,
    "flex_attention": importlib.import_module("torch.nn.attention.flex_attention"),
}
TORCHS: dict[str, Callable[..., Any]] = {name: getattr(home, name) for name, home in HOMES.items()}
OURS: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": scaled_dot_product_attention,
    "multi_head_attention_forward": multi_head_attention_forward,
    "flex_attention": flex_attention,
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Counts:
    """How often each function ran on regard, or on torch and why, in calls and in graphs: see Patch."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str | None]] = Counter()
        self.traced: Counter[tuple[str, str | None]] = Counter()


IN_PLACE: list[Counts] = []  # of the patches in place; the last one counts
_THREAD = threading.local()
_COUNTING = threading.Lock()


def _routed(name: str) -> Callable[..., Any]:
    """torch's function of that name, which regard runs where it can."""
    ours, options_left = OURS[name], OPTIONS_LEFT[name]
    theirs = _torchs_sdpa if name == "scaled_dot_product_attention" else TORCHS[name]

    @functools.wraps(TORCHS[name])
    def run(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        why = why_left(query, key, value)
        if why is None:
            why = options_left(query, key, value, *args, **kwargs)
        if torch.compiler.is_compiling():
            _count_traced(name, why)
            return (ours if why is None else theirs)(query, key, value, *args, **kwargs)
        patches = IN_PLACE[-1:]  # read once: another thread may restore it meanwhile
        if not patches or getattr(_THREAD, "in_torch", False):
            return theirs(query, key, value, *args, **kwargs)
        _count(patches[0].calls, name, why)
        if why is None:
            return ours(query, key, value, *args, **kwargs)
        _THREAD.in_torch = True  # what torch's function calls in turn is the same call
        try:
            return theirs(query, key, value, *args, **kwargs)
        finally:
            _THREAD.in_torch = False

    if name != "flex_attention":  # which torch.jit.script does not compile
        scripts_as(run, TORCHS[name])
    return run


@constant_in_graphs
def _count_traced(name: str, why: str | None) -> bool:
    """Called when a graph is made, not when it runs."""
    for patch in IN_PLACE[-1:]:
        _count(patch.traced, name, why)
    return True


def _count(counts: Counter[tuple[str, str | None]], name: str, why: str | None) -> None:
    with _COUNTING:  # += on a Counter is no single step, and several threads may call
        counts[name, why] += 1


def _mask_left(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, is_causal: Any = False, **others: Any
) -> str | None:
    """Why scaled_dot_product_attention stays with torch for its masks."""
    if attn_mask is not None and is_causal:
        return "attn_mask with is_causal, which torch reads by path"
    if not is_causal_bias(attn_mask):
        return _subclass_among(query, key, value, attn_mask)
    if (attn_mask.seq_len_q, attn_mask.seq_len_kv) == (query.shape[-2], key.shape[-2]):
        return None
    return "attn_mask is a causal bias of other lengths"


def _subclass_among(*args: Any, **kwargs: Any) -> str | None:
    """Why a call stays with torch for what a subclass of Tensor means to it."""
    for x in (*args, *kwargs.values()):
        kind: Any = type(x)
        if not isinstance(x, Tensor) or kind in (Tensor, nn.Parameter):
            continue
        if torch.compiler.is_compiling() and kind.__torch_function__ is _NO_TORCH_FUNCTION:
            continue  # the fake tensors of a graph
        return f"an argument is a {kind.__name__}, a subclass of Tensor"
    return None


_NO_TORCH_FUNCTION = torch._C._disabled_torch_function_impl  # pyright: ignore[reportPrivateUsage]


def _torchs_sdpa(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """torch's scaled_dot_product_attention, while another function has its name in torch.nn.functional.

    A causal bias recognises it by that name, and would else be added as the numbers that it holds.
    """
    mask = args[0] if args else kwargs.get("attn_mask")
    if is_causal_bias(mask):
        by_name = functional.scaled_dot_product_attention
        return type(mask).__torch_function__(by_name, (type(mask),), (query, key, value, *args), kwargs)
    return TORCHS["scaled_dot_product_attention"](query, key, value, *args, **kwargs)


def why_left(query: Any, key: Any, value: Any) -> str | None:
    """Why a call of torch's attention stays with torch; None where regard's kernels run it."""
    for t in (query, key, value):
        if not isinstance(t, Tensor):
            return f"a {type(t).__name__} is no tensor"
        if t.device.type != "cpu":
            return f"its tensors are on {t.device.type}"
        if t.dtype not in DTYPES:
            return f"its tensors are {str(t.dtype).removeprefix('torch.')}, which the kernels are not"
        if t.is_nested:
            return "its tensors are nested"
        if t.layout is not torch.strided:
            return f"its tensors have the layout {t.layout}"
    if not runnable():
        return f"the kernels were not built: {why_not_built()}"
    if torch.compiler.is_compiling():
        return None
    if any(type(t) not in (Tensor, nn.Parameter) for t in (query, key, value)):
        return "its tensors are of a subclass of Tensor"
    if functorch() or forward_ad._current_level >= 0:  # pyright: ignore[reportPrivateUsage]
        return "a torch.func transform or forward-mode derivative is under way"
    return "it is traced, or a dispatch mode watches it" if watched() else None


# why a call stays with torch for what comes with its tensors
OPTIONS_LEFT: dict[str, Callable[..., str | None]] = {
    "scaled_dot_product_attention": _mask_left,
    "multi_head_attention_forward": _subclass_among,
    "flex_attention": why_left_flex,
}
ROUTED = {name: _routed(name) for name in TORCHS}
AT_HOME = [Holder(home, name, name) for name, home in HOMES.items()]
HOLDERS = Holders(TORCHS, ROUTED)
