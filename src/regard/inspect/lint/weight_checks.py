"""What lint says of the weights: scores so large that one key has all, so alike that none has more, or not finite."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from regard.core.shapes import count_of
from regard.inspect.facts.rows import Concentration, MaxScore, RelativeEntropy
from regard.inspect.lint.defect import Defect, first_place
from regard.inspect.results import FactResults

# Σ p² of a row is at most its largest weight: above this, one key has more than 99%.
SATURATED = 0.99
# Of the rows of a head that see two keys or more.
SHARE = 0.5
# An entropy this close to that of equal weights: the scores of the row differ by some 0.01.
CONSTANT = 1 - 1e-5


def saturated(seen: FactResults, visible: Tensor) -> Iterator[Defect]:
    """Heads half of whose rows give all weight to one key."""
    open_rows, sharp = visible > 1, seen[Concentration()] > SATURATED
    count, rows = (sharp & open_rows).sum(-1), open_rows.sum(-1)
    heads = (count >= SHARE * rows) & (rows > 1)
    if not bool(heads.any()):
        return
    peak = seen[MaxScore()].score
    largest = float(peak[open_rows & heads[..., None] & peak.isfinite()].abs().max())
    sharp_rows = int(count[heads].sum())
    yield Defect(
        "saturated scores",
        sharp_rows,
        f"in {int(heads.sum()):,} of {count_of(heads.numel(), 'head', ',')} (first: {first_place(heads, ('head',))}) "
        f"{sharp_rows:,} of {int(rows[heads].sum()):,} rows {'gives' if sharp_rows == 1 else 'give'} one key more than "
        "99% of the weight; "
        f"the largest score there is {largest:.4g}. Gradients through such weights vanish.",
        "Scores of random vectors grow with sqrt(dk): ScaledDot() divides by it, Dot() does not. Else normalise q and "
        "k (Cosine(scale), q and k norms), or bound the scores: score >> SoftCap(50.0).",
    )


def constant(seen: FactResults, visible: Tensor) -> Iterator[Defect]:
    """Heads all of whose rows weigh every key alike."""
    open_rows = visible > 1
    flat, rows = (seen[RelativeEntropy()] > CONSTANT) & open_rows, open_rows.sum(-1)
    heads = (flat.sum(-1) == rows) & (rows > 1)
    if not bool(heads.any()):
        return
    yield Defect(
        "constant scores",
        int(rows[heads].sum()),
        f"in {int(heads.sum()):,} of {count_of(heads.numel(), 'head', ',')} (first: "
        f"{first_place(heads, ('head',))}) all {int(rows[heads].sum()):,} rows weigh every key that they see "
        "alike, as if the scores were one number: the output is the mean of the values.",
        "Are q or k 0, or all keys one vector (a projection that was not initialised, padding alone)? Is the scale of "
        "the score too small, or applied twice?",
    )


def rows_not_finite(seen: FactResults, visible: Tensor) -> Tensor:
    """Which rows have a score that is NaN or infinite, (*batch, h, nq); -inf hides a key, and is none."""
    return (visible > 0) & ~seen[MaxScore()].score.isfinite()


def lost(seen: FactResults, visible: Tensor) -> Iterator[Defect]:
    """Rows whose scores are NaN or infinite although everything that they are made of is finite."""
    bad = rows_not_finite(seen, visible)
    if not bool(bad.any()):
        return
    yield Defect(
        "scores not finite",
        int(bad.sum()),
        f"{int(bad.sum()):,} of {count_of(bad.numel(), 'row', ',')} {'has' if int(bad.sum()) == 1 else 'have'} a score "
        "that is NaN or infinite (first: "
        f"{first_place(bad, ('head', 'query'))}), and q, k and the tensors of the score are finite.",
        "The score itself makes it: a root or a logarithm of a negative number, a division by 0, or a product beyond "
        "3.4e38. attention_scores(q, k, score=..., rows=[...]) shows the row.",
    )
