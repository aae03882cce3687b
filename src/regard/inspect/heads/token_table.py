"""TokenTable: for each of some tokens, the tokens that a matrix of a head pairs it with."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import regard.core.html as html
from regard.core.shapes import blocks, count_of
from regard.inspect.report.findings import shown

ROOM = 1 << 24  # numbers of a block of rows × vocabulary


@dataclass(frozen=True, eq=False, repr=False)
class TokenTable:
    """Rows of a circuit: for each of t tokens, the k tokens with the largest numbers; `print` it.

    what, does  what the rows say: "L3H1 reads", "and raises"
    tokens      (t,) ids of the rows
    ids         (t, k) ids, largest first
    scores      (t, k) their numbers, in the dtype of the embedding
    rank        (t,) how many tokens of the vocabulary have a larger number than the row's token itself
    texts       the texts of the tokens, and of the ids
    """

    what: str
    does: str
    tokens: Tensor
    ids: Tensor
    scores: Tensor
    rank: Tensor
    texts: list[str]
    others: list[list[str]]

    def __repr__(self) -> str:
        rows = count_of(len(self.tokens), "token")
        return f"TokenTable({self.what} {rows} {self.does} {self.ids.shape[1]} each)"

    def __str__(self) -> str:
        head, cells = self._cells()
        rows = [head, *cells]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
        return "\n".join("  ".join(row).rstrip() for row in padded)

    def _repr_html_(self) -> str:
        """A row for each token, for a notebook."""
        head, rows = self._cells()
        return html.panel(f"{self.what} a token {self.does} others", html.table(rows, head))

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        head = [self.what, self.does, "rank of itself"]
        rows = [
            [shown(text), "  ".join(map(shown, others)), f"{rank:,}"]
            for text, others, rank in zip(self.texts, self.others, self.rank.tolist(), strict=True)
        ]
        return head, rows


def heaviest(rows: Tensor, columns: Tensor, own: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of rows · columns^T the k largest numbers of each row, and the rank of its own column.

    rows (t, d), columns (vocabulary, d), own (t,) a column for each row -> ids (t, k), scores (t, k), ranks (t,): how
    many columns have a larger number. At most ROOM numbers of the product exist at once.
    """
    found: list[tuple[Tensor, Tensor, Tensor]] = []
    for part in blocks(len(rows), max(ROOM // len(columns), 1)):
        product = rows[part] @ columns.T
        scores, ids = product.topk(k, -1)
        mine = product.gather(-1, own[part, None])
        found.append((ids, scores, (product > mine).sum(-1)))
    ids, scores, ranks = zip(*found, strict=True) if found else ((own.new_zeros(0, k),), (rows[:0, :0],), (own,))
    return torch.cat(ids), torch.cat(scores), torch.cat(ranks)
