"""A call on some of its heads: those heads of the whole call, whatever the score and the mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

import regard as rg
from needed import needs_kernels
from regard.core.region import Region, Tiling
from regard.masks.algebra import cover_of
from regard.parallel.call_on_heads import mask_of_heads, score_of_heads
from regard.parallel.heads import HeadShare
from regard.scores.modifiers import Modifier
from regard.testing import Case, draw, frame, masks, scores

AT = frame(heads=6)
KEY_HEADS = 3


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("heads", [(7, 7), (8, 2), (12, 3), (30, 5), (11, 1)])
def test_split_gives_each_head_to_one_rank(heads: tuple[int, int], ranks: int) -> None:
    h, hk = heads
    shares = HeadShare.split(h, hk, ranks)
    assert [share.first for share in shares] == [sum(s.count for s in shares[:n]) for n in range(ranks)]
    assert sum(share.count for share in shares) == h and min(share.count for share in shares) >= 1
    for share in shares:
        group = share.count // len(share.key_heads)
        read = [share.key_heads[i // group] for i in range(share.count)]
        assert read == [(share.first + i) // (h // hk) for i in range(share.count)]


def test_split_is_even_where_it_can_be() -> None:
    assert [s.count for s in HeadShare.split(12, 3, 2)] == [6, 6]
    assert [s.key_heads for s in HeadShare.split(12, 2, 4)] == [(0,), (0,), (1,), (1,)]
    assert [s.key_heads for s in HeadShare.split(8, 4, 2)] == [(0, 1), (2, 3)]
    assert [s.key_heads for s in HeadShare.split(8, 2, 3)] == [(0,), (0, 0, 1), (1,)]


@dataclass(frozen=True)
class Tilted(Modifier):
    """A modifier of one's own, with a number a head, a number a pair, and the number of the head."""

    by_head: Tensor
    by_pair: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s + at.heads(self.by_head) * at.pairs(self.by_pair) + (at.h % 3) * (at.i - at.j)


@dataclass(frozen=True)
class Far(rg.Mask):
    """A mask of one's own, with a number a pair, that knows tiles."""

    by_pair: Tensor

    def visible(self, at: Region) -> Tensor:
        return at.pairs(self.by_pair) > 0

    def cover(self, at: Tiling) -> Tensor:
        least, most = at.pairs(self.by_pair)
        return cover_of(none=most <= 0, all_=least > 0)


BLOCKS = torch.zeros(6, 13, 17)
BLOCKS[torch.arange(6) % 2 == 0, :, 3:] = 1  # whole tiles, of every other head
KEYED = rg.Additive(None, torch.randn(KEY_HEADS, 7, 7).double(), torch.randn(6, 7).double())
OWN = rg.ScaledDot() >> Tilted(torch.linspace(-1, 1, 6).double(), torch.linspace(0, 2, 6 * 13 * 17).reshape(6, 13, 17))
SCORES = {**scores(AT), "own": OWN, "Additive by key head": KEYED}
MASKS = {**masks(AT), "own": Far(BLOCKS)}


def of_heads(case: Case, share: HeadShare) -> Case:
    return replace(
        case,
        q=share.of(case.q, -3),
        k=share.of_keys(case.k, -3),
        v=share.of_keys(case.v, -3),
        score=score_of_heads(case.score, share),
        mask=mask_of_heads(case.mask, share),
    )


def check(case: Case, backend: rg.Reference | rg.Tiled) -> None:
    whole = run(case, backend)
    for share in HeadShare.split(6, KEY_HEADS, 4):
        found = run(of_heads(case, share), backend)
        torch.testing.assert_close(found, share.of(whole, -3), rtol=0, atol=1e-13)


def run(case: Case, backend: rg.Reference | rg.Tiled) -> Tensor:
    return rg.attention(
        case.q, case.k, case.v, score=case.score, mask=case.mask, positions=case.positions, backend=backend
    )


@pytest.mark.parametrize("name", SCORES)
def test_scores(name: str) -> None:
    check(draw(AT, key_heads=KEY_HEADS, score=SCORES[name]), rg.Reference())


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    check(draw(AT, key_heads=KEY_HEADS, mask=MASKS[name]), rg.Tiled())


@pytest.mark.parametrize("name", ["own", "Dense", "Not"])
def test_covers(name: str) -> None:
    whole = MASKS[name].cover(AT.tiling(4, 5)).expand(5, 6, 4, 4)
    for share in HeadShare.split(6, KEY_HEADS, 4):
        at = replace(AT, heads=share.count).tiling(4, 5)
        found = mask_of_heads(MASKS[name], share).cover(at)
        assert torch.equal(found.expand(5, share.count, 4, 4), share.of(whole, -3))


