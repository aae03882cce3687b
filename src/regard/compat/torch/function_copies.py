"""Copies of score_mods and mask_mods, each kept for all functions of the same code that read the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from threading import Lock
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from regard.compat.torch.captured import exchanged
from regard.core.functions import Unknown, callable_key, clone, frozen, settle
from regard.runtime.outline import plain

_MOST = 256  # that are kept
_MOST_OF_A_TENSOR = 1 << 16  # bytes that are part of a key
_copies: dict[Any, FunctionType] = {}
_templates: dict[Any, FunctionType] = {}
_changing = Lock()


def copy_of(fn: Callable[..., Any] | None) -> FunctionType | None:
    """The copy that is kept of a function that reads the same; a new one of the first. Raises Unknown."""
    if fn is None:
        return None
    found = _copies.get(callable_key(fn, _content))
    if found is None:
        with torch.inference_mode(False), torch.no_grad():  # training may call with what is kept
            made = frozen(fn)
        found = _kept(_copies, callable_key(made, _content), _function(made))
    return found


def template_of(fn: Callable[..., Any]) -> tuple[FunctionType, tuple[Tensor, ...]]:
    """A function of (tensors, *args) that computes what fn does, and the tensors with gradients that fn reads.

    It is kept for functions that read the same but for the numbers in these tensors. Raises Unknown.
    """
    learned = dict[int, Tensor]()

    def content(t: Tensor) -> Hashable:
        if not t.requires_grad:
            return _content(t)
        if not plain(t):
            raise Unknown
        learned.setdefault(id(t), t)
        return _place(list(learned).index(id(t)), t)

    key = callable_key(fn, content)
    found = _templates.get(key)
    if found is None:
        found = _new_template(fn, key)
    return found, tuple(learned.values())


def _function(fn: Callable[..., Any]) -> FunctionType:
    """A callable as a function."""
    if type(fn) is FunctionType:
        return fn

    def call(*args: Any) -> Any:
        return fn(*args)

    return call


def _new_template(fn: Callable[..., Any], key: Hashable) -> FunctionType:
    """A template of that key. Raises Unknown where another thread has changed what the function reads meanwhile."""
    places = dict[int, Tensor]()  # by the id of a tensor with a gradient, what stands in its place

    def place(t: Tensor) -> Tensor:
        if not t.requires_grad:
            return clone(t)
        return places.setdefault(id(t), torch.zeros((), dtype=t.dtype, device=t.device).expand(t.shape))

    copy = frozen(fn, place)
    in_order = tuple(places.values())
    numbers = {id(t): n for n, t in enumerate(in_order)}

    def content(t: Tensor) -> Hashable:
        return _place(numbers[id(t)], t) if id(t) in numbers else _content(t)

    if callable_key(copy, content) != key:
        raise Unknown
    made = exchanged(copy, in_order)  # those that a branch leaves out have gradients of 0
    assert isinstance(made, FunctionType)
    return _kept(_templates, key, made)


def _place(number: int, t: Tensor) -> Hashable:
    return "learned", number, t.dtype, t.shape


def _content(t: Tensor) -> Hashable:
    """A tensor by its numbers. Raises Unknown where they are many, or cannot be read, or have a gradient."""
    if t.requires_grad or not plain(t) or t.is_complex() or t.nbytes > _MOST_OF_A_TENSOR:
        raise Unknown
    return t.dtype, t.shape, t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _kept(kept: dict[Any, FunctionType], key: Hashable, made: FunctionType) -> FunctionType:
    """The function of that key, which is that of the copy: another thread may have changed what was copied."""
    with _changing:
        if len(kept) >= _MOST:
            kept.clear()
        found = kept.setdefault(key, made)
        settle(found)
    return found
