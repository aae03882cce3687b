"""Functions of a pair, scores and masks as FlexAttention takes them, and sums over features: for all candidates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from benchmarks.cases import Case

Mod = Callable[..., Tensor]
WIDE, REACH, TABLE = 64, 6, 64  # tokens of a row of an image; rows and columns around a token; distances of a table


@dataclass(frozen=True)
class PairFunctions:
    """What makes score(s, b, h, i, j), with what is learned as a last argument if anything is, and mask(b, h, i, j).

    term(q, k): what one feature adds to s, which is their scaled dot product where there is no term.
    """

    score: Callable[[Case], Mod] | None = None
    mask: Callable[[Case], Mod] | None = None
    term: Mod | None = None


def _alibi(case: Case) -> Mod:
    return lambda s, b, h, i, j: s - torch.exp2(-8.0 * (h + 1) / case.heads) * (i - j)


def _two(case: Case) -> Mod:
    return lambda s, b, h, i, j: s * torch.sigmoid(s)


def _ten(case: Case) -> Mod:
    def mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        near = (i - j).abs()
        s = 8.0 * torch.tanh((s - 0.01 * near) / 8.0)
        return torch.where(near % 4 == 0, s, s * 0.5)

    return mod


def _gates(case: Case) -> Mod:
    random = torch.Generator().manual_seed(1)
    query, key = torch.randn(2, case.batch, case.heads, case.shape[-2], generator=random)
    return lambda s, b, h, i, j: s * torch.sigmoid(query[b, h, i]) + key[b, h, j]


def _table(case: Case) -> Mod:
    return lambda s, b, h, i, j, table: s * torch.sigmoid(s) + table[(i - j).clamp(-TABLE, TABLE) + TABLE, h]


def _neighbours(case: Case) -> Mod:
    high = case.shape[-2] // WIDE

    def mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        y, x = (i // WIDE).clamp(REACH, high - 1 - REACH), (i % WIDE).clamp(REACH, WIDE - 1 - REACH)
        return ((y - j // WIDE).abs() <= REACH) & ((x - j % WIDE).abs() <= REACH)

    return mod


def _manhattan(q: Tensor, k: Tensor) -> Tensor:
    return (q - k).abs() / -8.0


def _dilated(case: Case) -> Mod:
    return lambda b, h, i, j: ((i - j).abs() <= 256) & ((i - j) % 4 == 0)


def _by_head(case: Case) -> Mod:
    return lambda b, h, i, j: (i - j).abs() <= 32 * (h + 1)


FUNCTIONS = {
    "alibi": PairFunctions(_alibi),
    "two operations": PairFunctions(_two),
    "ten operations": PairFunctions(_ten),
    "gates": PairFunctions(_gates),
    "learned table": PairFunctions(_table),
    "neighbours": PairFunctions(mask=_neighbours),
    "dilated": PairFunctions(mask=_dilated),
    "wider by head": PairFunctions(mask=_by_head),
    "ten operations, neighbours": PairFunctions(_ten, _neighbours),
    "L1 distance": PairFunctions(term=_manhattan),
    "L1 distance, ten operations": PairFunctions(_ten, term=_manhattan),
}


def score_of(case: Case) -> Mod | None:
    """The score of a case, of (s, b, h, i, j) or (s, b, h, i, j, learned); None where it has none of its own."""
    made = FUNCTIONS[case.what].score if case.what in FUNCTIONS else None
    return None if made is None else made(case)


def mask_of(case: Case) -> Mod | None:
    """The mask of a case; None where it has none of its own."""
    made = FUNCTIONS[case.what].mask if case.what in FUNCTIONS else None
    return None if made is None else made(case)


def term_of(case: Case) -> Mod | None:
    """What a feature adds to the scores of a case; None where they are scaled dot products."""
    return FUNCTIONS[case.what].term if case.what in FUNCTIONS else None


def score_mod(case: Case, learned: Tensor | None) -> Mod | None:
    """The score as FlexAttention takes it."""
    fn = score_of(case)
    return fn if fn is None or learned is None else lambda s, b, h, i, j: fn(s, b, h, i, j, learned)


def indices(case: Case, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """b, h, i, j of some rows, which broadcast to (batch, heads, rows, nk)."""
    b, h = torch.arange(case.batch)[:, None, None, None], torch.arange(case.heads)[:, None, None]
    return b, h, rows[:, None], torch.arange(case.keys)


@lru_cache
def visible_pairs(case: Case) -> int | None:
    """How many pairs the mask of a case shows, of all heads; None where it has none of its own."""
    mask = mask_of(case)
    if mask is None:
        return None
    full = (case.batch, case.heads, 1, case.keys)
    rows = torch.arange(case.shape[-2]).split(1)
    return sum(int(mask(*indices(case, row)).expand(full).sum()) for row in rows)
