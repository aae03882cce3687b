"""Tensors with gradients that a function reads without being given them: found, and exchanged for others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from regard.core.pair_indexing import PairIndexing


def captured_by(fn: Callable[..., Any], *args: Tensor) -> tuple[Tensor, ...]:
    """The tensors that require a gradient and that fn(*args) reads, in the order in which it reads them.

    Each that takes part in an operation of torch is found, wherever the function has it from: a closure, a module's
    parameter, a list.

    >>> table = torch.zeros(3, requires_grad=True)
    >>> len(captured_by(lambda i: table[i] + torch.ones(()), torch.tensor(1)))
    1
    """
    reader = _Reader()
    with torch.enable_grad(), PairIndexing(), reader:
        fn(*args)
    return tuple(reader.found.values())


def exchanged(fn: Callable[..., Any], captured: tuple[Tensor, ...]) -> Callable[..., Any]:
    """The function of (tensors, *args) that reads these tensors in the place of those that fn may read."""

    def call(tensors: tuple[Tensor, ...], *args: Any) -> Any:
        with _Exchange(captured, tensors):
            return fn(*args)

    return call


def with_captured(fn: Callable[..., Any], captured: tuple[Tensor, ...]) -> Callable[..., Any]:
    """As exchanged, of the tensors that fn captured: RuntimeError where it does not read all of them.

    It does not in a backward after something else was put in their place, as torch.func.functional_call does.
    """

    def call(tensors: tuple[Tensor, ...], *args: Any) -> Any:
        exchange = _Exchange(captured, tensors)
        with exchange:
            found = fn(*args)
        if len(exchange.met) < len(exchange.others):
            raise RuntimeError(
                f"{getattr(fn, '__name__', type(fn).__name__)} reads other tensors now than when flex_attention was "
                "called: their gradients would be lost. Keep what it reads until the backward has run; after "
                "torch.func.functional_call, differentiate with torch.func.grad."
            )
        return found

    return call


def check_exchange(fn: Callable[..., Any], captured: tuple[Tensor, ...], *args: Tensor) -> None:
    """ValueError where the result of fn(*args) depends on a captured tensor, and does not on one in its place."""
    given = tuple([t.detach().requires_grad_() for t in captured])
    with torch.enable_grad(), PairIndexing():
        own, other = fn(*args), with_captured(fn, captured)(given, *args)
    for of_own, of_other in zip(_depends(own, captured), _depends(other, given), strict=True):
        if of_own != of_other:
            raise ValueError(
                f"{getattr(fn, '__name__', 'score_mod')} gives a tensor that requires a gradient to what PyTorch does "
                "not show, such as a torch.autograd.Function: its gradient would be lost. Compute with operations of "
                "PyTorch, or write the score as a regard.Modifier with the tensor in a field."
            )


def _depends(result: Any, on: tuple[Tensor, ...]) -> list[bool]:
    if not isinstance(result, Tensor) or not result.requires_grad:
        return [False for _ in on]
    grads = torch.autograd.grad(result.sum(), on, allow_unused=True, retain_graph=True)
    return [one is not None for one in cast("tuple[Tensor | None, ...]", grads)]


class _Reader(TorchFunctionMode):
    """Finds the tensors with gradients that operations of torch read and that none of them made."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, Tensor] = {}
        self.made: dict[int, Tensor] = {}  # which keeps them: another tensor could get the id of one

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for x in _tensors((args, kwargs)):
            if x.requires_grad and id(x) not in self.made:
                self.found.setdefault(id(x), x)
        out = func(*args, **kwargs)
        self.made.update((id(x), x) for x in _tensors(out))
        return out


class _Exchange(TorchFunctionMode):
    """Gives operations of torch other tensors in the place of some."""

    def __init__(self, of: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.others = dict(zip(map(id, of), others, strict=True))
        self.met = set[int]()  # the ids of those that were exchanged

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Tensor, self._other, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _other(self, x: Tensor) -> Tensor:
        if id(x) not in self.others:
            return x
        self.met.add(id(x))
        return self.others[id(x)]


def _tensors(x: Any) -> list[Tensor]:
    return [t for t in tree_leaves(x) if isinstance(t, Tensor)]
