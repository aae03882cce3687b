"""Where queries and keys stand, and the sentence when nobody said so."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch

import regard as rg
from regard import Positions, ShapeError, head, tail
from regard.core.positions import resolve_positions


def test_head_and_tail() -> None:
    assert head(2, 4) == Positions(torch.arange(2), torch.arange(4))
    assert tail(2, 4) == Positions(torch.tensor([2, 3]), torch.arange(4))
    assert tail(3, 2).q.tolist() == [-1, 0, 1]
    assert tail(3, 3) == head(3, 3)
    assert head(0, 0).q.numel() == 0
    assert tail(2, 3, start=7) == Positions(torch.tensor([8, 9]), torch.tensor([7, 8, 9]))


def test_keys_that_do_not_begin_at_0_are_seen_as_where_they_stand() -> None:
    q, k = torch.randn(3, 8), torch.randn(17, 8)
    for mask in (rg.Causal() & rg.Window(before=4, after=0), rg.Causal() | rg.Prefix(9)):
        late = rg.attention(q, k[11:], k[11:], mask=mask, positions=tail(3, 6, start=11))
        hidden = rg.Dense(torch.arange(17).ge(11).expand(3, -1))
        torch.testing.assert_close(late, rg.attention(q, k, k, mask=mask & hidden, positions=tail(3, 17)))


def test_the_tail_of_each_sequence() -> None:
    expected = Positions(torch.tensor([[5, 6], [1, 2]]), torch.arange(7))
    for lengths in ([7, 3], (7, 3), torch.tensor([7, 3]), torch.tensor([7, 3], dtype=torch.int32)):
        assert tail(2, lengths) == expected
    assert tail(2, [1]) == Positions(torch.tensor([[-1, 0]]), torch.arange(1))
    assert tail(1, [0, 2], start=5) == Positions(torch.tensor([[4], [6]]), torch.tensor([5, 6]))
    assert tail(0, [7, 3]).q.shape == (2, 0)


def test_the_tail_of_each_sequence_stays_numbers_until_somebody_reads_it() -> None:
    p = tail(2, [7, 3])
    for twin in (p, copy.copy(p), copy.deepcopy(p), pickle.loads(pickle.dumps(p))):
        assert twin.span is not None and twin.span.by_sequence() and twin.span.offset() == (5, 1)
        assert not {"q", "k"} & twin.__dict__.keys()
    assert p == tail(2, [7, 3]) != tail(2, [7, 4]) and hash(p) == hash(tail(2, [7, 3]))
    assert repr(p) == "Positions(q=int64[2, 2], k=int64[7])"
    assert p.span is not None and not p.consecutive
    p.q.add_(1)  # a tensor of its own
    assert p.span is not None and p == Positions(torch.tensor([[5, 6], [1, 2]]), torch.arange(7))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_reading_positions_changes_nothing(mode: Any) -> None:
    with mode():
        p = tail(2, [7, 3])
        before = dict(p.__dict__)
        assert p.q.shape == (2, 2) and p.k.shape == (7,) and not p.consecutive
    assert p.__dict__ == before and p.span is not None


@pytest.mark.parametrize(
    ("lengths", "error", "said"),
    [
        (torch.ones(2), TypeError, "tail: nk has dtype torch.float32; expected integers"),
        (torch.ones(2).bool(), TypeError, "tail: nk has dtype torch.bool; expected integers"),
        (torch.ones(2, 3).long(), ShapeError, r"tail: nk has shape \(2, 3\); expected a number, or lengths \(batch,\)"),
        ([2, 1.5], TypeError, r"tail: nk is \[2, 1.5\]; expected integers: a list of numbers, or a tensor"),
        ([True], TypeError, r"tail: nk is \[True\]; expected integers"),
        ([2, -1], ValueError, r"tail: nk is \[2, -1\]; expected lengths of 0 or more"),
        ([], ValueError, r"tail: nk is \[\]; expected lengths of 0 or more, of one sequence at least"),
        (torch.zeros(0).long(), ValueError, "of one sequence at least"),
    ],
)
def test_lengths_that_are_none_are_refused(lengths: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        tail(1, lengths)


def test_positions_are_values() -> None:
    p = tail(2, 4)
    assert p == tail(2, 4) != head(2, 4) and hash(p) == hash(tail(2, 4))
    assert pickle.loads(pickle.dumps(p)) == p
    assert repr(p) == "Positions(q=int64[2], k=int64[4])"


@pytest.mark.parametrize("name", ["q", "k"])
def test_what_is_no_integer_is_refused(name: str) -> None:
    good = {"q": torch.arange(2), "k": torch.arange(2)}
    for bad, error, said in (
        (torch.ones(2), TypeError, f"Positions.{name} has dtype torch.float32; expected integers"),
        (torch.ones(2).bool(), TypeError, f"Positions.{name} has dtype torch.bool"),
        ([0, 1], TypeError, f"Positions.{name} is a list"),
        (torch.tensor(3), ShapeError, rf"Positions.{name} has shape \(\); expected \(n,\)"),
    ):
        with pytest.raises(error, match=said):
            Positions(**{**good, name: bad})


def test_missing_positions_are_refused_with_both_readings() -> None:
    q, k = torch.zeros(4, 8), torch.zeros(9, 8)
    said = (
        "4 queries meet 9 keys under Causal(), and their positions are not given. Pass\n"
        "  positions=tail(4, 9) if the queries are the last 4 tokens (decoding), or positions=head(4, 9) if they are "
        "the first."
    )
    for ask in (
        lambda: rg.attention(q, k, k, mask=rg.Causal()),
        lambda: rg.attention(q, k, k, mask=rg.Causal(), backend=rg.Reference()),
        lambda: rg.Causal().dense(4, 9),
    ):
        with pytest.raises(ShapeError, match=f"^{re.escape(said)}$"):
            ask()
    score = rg.ScaledDot() >> rg.Alibi(torch.ones(1))
    with pytest.raises(ShapeError, match=r"under ScaledDot\(\) >> Alibi"):
        rg.attention(q, k, k, score=score)


def test_what_compares_no_positions_needs_none() -> None:
    q, k = torch.randn(4, 8), torch.randn(9, 8)
    coordinates = rg.Alibi(torch.ones(1), torch.randn(9, 2), torch.randn(4, 2))
    for mask in (rg.Everything(), rg.Lengths(keys=torch.tensor(5)), ~rg.Dense(torch.ones(4, 9).bool())):
        assert rg.attention(q, k, k, mask=mask, score=rg.Dot() >> coordinates).shape == (4, 8)
    with pytest.raises(ShapeError, match="positions are not given"):
        rg.attention(q, k, k, mask=rg.Lengths(keys=torch.tensor(5)) | ~rg.Prefix(2))


@pytest.mark.parametrize(
    ("q", "k", "said"),
    [
        ((3,), (5,), r"positions.q has shape \(3,\); expected \(2,\) or \(7, 3, 2\)"),
        ((2,), (4,), r"positions.k has shape \(4,\); expected \(5,\) or \(7, 3, 5\)"),
        ((7, 2), (5,), r"positions.q has shape \(7, 2\)"),
        ((1, 7, 3, 2), (5,), r"positions.q has shape \(1, 7, 3, 2\)"),
    ],
)
def test_positions_that_do_not_fit_are_refused(q: tuple[int, ...], k: tuple[int, ...], said: str) -> None:
    given = Positions(torch.zeros(q, dtype=torch.int64), torch.zeros(k, dtype=torch.int64))
    with pytest.raises(ShapeError, match=said):
        resolve_positions(given, 2, 5, (7, 3), None, "cpu")


@pytest.mark.parametrize("lead", [(), (3,), (1, 3), (7, 1), (7, 3)])
def test_positions_follow_the_batch_axes(lead: tuple[int, ...]) -> None:
    given = Positions(torch.zeros(*lead, 2, dtype=torch.int64), torch.arange(5))
    assert resolve_positions(given, 2, 5, (7, 3), None, "cpu") == given


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_small_integers_do_not_wrap(dtype: torch.dtype) -> None:
    small = Positions(torch.arange(3).to(dtype), torch.arange(3).to(dtype))
    for mask in (rg.Window(before=1, after=1), rg.Dilated(2), ~rg.Causal()):
        assert torch.equal(mask.dense(3, positions=small), mask.dense(3))
        assert torch.equal(mask.on(3, positions=small).counts(), mask.on(3).counts())


@pytest.mark.parametrize("first", [1 << 70, -(1 << 70), (1 << 63) - 1])
def test_numbers_beyond_int64_are_refused(first: int) -> None:
    for made in (lambda: rg.tail(5, 5, start=first), lambda: rg.tail(1, [5, 5], start=first)):
        with pytest.raises(ValueError, match=r"expected numbers from -2\^62 to 2\^62"):
            made()


def test_only_differences_count_past_2_31() -> None:
    x = torch.randn(5, 7)
    score = rg.ScaledDot() >> rg.Alibi(torch.ones(1))
    for offset in (2**31 - 2, 2**33, -(2**40)):
        far = Positions(tail(5, 5).q + offset, tail(5, 5).k + offset)
        for mask in (rg.Causal(), rg.Window(before=1, after=2)):
            near = rg.attention(x, x, x, score=score, mask=mask)
            assert torch.equal(rg.attention(x, x, x, score=score, mask=mask, positions=far), near)
