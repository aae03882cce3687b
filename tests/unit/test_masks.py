"""Laws that hold for every mask and every composition of masks, against their dense form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import regard as rg
from regard import Cover, Mask, Positions, testing
from regard.masks.algebra import View

BATCH, HEADS = (2,), 3


@dataclass(frozen=True)
class Size:
    """One call's axes and where its queries and keys stand."""

    nq: int
    nk: int
    positions: Positions

    def view(self, mask: Mask) -> View:
        return mask.on(self.nq, self.nk, positions=self.positions, batch=BATCH, heads=HEADS)

    def dense(self, mask: Mask) -> Tensor:
        return self.view(mask).dense().expand(*BATCH, HEADS, self.nq, self.nk)


def _stand(n: int, kind: str, g: torch.Generator) -> Tensor:
    index = torch.arange(n)
    return {
        "index": index,
        "offset": index + 2**33,
        "gaps": torch.randint(0, 3, (n,), generator=g).cumsum(0),
        "unsorted": torch.randperm(n, generator=g),
        "repeated": torch.randint(-3, 4, (n,), generator=g),
        "by batch": torch.randint(0, 3, (*BATCH, n), generator=g).cumsum(-1),
        "by batch unsorted": torch.randint(-9, 9, (*BATCH, n), generator=g),
    }[kind]


STANDS = ("index", "gaps", "unsorted", "repeated", "by batch", "by batch unsorted")


@st.composite
def sizes(draw: Callable[..., object]) -> Size:
    nq, nk = draw(st.integers(0, 9)), draw(st.integers(0, 11))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    if draw(st.booleans()):
        offset = draw(st.sampled_from([0, 2**33]))
        at = rg.tail(nq, nk) if draw(st.booleans()) else rg.head(nq, nk)
        return Size(nq, nk, Positions(at.q + offset, at.k + offset))
    return Size(nq, nk, Positions(*(_stand(n, draw(st.sampled_from(STANDS)), g) for n in (nq, nk))))


def leaf(size: Size, which: int, seed: int) -> Mask:
    """One mask of each class and form, fitting that size."""
    g = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=g)

    nq, nk = size.nq, size.nk
    bound = [None, *range(5)]
    before, after = (bound[int(n)] for n in integers(0, 6, 2))
    sorted_ids = [integers(0, 2, *lead, n).cumsum(-1) for lead in ((), BATCH) for n in (nq, nk)]
    makers: list[Callable[[], Mask]] = [
        rg.Everything,
        rg.Causal,
        lambda: rg.Window(before=before, after=after),
        lambda: rg.Prefix(int(integers(-1, nk + 2))),
        lambda: rg.Prefix(integers(-1, nk + 2, *BATCH)),
        lambda: rg.Dilated(int(integers(1, 5))),
        lambda: rg.Lengths(keys=integers(0, nk + 1, *BATCH)),
        lambda: rg.Lengths(keys=integers(0, nk + 1), queries=integers(0, nq + 1, *BATCH)),
        lambda: rg.Lengths(first=integers(0, nk + 1, *BATCH), queries=integers(0, nq + 1, *BATCH)),
        lambda: rg.Lengths(first=integers(0, nk + 1, *BATCH), keys=integers(0, nk + 1)),
        lambda: rg.Documents(*sorted_ids[:2]),
        lambda: rg.Documents(*sorted_ids[2:]),
        lambda: rg.Documents(sorted_ids[0], sorted_ids[3]),
        lambda: rg.Documents(integers(0, 3, *BATCH, nq), integers(0, 3, nk)),
        lambda: rg.Retained(integers(-1, nk + 3, nk)),
        lambda: rg.Retained(integers(-1, nk + 3, *BATCH, nk)),
        lambda: rg.Retained(integers(-1, nk + 3, *BATCH, HEADS, nk)),
        lambda: rg.Where(lambda b, h, i, j: (i * 3 + j * 5 + h + b) % 7 < 3),
        *(_dense_maker(shape, g) for shape in ((1, nk), (1, nq, 1), (nk,), (), (HEADS, nq, nk), (2, 1, nq, nk))),
        _dense_maker((2, HEADS, nq, nk), g),
        _dense_maker((2, 1, 1, nk), g),
        lambda: rg.Dense(torch.ones(1, 1, nq, nk, dtype=torch.bool)),
    ]
    return makers[which % len(makers)]()


LEAVES = 27


def _dense_maker(shape: tuple[int, ...], g: torch.Generator) -> Callable[[], Mask]:
    return lambda: rg.Dense(torch.rand(shape, generator=g) < 0.6)


@st.composite
def cases(draw: Callable[..., object], count: int = 1) -> tuple[Size, list[Mask]]:
    """A size and `count` compositions of up to four masks each."""
    size = draw(sizes())
    one = st.builds(lambda which, seed: leaf(size, which, seed), st.integers(0, LEAVES - 1), st.integers(0, 2**20))
    mask = st.recursive(
        one,
        lambda m: st.one_of(
            m.map(lambda a: ~a), st.builds(lambda a, b: a & b, m, m), st.builds(lambda a, b: a | b, m, m)
        ),
        max_leaves=4,
    )
    return size, [draw(mask) for _ in range(count)]


