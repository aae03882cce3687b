"""Watching: reports the attention calls that go through torch's functions, without changing them."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.overrides
from torch import nn
from torch.nn.functional import multi_head_attention_forward, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from regard.api import attention
from regard.call.hooks import AttentionCall, Observer
from regard.inspect.capture.fastpath import encoder_layer, native_multi_head, remembering
from regard.inspect.capture.mha import multi_head
from regard.inspect.capture.own import of_attention
from regard.inspect.capture.replaced import replaced
from regard.inspect.capture.sdpa import scaled_dot_product

READERS: dict[Any, Callable[..., AttentionCall]] = {
    attention: of_attention,
    scaled_dot_product_attention: scaled_dot_product,
    multi_head_attention_forward: multi_head,
    torch._transformer_encoder_layer_fwd: encoder_layer,  # pyright: ignore
    torch._native_multi_head_attention: native_multi_head,  # pyright: ignore
}

_QUIET: ContextVar[bool] = ContextVar("someone else reports what is called here", default=False)


class Watching(TorchFunctionMode):
    """While it is open, `observer` is called with each attention call on this thread, once it has been made.

    A function that calls others is recorded once: no mode sees what is called inside of it.
    """

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self.observer = observer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        reader = READERS.get(func)
        if reader is not None and not _QUIET.get():
            with torch.no_grad():
                call = reader(*args, **kwargs)
            self.observer(call)
        return out


@contextmanager
def watching(observer: Observer) -> Generator[None, None, None]:
    """Watching, with torch's encoder layers on the way that they would take without it."""
    asked = replaced(torch.overrides, "has_torch_function", _overlooking)
    merged = replaced(nn.MultiheadAttention, "merge_masks", remembering)
    with asked, merged, Watching(observer):
        yield


@contextmanager
def quiet() -> Generator[None, None, None]:
    """A block in which nothing is recorded: the code that opens it records its own call."""
    token = _QUIET.set(True)
    try:
        yield
    finally:
        _QUIET.reset(token)


def _overlooking(ask: Callable[..., bool]) -> Callable[..., bool]:
    """The question by which torch's encoder layers leave their fused kernels, answered as if nothing were recorded.

    The other way has other bits, and other values where there is padding.
    """

    def has_torch_function(relevant_args: Any) -> bool:
        ours = list[Any]()
        while isinstance(torch.overrides._get_current_function_mode(), Watching):  # pyright: ignore
            ours.append(torch.overrides._pop_mode())  # pyright: ignore
        try:
            return ask(relevant_args)
        finally:
            for mode in reversed(ours):
                torch.overrides._push_mode(mode)  # pyright: ignore

    return has_torch_function
