"""The rules by which heads are named, on weights where the answer is known."""

from __future__ import annotations

import torch

from regard.demo.findings import CONTEXT, followers, heads_above, induction, largest, previous_token


def test_previous_token_is_a_share_of_rows() -> None:
    top = torch.tensor([[0, 0, 1, 2], [0, 1, 2, 3], [0, 0, 2, 2]])
    torch.testing.assert_close(previous_token(top), torch.tensor([1.0, 0.0, 2 / 3]))
    assert previous_token(torch.zeros(2, 1, dtype=torch.int64)).tolist() == [0.0, 0.0]


def test_followers_stand_after_the_same_context() -> None:
    passage = torch.arange(CONTEXT + 3)
    tokens = torch.cat([passage, torch.tensor([99]), passage, passage])
    found = followers(tokens, 255)
    n = len(passage)
    assert all(not keys for keys in found[: n + CONTEXT])
    first = n + 1 + CONTEXT - 1  # the first byte at which CONTEXT bytes have come again
    assert found[first] == [CONTEXT]
    assert found[first + n] == [CONTEXT, n + 1 + CONTEXT]
    assert all(j <= i for i, keys in enumerate(found) for j in keys)


def test_followers_are_within_reach() -> None:
    passage = torch.arange(CONTEXT + 3)
    tokens = torch.cat([passage, torch.full((40,), 99), passage])
    assert any(followers(tokens, 60)[-3:])
    assert not any(followers(tokens, 20)[-3:])


def test_induction_counts_rows_with_an_earlier_copy() -> None:
    passage = torch.arange(20)
    tokens = torch.cat([passage, passage])
    perfect = torch.tensor([keys[-1] if keys else 0 for keys in followers(tokens, 255)])
    share, rows = induction(torch.stack([perfect, torch.zeros_like(perfect)]), tokens, 255)
    assert rows == 20 - CONTEXT + 1
    assert share.tolist() == [1.0, 0.0]


def test_induction_in_a_text_without_repetition() -> None:
    share, rows = induction(torch.zeros(2, 3, 30, dtype=torch.int64), torch.arange(30), 255)
    assert rows == 0 and share.shape == (2, 3) and not share.any()


def test_heads_are_sorted_by_share() -> None:
    shares = torch.tensor([[0.1, 0.75], [0.9, 0.2]])
    assert [str(head) for head in heads_above(shares, 0.5)] == ["L1H0 (90%)", "L0H1 (75%)"]
    assert str(largest(shares)) == "L1H0 (90%)"
