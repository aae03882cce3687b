"""HeadResult: numbers of a model's heads that a report holds beside its own grids."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

from torch import Tensor
from typing_extensions import Self

import regard.core.html as html
from regard.core.shapes import count_of
from regard.inspect.report.carried_layer import CarriedLayer
from regard.inspect.report.circuit_layer import CircuitLayer
from regard.inspect.report.findings import Findings, Head
from regard.inspect.report.grids import Grid
from regard.inspect.report.layer import Layer
from regard.inspect.report.notebook import findings_table, head_figure
from regard.inspect.report.printed import grid, sentences, shelves
from regard.inspect.stacks import places

T = TypeVar("T")

WIDTH = 80


class HeadArray(NamedTuple):
    """Numbers of all heads: one tensor (h, ...) a layer, the names of its axes, and what it counts in."""

    axes: str
    unit: str
    values: tuple[Tensor, ...]


class HeadResult(ABC):
    """What was found of a model's heads besides where they look: `print` it, or put it into a report (`with_heads`).

    layers  the paths of the attention layers, in the order of their calls
    """

    layers: tuple[str, ...]

    @property
    @abstractmethod
    def grids(self) -> tuple[Grid, ...]:
        """The numbers that are shown, each as a table of layers × heads."""

    @property
    @abstractmethod
    def findings(self) -> Findings:
        """What they say in sentences."""

    @property
    @abstractmethod
    def arrays(self) -> dict[str, HeadArray]:
        """All numbers of the heads, by the names that they have in files."""

    @property
    @abstractmethod
    def numbers(self) -> dict[str, Any]:
        """What else was found, by name: numbers and texts."""

    @abstractmethod
    def reordered(self, order: Sequence[int]) -> Self:
        """The same with its layers in another order."""

    @property
    def head_counts(self) -> tuple[int, ...]:
        """How many heads each layer has."""
        return tuple(len(of_layer) for of_layer in next(iter(self.arrays.values())).values)

    @property
    def carried_by_layer(self) -> tuple[CarriedLayer, ...]:
        """What each layer carries on the report's text, where that is what was found; else none."""
        return ()

    @property
    def circuits_by_layer(self) -> tuple[CircuitLayer, ...]:
        """The circuits of each layer by token, where that is what was found; else none."""
        return ()

    @property
    def heading(self) -> str:
        """What it is of, in a line."""
        return "; ".join(dict.fromkeys(grid.label for grid in self.grids))

    def __repr__(self) -> str:
        layers, heads = count_of(len(self.head_counts), "layer"), count_of(sum(self.head_counts), "head")
        return f"{type(self).__name__}({layers}, {heads}: {self.heading})"

    def _repr_html_(self) -> str:
        """Its grids and findings for a notebook."""
        grids = [head_figure(grid.label, grid.values, grid.rows, grid.signs) for grid in self.grids]
        found = findings_table((finding.said, finding.rule) for finding in self.findings)
        return html.panel(f"{type(self).__name__}: {self.heading}", html.side_by_side(*grids), found)

    def __str__(self) -> str:
        pictures = shelves([grid(one) for one in self.grids], WIDTH)
        return "\n".join([*pictures, "", *sentences(self.findings, WIDTH)])


def matched(result: HeadResult, layers: Sequence[Layer]) -> HeadResult:
    """A result with its layers in the order of a report's; ValueError where they, heads or keys are not the same."""
    own = _counted(zip(result.layers, result.head_counts, strict=True))
    wanted = _counted((layer.name, layer.heads) for layer in layers)
    if sorted(own) != sorted(wanted):
        raise ValueError(
            f"with_heads has a {type(result).__name__} of {_listed(own)}; the report is of {_listed(wanted)}. Expected "
            "the same layers and heads: make both with one model."
        )
    found = result.reordered([own.index(one) for one in wanted])
    keys = [one.norms.shape[-1] for one in found.carried_by_layer]
    if keys and keys != [len(layer.keys) for layer in layers]:
        raise ValueError(
            f"with_heads has a {type(result).__name__} of {count_of(max(keys), 'key', ',')}; the report is of "
            f"{max(len(layer.keys) for layer in layers):,}. Expected one text: make both with it."
        )
    return found


def in_order(values: Sequence[T], order: Sequence[int]) -> tuple[T, ...]:
    """The values at these places."""
    return tuple(values[place] for place in order)


def ranked(layers: Sequence[str], values: Sequence[Tensor]) -> list[Head]:
    """All heads of layers with these paths, the largest of their values (h,) first."""
    named = places(layers)
    found = [
        Head(layer, head, value, place=named[layer])
        for layer, of_layer in enumerate(values)
        for head, value in enumerate(of_layer.tolist())
    ]
    return sorted(found, key=lambda head: -head.value)


def _counted(heads: Iterable[tuple[str, int]]) -> list[tuple[str, int, int]]:
    """Each layer with its heads and how often its name came before: a model may call one layer in several places."""
    before = Counter[str]()
    found: list[tuple[str, int, int]] = []
    for name, count in heads:
        found.append((name, count, before[name]))
        before[name] += 1
    return found


def _listed(layers: Sequence[tuple[str, int, int]]) -> str:
    first, last = (f"{name} ({count_of(heads, 'head')})" for name, heads, _ in (layers[0], layers[-1]))
    return first if len(layers) == 1 else f"{count_of(len(layers), 'layer')}, {first} to {last}"
