"""Graphs of scores and masks as texts, for graphs of torch: what a person wrote is run again where they run.

A text is a list of JSON. Each item is an operation: its name, its arguments, those by name, and whether autograd
records it, as in ["aten.mul.Tensor",[{"n":0},2],{},true]. {"n":0} stands for the result of the first item; the last
one is the result of all. "score", "tensor", "index", "take", "same", "query" and "key" are as in Node.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.backends.native.programs.graph import SIZES, Graph, Node, NotTraced
from regard.core.dispatch_mode import flat
from regard.core.region import Region
from regard.core.value import Value
from regard.masks.algebra import Mask
from regard.scores.algebra import Modifier

_OWN = ("score", "tensor", "index", "take", "same", "query", "key")
_LEFT_OUT = {"layout", "pin_memory", "memory_format"}  # what they say changes no number


def write_graph(graph: Graph) -> str:
    """A graph as a text, which needs no object of this process. Raises NotTraced."""
    if graph.function is not None:
        raise NotTraced(f"{graph.function}, a torch.autograd.Function, has a backward of its own")
    entries = list[Any]()
    _append(graph.result, entries, {})
    return json.dumps(entries, separators=(",", ":"))


def _append(node: Node, entries: list[Any], numbers: dict[Node, int]) -> None:
    """A node, after those that it reads; numbers: of the nodes that stand there already."""
    if node in numbers:
        return
    for x in flat(node.arguments):
        if isinstance(x, Node):
            _append(x, entries, numbers)
    entries.append(_entry(node, numbers))
    numbers[node] = len(entries) - 1


def _entry(node: Node, numbers: dict[Node, int]) -> list[Any]:
    if node.pair:
        raise NotTraced("it is a function of single pairs")
    if not isinstance(node.op, str):
        _check_sizes(node)
    named = {name: _argument(x, numbers) for name, x in node.kwargs.items() if name not in _LEFT_OUT}
    return [str(node.op), [_argument(x, numbers) for x in node.args], named, node.recorded]


def _check_sizes(node: Node) -> None:
    """Raises NotTraced where a shape is written down that is that of the few pairs for which the graph was recorded.

    () is none of theirs: s.new_zeros(()) is one number for any pairs.
    """
    known = {argument.name for argument in node.op._schema.arguments}
    of_region = node.aligned or not any(isinstance(x, Node) for x in flat(node.arguments))
    if of_region and known & SIZES and node.shape != ():
        raise NotTraced(f"{node.op} is given a shape")


def _argument(x: Any, numbers: dict[Node, int]) -> Any:
    if isinstance(x, Node):
        return {"n": numbers[x]}
    if isinstance(x, (list, tuple)):
        return [_argument(one, numbers) for one in x]
    if isinstance(x, torch.dtype):
        return {"dtype": str(x).removeprefix("torch.")}
    if isinstance(x, torch.device) and x.type == "cpu":
        return {"device": "cpu"}
    if x is None or type(x) in (bool, int, float, str):
        return x
    if isinstance(x, Tensor):
        raise NotTraced("it reads a tensor that none of its fields holds")
    raise NotTraced(f"an operation is given {x!r}")


@dataclass(frozen=True)
class RecordedModifier(Modifier):
    """Modifiers that were recorded: what `text` says of a score and of the tensors that they held."""

    text: str
    held: tuple[Tensor, ...] = ()

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return _run(self.text, self.held, {"score": s}, at)


@dataclass(frozen=True)
class RecordedMask(Mask):
    """A mask that was recorded: what `text` says of the tensors that it held."""

    per_head: ClassVar[bool] = True
    text: str
    held: tuple[Tensor, ...] = ()

    def visible(self, at: Region) -> Tensor:
        return _run(self.text, self.held, {}, at)


@dataclass(frozen=True)
class RecordedFunction(Value):
    """The function of an Elementwise that was recorded: what `text` says of a query, a key and the tensors."""

    text: str

    def __call__(self, q: Tensor, k: Tensor, *tensors: Tensor) -> Tensor:
        return _run(self.text, tensors, {"query": q, "key": k}, None)


def _run(text: str, held: Sequence[Tensor], given: Mapping[str, Tensor], at: Region | None) -> Tensor:
    """given: what the operations of these names are."""
    results = list[Any]()
    for op, args, named, recorded in _read(text):
        with torch.set_grad_enabled(recorded and torch.is_grad_enabled()):
            if op in given:
                found: Any = given[op]
            elif op == "tensor":
                found = held[args[0]]
            elif op == "index":
                found = getattr(at, args[0])
            elif op == "take":
                found = getattr(at, args[0])(_value(args[1], results))
            elif op == "same":
                found = _value(args[0], results)
            else:
                found = op(*_value(args, results), **{name: _value(x, results) for name, x in named.items()})
            results.append(found)
    return results[-1]


def _value(x: Any, results: list[Any]) -> Any:
    """An argument, with results in the place of their numbers.

    No function in _run: one that calls itself would keep all results until Python looks for cycles.
    """
    if isinstance(x, list):
        return [_value(one, results) for one in x]  # pyright: ignore[reportUnknownVariableType]
    return results[x.n] if isinstance(x, _Result) else x


@dataclass(frozen=True)
class _Result:
    """The result of an operation of a text, by its number."""

    n: int


@lru_cache(256)
def _read(text: str) -> tuple[tuple[Any, list[Any], dict[str, Any], bool], ...]:
    """The operations of a text."""

    def operation(name: str) -> Any:
        if name in _OWN:
            return name
        space, packet, overload = name.split(".")
        return getattr(getattr(getattr(torch.ops, space), packet), overload)

    return tuple(
        (operation(op), _read_argument(args), {name: _read_argument(x) for name, x in named.items()}, recorded)
        for op, args, named, recorded in json.loads(text)
    )


def _read_argument(x: Any) -> Any:
    if isinstance(x, list):
        return [_read_argument(one) for one in x]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(x, dict):
        return x
    ((kind, of),) = x.items()  # pyright: ignore[reportUnknownVariableType]
    return {"n": _Result, "dtype": lambda name: getattr(torch, name), "device": torch.device}[kind](of)
