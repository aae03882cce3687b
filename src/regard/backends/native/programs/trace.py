"""Modifiers as a graph of torch's operations, recorded while they run once on a few pairs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from regard.backends.native.programs.graph import Graph, Node, flat, mapped
from regard.core.functions import settled
from regard.core.region import Frame, Region
from regard.core.value import number_key
from regard.masks.algebra import And, Mask, Not, Or
from regard.scores.algebra import Modifier
from regard.scores.modifiers import Bias

_AXES = {"i": "i", "row": "i", "j": "j", "col": "j", "b": "b", "h": "h"}  # of an index
_TAKEN = {"heads": "h", "queries": "i", "keys": "j", "sequences": "b", "pairs": "ij"}  # axes of what a region takes
_SOME = ", as in a part of a call whose queries or keys are not evenly spaced"
_DIMS = {"h": -3, "i": -2, "j": -1}


class NotTraced(Exception):
    """Why modifiers are no program, as a clause."""


def trace(stages: Sequence[Modifier], frame: Frame, dtype: torch.dtype) -> Graph:
    """The graph of the modifiers of a call. Raises NotTraced."""
    recorder = Recorder(len(frame.batch) + 3)
    region = _TracedRegion(frame, recorder)
    shape = (*frame.batch, frame.heads, *region.size)
    s = recorder.keep("score", (), "s", torch.zeros(shape, dtype=dtype, device="cpu"))
    tensors = [t for stage in stages for t in stage.tensors()]
    rest = iter(recorder.given(tensors))
    own: list[Any] = [stage.with_tensors(rest) if stage.tensors() else stage for stage in stages]
    with recorder.recording():
        for stage in own:
            pair = stage.of_pair()
            if pair is not None:
                s = recorder.keep("same", (_of_score(pair, recorder, s, dtype),), "sbhij", torch.zeros_like(s))
            elif type(stage) is Bias:
                s = _plus(s, region.pairs(stage.bias).to(dtype))
            else:
                s = stage.local(region).modify(s, region)
                recorder.check_scores(s, shape, stage)
    result = recorder.node_of(s)
    if not isinstance(result, Node):
        raise NotTraced("what its modifiers return does not depend on the pair")
    return Graph(result, recorder.fixed)


def trace_mask(mask: Mask, frame: Frame) -> Graph:
    """The graph of what a mask says of a pair. Raises NotTraced."""
    recorder = Recorder(len(frame.batch) + 3)
    region = _TracedRegion(frame, recorder)
    with recorder.recording():
        seen: Any = _visible(mask.with_tensors(iter(recorder.given(mask.tensors()))), region, recorder)
    result = recorder.node_of(seen)
    if not isinstance(result, Node) or result.value.dtype != torch.bool or not result.aligned:
        raise NotTraced("what it returns is no boolean that depends on the pair")
    return Graph(result, recorder.fixed)


def _visible(mask: Mask, region: _TracedRegion, recorder: Recorder) -> Tensor:
    """mask.visible(region), where parts of the mask may be functions of single pairs."""
    if type(mask) is And:
        return _visible(mask.a, region, recorder) & _visible(mask.b, region, recorder)
    if type(mask) is Or:
        return _visible(mask.a, region, recorder) | _visible(mask.b, region, recorder)
    if type(mask) is Not:
        return ~_visible(mask.a, region, recorder)
    pair = mask.of_pair()
    if pair is None:
        return mask.visible(region)
    node = _of_pair(pair, recorder)
    whole = torch.zeros((1,) * (recorder.dims - 2) + region.size, dtype=torch.bool, device="cpu")
    return recorder.keep("same", (node,), "".join(node.axes), whole)


def _plus(s: Tensor, x: Tensor) -> Tensor:
    """regard.scores.algebra.plus, which looks at numbers, of every pair."""
    y, most = s + x, torch.finfo(s.dtype).max
    lost = (y.abs() > most) & (s.abs() <= most) & (x.abs() <= most)
    return torch.where(lost, y.clamp(-most, most), y)


def _of_score(fn: Callable[..., Tensor], recorder: Recorder, s: Tensor, dtype: torch.dtype) -> Node:
    """fn(s, b, h, i, j) of single pairs, in the graph."""
    before = recorder.node_of(s)
    assert isinstance(before, Node)
    score = torch.zeros((), dtype=dtype, device="cpu")
    recorder.nodes[id(score)] = Node("same", (before,), {}, before.axes, True, score)
    return _of_pair(fn, recorder, score)


def _of_pair(fn: Callable[..., Tensor], recorder: Recorder, *scores: Tensor) -> Node:
    """fn(*scores, b, h, i, j) of single pairs, in the graph: all its numbers have no axes."""
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    index = [
        recorder.keep("index", (name,), _AXES[name], torch.zeros((), dtype=torch.int64, device="cpu"))
        for name in ("b", "h", "row", "col")
    ]
    recorder.constants = settled(fn)
    with TransformGetItemToIndex():
        found: Any = fn(*scores, *index)
    recorder.constants = False
    node = recorder.node_of(found)
    if not isinstance(found, Tensor) or found.dim() or not isinstance(node, Node):
        raise NotTraced("its function returns no number that depends on the pair")
    return node


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
        self._add(value, Node(op, args, {}, frozenset(axes), aligned, value))
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
            self._add(out, Node(func, tuple(args), kwargs, axes, aligned, out, torch.is_grad_enabled()))
        return out


def _key(x: Any) -> Any:
    """What distinguishes the arguments of an operation: numbers by their bits, tensors by identity."""
    if isinstance(x, (list, tuple)):
        return tuple(_key(one) for one in x)
    return id(x) if isinstance(x, (Node, Tensor)) else number_key(x)


def _heads_of(node: Node) -> str:
    """The axes of a tensor that meets scores as it is: it may have heads and batch elements."""
    shape = node.value.shape
    if any(n != 1 for n in shape[-2:]):
        raise NotTraced("a tensor meets the scores that no method of the region took its queries and keys from")
    return "bh" if len(shape) > 3 else "h" if len(shape) == 3 else ""


class _TracedRegion(Region):
    """A few queries and keys, of which the recorder knows what is asked of them."""

    def __init__(self, frame: Frame, recorder: Recorder) -> None:
        self.size: tuple[int, int] = min(frame.nq, 2), min(frame.nk, 3)
        self._recorder, self._frame = recorder, frame
        self._plain = Region(frame, slice(0, self.size[0]), slice(0, self.size[1]))
        self._row = self._col = None

    @property
    def frame(self) -> Frame:
        self._recorder.fixed = False  # it reads sizes, or positions
        return self._frame

    @property
    def rows(self) -> Any:
        raise NotTraced(f"it asks which rows a region has{_SOME}")

    @property
    def cols(self) -> Any:
        raise NotTraced(f"it asks which columns a region has{_SOME}")

    def _index(self, name: str) -> Tensor:
        value = self._quietly(lambda: getattr(self._plain, name).clone())
        return self._recorder.keep("index", (name,), _AXES[name], value)

    def _quietly(self, fn: Callable[[], Tensor]) -> Tensor:
        self._recorder.quiet = True
        try:
            return fn()
        finally:
            self._recorder.quiet = False

    def _take(self, name: str, t: Tensor) -> Tensor:
        node = self._recorder.node_of(t)
        if not isinstance(node, Node):
            self._recorder.fixed = False
        elif node.aligned:
            raise NotTraced(f"it takes {name} of what it computed for pairs")
        value = self._quietly(lambda: getattr(self._plain, name)(t))
        if value is t:
            return t
        return self._recorder.keep(
            "take", (name, node), self._axes(name, value), self._quietly(lambda: value.view_as(value))
        )

    def _axes(self, name: str, value: Tensor) -> str:
        if name != "pairs":
            return _TAKEN[name] + ("b" if value.dim() > 3 else "")
        axes = "".join(
            axis for axis, dim in _DIMS.items() if value.dim() >= -dim and self._long(axis, value.shape[dim])
        )
        return axes + ("b" if value.dim() > 3 else "")

    def _long(self, axis: str, size: int) -> bool:
        return size != 1 or {"h": self._frame.heads, "i": self._frame.nq, "j": self._frame.nk}[axis] == 1

    @property
    def i(self) -> Tensor:
        return self._index("i")

    @property
    def j(self) -> Tensor:
        return self._index("j")

    @property
    def row(self) -> Tensor:
        return self._index("row")

    @property
    def col(self) -> Tensor:
        return self._index("col")

    @property
    def b(self) -> Tensor:
        return self._index("b")

    @property
    def h(self) -> Tensor:
        return self._index("h")

    def queries(self, t: Tensor) -> Tensor:
        return self._take("queries", t)

    def keys(self, t: Tensor) -> Tensor:
        return self._take("keys", t)

    def sequences(self, t: Tensor) -> Tensor:
        return self._take("sequences", t)

    def heads(self, t: Tensor) -> Tensor:
        return self._take("heads", t)

    def pairs(self, t: Tensor) -> Tensor:
        return self._take("pairs", t)
