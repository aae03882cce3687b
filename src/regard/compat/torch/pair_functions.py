"""A function of single pairs, FlexAttention's score_mod or mask_mod, recorded: what it computes, and of what."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from regard.core.dispatch_mode import DispatchMode, flat, mapped
from regard.core.pair_indexing import PairIndexing
from regard.core.region import Region
from regard.core.shapes import listed
from regard.core.wrong_calls import kind_of

ATEN = torch.ops.aten
Op = Any  # torch._ops.OpOverload
_DIFFERENCES = (ATEN.sub.Tensor, ATEN.sub.Scalar)
_SUMS = (ATEN.add.Tensor, ATEN.add.Scalar)
_COMPARISONS = tuple(
    getattr(getattr(ATEN, name), form) for name in ("ge", "gt", "le", "lt", "eq", "ne") for form in ("Tensor", "Scalar")
)
_CONSTANTS = (  # what they are given decides dtype and device alone
    *(ATEN.new_ones.default, ATEN.new_zeros.default, ATEN.ones_like.default, ATEN.zeros_like.default),
)


class NotRecorded(Exception):
    """Why a function, or a part of it, cannot be read, as a clause."""


@dataclass(frozen=True, eq=False)
class Node:
    """One number that the function computes for a pair.

    op, args  the operation of torch and its arguments, in which there may be other Nodes; op None: an argument
    reads     the arguments of the function that it depends on, of "s", "b", "h", "i", "j"
    shift     by how much it grows where i and j both grow by 1; 0: it depends on i - j alone; None: not known
    value     the number for the pair that was recorded
    """

    op: Op | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: frozenset[str]
    shift: int | None
    value: Tensor

    @property
    def by_difference(self) -> bool:
        """Whether it depends on i - j, and on neither alone."""
        return {"i", "j"} <= self.reads and self.shift == 0


def record(fn: Callable[..., Any], names: str, dtype: torch.dtype, device: torch.device) -> Node | Tensor:
    """fn(*names), each of "s" (a score, of that dtype) and "b", "h", "i", "j" (int64): its result as a Node.

    A Tensor where the result depends on no argument. Raises NotRecorded for what is no tensor, and for functions that
    look at a number, write into a tensor, draw random numbers, or compute of a score what autograd does not
    differentiate.
    """
    recorder = _Recorder()
    given = [recorder.argument(name, dtype, device) for name in names]
    with torch.enable_grad(), PairIndexing(), recorder:  # where a function forbids gradients is seen
        result = fn(*given)
    if not isinstance(result, Tensor) or result.dim():
        raise NotRecorded(f"it returns {type(result).__name__}, not one number a pair")
    return recorder.node_of(result)


class _Recorder(DispatchMode):
    """While it is open, every operation of torch on the function's arguments becomes a Node."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: dict[int, Node] = {}  # by the id of the value, which the Node keeps alive

    def argument(self, name: str, dtype: torch.dtype, device: torch.device) -> Tensor:
        value = torch.zeros((), dtype=dtype if name == "s" else torch.int64, device=device)
        self._keep(Node(None, (name,), {}, frozenset(name), int(name in "ij"), value))
        return value

    def node_of(self, x: Any) -> Any:
        """The Node of a tensor, where it is one."""
        return self.nodes.get(id(x), x)

    def __torch_dispatch__(self, func: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotRecorded(f"{func} draws random numbers")
        out = func(*args, **kwargs)
        args, kwargs = mapped(args, self.node_of), {name: self.node_of(x) for name, x in kwargs.items()}
        read = [x for x in flat((*args, *kwargs.values())) if isinstance(x, Node)]
        if not read or func in _CONSTANTS:
            return out
        if func._schema.is_mutable:
            raise NotRecorded(f"{func} writes into a tensor")
        if not torch.is_grad_enabled() and any("s" in node.reads for node in read):
            raise NotRecorded(f"{func} of a score stands under torch.no_grad, or in a torch.autograd.Function")
        if not isinstance(out, Tensor):
            raise NotRecorded(f"{func} looks at a number, or has several results")
        if id(out) not in self.nodes:
            reads = frozenset[str]().union(*(node.reads for node in read))
            self._keep(Node(func, args, kwargs, reads, _shift(func, args, kwargs, read), out))
        return out

    def _keep(self, node: Node) -> None:
        self.nodes[id(node.value)] = node


def _shift(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], read: list[Node]) -> int | None:
    if all(node.shift == 0 for node in read):
        return 0
    if kwargs or len(args) != 2 or any(node.value.is_floating_point() for node in read):
        return None
    a, b = (x.shift if isinstance(x, Node) else 0 for x in args)
    if a is None or b is None:
        return None
    if op in _SUMS:
        return a + b
    if op in _DIFFERENCES:
        return a - b
    return 0 if op in _COMPARISONS and a == b else None


