"""A region that records which indices, positions and tensors a function reads of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from regard.backends.native.programs.graph import Node, NotTraced
from regard.backends.native.programs.recorder import Recorder
from regard.core.region import Frame, Region

AXES = {"i": "i", "row": "i", "j": "j", "col": "j", "b": "b", "h": "h"}  # of an index
_TAKEN = {"heads": "h", "queries": "i", "keys": "j", "sequences": "b", "pairs": "ij"}  # axes of what a region takes
_SOME = ", as in a part of a call whose queries or keys are not evenly spaced"
_DIMS = {"h": -3, "i": -2, "j": -1}


class TracedRegion(Region):
    """A few queries and keys; the recorder notes what a function reads of them."""

    def __init__(self, frame: Frame, recorder: Recorder, more: tuple[int, int] = (0, 0)) -> None:
        """more: how many queries and keys there are beyond the usual ones."""
        self.size: tuple[int, int] = min(frame.nq, 2 + more[0]), min(frame.nk, 3 + more[1])
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
        return self._recorder.keep("index", (name,), AXES[name], value)

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
