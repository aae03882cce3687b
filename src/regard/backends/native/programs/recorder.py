"""Operations of torch recorded as a graph while they run once on a few pairs."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from regard.backends.native.programs.compositions import COMPOSED
from regard.backends.native.programs.graph import Node, NotTraced
from regard.core.dispatch_mode import DispatchMode, flat, mapped
from regard.core.tracing import unseen_by_hooks
from regard.core.value import number_key
from regard.scores.algebra import Modifier

ATEN = torch.ops.aten


class Recorder(DispatchMode):
    """While it is open, every operation of torch on a tensor that it knows becomes a Node."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.nodes: dict[int, Node] = {}  # by the id of a value
        self.values: list[Tensor] = []  # which must not be that of another one meanwhile
        self.known: dict[Any, Node] = {}
        self.dims, self.fixed = dims, True
        self.quiet = False  # while the region works, not the modifier
        self.composed = COMPOSED
        self.function: str | None = None  # the name of a torch.autograd.Function that computed a part
        self.constants = False  # while a function works whose tensors nobody changes
        self.sizes = False  # whether sizes were read

    @contextmanager
    def recording(self) -> Generator[None, None, None]:
        """Records what runs inside. Raises NotTraced for any error that comes of it."""
        try:
            # also of a call without gradients: where a function forbids them is recorded
            with torch.inference_mode(False), torch.enable_grad(), unseen_by_hooks(), _Reads(self), self:
                yield
        except NotTraced:
            raise
        except Exception as error:
            raise NotTraced(f"{type(error).__name__} was raised while it ran on a few pairs") from error

    def keep(self, op: Any, args: tuple[Any, ...], axes: str, value: Tensor, aligned: bool = True) -> Tensor:
        self._add(value, Node(op, args, {}, frozenset(axes), aligned, value.dtype, value.shape))
        return value

    def keep_of_pair(self, op: Any, args: tuple[Any, ...], axes: frozenset[str], value: Tensor) -> Tensor:
        """A number of one pair."""
        self._add(value, Node(op, args, {}, axes, True, value.dtype, value.shape, pair=True))
        return value

    def given(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that modifiers or a mask hold; one that stands twice is two, known by identity."""
        found: list[Tensor] = []
        for n, t in enumerate(tensors):
            found.append(self.keep("tensor", (n,), "", self.differentiable(t), aligned=False))
        return found

    def _add(self, value: Tensor, node: Node) -> None:
        """Remembers the node of a value: an earlier one, where that computes the same of the same."""
        self.values.append(value)
        key = node.op, _key(node.args), _key(tuple(node.kwargs.items())), node.recorded, value.dim()
        self.nodes[id(value)] = self.known.setdefault(key, node)

    def node_of(self, x: Any) -> Any:
        """The Node of a tensor, where it is one."""
        return self.nodes.get(id(x), x) if isinstance(x, Tensor) else x

    @contextmanager
    def _seen_by_autograd(self) -> Generator[None, None, None]:
        """Here tensors are made of which autograd records what is computed: it knows the functions with derivatives of
        their own. In a call without gradients too, since its graph may be kept for others.
        """
        self.quiet = True
        with torch.inference_mode(False), torch.enable_grad():
            yield
        self.quiet = False

    def differentiable(self, t: Tensor) -> Tensor:
        """The same numbers; of floats autograd records what is computed."""
        with self._seen_by_autograd():
            own = t.clone() if t.is_inference() else t.detach()
            return own.requires_grad_(t.is_floating_point()).view_as(t)

    def score(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Scores of which it does, and which a function may try to write to."""
        with self._seen_by_autograd():
            return torch.zeros(shape, dtype=dtype, device="cpu").requires_grad_().clone()

    def look_for_functions(self, found: Any) -> None:
        """Remembers a torch.autograd.Function that computed a part of what a modifier returns."""
        left, known = [found.grad_fn] if isinstance(found, Tensor) and found.grad_fn is not None else [], set[Any]()
        while left:
            node = left.pop()
            known.add(node)
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                self.function = type(node).__name__.removesuffix("Backward")
            left += [other for other, _ in node.next_functions if other is not None and other not in known]

    def check_scores(self, s: Any, shape: tuple[int, ...], stage: Modifier) -> None:
        if not isinstance(s, Tensor) or s.shape != shape or not s.is_floating_point():
            raise NotTraced(f"{type(stage).__name__}.modify does not return scores of the shape that it was given")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim":  # of a tensor's device: asked where C++ allows no error
            return func(*args, **kwargs)
        if not self.quiet and self._composed(func, args, kwargs):
            with self:
                return self.composed[func._schema.name.partition("::")[2]](*args, **kwargs)
        out = func(*args, **kwargs)
        if self.quiet:
            return out
        args = mapped(args, self.node_of)
        kwargs = {name: mapped((x,), self.node_of)[0] for name, x in kwargs.items()}
        every = flat((*args, *kwargs.values()))
        read = [x for x in every if isinstance(x, Node)]
        if not self.constants and any(isinstance(x, Tensor) for x in every):
            self.fixed = False  # a tensor that no field of a modifier holds
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NotTraced(f"{func} draws random numbers")
        if not read:
            return out
        if func._schema.is_mutable:
            raise NotTraced(f"{func} writes into a tensor")
        if func == ATEN.unbind.int:
            return [self._recorded(ATEN.select.int, [args[0], (*args[1:], 0)[0], n], {}, t) for n, t in enumerate(out)]
        if func == ATEN.embedding.default and (*args[2:3], -1)[0] < 0 and True not in args[3:]:
            return self._recorded(ATEN.index.Tensor, [args[0], [args[1]]], {}, out)
        if func == ATEN.log_sigmoid_forward.default:  # whose second result is for its derivative
            return self._recorded(ATEN.log_sigmoid.default, args, kwargs, out[0]), out[1]
        if not isinstance(out, Tensor):
            raise NotTraced(f"{func} looks at a number, or has several results")
        return self._recorded(func, args, kwargs, out)

    def _composed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether an operation is recorded as others: of pairs, for which no operand can hold its results."""
        if func.namespace != "aten" or func._schema.name.partition("::")[2] not in self.composed:
            return False
        read = [self.node_of(x) for x in flat((*args, *kwargs.values()))]
        axes = frozenset[str]().union(*(node.axes for node in read if isinstance(node, Node)))
        return "s" in axes or {"i", "j"} <= axes

    def _recorded(self, func: Any, args: Any, kwargs: dict[str, Any], out: Tensor) -> Tensor:
        read = [x for x in flat((*args, *kwargs.values())) if isinstance(x, Node)]
        if id(out) not in self.nodes:
            axes = frozenset[str]().union(*(node.axes for node in read))
            aligned = any(node.aligned for node in read)
            pair = any(node.pair for node in read)
            own = not pair and not str(func).startswith("aten.index.")
            if own and aligned and not all(node.aligned for node in read):
                axes |= {name for node in read if not node.aligned for name in _heads_of(node)}
            if aligned and out.dim() > self.dims:
                raise NotTraced(f"{func} adds an axis")
            recorded = torch.is_grad_enabled()
            self._add(out, Node(func, tuple(args), kwargs, axes, aligned, out.dtype, out.shape, recorded, pair))
        return out


class _Reads(TorchFunctionMode):
    """Sees what is read of a tensor by what is no operation of torch. Raises NotTraced where that is its numbers."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READ:
            raise NotTraced(f"{func.__name__} looks at the numbers of a tensor")
        if func in _SIZES and not self._recorder.quiet:
            self._recorder.sizes = True
        return func(*args, **(kwargs or {}))


_READ = {Tensor.tolist, Tensor.numpy, Tensor.__array__}
_SIZES = {Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__, cast(Any, Tensor.shape).__get__}


class PortableRecorder(Recorder):
    """A recorder that knows numbers which what it records makes tensors of, such as torch.tensor(0.5), as nodes too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if not self.quiet and isinstance(out, Tensor) and out.dim() == 0 and id(out) not in self.nodes:
            if func == ATEN.lift_fresh.default and id(args[0]) not in self._computed:
                number = (out.item(),), {"dtype": out.dtype, "device": out.device}
                self._add(out, Node(ATEN.scalar_tensor.default, *number, frozenset(), False, out.dtype, out.shape))
            else:
                self._computed[id(out)] = out
        return out

    def __init__(self, dims: int) -> None:
        super().__init__(dims)
        self._computed: dict[int, Tensor] = {}  # of tensors that nobody knows, by id


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