@pytest.mark.parametrize("seed", [7, (5 << 40) + 77, (1 << 62) - 5])
@pytest.mark.parametrize("backend", [rg.Tiled(), rg.Native()], ids=["tiled", "native"])
def test_dropout_is_that_of_the_heads(seed: int, backend: rg.Tiled | rg.Native) -> None:
    q, k = torch.randn(2, 6, 13, 8), torch.zeros(2, 6, 13, 8)
    v = torch.eye(13).expand(2, 6, 13, 13)  # so that the output is the weights
    dropout = rg.Dropout(0.4, seed=seed)
    whole = rg.attention(q, k, v, dropout=dropout, backend=backend)
    some = rg.attention(q[:, 2:], k[:, 2:], v[:, 2:], dropout=dropout.from_head(2), backend=backend)
    assert torch.equal(some, whole[:, 2:]) and bool((some == 0).any())


@dataclass(frozen=True)
class Gated(rg.Similarity):
    gate: Tensor

    def compare(self, q: Tensor, k: Tensor, at: Region) -> Tensor:
        return q @ k.mT * self.gate


@dataclass(frozen=True)
class GatedByHead(Gated):
    head_axes: ClassVar[Mapping[str, int] | None] = {"gate": -3}


@pytest.mark.parametrize("kind", [Gated, type("Derived", (GatedByHead,), {})])
def test_a_similarity_of_ones_own_is_refused_if_its_class_does_not_name_its_head_axes(kind: type[Gated]) -> None:
    with pytest.raises(rg.Unsupported, match=r"head_axes = \{'w': -2\}"):
        score_of_heads(kind(torch.rand(4, 1, 1)), HeadShare.split(4, 4, 2)[0])


def test_a_similarity_of_ones_own_names_its_head_axes() -> None:
    q, k, v, gate = torch.randn(1, 4, 7, 8), torch.randn(1, 4, 9, 8), torch.randn(1, 4, 9, 8), torch.rand(4, 1, 1)
    whole = rg.attention(q, k, v, score=GatedByHead(gate))
    for share in HeadShare.split(4, 4, 2):
        score = score_of_heads(GatedByHead(gate), share)
        found = rg.attention(*(share.of(t, -3) for t in (q, k, v)), score=score)
        torch.testing.assert_close(found, share.of(whole, -3))


WHERE = rg.Where(lambda b, h, i, j: (i + 2 * j + h) % 3 != 0)


@needs_kernels
@pytest.mark.parametrize("mask", [rg.Causal(), WHERE, WHERE & rg.Causal()], ids=["causal", "where", "where and causal"])
def test_a_score_and_a_mask_of_ones_own_are_programs_of_some_heads(mask: rg.Mask) -> None:
    """Values and gradients are those of the whole."""
    q, k, v = (torch.randn(2, heads, 29, 8).double() for heads in (6, KEY_HEADS, KEY_HEADS))
    by_head, by_pair = torch.linspace(-1, 1, 6).double(), torch.linspace(0, 2, 6 * 29 * 29).reshape(6, 29, 29).double()
    inputs = [t.requires_grad_() for t in (q, k, v, by_head, by_pair)]
    whole = rg.attention(q, k, v, score=rg.ScaledDot() >> Tilted(by_head, by_pair), mask=mask, backend=rg.Reference())
    weights = torch.randn_like(whole)
    true = torch.autograd.grad((whole * weights).sum(), inputs)
    sums = [torch.zeros_like(t) for t in inputs]
    for share in HeadShare.split(6, KEY_HEADS, 4):
        single = [t.detach().float().requires_grad_() for t in inputs]
        tilted = rg.ScaledDot() >> Tilted(*single[3:])
        own = share.of(single[0], -3), share.of_keys(single[1], -3), share.of_keys(single[2], -3)
        options = {"score": score_of_heads(tilted, share), "mask": mask_of_heads(mask, share)}
        plan = rg.explain(*own, **options)
        assert plan.backend == rg.Native() and "a program of" in dict(plan.facts)["modifiers as"]
        assert (mask.rule() is not None) == ("a program of" not in dict(plan.facts)["mask as"])
        assert dict(plan.facts)["backward"] == "the same kernels"
        out = rg.attention(*own, **options)
        torch.testing.assert_close(out.double(), share.of(whole, -3), rtol=0, atol=1e-5)
        found = torch.autograd.grad((out * share.of(weights, -3)).sum(), single)
        sums = [a + b for a, b in zip(sums, found, strict=True)]
    for a, b in zip(sums, true, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
