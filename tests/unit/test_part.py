"""A mask of a whole call, restricted to some of its queries and keys, hides what the whole hides there."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import regard as rg
from needed import needs_kernels
from regard.backends.native.lower_intervals import lower_intervals
from regard.backends.native.lower_mask import MIN_ROWS_FOR_TILES
from regard.backends.native.mask_text import has_function
from regard.call.of_part import mask_of_part, score_of_part
from regard.call.part import Indices, QueriesAndKeys, select
from regard.core.positions import Positions
from regard.core.region import Frame, Region

NQ, NK = 23, 37
PARTS: dict[str, tuple[Indices | None, Indices]] = {
    "contiguous": (range(5, 16), range(11, 30)),
    "striped": (range(1, NQ, 3), range(2, NK, 4)),
    "zigzag": (torch.tensor([2, 3, 4, 17, 18]), torch.tensor([6, 7, 8, 9, 29, 30, 31])),
    "in any order": (torch.tensor([9, 0, 22, 4]), torch.tensor([30, 5, 12, 36, 0])),
    "all queries": (None, range(9, 24)),
    "no keys": (range(4, 9), range(0)),
}
LENGTHS = rg.Lengths(keys=torch.tensor([8, 31]), queries=torch.tensor([23, 12]))
SORTED = rg.Documents(torch.arange(NQ) // 5, torch.arange(NK) // 7)
MIXED = rg.Documents(torch.arange(NQ) % 3, torch.arange(NK) % 3)
MASKS = {
    "documents": SORTED,
    "mixed documents": MIXED,
    "lengths": LENGTHS,
    "causal documents": rg.Causal() & SORTED,
    "window, lengths": rg.Window(before=9, after=2) & LENGTHS,
    "all three": rg.Causal() & SORTED & LENGTHS,
    "not one interval": ~SORTED | LENGTHS,
    "dense": rg.Dense(torch.rand(2, 1, NQ, NK, generator=torch.Generator().manual_seed(0)) < 0.6),
}


def of_part(name: str) -> tuple[QueriesAndKeys, Frame]:
    """A part, and the frame of a call with it, at the positions that its tokens have in the whole."""
    part = QueriesAndKeys(*PARTS[name], NQ, NK)
    at = Positions(part.of_queries(torch.arange(NK - NQ, NK)), part.of_keys(torch.arange(NK)))
    return part, Frame((2,), 3, at.q.shape[-1], at.k.shape[-1], at)


def expected(mask: rg.Mask, part: QueriesAndKeys) -> torch.Tensor:
    whole = mask.on(NQ, NK, positions=rg.tail(NQ, NK), batch=(2,), heads=3).dense().expand(2, 3, NQ, NK)
    return select(part.of_queries(whole, -2), part.cols)


@pytest.mark.parametrize("name", list(PARTS))
@pytest.mark.parametrize("mask", list(MASKS))
def test_pairs_tiles_and_rows_agree_with_the_whole(mask: str, name: str) -> None:
    part, frame = of_part(name)
    restricted, dense = mask_of_part(MASKS[mask], part), expected(MASKS[mask], part)
    assert torch.equal(restricted.visible(frame.region()).expand(frame.shape), dense)
    tiling = frame.tiling(3, 4)
    cover = restricted.cover(tiling).expand(2, 3, *tiling.shape)
    for n, rows in enumerate(tiling.row_blocks):
        for m, cols in enumerate(tiling.col_blocks):
            tile = dense[..., rows, cols].flatten(-2)
            assert not tile.any(-1)[cover[..., n, m] == rg.Cover.NONE].any()
            assert tile.all(-1)[cover[..., n, m] == rg.Cover.ALL].all()
    interval = restricted.rows(frame)
    if interval is not None:
        col = torch.arange(frame.nk)
        inside = (col >= interval.start[..., None]) & (col < interval.stop[..., None])
        assert torch.equal(inside.expand(frame.shape), dense)


@pytest.mark.parametrize("name", ["contiguous", "striped", "zigzag", "all queries"])
@pytest.mark.parametrize(
    "mask", ["documents", "mixed documents", "lengths", "causal documents", "window, lengths", "all three"]
)
def test_the_kernels_read_intervals_or_documents_of_a_part(mask: str, name: str) -> None:
    """And so no map of its tiles is written out."""
    part, frame = of_part(name)
    assert lower_intervals(mask_of_part(MASKS[mask], part), frame) is not None


@pytest.mark.parametrize("name", list(PARTS))
@pytest.mark.parametrize("mask", list(MASKS))
def test_native_attends_as_the_whole_does(mask: str, name: str) -> None:
    part, frame = of_part(name)
    q, k, v = torch.randn(2, 3, frame.nq, 8), torch.randn(2, 3, frame.nk, 8), torch.randn(2, 3, frame.nk, 5)
    own = rg.attention(q, k, v, mask=mask_of_part(MASKS[mask], part), positions=frame.positions, backend=rg.Native())
    dense = rg.attention(q, k, v, mask=rg.Dense(expected(MASKS[mask], part)), backend=rg.Reference())
    torch.testing.assert_close(own, dense)


@dataclass(frozen=True)
class Placed(rg.Modifier):
    """A modifier of one's own, with numbers of queries, keys and pairs, and with indices and positions."""

    by_query: Tensor
    by_key: Tensor
    by_pair: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        s = s + at.queries(self.by_query) * at.keys(self.by_key) + at.pairs(self.by_pair) * at.b
        return s + 0.01 * (at.row - 2 * at.col) + 0.02 * (at.i - at.j)


