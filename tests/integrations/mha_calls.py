"""Random calls of multi_head_attention_forward, right and wrong: regard answers or refuses each as torch does."""

from __future__ import annotations

import random
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.compat.torch.multihead import multi_head_attention_forward

E, HEADS = 12, 3


def a_call(seed: int) -> dict[str, Any]:
    """The arguments, with at most a few that do not fit."""
    draw, make = random.Random(seed), torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make)

    def other(usual: int, *unusual: int) -> int:
        return draw.choice(unusual) if draw.random() < 0.03 else usual

    batched, separate, needs = draw.random() < 0.8, draw.random() < 0.3, draw.random() < 0.5
    nq, nk, n = draw.choice([1, 4, 5]), draw.choice([1, 3, 5]), draw.choice([1, 2]) if batched else 1
    widths = (E, draw.choice([E, 5]), draw.choice([E, 7])) if separate else (E, E, E)
    lead = [(nq, n), (other(nk, 1, 4), other(n, 1, 3)), (other(nk, 1, 4), other(n, 1, 3))]
    query, key, value = (
        normal(*(shape if batched else shape[:1]), other(w, 6)) for shape, w in zip(lead, widths, strict=True)
    )
    alike = draw.random()
    if alike < 0.5 and not separate:
        value = key
        query = key if alike < 0.2 else query
    nq, nk = len(query), len(key)
    call: dict[str, Any] = {"query": query, "key": key, "value": value, "embed_dim_to_check": other(E, 6)}
    call |= {"num_heads": other(HEADS, 4, 5), "training": True, "need_weights": needs, "dropout_p": other(0, -1)}
    call |= {"in_proj_weight": None if separate else normal(3 * other(E, 6), other(E, 6))}
    if separate:
        call["use_separate_proj_weight"] = True
        for name, w in zip("qkv", widths, strict=True):
            call[f"{name}_proj_weight"] = None if draw.random() < 0.03 else normal(other(E, 6), other(w, 6))
    call["in_proj_bias"] = normal(other(3 * E, 3, 1, E)) if draw.random() < 0.6 else None
    call |= {"out_proj_weight": normal(other(E, 6), other(E, 6)), "out_proj_bias": normal(other(E, 1))}
    static = draw.random() < 0.2
    both, appended = draw.random() < 0.25 and not (static and draw.random() < 0.7), draw.random() < 0.2
    for name in ("bias_k", "bias_v"):
        shape = draw.choice([(1, 1, E)] * 8 + [(E,), (1, E), (2, 1, E), (1, n, E), (1, 1, 6), (n, E)])
        call[name] = normal(*shape) if both and draw.random() > 0.05 else None
    call["add_zero_attn"] = appended
    m = other(nk, 1, 4)
    for name in ("static_k", "static_v"):
        shape = (other(n * HEADS, HEADS, 1), other(m, nk), other(E // HEADS, 2))
        call[name] = normal(*shape) if static and draw.random() > 0.1 else None
    if draw.random() < 0.5:
        shape = (nq, nk) if draw.random() < 0.5 else (n * HEADS, nq, nk)
        call["attn_mask"] = _mask(draw, normal(*shape[:-2], other(nq, 1, 2), other(nk, 1, 6)), make)
    if draw.random() < 0.4:
        keys = m if call["static_k"] is not None else nk
        mask = _mask(draw, normal(*((other(n, 1, 3),) if batched else ()), other(keys, nk, 6)), make)
        call["key_padding_mask"] = mask
    call["is_causal"] = draw.random() < 0.2
    return call


def _mask(draw: random.Random, numbers: Tensor, make: torch.Generator) -> Tensor:
    """Booleans that hide, but not the first key, or numbers to add."""
    kind = draw.random()
    if kind < 0.5:
        hidden = torch.rand(numbers.shape, generator=make) < 0.4
        hidden[..., :1] = False
        return hidden
    return numbers.to(torch.float64 if kind < 0.55 else torch.int64 if kind < 0.58 else numbers.dtype)


def answer(function: Any, call: dict[str, Any]) -> tuple[Tensor, Tensor | None] | None:
    """What it gives; None where it refuses the call."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Support for mismatched")
        try:
            return function(**call)
        except (AssertionError, RuntimeError, ValueError, ZeroDivisionError):
            return None


def difference(seed: int) -> str | None:
    """How regard's function differs from torch's in one call; None where it does not."""
    call = a_call(seed)
    ours, theirs = answer(multi_head_attention_forward, call), answer(F.multi_head_attention_forward, call)
    if ours is None or theirs is None:
        return None if ours is theirs else f"regard {'refuses' if ours is None else 'answers'}, torch does not"
    try:
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    except AssertionError as error:
        return str(error)
    return None
