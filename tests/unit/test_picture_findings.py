"""Findings about an image: by patches, in place of what is said of texts."""

from __future__ import annotations

import pytest
import torch

import regard as rg
import sample_reports as reports
from regard.inspect.report.picture import Picture
from regard.inspect.report.picture_findings import near

ROWS, COLUMNS = 5, 7


def report(k: torch.Tensor, special: int = 1, q: torch.Tensor | None = None) -> rg.Report:
    """Of queries that are one-hot, so that k is the scores: (heads, n, n)."""
    n = k.shape[-2]
    assert n == special + ROWS * COLUMNS
    q = torch.eye(n).expand(1, len(k), n, n) * n**0.5 if q is None else q
    names = ["[CLS]", "[special 1]"][:special] + [f"{r},{c}" for r in range(ROWS) for c in range(COLUMNS)]
    picture = Picture.of(torch.rand(3, 50, 70), ROWS, COLUMNS, special)
    return rg.Report.of([reports.call(q, k.mT[None])], title="image", model="Made", tokens=names, picture=picture)


def scores(heads: int, special: int) -> torch.Tensor:
    n = special + ROWS * COLUMNS
    return torch.rand(heads, n, n, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("special", [0, 1, 2])
def test_near_is_the_share_of_patches_that_look_at_one_around(special: int) -> None:
    k = scores(2, special)
    found = report(k, special)
    assert found.picture is not None
    share, chance, count = near(found.layers[0], found.picture)

    def beside(a: int, b: int) -> bool:
        (r, c), (s, d) = divmod(a, COLUMNS), divmod(b, COLUMNS)
        return max(abs(r - s), abs(c - d)) == 1

    patches = range(ROWS * COLUMNS)
    heaviest = k.argmax(-1)[:, special:] - special
    for head in range(2):
        hits = [int(heaviest[head, a]) >= 0 and beside(a, int(heaviest[head, a])) for a in patches]
        assert float(share[head]) == pytest.approx(sum(hits) / len(patches))
    around = sum(beside(a, b) for a in patches for b in patches) / len(patches)
    assert float(chance[0]) == pytest.approx(around / (special + len(patches))) and count == len(patches)


def test_a_head_that_looks_at_the_patch_beside_is_named() -> None:
    k = scores(2, 1)
    for row in range(ROWS):
        for column in range(COLUMNS):
            beside = column + 1 if column + 1 < COLUMNS else column - 1
            k[1, 1 + row * COLUMNS + column, 1 + row * COLUMNS + beside] = 20
    said = [finding.said for finding in report(k).findings]
    assert said[0].startswith("near-patch heads: L0H1 (100%, ")


def test_cls_and_the_patches_that_it_looks_at() -> None:
    k = scores(3, 1)
    k[0, 0, 9] = k[2, 0, 9] = 6
    k[1, 0, 0] = 30  # at itself: not a patch
    found = report(k)
    entropy = found.layers[0].entropy[:, 0].exp()
    best = min((0, 2), key=lambda head: float(entropy[head]))
    said = [finding.said for finding in found.findings]
    assert f"[CLS] looks at the fewest patches in L0H{best}: the equivalent of {entropy[best]:.3g} of 36 keys" in said
    assert any(one.startswith("patch ‘1,1’ is the heaviest key of [CLS] in 2 of 3 heads") for one in said)
    assert found.shown()[0].name == f"L0H{best}" and "[CLS] looks at" in found.shown()[1]


@pytest.mark.parametrize("special", [0, 1])
def test_nothing_is_said_of_induction_or_of_the_token_before(special: int) -> None:
    found = report(scores(2, special), special)
    text = str(found).lower()
    assert not any(word in text for word in ("induction", "previous", "next-token", "next token", "first token"))
    assert ("[cls]" in text) == (special == 1)
    assert [grid.title for grid in found.summary][1] == ("[CLS]" if special else "max score")


def test_layers_that_do_not_read_the_whole_image_have_no_near_patches() -> None:
    n = 1 + ROWS * COLUMNS
    pooled = torch.randn(1, 2, 1, 8), torch.randn(1, 2, n, 8)
    whole = torch.randn(2, 1, 2, n, 8).unbind()
    picture = Picture.of(torch.rand(3, 50, 70), ROWS, COLUMNS, 1)
    calls = [reports.call(*whole, name="a"), reports.call(*pooled, name="b")]
    found = rg.Report.of(calls, title="image", model="Made", picture=picture)
    assert near(found.layers[1], picture)[0].tolist() == [0.0, 0.0]
    assert found.findings[0].said.startswith("near-patch heads: none; the nearest is L0H")
