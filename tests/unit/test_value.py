"""Masks, scores and their parts are values: they compare, hash, print, pickle, and give out their tensors."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, fields

import pytest
import torch

import regard as rg
from regard.core.value import Value


def causal(b: object, h: object, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
    return j <= i


def scaled_difference(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return -w * (q - k).abs()


def manhattan(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return -torch.cdist(q * w, k * w, p=1)


def make() -> list[Value]:
    """One of each kind, and compositions; twice made, they are equal but share no tensor."""
    dense = torch.eye(3, dtype=torch.bool)
    lengths = rg.Lengths(keys=torch.tensor([1, 3]))
    slopes = rg.Alibi(rg.Alibi.geometric(3), torch.ones(3, 2))
    table = rg.RelativeBias(torch.ones(6, 3), rg.ClippedBuckets(before=3, after=2))
    return [
        rg.Everything(),
        rg.Causal(),
        rg.Window(before=2, after=None),
        rg.Window(before=2, after=0),
        rg.Prefix(3),
        rg.Prefix(torch.tensor([1, 3])),
        rg.Dilated(3),
        lengths,
        rg.Lengths(queries=torch.tensor([1, 3])),
        rg.Documents(torch.tensor([0, 0, 1])),
        rg.Documents(torch.tensor([0, 0, 1]), torch.tensor([0, 0, 1])),
        rg.Dense(dense),
        rg.Where(causal),
        rg.Causal() & lengths | ~rg.Dense(dense),
        rg.Causal() & (lengths | ~rg.Dense(dense)),
        rg.Dot(),
        rg.ScaledDot(),
        rg.ScaledDot(0.5),
        rg.ScaledDot(torch.tensor([0.5, 1.0, 2.0])),
        rg.Bilinear(torch.ones(2, 3)),
        rg.Additive(torch.ones(2, 3), None, torch.ones(3)),
        rg.Additive(None, torch.ones(2, 3), torch.ones(3)),
        rg.Cosine(),
        rg.Cosine(2.0),
        rg.Distance(0.25),
        rg.Custom(manhattan, (torch.ones(3),)),
        rg.Elementwise(scaled_difference, (torch.ones(3),)),
        rg.SoftCap(50.0),
        slopes,
        rg.LogDistance(0.5, 0.1),
        rg.LogDistance(torch.ones(3), 0.1),
        rg.Bias(torch.full((3, 3), 0.5)),
        table,
        rg.ScaledDot() >> rg.SoftCap(50.0) >> slopes >> table,
        rg.tail(2, 3),
        rg.tail(2, [3, 2]),
        rg.Lengths([3, 2]),
        rg.Lengths(queries=[3, 2]),
        rg.Dropout(0.1, seed=7),
        rg.T5Buckets(),
        rg.GridBuckets(2, 3),
        rg.Tiled(rows=2),
    ]


@pytest.mark.parametrize("n", range(len(make())))
def test_equal_where_made_alike_and_nowhere_else(n: int) -> None:
    one, other = make(), make()
    assert one[n] == other[n] and hash(one[n]) == hash(other[n])
    assert [m for m, value in enumerate(other) if value == one[n]] == [n]
    assert len({*one, *other}) == len(one)


@pytest.mark.parametrize("value", make(), ids=repr)
def test_copies_and_pickles_are_equal(value: Value) -> None:
    for twin in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value), copy.copy(value)):
        assert twin == value and hash(twin) == hash(value) and repr(twin) == repr(value)


@pytest.mark.parametrize("value", make(), ids=repr)
def test_tensors_go_out_and_in_again(value: Value) -> None:
    before = value.tensors()
    shifted = tuple(~t if t.dtype == torch.bool else t + 1 for t in before)
    given = iter(shifted)
    other = value.with_tensors(given)
    assert next(given, None) is None
    assert type(other) is type(value)
    assert all(a is b for a, b in zip(other.tensors(), shifted, strict=True))
    assert all(map(torch.equal, value.tensors(), before)), "the original has changed"
    assert (other == value) == (not before)
    assert other.with_tensors(iter(before)) == value


@pytest.mark.parametrize("value", make(), ids=repr)
def test_frozen(value: Value) -> None:
    for field in fields(value):
        with pytest.raises(FrozenInstanceError):
            setattr(value, field.name, None)


def test_tensors_compare_by_dtype_shape_and_content() -> None:
    x = torch.arange(3.0)
    same, others = rg.Bias(x.clone()), (x + 1, x.double(), x[:2], x[None])
    assert rg.Bias(x) == same and hash(rg.Bias(x)) == hash(same)
    assert all(rg.Bias(x) != rg.Bias(other) for other in others)
    nan = rg.Bias(torch.tensor([float("nan")]))
    assert nan == nan
    assert rg.Prefix(1) != rg.Prefix(torch.tensor(1)) and rg.Prefix(1) != 1


def test_gradients_pass_through_an_exchange() -> None:
    old, new = torch.ones(3), torch.full((3,), 2.0, requires_grad=True)
    score = (rg.Dot() >> rg.Alibi(old)).with_tensors(iter((new,)))
    x = torch.randn(2, 3, 5, 7)
    rg.attention(x, x, x, score=score).sum().backward()
    assert new.grad is not None and new.grad.shape == (3,)


def test_they_print_as_they_are_written() -> None:
    ids = torch.tensor([0, 1])
    shown = {
        "Causal() & Window(before=2, after=0) | Prefix(n=4)": rg.Causal() & rg.Window(2, 0) | rg.Prefix(4),
        "Causal() & (Window(before=2, after=0) | Prefix(n=4))": rg.Causal() & (rg.Window(2, 0) | rg.Prefix(4)),
        "~(Causal() & Prefix(n=4)) | ~Causal()": ~(rg.Causal() & rg.Prefix(4)) | ~rg.Causal(),
        "Documents(q_ids=int64[2])": rg.Documents(ids),
        "ScaledDot() >> SoftCap(cap=50.0) >> Bias(bias=float32[2, 3])": rg.ScaledDot()
        >> rg.SoftCap(50)
        >> rg.Bias(torch.full((2, 3), 0.5)),
        "Cosine(scale=tensor(2.))": rg.Cosine(torch.tensor(2.0)),
        "Tiled(keys=5)": rg.Tiled(keys=5),
    }
    assert {repr(value): value for value in shown.values()} == shown


def test_a_subclass_of_ones_own_is_a_value_too() -> None:
    import dataclasses

    @dataclasses.dataclass(frozen=True)
    class Band(rg.Mask):
        width: torch.Tensor

    a, b = Band(torch.tensor(2)), Band(torch.tensor(2))
    assert a == b and hash(a) == hash(b) and a != Band(torch.tensor(3)) and repr(a) == "Band(width=tensor(2))"
