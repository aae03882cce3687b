"""Rules: what a report says of its layers, by what they read; a text or an image."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import regard.inspect.report.findings as text_findings
import regard.inspect.report.grids as text_grids
from regard.inspect.report.findings import Finding, Head
from regard.inspect.report.grids import Grid
from regard.inspect.report.layer import Layer
from regard.inspect.report.picture import CLS, Picture
from regard.inspect.report.picture_findings import (
    picture_findings,
    picture_overview,
    picture_shares,
    picture_striking,
)


class Rules(ABC):
    """Findings, grids, the head shown first and the name of the first token, of these layers."""

    layers: Sequence[Layer]

    @property
    @abstractmethod
    def first_name(self) -> str:
        """What the first token is called."""

    @abstractmethod
    def findings(self) -> tuple[Finding, ...]:
        """What the rules find, each with its number."""

    @abstractmethod
    def overview(self) -> tuple[Grid, ...]:
        """What every report says of each head: entropy, mass on the first token, largest score."""

    @abstractmethod
    def shares(self) -> tuple[Grid, ...]:
        """The shares of rows that follow a pattern."""

    @abstractmethod
    def striking(self) -> tuple[Head, str]:
        """The head that is shown where none is named, and why."""


@dataclass(frozen=True)
class TextRules(Rules):
    """Of a text, whose tokens are called `unit`; `context` of them make an induction."""

    layers: Sequence[Layer]
    context: int
    unit: str

    @property
    def first_name(self) -> str:
        return f"the first {self.unit}"

    def findings(self) -> tuple[Finding, ...]:
        return text_findings.findings(self.layers, self.context, self.unit)

    def overview(self) -> tuple[Grid, ...]:
        return text_grids.overview(self.layers, self.unit)

    def shares(self) -> tuple[Grid, ...]:
        return text_grids.shares(self.layers, self.context, self.unit)

    def striking(self) -> tuple[Head, str]:
        return text_findings.striking(self.layers, self.context, self.unit)


@dataclass(frozen=True)
class PictureRules(Rules):
    """Of an image, whose tokens are its patches and, before them, special ones."""

    layers: Sequence[Layer]
    picture: Picture

    @property
    def first_name(self) -> str:
        return CLS if self.picture.special else "the first patch"

    def findings(self) -> tuple[Finding, ...]:
        return picture_findings(self.layers, self.picture)

    def overview(self) -> tuple[Grid, ...]:
        return picture_overview(self.layers, self.picture)

    def shares(self) -> tuple[Grid, ...]:
        return picture_shares(self.layers, self.picture)

    def striking(self) -> tuple[Head, str]:
        return picture_striking(self.layers, self.picture)
