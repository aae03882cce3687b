"""Content: what a report says, whatever it is written as."""

from __future__ import annotations

from abc import ABC
from dataclasses import dataclass
from functools import cached_property

from regard.core.wrong_calls import kind_of
from regard.inspect.report.findings import Findings, Head
from regard.inspect.report.grids import Grid, worth_showing
from regard.inspect.report.head_result import HeadResult
from regard.inspect.report.layer import Layer
from regard.inspect.report.picture import Picture
from regard.inspect.report.rules import PictureRules, Rules, TextRules
from regard_command.labels import parse_head


@dataclass(frozen=True, eq=False, repr=False)
class Content(ABC):
    """The data of a report and what follows from them, for the modules that write it; made as a Report only."""

    title: str
    model: str
    layers: tuple[Layer, ...]
    seconds: float = 0.0
    unit: str = "token"
    context: int = 2
    notes: tuple[str, ...] = ()
    picture: Picture | None = None
    head_results: tuple[HeadResult, ...] = ()
    second_text: int = 0

    def __post_init__(self) -> None:
        if not self.layers:
            raise ValueError("calls is empty; a report needs one attention call or more.")
        last = max(len(layer.keys) for layer in self.layers) - 1
        if not 0 <= self.second_text <= last:
            raise ValueError(f"second_text is {self.second_text}; expected the number of a token, 0 to {last}.")

    @property
    def kept(self) -> int:
        """Bytes that the facts take."""
        return sum(layer.kept for layer in self.layers)

    @property
    def inputs(self) -> int:
        """Bytes that queries and keys take, where they were kept."""
        return sum(layer.inputs for layer in self.layers)

    @property
    def dense(self) -> int:
        """Bytes that the weights would take in float32."""
        return sum(layer.dense for layer in self.layers)

    @cached_property
    def rules(self) -> Rules:
        """What is said of these layers, by what they read."""
        if self.picture is not None:
            return PictureRules(self.layers, self.picture)
        return TextRules(self.layers, self.context, self.unit)

    @cached_property
    def findings(self) -> Findings:
        """What the rules find, each with its number."""
        return Findings((*self.rules.findings(), *(said for result in self.head_results for said in result.findings)))

    @property
    def overview(self) -> tuple[Grid, ...]:
        """The grids that a picture and a page show at once: three numbers of every head, and those of head_results."""
        return (*self.summary, *self._of_results)

    @property
    def first_name(self) -> str:
        """What the first token is called."""
        return self.rules.first_name

    @cached_property
    def summary(self) -> tuple[Grid, ...]:
        """What every report says of each head: entropy, mass on the first token, largest score."""
        return self.rules.overview()

    @cached_property
    def grids(self) -> tuple[Grid, ...]:
        """All grids: with the shares of rows that are worth showing."""
        return (*self.summary, *filter(worth_showing, self.rules.shares()), *self._of_results)

    @property
    def _of_results(self) -> tuple[Grid, ...]:
        return tuple(grid for result in self.head_results for grid in result.grids)

    @cached_property
    def striking(self) -> tuple[Head, str]:
        """The head that is shown where none is named, and why."""
        return self.rules.striking()

    def shown(self, head: tuple[int, int] | None = None) -> tuple[Head, str]:
        """The head with that layer and number, or the striking one; and its title. Raises ValueError for no head."""
        if head is None:
            found, why = self.striking
            return found, f"{found.name}: {why}"
        if isinstance(head, int):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"head={head} names no layer; expected (layer, head), or a label such as 'L3H1'.")
        layer, number = head
        there = 0 <= layer < len(self.layers) and 0 <= number < self.layers[layer].heads
        if not there:
            last = len(self.layers) - 1
            most = max(one.heads for one in self.layers) - 1
            raise ValueError(
                f"there is no head L{layer}H{number}; this model has layers 0 to {last}, heads 0 to {most}."
            )
        found = Head(layer, number, 0.0, place=self.layers[layer].place)
        return found, f"{found.name}: {self.layers[layer].name}"

    def find(self, label: str) -> tuple[int, int]:
        """The layer, counted over all, and the head of a label such as L3H1, "decoder cross L3H1", or 3,1.

        Raises ValueError for no label, and for one that fits no layer, or several.
        """
        if not isinstance(label, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"the label is {kind_of(label)}; expected a str such as 'L3H1'.")
        place, head = parse_head(label)
        if isinstance(place, int):
            return place, head
        fits = [n for n, layer in enumerate(self.layers) if layer.place.lower() == place.lower()]
        if not fits:
            there = f"{self.layers[0].place} to {self.layers[-1].place}"
            several = [layer.place for layer in self.layers if layer.place.endswith(f" {place}")]
            if several:
                there = f"{', '.join(several)}; write which, as in {several[-1]}H{head}"
            raise ValueError(f"there is no layer {place} here; there are {there}.")
        return fits[0], head
