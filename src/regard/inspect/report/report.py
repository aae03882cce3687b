"""Report: what a user is shown of a model that read a text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, ClassVar

import regard.inspect.report.page as page
import regard.inspect.report.save as save
import regard.inspect.report.text as text
from regard.inspect.facts.algebra import Fact
from regard.inspect.report.content import Content
from regard.inspect.report.layer import FACTS, Layer, Looked


@dataclass(frozen=True, eq=False, repr=False)
class Report(Content):
    """The attention of a model on one text: print it, or save it as a picture, a page or numbers.

    title, model   what was run, and the class of the model
    layers         what each attention call did, first layer first
    seconds        how long running and looking took
    unit           what a token is called: "token", "byte"
    context        how many tokens have to repeat for an earlier copy to count (induction)
    notes          further facts for the first line

    >>> from types import SimpleNamespace
    >>> from regard.inspect.look_tensors import look
    >>> from regard.masks.positional import Causal
    >>> x, mask = torch.eye(4).expand(1, 2, 4, 4), Causal()
    >>> seen = look(x, x, facts=Report.FACTS, mask=mask)
    >>> report = Report.of([SimpleNamespace(name="attention", seen=seen, view=mask.on(4, batch=(1,), heads=2))],
    ...                    title="two heads", model="none", tokens="abcd")
    >>> print(report)
    two heads (none)  4 tokens, 1 × 2 heads ...
    >>> [finding.said for finding in report.findings][-1]
    'max score 0.5 at L0H0 (next head 0.5)'
    """

    FACTS: ClassVar[tuple[Fact[Any], ...]] = FACTS  # what has to be recorded

    @staticmethod
    def of(
        calls: Iterable[Looked],
        *,
        title: str,
        model: str,
        tokens: Sequence[str] = (),
        key_tokens: Sequence[str] = (),
        element: int = 0,
        seconds: float = 0.0,
        unit: str = "token",
        context: int = 2,
        notes: tuple[str, ...] = (),
    ) -> Report:
        """A report on the calls of a tape that was recorded with facts=Report.FACTS.

        tokens are the texts of the sequence, key_tokens those of the one that cross-attention reads; `element` says
        which of a batch. Raises ValueError for no call, IndexError for an element that is not there.
        """
        layers = tuple(Layer.of(call, element, tokens, key_tokens) for call in calls)
        return Report(title, model, layers, seconds, unit, context, notes)

    def text(self, width: int = 80) -> str:
        """The report for a terminal: a line of facts, grids of layers × heads, findings with their rules."""
        return text.describe(self, width)

    def save(self, path: str | PathLike[str], head: tuple[int, int] | None = None) -> None:
        """Writes the report; the suffix says as what: .png .svg .pdf .html .json .npz. See docs/report.md.

        `head` (layer, head) is the one drawn large; the striking one, where none is given. The file is written beside
        its place first and then moved there, so that it is never half. Raises ValueError for another suffix.
        """
        save.write(self, path, head)

    def __repr__(self) -> str:
        return f"Report({text.name(self)}, {text.facts(self)})"

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return page.fragment(self)