@dataclass(frozen=True)
class Every(rg.Mask):
    """A mask of one's own that reads indices."""

    def visible(self, at: Region) -> Tensor:
        return (at.row + at.col) % 3 != 0


PROGRAMS: dict[str, rg.Mask] = {
    "window": rg.Window(9, 2),
    "own": Every(),
    "where": rg.Where(lambda b, h, i, j: (i + 2 * j + h) % 3 != 0) & rg.Causal(),
}


@needs_kernels
@pytest.mark.parametrize("name", ["contiguous", "striped", "all queries"])
@pytest.mark.parametrize("mask", list(PROGRAMS))
def test_a_score_and_a_mask_of_ones_own_are_programs_of_a_part(mask: str, name: str) -> None:
    """Where its queries and keys are ranges of the whole's. Values and gradients are those of the same pairs there."""
    part, frame = of_part(name)
    q, k, v = (torch.randn(2, 3, n, 8) for n in (frame.nq, frame.nk, frame.nk))
    tensors = torch.randn(NQ), torch.randn(2, NK), torch.randn(3, NQ, NK)
    found, true = list[Tensor](), list[Tensor]()
    for dtype, results in ((torch.float32, found), (torch.float64, true)):
        inputs = [t.to(dtype).requires_grad_() for t in (q, k, v, *tensors)]
        *qkv, by_query, by_key, by_pair = inputs
        if dtype == torch.float32:
            score = score_of_part(rg.ScaledDot() >> Placed(by_query, by_key, by_pair), part)
            options = {"score": score, "mask": mask_of_part(PROGRAMS[mask], part), "positions": frame.positions}
            facts = dict(rg.explain(*qkv, **options).facts)
            assert "a program of" in facts["modifiers as"] and facts["backward"] == "the same kernels"
            assert ("a program of" in facts["mask as"]) == (mask != "window" and frame.nq >= MIN_ROWS_FOR_TILES)
            out = rg.attention(*qkv, **options)
        else:
            rows, cols = part.of_queries(torch.arange(NQ)), part.of_keys(torch.arange(NK))
            at = frame.positions
            bias = (by_query[:, None] * by_key[:, None, None] + by_pair * torch.arange(2)[:, None, None, None])[
                ..., rows, :
            ][..., cols]
            bias = bias + 0.01 * (rows[:, None] - 2 * cols) + 0.02 * (at.q[:, None] - at.k)
            seen = rg.Dense(expected(PROGRAMS[mask], part))
            out = rg.attention(*qkv, score=rg.ScaledDot() >> rg.Bias(bias), mask=seen, backend=rg.Reference())
        weights = torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(dtype)
        results += [out, *torch.autograd.grad((out * weights).sum(), inputs)]
    for one, other in zip(found, true, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def test_a_part_of_any_indices_stays_on_tiles() -> None:
    part, frame = of_part("zigzag")
    q, k = torch.randn(2, 3, frame.nq, 8), torch.randn(2, 3, frame.nk, 8)
    placed = Placed(torch.randn(NQ), torch.randn(2, NK), torch.randn(3, NQ, NK))
    score = score_of_part(rg.ScaledDot() >> placed, part)
    why = rg.explain(q, k, k, score=score, positions=frame.positions)
    assert why.backend == rg.Tiled()
    assert "in a part of a call whose queries or keys are not evenly spaced" in str(why)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.parametrize("name", ["zigzag", "in any order", "striped", "all queries"])
@pytest.mark.parametrize("mask", [*MASKS, *PROGRAMS])
def test_flex_attends_as_the_whole_does(mask: str, name: str) -> None:
    """It asks about single pairs."""
    part, frame = of_part(name)
    q, k, v = torch.randn(2, 3, frame.nq, 8), torch.randn(2, 3, frame.nk, 8), torch.randn(2, 3, frame.nk, 5)
    score = score_of_part(rg.ScaledDot() >> Placed(torch.randn(NQ), torch.randn(2, NK), torch.randn(3, NQ, NK)), part)
    seen = mask_of_part((MASKS | PROGRAMS)[mask], part)
    with torch.compiler.set_stance("force_eager"):
        own, dense = (
            rg.attention(q, k, v, score=score, mask=seen, positions=frame.positions, backend=backend)
            for backend in (rg.Flex(devices=("cpu",)), rg.Reference())
        )
    torch.testing.assert_close(own, dense)


@pytest.mark.parametrize("mask", [~rg.Causal(), rg.Dense(torch.ones(NQ, NK).bool()) | rg.Causal()], ids=repr)
def test_a_part_of_regards_own_mask_is_no_function(mask: rg.Mask) -> None:
    part, _ = of_part("contiguous")
    assert not has_function(mask_of_part(mask, part))
    assert has_function(mask_of_part(mask | rg.Where(lambda b, h, i, j: i > j), part))
