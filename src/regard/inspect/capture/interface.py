"""transformers' attention interface, watched: what each implementation is called with, and what that means."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from regard.call.hooks import AttentionCall, notify, observing
from regard.core.errors import Unsupported
from regard.core.positions import Positions
from regard.core.shapes import listed
from regard.core.tracing import loaded
from regard.core.wrong_calls import kind_of
from regard.inspect.capture.mode import quiet
from regard.inspect.capture.padding import of_real_queries
from regard.inspect.capture.replaced import replaced
from regard.masks.algebra import Everything
from regard.masks.convert import Converted, from_sdpa, split
from regard.masks.dense import Dense
from regard.scores.algebra import Score
from regard.scores.modifiers import Bias, SoftCap
from regard.scores.similarity import ScaledDot


def watching_interface() -> AbstractContextManager[None]:
    """Where transformers is loaded: reports each call of its attention modules to the observers.

    The implementation runs as it would. One that reports itself (regard's) is left to do so.
    """
    interface: Any = getattr(loaded("transformers.modeling_utils"), "AttentionInterface", None)
    if not hasattr(interface, "get_interface"):
        return nullcontext()
    return replaced(interface, "get_interface", _telling)


def _telling(ask: Callable[..., Callable[..., Any]]) -> Callable[..., Callable[..., Any]]:
    @functools.wraps(ask)
    def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        run = ask(self, attn_implementation, default)
        name = "eager" if run is default else attn_implementation

        @functools.wraps(run)
        def observed(
            module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
        ) -> Any:
            by_itself = list[AttentionCall]()
            with quiet(), observing(by_itself.append):
                out = run(module, query, key, value, attention_mask, **options)
            if not by_itself:
                notify(lambda: _read(name, module, query, key, value, attention_mask, options))
            return out

        return observed

    return get_interface


@torch.no_grad()
def _read(name: str, module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict[str, Any]) -> AttentionCall:
    """A call of an implementation of that name, as transformers 5 makes it: q (b, h, nq, d), k and v (b, hk, nk, d)."""
    if options.get("cache") is not None:
        raise Unsupported("record cannot look at a paged cache (continuous batching): its keys lie in blocks.")
    masks = _masks(name, module, q.shape[-2], k.shape[-2], mask, options.get("is_causal"))
    score: Score = ScaledDot(options.get("scaling"))
    if options.get("softcap") is not None:
        score = score >> SoftCap(options["softcap"])
    for bias in (options.get("position_bias"), masks.bias):
        score = score if bias is None else score >> Bias(bias)
    own, sink = of_real_queries(module, masks.mask, q.shape[-2], k.shape[-2]), options.get("s_aux")
    return AttentionCall(module, q, k, score, own, masks.positions, sink, v, mask_if_cross=masks.mask)


def _masks(name: str, module: Any, nq: int, nk: int, mask: Any, is_causal: bool | None) -> Converted:
    if isinstance(mask, Tensor) and mask.dim() == 4:
        allowed, bias = _split(mask)
        return Converted(Dense(allowed), bias, _standing(allowed, nq, nk))
    if mask is None and name == "eager":
        return Converted(Everything())  # it adds what it is given, and is never causal by itself
    if mask is None and name == "sdpa":
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        return from_sdpa(None, nq, nk, is_causal=bool(causal) and nq > 1)
    what = f"shape {listed(mask.shape)}" if isinstance(mask, Tensor) else kind_of(mask)
    raise Unsupported(
        f'record does not know what a mask ({what}) means to attn_implementation="{name}"; it reads masks '
        '(batch, heads, nq, nk). Record the model with "sdpa", "eager" or "regard": model.set_attn_implementation(...).'
    )


def _standing(allowed: Tensor, nq: int, nk: int) -> Positions | None:
    """In a cache, a query stands at the last key that it sees: one that does not grow has room behind it."""
    if nq >= nk:
        return None
    index = torch.arange(nk, device=allowed.device, dtype=torch.int64)
    last = (allowed.flatten(0, 1).any(0) * index).amax(-1)
    return Positions(last.expand(nq), index)


def _split(mask: Tensor) -> tuple[Tensor, Tensor | None]:
    """What a mask lets through, and adds to that. Booleans: True = may attend; -inf and the least number hide."""
    if mask.dtype == torch.bool:
        return mask, None
    allowed, added = split(mask, torch.finfo(mask.dtype).min)
    return torch.ones_like(mask, dtype=torch.bool) if allowed is None else allowed, added
