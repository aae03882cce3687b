"""Defect: one finding of lint, and Lint, all of them."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

import regard.core.html as html


@dataclass(frozen=True)
class Defect:
    """What looks wrong in a call.

    name    what kind it is: see `regard.lint`
    number  how often: rows, pairs, keys or numbers, as `said` tells
    said    a sentence with the number, and where it is seen first
    cure    what to do about it
    """

    name: str
    number: int
    said: str
    cure: str

    def __str__(self) -> str:
        lines = (f"{self.name}: {self.said}", f"-> {self.cure}")
        return "\n".join(
            textwrap.fill(line, 110, initial_indent=indent, subsequent_indent="     ", break_on_hyphens=False)
            for indent, line in zip(("", "  "), lines, strict=True)
        )


@dataclass(frozen=True)
class Lint:
    """What `regard.lint` found, the most certain first: a sequence of Defects that prints. Empty, it is false.

    >>> Lint(())
    nothing found
    >>> bool(Lint(()))
    False
    """

    defects: tuple[Defect, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The kind of each."""
        return tuple(defect.name for defect in self.defects)

    def __len__(self) -> int:
        return len(self.defects)

    def __iter__(self) -> Iterator[Defect]:
        return iter(self.defects)

    def __getitem__(self, n: int) -> Defect:
        return self.defects[n]

    def __str__(self) -> str:
        return "\n".join(map(str, self.defects)) or "nothing found"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """Its defects for a notebook: a row each, with the cure."""
        rows = [(one.name, f"{one.number:,}", one.said, one.cure) for one in self.defects]
        found = html.table(rows, ("name", "number", "what is found", "cure")) if rows else html.quiet("nothing found")
        return html.panel("Lint", found)


def first_place(where: Tensor, names: tuple[str, ...]) -> str:
    """The first True of a boolean tensor, its axes by name; further axes in front are the batch's.

    >>> import torch
    >>> first_place(torch.tensor([[[False, False], [False, True]]]), ("head", "query"))
    'batch 0, head 1, query 1'
    """
    index = [int(n) for n in where.nonzero()[0].tolist()]
    lead, own = index[: len(index) - len(names)], index[len(index) - len(names) :]
    batch = [f"batch {', '.join(map(str, lead))}"] if lead else []
    return ", ".join([*batch, *(f"{name} {n}" for name, n in zip(names, own, strict=True))])


def of_heads(x: Tensor) -> tuple[Tensor, tuple[str, ...]]:
    """x (*batch, h, n), and the name of its head axis; without that axis where all heads are alike."""
    alike = bool((x == x[..., :1, :]).all())
    return (x[..., 0, :], ()) if alike else (x, ("head",))
