"""Operations of torch recorded as a graph while they run once on a few pairs."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from regard.backends.native.programs.graph import Node, flat, mapped
from regard.core.value import number_key
from regard.scores.algebra import Modifier


class NotTraced(Exception):
    """Why modifiers are no program, as a clause."""


class Recorder(TorchDispatchMode):
    """While it is open, every operation of torch on a tensor that it knows becomes a Node."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.nodes: dict[int, Node] = {}  # by the id of a value
        self.values: list[Tensor] = []  # which must not be that of another one meanwhile
        self.known: dict[Any, Node] = {}
        self.dims, self.fixed = dims, True
        self.quiet = False  # while the region works, not the modifier
        self.constants = False  # while a function works whose tensors nobody changes

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here; torch would import its compiler, which takes seconds, to leave this class out."""
        return False

    @contextmanager
    def recording(self) -> Generator[None, None, None]:
        """Records what runs inside. Raises NotTraced for any error that comes of it."""
        try:
            # nothing requires a gradient; but where a function forbids them is recorded
            with torch.enable_grad(), self:
                yield
        except NotTraced:
            raise
        except Exception as error:
            raise NotTraced(f"{type(error).__name__} was raised while it ran on a few pairs") from error

    def keep(self, op: Any, args: tuple[Any, ...], axes: str, value: Tensor, aligned: bool = True) -> Tensor:
        self._add(value, Node(op, args, {}, frozenset(axes), aligned, value.dtype, value.shape))
        return value

    def given(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that modifiers or a mask hold; one that stands twice is two, known by identity."""
        return [self.keep("tensor", (n,), "", t.detach().view_as(t), aligned=False) for n, t in enumerate(tensors)]

    def _add(self, value: Tensor, node: Node) -> None:
        """Remembers the node of a value: an earlier one, where that computes the same of the same."""
        self.values.append(value)
        key = node.op, _key(node.args), _key(tuple(node.kwargs.items())), node.recorded, value.dim()
        self.nodes[id(value)] = self.known.setdefault(key, node)

    def node_of(self, x: Any) -> Any:
        """The Node of a tensor, where it is one."""
        return self.nodes.get(id(x), x) if isinstance(x, Tensor) else x

    def check_scores(self, s: Any, shape: tuple[int, ...], stage: Modifier) -> None:
        if not isinstance(s, Tensor) or s.shape != shape or not s.is_floating_point():
            raise NotTraced(f"{type(stage).__name__}.modify does not return scores of the shape that it was given")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self.quiet:
            return out
        args = mapped(args, self.node_of)
        kwargs = {name: mapped((x,), self.node_of)[0] for name, x in kwargs.items()}
        every = flat((*args, *kwargs.values()))
        read = [x for x in every if isinstance(x, Node)]
        if not self.constants and any(isinstance(x, Tensor) for x in every):
            self.fixed = False  # a tensor that no field of a modifier holds
        if not read:
            return out
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotTraced(f"{func} draws random numbers")
        if func._schema.is_mutable:
            raise NotTraced(f"{func} writes into a tensor")
        if not isinstance(out, Tensor):
            raise NotTraced(f"{func} looks at a number, or has several results")
        if id(out) not in self.nodes:
            axes = frozenset[str]().union(*(node.axes for node in read))
            aligned = any(node.aligned for node in read)
            if aligned and not all(node.aligned for node in read) and not str(func).startswith("aten.index."):
                axes |= {name for node in read if not node.aligned for name in _heads_of(node)}
            if aligned and out.dim() > self.dims:
                raise NotTraced(f"{func} adds an axis")
            recorded = torch.is_grad_enabled()
            self._add(out, Node(func, tuple(args), kwargs, axes, aligned, out.dtype, out.shape, recorded))
        return out


def _key(x: Any) -> Any:
    """What distinguishes the arguments of an operation: numbers by their bits, tensors by identity."""
    if isinstance(x, (list, tuple)):
        return tuple(_key(one) for one in x)
    return id(x) if isinstance(x, (Node, Tensor)) else number_key(x)


def _heads_of(node: Node) -> str:
    """The axes of a tensor that meets scores as it is: it may have heads and batch elements."""
    shape = node.shape
    if any(n != 1 for n in shape[-2:]):
        raise NotTraced("a tensor meets the scores that no method of the region took its queries and keys from")
    return "bh" if len(shape) > 3 else "h" if len(shape) == 3 else ""
