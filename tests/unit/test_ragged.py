"""Lengths and Documents: pictures drawn by hand, and what they refuse."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest
import torch

import regard as rg

IDS = torch.tensor([0, 0, 1, 1, 1, 2])


def test_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    rg.Lengths(keys=torch.tensor([0, 2, 3]), queries=torch.tensor([2, 1, 0])).draw(2, 3)
    assert capsys.readouterr().out == "···\n···\n\n■■·\n···\n\n···\n···\n"
    rg.Lengths(queries=torch.tensor(1)).draw(2)
    rg.Lengths().draw(2)
    assert capsys.readouterr().out == "■■\n··\n■■\n■■\n"


def test_lengths_in_lists() -> None:
    keys, queries = [0, 2, 3], [2, 1, 0]
    k, q = torch.tensor(keys), torch.tensor(queries)
    for lists, tensors in (
        (rg.Lengths(keys), rg.Lengths(k)),
        (rg.Lengths(tuple(keys)), rg.Lengths(k)),
        (rg.Lengths(queries=queries), rg.Lengths(queries=q)),
        (rg.Lengths(keys, queries), rg.Lengths(k, q)),
        (rg.Lengths(first=keys), rg.Lengths(first=k)),
        (rg.Lengths(keys, queries, [0, 1, 3]), rg.Lengths(k, q, torch.tensor([0, 1, 3]))),
        (rg.Lengths(keys, q), rg.Lengths(k, q)),
        (rg.Lengths(k, queries), rg.Lengths(k, q)),
        (replace(rg.Lengths(keys), queries=queries), rg.Lengths(k, q)),
    ):
        assert lists == tensors and hash(lists) == hash(tensors) and repr(lists) == repr(tensors)
        assert torch.equal(lists.dense(2, 3), tensors.dense(2, 3))
    assert rg.Lengths([]).keys.shape == (0,) and rg.Lengths([]).keys.dtype == torch.int64


def test_lengths_in_lists_stay_numbers_until_somebody_reads_them() -> None:
    mask = rg.Lengths([1, 2])
    for twin in (mask, copy.copy(mask), copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert twin.__dict__ == {"_numbers": ((1, 2), None, None)}
    assert mask.queries is None and torch.equal(mask.keys, torch.tensor([1, 2])) and mask.keys is mask.keys
    held = mask.__dict__.keys() - {"_of_numbers"}
    assert held == {"keys", "queries", "first"}, "what is written to the tensor from here on counts"


def test_lengths_are_indices_and_not_positions() -> None:
    x = torch.randn(2, 3, 4, 5)
    mask = rg.Lengths(keys=torch.tensor([2, 4]))
    far = rg.Positions(torch.arange(4) + 100, torch.arange(4).flip(0))
    assert torch.equal(rg.attention(x, x, x, mask=mask, positions=far), rg.attention(x, x, x, mask=mask))


def test_documents(capsys: pytest.CaptureFixture[str]) -> None:
    rg.Documents(IDS).draw(6)
    (rg.Documents(IDS) & rg.Causal()).draw(6)
    rg.Documents(torch.tensor([2, 0]), torch.tensor([0, 2, 0, 1])).draw(2, 4)
    assert capsys.readouterr().out.split() == [
        *("■■····", "■■····", "··■■■·", "··■■■·", "··■■■·", "·····■"),
        *("■·····", "■■····", "··■···", "··■■··", "··■■■·", "·····■"),
        *("·■··", "■·■·"),
    ]


def test_packing_equals_attending_one_by_one() -> None:
    q, k, v = (torch.randn(2, 3, 6, d, dtype=torch.float64) for d in (5, 5, 7))
    packed = rg.attention(q, k, v, mask=rg.Documents(IDS) & rg.Causal())
    for part in (slice(0, 2), slice(2, 5), slice(5, 6)):
        alone = rg.attention(q[..., part, :], k[..., part, :], v[..., part, :], mask=rg.Causal())
        torch.testing.assert_close(packed[..., part, :], alone, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: rg.Lengths(keys=torch.ones(2)), TypeError, "Lengths.keys has dtype torch.float32; expected integers"),
        (
            lambda: rg.Lengths(queries=torch.ones(2, 5).bool()),
            TypeError,
            r"Lengths.queries has dtype torch.bool; expected integers. A padding mask .* by mask.sum\(-1\)",
        ),
        (
            lambda: rg.Lengths(first=torch.ones(2, 5).bool()),
            TypeError,
            r"Lengths.first has dtype torch.bool; expected integers. A padding mask .* by \(~mask\).sum\(-1\)",
        ),
        (lambda: rg.Lengths(keys=[3.0]), TypeError, r"Lengths.keys is \[3.0\]; expected integers: a list of numbers"),
        (lambda: rg.Lengths(queries=(3, True)), TypeError, r"Lengths.queries is \(3, True\); expected integers"),
        (lambda: rg.Lengths(keys={3}), TypeError, "Lengths.keys is a set; expected a torch tensor or an array"),
        (lambda: rg.Lengths([3, 8]).dense(5, 7), rg.ShapeError, "Lengths.keys holds 3 to 8; expected numbers from 0"),
        (
            lambda: rg.Lengths(keys=torch.tensor([3, 8])).dense(5, 7),
            rg.ShapeError,
            "Lengths.keys holds 3 to 8; expected numbers from 0 to 7",
        ),
        (lambda: rg.Lengths(keys=torch.tensor([-1])).dense(5), rg.ShapeError, "Lengths.keys holds -1 to -1"),
        (
            lambda: rg.Lengths(queries=torch.tensor([7])).dense(5, 7),
            rg.ShapeError,
            "Lengths.queries holds 7 to 7; expected numbers from 0 to 5",
        ),
        (
            lambda: rg.Lengths(keys=torch.tensor([1, 2, 3])).on(5, batch=(2,)),
            rg.ShapeError,
            r"Lengths.keys has shape \(3,\); expected a number a sequence, \(2,\)",
        ),
        (lambda: rg.Documents(torch.ones(3)), TypeError, "Documents.q_ids has dtype torch.float32"),
        (
            lambda: rg.Documents(IDS).dense(6, 7),
            rg.ShapeError,
            r"Documents.k_ids has shape \(6,\); expected \(7,\), and k_ids, which defaults to q_ids, must be given",
        ),
        (
            lambda: rg.Documents(IDS.expand(3, 6)).on(6, batch=(2,)),
            rg.ShapeError,
            r"Documents.q_ids has shape \(3, 6\); expected \(6,\) or \(2, 6\)",
        ),
        (lambda: rg.Documents(torch.tensor(3)).dense(6), rg.ShapeError, r"Documents.q_ids has shape \(\)"),
    ],
)
def test_refusals(make: object, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        make()


def test_small_integers_are_as_good() -> None:
    for dtype in (torch.uint8, torch.int16, torch.int32):
        assert rg.Lengths(keys=torch.tensor([1, 2], dtype=dtype)) == rg.Lengths(keys=torch.tensor([1, 2]))
        assert rg.Documents(IDS.to(dtype)) == rg.Documents(IDS)
