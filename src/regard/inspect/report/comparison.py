"""Comparison: two reports on the same heads, which of these changed most, and where their mass moved."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from torch import Tensor

import regard.inspect.report.comparison_numbers as comparison_numbers
import regard.inspect.report.page_compare as page_compare
import regard.inspect.report.printed as printed
import regard.inspect.report.save as save
import regard.inspect.report.text as text
from regard.core.wrong_calls import answers_wrong_calls
from regard.inspect.report.compared import Compared
from regard.inspect.report.findings import percent
from regard.inspect.report.page_parts import framed
from regard_command.paths import COMPARED, check_suffix

LISTED = 12  # heads that are printed, those that changed most
WRITERS = {".html": page_compare.write, ".json": comparison_numbers.write_json, ".npz": comparison_numbers.write_npz}
Label = tuple[int, int] | str  # (layer, head), or as in "L3H1"


class Comparison(Compared):
    """What differs between two reports: print it, or save it as a page with signed maps, or as numbers.

    Tokens of the two texts that correspond are compared: equal ones as difflib aligns them, and those of a run that was
    replaced by as many others. The change of a head is the mean, over the queries that have a counterpart, of
    ½ Σ_j |p_ij - p'_ij|: the share of the mass that lies on other keys (the total variation distance), 0 for the same
    weights, 1 where no key is shared. A key without a counterpart has weight 0 in the other text. Beyond 512 tokens,
    maps of up to 128 × 128 cells are compared: cells of corresponding tokens where queries and keys were kept (look
    keeps those of texts of up to 2,048 tokens), otherwise each cell with the one in its place. Raises ValueError where
    the reports have unlike heads.

    >>> from types import SimpleNamespace
    >>> import regard as rg, torch
    >>> def read(x):
    ...     mask = rg.Causal()
    ...     seen, view = rg.look(x, x, facts=rg.Report.FACTS, mask=mask), mask.on(4, batch=(1,), heads=2)
    ...     call = SimpleNamespace(name="attention", seen=seen, view=view, kind="self")
    ...     return rg.Report.of([call], title="two heads", model="none")
    >>> one, other = torch.zeros(1, 2, 4, 4), torch.zeros(1, 2, 4, 4)
    >>> other[:, 1] = 9 * torch.eye(4)
    >>> [(head.name, round(head.value, 2)) for head in read(one).compare(read(other)).heads]
    [('L0H1', 0.48), ('L0H0', 0.0)]
    """

    def moved(self, head: Label, other: Label | None = None) -> Tensor:
        """The signed map of a head, (rows, cols): its weights after less those before.

        `other` is another head, whose weights are taken after. Rows and columns are those of `pair(layer, other
        layer).rows` and `.cols`: the tokens of both texts in one order. NaN in the rows of queries that have no
        counterpart. Raises ValueError for a head that does not exist, and for layers whose maps do not fit.
        """
        a, b = self.find(head, head if other is None else other)
        return self.pair(a[0], b[0]).moved(a[1], b[1])

    def between(self, head: Label, other: Label) -> float:
        """The change from one head to another, from 0 to 1; see the class. Raises ValueError as `moved`."""
        a, b = self.find(head, other)
        return self.pair(a[0], b[0]).change(a[1], b[1])

    def find(self, head: Label, other: Label) -> tuple[tuple[int, int], tuple[int, int]]:
        """The layer and number of a head before and of one after. Raises ValueError as `moved`."""
        found = [one.find(at) if isinstance(at, str) else at for one, at in ((self.before, head), (self.after, other))]
        for report, at in zip((self.before, self.after), found, strict=True):
            report.shown(at)  # refused where it is not there
        if not self.fits(found[0][0], found[1][0]):
            sizes = [
                " × ".join(map(str, side[n].maps.shape[-2:])) for side, (n, _) in zip(self.layers, found, strict=True)
            ]
            if self.aligned is not None:
                raise ValueError(
                    f"{head} and {other} read other texts; expected heads of layers with the same two texts, or texts "
                    "of up to 512 tokens, which are compared by token."
                )
            raise ValueError(
                f"the map of {head} has {sizes[0]} cells, that of {other} {sizes[1]}; expected as many. Compare heads "
                "whose layers have equally long texts, or texts of up to 512 tokens, which are compared by token."
            )
        return found[0], found[1]

    def text(self, width: int = 80) -> str:
        """The comparison for a terminal: the change of every head, findings, the heads that changed most."""
        listed = [
            f"{head.name}  {percent(head.value)} of its mass: {', '.join(self.numbers(head))}" for head in self.heads
        ]
        names = [f"before: {text.name(self.before)}", f"after:  {text.name(self.after)}"]
        said = printed.sentences(self.findings, width)
        return "\n".join([*names, "", *printed.grid(self.change), "", *said, "", *listed[:LISTED]])

    def html(self, heads: tuple[Label, Label] | None = None) -> str:
        """The page as one text; `heads` as in save."""
        return page_compare.html(self, self._shown(heads))

    @answers_wrong_calls({"head": "write heads=(before, after), such as ('L3H1', 'L3H1')"})
    def save(self, path: str | PathLike[str], heads: tuple[Label, Label] | None = None) -> None:
        """Writes the page (.html), or the numbers (.json, .npz). See docs/report.md.

        `heads`, such as ("L3H1", "L5H0"), are the head before and the head after that are shown first; the default is
        the head that changed most. Raises ValueError for another suffix, and for heads as `moved`.
        """
        path = Path(path)
        check_suffix(path, COMPARED)
        shown = self._shown(heads)
        with save.whole(path) as file:
            WRITERS[path.suffix.lower()](self, file, shown)

    def _shown(self, heads: tuple[Label, Label] | None) -> tuple[tuple[int, int], tuple[int, int]]:
        if isinstance(heads, str):
            raise TypeError(
                f"heads is {heads!r}; expected the head before and the head after: heads=({heads!r}, {heads!r})."
            )
        if heads is not None:
            return self.find(*heads)
        most = (self.heads[0].layer, self.heads[0].head)
        return most, most

    def __repr__(self) -> str:
        return f"Comparison({text.name(self.before)}, {text.name(self.after)})"

    def __str__(self) -> str:
        return self.text()

    def _repr_html_(self) -> str:
        return framed(self.html(), repr(self))
