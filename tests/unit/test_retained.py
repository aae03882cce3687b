"""Retained: its definition pair by pair, shapes, and the ways in which a call may have it."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard import testing
from regard.core.errors import ShapeError

NQ, NK = 13, 17
AT = testing.frame(nq=NQ, nk=NK, batch=(3,), heads=4)
SHAPES = [(NK,), (3, NK), (3, 1, NK), (3, 2, NK), (3, 4, NK)]


def drawn(*shape: int) -> torch.Tensor:
    return torch.randint(-2, NK + 3, shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_definition(shape: tuple[int, ...]) -> None:
    until, at = drawn(*shape), AT.positions.q
    seen = rg.Retained(until).on(NQ, NK, batch=(3,), heads=4, positions=AT.positions).dense().expand(3, 4, NQ, NK)
    for b in range(3):
        for h in range(4):
            row = until if until.dim() == 1 else until[b] if until.dim() == 2 else until[b, h * shape[1] // 4]
            expected = [[int(at[i]) < int(row[j]) for j in range(NK)] for i in range(NQ)]
            assert seen[b, h].tolist() == expected


def test_heads_without_batch_axes() -> None:
    until = drawn(2, NK)
    seen = rg.Retained(until).on(NQ, NK, batch=(), heads=4, positions=rg.tail(NQ, NK)).dense()
    assert seen.shape == (4, NQ, NK)
    assert torch.equal(seen, torch.arange(NK - NQ, NK)[:, None] < until.repeat_interleave(2, 0)[:, None])


def test_a_call_without_heads() -> None:
    q, k, v = (torch.randn(3, n, 8) for n in (NQ, NK, NK))
    mask, at = rg.Retained(drawn(3, NK)), rg.tail(NQ, NK)
    one = rg.attention(*(t[:, None] for t in (q, k, v)), mask=mask, positions=at)[:, 0]
    torch.testing.assert_close(rg.attention(q, k, v, mask=mask, positions=at), one)
    with pytest.raises(ShapeError, match=r"Retained.until has shape \(3, 1, 17\); expected \(17,\) or \(3, 17\): a p"):
        rg.attention(q, k, v, mask=rg.Retained(drawn(3, 1, NK)), positions=at)


def test_positions_decide_and_not_indices() -> None:
    until = torch.tensor([5, 6, 7, 8])
    seen = rg.Retained(until).dense(2, 4, positions=rg.Positions(torch.tensor([6, 5]), torch.tensor([0, 9, 2, 3])))
    assert seen[0].tolist() == [[False, False, True, True], [False, True, True, True]]


def test_it_is_what_evictions_leave() -> None:
    """Keys are dropped from a cache one by one while tokens are decoded; in one call `until` says so."""
    q, k, v = (torch.randn(1, 2, 9, 8) for _ in range(3))
    evicted_at = torch.tensor([3, 9, 4, 9, 9, 6, 9, 9, 9])
    whole = rg.attention(q, k, v, mask=rg.Causal() & rg.Retained(evicted_at))
    for i in range(9):
        kept = [j for j in range(i + 1) if i < evicted_at[j]]
        alone = rg.attention(q[:, :, i : i + 1], k[:, :, kept], v[:, :, kept])
        torch.testing.assert_close(whole[:, :, i : i + 1], alone)


def test_it_is_no_pattern_and_lint_says_what_it_hides() -> None:
    x = torch.randn(1, 2, 9, 8)
    assert rg.lint(x, x, x, mask=rg.Causal() & rg.Retained(torch.full((9,), 9))).names == ()
    assert rg.lint(x, x, x, mask=rg.Causal() & rg.Retained(torch.zeros(9).long())).names == ("empty rows",)


def test_repr_picture_and_cover() -> None:
    mask = rg.Retained(torch.arange(NK))
    assert repr(mask) == f"Retained(until=int64[{NK}])"
    assert mask._repr_html_() is not None
    covers = rg.Retained(torch.tensor([0, 0, 9, 9, 2, 9])).on(6).cover(3, 2)
    assert covers[0].tolist() == [[0, 2, 1], [0, 2, 1]]


@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 1, 3), (2, 2, 3), (2, 3, 2, 3), (2, 3, 1, 3)], ids=str)
def test_it_is_drawn_with_all_of_its_axes(shape: tuple[int, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """A map for each batch element and group of heads, one after another; joined to a mask without heads too."""
    until = torch.randint(-1, 5, shape)
    for mask, sees in ((rg.Retained(until), lambda i, j: True), (rg.Causal() & rg.Retained(until), int.__ge__)):
        mask.draw(3)
        drawn = [one.split("\n") for one in capsys.readouterr().out.strip().split("\n\n")]
        each = until.reshape(-1, 3).tolist()
        expected = [["".join("·■"[i < row[j] and sees(i, j)] for j in range(3)) for i in range(3)] for row in each]
        assert drawn == expected


def test_it_is_drawn_beside_masks_that_have_heads_or_batch_axes_of_their_own() -> None:
    until, allowed = torch.randint(-1, 5, (2, 1, 3)), torch.rand(2, 4, 3, 3) < 0.5
    seen = (rg.Retained(until) & rg.Dense(allowed)).dense(3)
    assert torch.equal(seen, allowed & (torch.arange(3)[:, None] < until[..., None, :]))
    until, lengths = torch.randint(-1, 5, (2, 4, 3)), rg.Lengths(keys=[3, 1])
    seen = (lengths & rg.Retained(until)).dense(3)
    assert torch.equal(seen, lengths.dense(3) & (torch.arange(3)[:, None] < until[..., None, :]))
    with pytest.raises(ShapeError, match="where g divides the 3 heads: a position for each key"):
        rg.Retained(until).on(3, heads=3)