def assert_sound(size: Size, mask: Mask, r: int, c: int) -> None:
    dense, cover = size.dense(mask), size.view(mask).cover(r, c)
    assert cover.dtype == torch.int8
    for m, rows in enumerate(range(0, size.nq, r)):
        for n, cols in enumerate(range(0, size.nk, c)):
            tile, said = dense[..., rows : rows + r, cols : cols + c], cover[..., m, n]
            assert not (tile.any(-1).any(-1) & (said == Cover.NONE)).any()
            assert not (~tile.all(-1).all(-1) & (said == Cover.ALL)).any()


def assert_rows(size: Size, mask: Mask) -> bool:
    """Whether the rows are intervals; if so they are the dense form."""
    interval, j = size.view(mask).rows(), torch.arange(size.nk)
    if interval is None:
        return False
    start, stop = (x.expand(*BATCH, HEADS, size.nq)[..., None] for x in interval)
    assert (start >= 0).all() and (stop <= size.nk).all() and (start <= stop).all()
    assert torch.equal((start <= j) & (j < stop), size.dense(mask))
    return True


@pytest.mark.parametrize("which", range(LEAVES))
@given(size=sizes(), seed=st.integers(0, 2**20), r=st.integers(1, 12), c=st.integers(1, 12))
def test_every_mask_is_sound(which: int, size: Size, seed: int, r: int, c: int) -> None:
    mask = leaf(size, which, seed)
    assert_sound(size, mask, r, c)
    assert_rows(size, mask)


@given(cases(), st.integers(1, 12), st.integers(1, 12))
def test_every_composition_is_sound(case: tuple[Size, list[Mask]], r: int, c: int) -> None:
    size, (mask,) = case
    assert_sound(size, mask, r, c)
    assert_rows(size, mask)


@given(cases(3))
def test_boolean_algebra(case: tuple[Size, list[Mask]]) -> None:
    size, (a, b, c) = case
    x, y, z = (size.dense(m) for m in (a, b, c))
    for mask, expected in (
        (a & b, x & y),
        (a | b, x | y),
        (~a, ~x),
        (~(a & b), ~x | ~y),
        (~(a | b), ~x & ~y),
        (a & (b | c), (x & y) | (x & z)),
        (a | (b & c), (x | y) & (x | z)),
        (~~a, x),
        (a & ~a, x & ~x),
        (a | ~a, x | ~x),
        (a & rg.Everything(), x),
        (rg.Everything() & a, x),
        (a | ~rg.Everything(), x),
        (~rg.Everything() | a, x),
    ):
        assert torch.equal(size.dense(mask), expected)
    assert ~~a == a and a & rg.Everything() == a == rg.Everything() & a


@given(cases())
def test_what_a_view_counts_is_what_the_dense_form_holds(case: tuple[Size, list[Mask]]) -> None:
    size, (mask,) = case
    dense, view = size.dense(mask), size.view(mask)
    assert torch.equal(view.counts(), dense.sum(-1))
    assert torch.equal(view.empty_rows(), ~dense.any(-1))
    assert view.density() == pytest.approx(float(dense.double().mean()) if dense.numel() else 0.0, abs=1e-15)
    added = view.additive(torch.float64)
    assert added.dtype == torch.float64
    assert torch.equal(
        added.expand(dense.shape), torch.zeros(dense.shape, dtype=torch.float64).masked_fill(~dense, -torch.inf)
    )


