"""Graphs of modifiers: what each node is, and its numbers for all queries and keys of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from regard.core.dispatch_mode import flat, mapped
from regard.core.region import Frame, Region
from regard.core.value import number_key


class NotTraced(Exception):
    """Why modifiers are no program, as a clause."""


@dataclass(frozen=True, eq=False)
class Node:
    """A tensor that the modifiers compute.

    op       a function of torch; or "score"; "index", of which args[0] is the name; "tensor", the args[0]-th of the
             modifiers; "take", of which args are a method of Region and what it is given
    axes     what it may differ by, of "s" (the score), "b", "h", "i", "j"
    aligned  whether its axes are those of scores, (*batch, h, r, c), or it broadcasts to them
    dtype    of its numbers
    shape    for the few pairs
    recorded whether autograd would record it: its derivative is 0 where it stands under torch.no_grad
    pair     whether it is of one pair: its shape is that of the numbers that the pair has, () where it has one
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    axes: frozenset[str]
    aligned: bool
    dtype: torch.dtype
    shape: torch.Size
    recorded: bool = True
    pair: bool = False

    @property
    def several(self) -> bool:
        """Whether it has several numbers a pair."""
        return self.pair and self.shape != ()

    @property
    def of_several(self) -> bool:
        """Whether it is of one pair, and it or an argument of it has several numbers."""
        return self.pair and (self.several or any(isinstance(y, Node) and y.several for y in flat(self.arguments)))

    @property
    def arguments(self) -> tuple[Any, ...]:
        return *self.args, *self.kwargs.values()

    @property
    def whole(self) -> bool:
        """Whether torch computes it once for all queries, or all keys: then it is an operand."""
        return "s" not in self.axes and not {"i", "j"} <= self.axes


@dataclass
class Graph:
    """What modifiers compute.

    fixed: it serves all calls of the structure that was recorded
    kept: what lower.py keeps of its programs
    function: a torch.autograd.Function that it calls, whose derivative is not that of what its forward computes
    sizes: whether sizes of the few pairs were read
    """

    result: Node
    fixed: bool = True
    function: str | None = None
    sizes: bool = False
    kept: dict[Any, Any] = field(default_factory=dict[Any, Any])


SIZES = {"size", "shape", "repeats"}  # arguments by which an operation is told the shape of its result


def alike(x: Any, y: Any, known: dict[Node, Node]) -> bool:
    """Whether two nodes, or arguments of nodes, say the same of every pair, traced on other numbers of pairs.

    Raises NotTraced where they read tensors of the sizes of these.

    known: which nodes of the second graph are those of the first, as far as that is known
    """
    if isinstance(x, Node):
        if not isinstance(y, Node) or x in known:
            return isinstance(y, Node) and known[x] is y
        known[x] = y
        if (x.op, x.recorded, x.dtype, x.axes, x.kwargs.keys()) != (y.op, y.recorded, y.dtype, y.axes, y.kwargs.keys()):
            return False
        names = () if isinstance(x.op, str) else [argument.name for argument in x.op._schema.arguments]
        by_name = {**dict(zip(names, x.args, strict=False)), **x.kwargs} if names else dict(enumerate(x.args))
        others = (*y.args, *y.kwargs.values())
        given = zip(by_name.items(), others, strict=True)
        return len(x.args) == len(y.args) and all(name in SIZES or alike(a, b, known) for (name, a), b in given)
    if isinstance(x, (list, tuple)):
        items = cast("Sequence[Any]", x)
        same = isinstance(y, (list, tuple)) and len(items) == len(cast("Sequence[Any]", y))
        return same and all(alike(a, b, known) for a, b in zip(items, y, strict=True))
    if isinstance(x, Tensor):
        if isinstance(y, Tensor) and x.shape != y.shape:
            raise NotTraced("it makes a tensor as large as the part of a call that it is given")
        return x is y or (isinstance(y, Tensor) and torch.equal(x, y))
    return number_key(x) == number_key(y)


@dataclass
class Values:
    """What the nodes of a graph that are `whole` are for all queries and keys of a call."""

    frame: Frame
    tensors: Sequence[Tensor]
    known: dict[Node, Tensor] = field(default_factory=dict[Node, Tensor])

    def of(self, x: Any) -> Any:
        """A node's numbers, aligned as it is; what is no node stays, and is no tensor of the call."""
        if not isinstance(x, Node):
            return x.detach() if isinstance(x, Tensor) else x
        if x not in self.known:
            self.known[x] = self._computed(x)
        return self.known[x]

    def __post_init__(self) -> None:
        self.whole = Region(self.frame, slice(None), slice(None))

    def _computed(self, x: Node) -> Tensor:
        whole = self.whole
        if x.op == "tensor":
            return self.tensors[x.args[0]]
        if x.op == "index":
            return getattr(whole, x.args[0])
        if x.op == "take":
            return getattr(whole, x.args[0])(self.of(x.args[1]))
        if x.op == "same":
            return self.of(x.args[0])
        if x.of_several:
            found = self._each_pair(x)
            return found if x.recorded else found.detach()
        name = str(x.op)
        if name.startswith("aten.expand") and x.aligned:  # sizes are those of the few pairs
            return self.of(x.args[0])
        found = x.op(*mapped(x.args, self.of), **{name: mapped((y,), self.of)[0] for name, y in x.kwargs.items()})
        return found if x.recorded else found.detach()

    def _each_pair(self, x: Node) -> Tensor:
        """What an operation on several numbers a pair is, by torch.vmap: axes of scores, then those of its numbers."""
        dims = len(self.frame.shape)
        args, names = list(flat(x.arguments)), list[Node]()
        for y in args:
            if isinstance(y, Node) and y.pair and y not in names:
                names.append(y)
        given = [self.of(y) for y in names]
        given = [t[(None,) * (dims + len(y.shape) - t.dim())] for y, t in zip(names, given, strict=True)]
        sizes = [max(t.shape[axis] for t in given) for axis in range(dims)]

        def one(*numbers: Tensor) -> Tensor:
            known = dict(zip(names, numbers, strict=True))

            def value(y: Any) -> Any:
                return known[y] if isinstance(y, Node) and y.pair else self.of(y)

            return x.op(*mapped(x.args, value), **{name: mapped((y,), value)[0] for name, y in x.kwargs.items()})

        fn: Callable[..., Any] = one
        for axis in reversed(range(dims)):
            if sizes[axis] != 1:
                fn = torch.vmap(fn, in_dims=tuple([None if t.shape[axis] == 1 else 0 for t in given]))
        found = fn(*(t.reshape([n for n in t.shape[:dims] if n != 1] + list(t.shape[dims:])) for t in given))
        return found.reshape([*sizes, *x.shape])


@lru_cache(1024)
def _name_of(op: Any) -> str:
    return op if isinstance(op, str) else str(op).split(".")[1]


def name_of(x: Node) -> str:
    """What torch calls an operation, without its overload."""
    return _name_of(x.op)