def evaluate(node: Node, **index: Tensor) -> Tensor:
    """The node's numbers for vectors of indices b, h, i, j: one axis for each that is given, in this order; others 0;
    behind these, the axes of several numbers of a pair.

    They are computed as torch computes them, one pair at a time under vmap.
    """
    names = [name for name in "bhij" if name in index]
    zero = torch.zeros((), dtype=torch.int64, device=node.value.device)

    def one(*at: Tensor) -> Tensor:
        return pair_function(node)(*(dict(zip(names, at, strict=True)).get(name, zero) for name in "bhij"))

    fn: Callable[..., Any] = one
    for axis in reversed(range(len(names))):
        fn = torch.vmap(fn, in_dims=tuple(0 if axis == other else None for other in range(len(names))))
    found = fn(*(index[name] for name in names))
    return cast(Tensor, found).expand([*(len(index[name]) for name in names), *node.value.shape])


@dataclass(frozen=True)
class Sizes:
    """The pairs of a call of flex_attention: (batch, heads, nq, nk), the dtype of its scores, and their device."""

    batch: int
    heads: int
    nq: int
    nk: int
    dtype: torch.dtype
    device: torch.device

    @property
    def pairs(self) -> int:
        """How many pairs there are."""
        return self.batch * self.heads * self.nq * self.nk

    def indices(self, names: frozenset[str] | str) -> dict[str, Tensor]:
        """All indices of these axes, of "b", "h", "i", "j"."""
        of = {"b": self.batch, "h": self.heads, "i": self.nq, "j": self.nk}
        return {name: torch.arange(of[name], dtype=torch.int64, device=self.device) for name in "bhij" if name in names}

    def by_difference(self, node: Node) -> Tensor:
        """What a node that depends on i - j is for -(nk - 1), ..., nq - 1, for each head where it depends on that."""
        index = self.indices(node.reads & {"h"})
        return evaluate(node, **index, i=torch.arange(1 - self.nk, self.nq, dtype=torch.int64, device=self.device))

    def by_axes(self, node: Node) -> Tensor:
        """What a node is for all indices that it reads, shaped to broadcast to (batch, heads, nq, nk)."""
        index = self.indices(node.reads)
        found = evaluate(node, **index)
        return found.reshape([len(index[name]) if name in index else 1 for name in "bhij"])


def pair_function(node: Node) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The function of (b, h, i, j) that a node computes, which reads no score."""

    def fn(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return _value_of(node, {"b": b, "h": h, "i": i, "j": j}, {})

    return fn


def _value_of(x: Any, given: dict[str, Tensor], known: dict[Node, Any]) -> Any:
    """What an argument of an operation is: of a node, what it computes. known: of nodes that were computed already."""
    if not isinstance(x, Node):
        return x
    if x not in known:
        known[x] = (
            given[x.args[0]]
            if x.op is None
            else x.op(
                *mapped(x.args, lambda arg: _value_of(arg, given, known)),
                **{name: _value_of(arg, given, known) for name, arg in x.kwargs.items()},
            )
        )
    return known[x]


def each_pair(fn: Callable[..., Tensor], at: Region, *scores: Tensor) -> Tensor:
    """fn of single pairs (with their scores), by vmap over (batch, heads, queries, keys), as torch evaluates it.

    Raises TypeError where it returns no number.
    """

    def number(*pair: Tensor) -> Tensor:
        found: Any = fn(*pair)
        if not isinstance(found, Tensor) or found.dim():
            what = f"a tensor of shape {listed(found.shape)}" if isinstance(found, Tensor) else kind_of(found)
            expected = "the new score of a pair" if scores else "whether a pair is visible"
            name = getattr(fn, "__name__", "score_mod" if scores else "mask_mod")
            raise TypeError(f"{name} returned {what}; expected {expected}, a tensor of one number.")
        return found

    run: Callable[..., Tensor] = number
    index = tuple(t.reshape(-1) for t in (at.b, at.h, at.row, at.col))
    for axis in (3, 2, 1, 0):
        dims = tuple(0 if axis == other else None for other in range(4))
        run = torch.vmap(run, in_dims=(0,) * len(scores) + dims)
    with PairIndexing():
        return run(*scores, *index)