def test_what_should_be_an_interval_is_one() -> None:
    size = Size(7, 11, rg.tail(7, 11))
    lengths = rg.Lengths(keys=torch.tensor([3, 11]), queries=torch.tensor([7, 2]))
    ids = rg.Documents(torch.arange(7) // 3 + 1, torch.arange(11) // 4)
    nobody = rg.Lengths(keys=torch.tensor([0, 11]), queries=torch.tensor([7, 0]))
    for mask in (
        rg.Everything(),
        ~rg.Everything(),
        rg.Causal() & rg.Window(before=3, after=0) & lengths,
        rg.Causal() & ids,
        ~rg.Causal(),
        rg.Causal() | rg.Prefix(4),
        rg.Window(before=2, after=2) | rg.Causal(),
        ~rg.Prefix(torch.tensor([4, 9])) & rg.Causal(),
        rg.Window(before=None, after=None),
        rg.Dilated(1),
        nobody | rg.Window(before=1, after=1),
        rg.Window(before=1, after=1) | nobody,
        ~nobody,
    ):
        assert assert_rows(size, mask), mask
    for mask in (~rg.Window(1, 1), rg.Window(1, 0) | rg.Prefix(2), rg.Dilated(2), rg.Dense(torch.ones(7, 11).bool())):
        assert size.view(mask).rows() is None


def test_tiles_are_skipped_where_they_can_be() -> None:
    size, ALL, SOME, NONE = Size(6, 6, rg.head(6, 6)), Cover.ALL, Cover.SOME, Cover.NONE
    ids = torch.tensor([0, 0, 1, 1, 1, 1])
    for mask, expected in (
        (rg.Everything(), [[ALL, ALL], [ALL, ALL]]),
        (~rg.Everything(), [[NONE, NONE], [NONE, NONE]]),
        (rg.Causal(), [[SOME, NONE], [ALL, SOME]]),
        (~rg.Causal(), [[SOME, ALL], [NONE, SOME]]),
        (rg.Window(before=2, after=0), [[SOME, NONE], [SOME, SOME]]),
        (rg.Window(before=5, after=5), [[ALL, ALL], [ALL, ALL]]),
        (rg.Prefix(3), [[ALL, NONE], [ALL, NONE]]),
        (rg.Lengths(keys=torch.tensor(3), queries=torch.tensor(3)), [[ALL, NONE], [NONE, NONE]]),
        (rg.Documents(ids), [[SOME, SOME], [SOME, ALL]]),
        (rg.Documents(ids // 1 + torch.arange(6) // 3), [[SOME, NONE], [NONE, ALL]]),
        (rg.Dense(torch.arange(6) < 3), [[ALL, NONE], [ALL, NONE]]),
        (rg.Where(lambda b, h, i, j: j <= i), [[SOME, SOME], [SOME, SOME]]),
    ):
        assert size.view(mask).cover(3, 3)[0, 0].tolist() == expected, mask


def test_a_tile_of_a_mask_is_min_max_and_swap() -> None:
    every = torch.tensor([0, 1, 2], dtype=torch.int8)
    assert [int(c) for c in Cover] == every.tolist()
    a, b = rg.Causal(), rg.Prefix(3)
    size = Size(6, 6, rg.head(6, 6))
    x, y = (size.view(m).cover(2, 2) for m in (a, b))
    assert torch.equal(size.view(a & b).cover(2, 2), torch.minimum(x, y))
    assert torch.equal(size.view(a | b).cover(2, 2), torch.maximum(x, y))
    assert torch.equal(size.view(~a).cover(2, 2), 2 - x)


@pytest.mark.parametrize("other", [5, None, torch.ones(2, 2).bool(), "causal"])
@pytest.mark.parametrize("mask", [rg.Causal(), rg.Everything()], ids=repr)
def test_only_masks_join(mask: Mask, other: object) -> None:
    for join in (lambda: mask & other, lambda: mask | other):
        with pytest.raises(TypeError, match=r"& and \| join masks; one side is"):
            join()


def test_batch_axes_that_disagree_are_refused() -> None:
    with pytest.raises(rg.ShapeError, match=r"the batch axes of one mask and its positions are \(2,\) and \(3,\)"):
        (rg.Lengths(keys=torch.tensor([1, 2])) & rg.Prefix(torch.tensor([1, 2, 3]))).dense(4)
    for mask in (rg.Causal() & rg.Lengths(keys=torch.tensor([9])), ~(rg.Causal() | rg.Lengths(keys=torch.tensor([9])))):
        with pytest.raises(rg.ShapeError, match="expected numbers from 0 to 4"):
            mask.dense(4)


def test_a_mask_without_visible_says_so() -> None:
    with pytest.raises(NotImplementedError, match=r"Mask does not define visible\(at\)"):
        Mask().dense(3)


@pytest.mark.parametrize("mask", list(testing.masks(testing.frame()).values()), ids=str)
def test_no_mask_is_true_or_false(mask: Mask) -> None:
    """Causal() and Window(4, 4) would be Window(4, 4), which sees the future."""
    other = rg.Causal()
    for way in (lambda: mask and other, lambda: mask or other, lambda: not mask, lambda: bool(mask)):
        with pytest.raises(TypeError, match=r"is neither true nor false.*write &, \| and ~\.$"):
            way()


@pytest.mark.parametrize("far", [2**62 + 1, 2**63 - 1, 2**70])
@pytest.mark.parametrize("backend", [rg.Reference(), rg.Tiled(), None], ids=str)
def test_a_window_wider_than_positions_is_unbounded(far: int, backend: Any) -> None:
    q, at = torch.randn(1, 2, 6, 8), torch.arange(6) - 3
    for mask, same in ((rg.Window(0, far), rg.Window(0, None)), (rg.Window(far, 0), rg.Window(None, 0))):
        assert mask == same
        found = rg.attention(q, q, q, mask=mask, positions=Positions(at, at), backend=backend)
        allowed = at[:, None] <= at if mask.before == 0 else at[:, None] >= at
        torch.testing.assert_close(found, rg.attention(q, q, q, mask=rg.Dense(allowed), backend=rg.Reference()))
