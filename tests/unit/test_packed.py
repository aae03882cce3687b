"""Packed batches: each form and back, and attention of each sequence to itself, as if it were alone."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable
from functools import partial

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from torch import Tensor

import regard as rg
from regard import Packed, pack, unpack

exact = partial(torch.testing.assert_close, rtol=0, atol=1e-12)
DOUBLE = {"dtype": torch.float64}
LENGTHS = [5, 1, 0, 11, 3]
HEADS, KEY_HEADS, DK, DV = 4, 2, 5, 7


def sequences(*rest: int, lengths: list[int] = LENGTHS) -> list[Tensor]:
    return [torch.randn(n, *rest, **DOUBLE) for n in lengths]


def nested(parts: list[Tensor]) -> Tensor:
    offsets = torch.tensor([0, *(len(t) for t in parts)]).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(torch.cat(parts), offsets)


FORMS: dict[str, Callable[[list[Tensor]], Packed]] = {
    "list": pack,
    "tuple": lambda parts: pack(tuple(parts)),
    "padded": lambda parts: pack(
        torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=torch.nan),
        torch.tensor([len(t) for t in parts]),
    ),
    "nested": lambda parts: pack(nested(parts)),
    "nested, other axis": lambda parts: pack(nested(parts).transpose(1, 2)) if parts[0].dim() > 1 else pack(parts),
    "cu_seqlens": lambda parts: pack(
        torch.cat(parts), cu_seqlens=torch.tensor([0, *(len(t) for t in parts)]).cumsum(0).int()
    ),
}


@pytest.mark.parametrize("rest", [(), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_comes_back(form: str, rest: tuple[int, ...]) -> None:
    parts = sequences(*rest)
    p = FORMS[form](parts)
    assert p == Packed(torch.cat(parts), torch.tensor(LENGTHS))
    assert all(map(torch.equal, unpack(p), parts)) and len(unpack(p)) == len(parts)
    assert torch.equal(p.padded(-1.0), torch.nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=-1.0))
    assert all(map(torch.equal, p.nested().unbind(), parts))
    assert p.cu_seqlens.tolist() == [0, 5, 6, 6, 17, 20] and p.cu_seqlens.dtype == torch.int32
    assert p.ids.tolist() == [b for b, n in enumerate(LENGTHS) for _ in range(n)]
    assert p.positions.q.tolist() == p.positions.k.tolist() == [i for n in LENGTHS for i in range(n)]
    assert p.mask == rg.Documents(p.ids)


@given(lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_forms_agree_for_any_lengths(lengths: list[int]) -> None:
    parts = sequences(3, lengths=lengths)
    p = pack(parts)
    assert pack(p.padded(), p.lengths) == pack(p.padded(), lengths) == Packed(p.values, lengths)
    assert pack(p.padded(), p.lengths) == pack(p.values, cu_seqlens=p.cu_seqlens) == pack(p.nested()) == p
    assert p.padded().shape == (len(lengths), max(lengths), 3)


def test_a_pack_is_a_value() -> None:
    p = pack([torch.tensor([1, 2]), torch.tensor([3])])
    assert repr(p) == "Packed(values=int64[3], lengths=int64[2])" and pickle.loads(pickle.dumps(p)) == p
    assert p.with_values(torch.zeros(3, 4)) == Packed(torch.zeros(3, 4), torch.tensor([2, 1]))
    assert pack([np.ones((2, 3)), np.ones((1, 3))]).values.shape == (3, 3)
    assert torch.equal(p.padded(), torch.tensor([[1, 2], [3, 0]]))


@pytest.mark.parametrize("form", FORMS)
def test_gradients_pass_through_every_form(form: str) -> None:
    parts = [t.requires_grad_() for t in sequences(3)]
    weights = sequences(3)
    p = FORMS[form](parts)
    doubled = p.with_values(p.values * 2)
    backs = {
        "unpack": unpack(doubled),
        "padded": [row[:n] for row, n in zip(doubled.padded(7.0), LENGTHS, strict=True)],
        "nested": doubled.nested().unbind(),
    }
    for back in backs.values():
        grads = torch.autograd.grad(
            sum((t * w).sum() for t, w in zip(back, weights, strict=True)), parts, retain_graph=True
        )
        for g, w in zip(grads, weights, strict=True):
            exact(g, 2 * w)


@pytest.mark.parametrize("mask", [rg.Everything(), rg.Causal(), rg.Window(before=2, after=1)], ids=repr)
def test_a_layer_treats_each_sequence_of_a_pack_as_if_alone(mask: rg.Mask) -> None:
    layer = rg.nn.MultiHeadAttention(12, HEADS, key_heads=KEY_HEADS, rotary=rg.nn.Rotary(2), **DOUBLE)
    parts = sequences(12)
    p = pack(parts)
    out = unpack(p.with_values(layer(p.values, mask=p.mask & mask)))
    for part, found in zip(parts, out, strict=True):
        exact(found, layer(part, mask=mask))


def qkv(q_lengths: list[int] = LENGTHS, k_lengths: list[int] = LENGTHS) -> list[list[Tensor]]:
    sizes = ((q_lengths, HEADS, DK), (k_lengths, KEY_HEADS, DK), (k_lengths, KEY_HEADS, DV))
    return [[t.requires_grad_() for t in sequences(h, d, lengths=n)] for n, h, d in sizes]


def alone(parts: list[list[Tensor]], **options: object) -> list[Tensor]:
    """Each sequence by itself, (n_i, heads, dv)."""
    calls = [[t.transpose(0, 1)[None] for t in one] for one in zip(*parts, strict=True)]
    return [rg.attention(*call, backend=rg.Reference(), **options)[0].transpose(0, 1) for call in calls]


CALLS = {
    "everything": {},
    "causal": {"mask": rg.Causal()},
    "window": {"mask": rg.Window(before=2, after=0)},
    "prefix": {"mask": rg.Causal() | rg.Prefix(2)},
    "alibi": {"mask": rg.Causal(), "score": rg.ScaledDot() >> rg.Alibi(torch.rand(HEADS, **DOUBLE))},
    "where": {"mask": rg.Where(lambda b, h, i, j: (i + 2 * j) % 3 == 0)},
    "sink": {"sink": torch.randn(HEADS, **DOUBLE), "score": rg.ScaledDot() >> rg.SoftCap(2.0)},
}


@pytest.mark.parametrize("name", CALLS)
def test_nested_tensors_attend_as_their_sequences_would(name: str) -> None:
    parts, weights = qkv(), sequences(HEADS, DV)
    q, k, v = (nested(t).transpose(1, 2) for t in parts)
    out = rg.attention(q, k, v, **CALLS[name])
    assert out.is_nested and out.layout == torch.jagged and out.dim() == 4
    assert out.shape[:3] == q.shape[:3]  # one ragged axis: they can be added
    found, true = out.transpose(1, 2).unbind(), alone(parts, **CALLS[name])
    leaves = [t for one in parts for t in one]
    grads = [
        torch.autograd.grad(sum((t * w).sum() for t, w in zip(outs, weights, strict=True)), leaves)
        for outs in (found, true)
    ]
    for a, b in zip((*found, *grads[0]), (*true, *grads[1]), strict=True):
        exact(a, b)


def test_nested_tensors_without_heads() -> None:
    parts = [sequences(d) for d in (DK, DK, DV)]
    out = rg.attention(*map(nested, parts), mask=rg.Causal(), backend=rg.Tiled())
    assert out.dim() == 3
    for found, *one in zip(out.unbind(), *parts, strict=True):
        exact(found, rg.attention(*one, mask=rg.Causal()))


def test_queries_of_other_lengths_than_keys() -> None:
    parts = qkv([3, 2, 4], [7, 1, 5])
    q, k, v = (nested(t).transpose(1, 2) for t in parts)
    for found, true in zip(rg.attention(q, k, v).transpose(1, 2).unbind(), alone(parts), strict=True):
        exact(found, true)
    with pytest.raises(rg.ShapeError, match=r"q has lengths \[3, 2, 4\], k \[7, 1, 5\] under a mask"):
        rg.attention(q, k, v, mask=rg.Causal())
    tails = [rg.tail(nq, nk) for nq, nk in ((3, 7), (2, 1), (4, 5))]
    at = rg.Positions(torch.cat([p.q for p in tails]), torch.cat([p.k for p in tails]))
    out = rg.attention(q, k, v, mask=rg.Causal(), positions=at)
    for b, found in enumerate(out.transpose(1, 2).unbind()):
        exact(found, alone([t[b : b + 1] for t in parts], mask=rg.Causal(), positions=tails[b])[0])


def test_a_nested_tensor_with_gaps() -> None:
    x = torch.randn(3, 9, DK, **DOUBLE)
    start, length = torch.tensor([1, 0, 2]), torch.tensor([4, 7, 2])
    view = torch.nested.narrow(x, 1, start, length, layout=torch.jagged)
    parts = [row[a : a + n] for row, a, n in zip(x, start.tolist(), length.tolist(), strict=True)]
    assert view.lengths() is not None and pack(view) == pack(parts)
    for found, part in zip(rg.attention(view, view, view).unbind(), parts, strict=True):
        exact(found, rg.attention(part, part, part))


def test_dtype_dropout_and_a_named_backend_reach_the_call() -> None:
    x = nested(sequences(8))
    assert rg.attention(*[x.bfloat16()] * 3).dtype == torch.bfloat16
    dropped = rg.attention(x, x, x, dropout=rg.Dropout(1.0))
    assert dropped.shape == x.shape and not bool(dropped.values().any())
    with pytest.raises(rg.Unsupported, match=r"backend Sdpa\(\) cannot run this call"):
        rg.attention(x, x, x, backend=rg.Sdpa())


class Model(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return rg.attention(x, x, x, mask=rg.Causal())


def test_a_recorder_sees_the_sequences_one_behind_another() -> None:
    parts, model, entropy = sequences(8), Model(), rg.facts.Entropy()
    with rg.record(model, [entropy]) as tape:
        model(nested(parts))
    with rg.record(model, [entropy]) as each:
        for part in parts:
            model(part)
    assert len(tape) == 1
    exact(tape.calls[0][entropy].flatten(), torch.cat([call[entropy].flatten() for call in each]))


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: pack([]), ValueError, "x is an empty list"),
        (
            lambda: pack([torch.zeros(2, 3), torch.zeros(2, 4)]),
            rg.ShapeError,
            r"x\[1\] has shape \(2, 4\), x\[0\] \(2, 3",
        ),
        (lambda: pack([torch.zeros(2, 3), torch.tensor(1.0)]), rg.ShapeError, r"x\[1\] has shape \(\)"),
        (lambda: pack([torch.zeros(2)], torch.tensor([2])), TypeError, "a list of tensors has its own lengths"),
        (lambda: pack(torch.zeros(2, 3)), TypeError, r"x is one tensor, \(2, 3\); give lengths"),
        (
            lambda: pack(torch.zeros(2, 3), torch.tensor([1, 1]), cu_seqlens=torch.tensor([0, 2])),
            TypeError,
            "x is one tensor",
        ),
        (lambda: pack(torch.zeros(2, 3), torch.tensor([1, 4])), rg.ShapeError, r"lengths \[1, 4\]; expected 0 to 3"),
        (lambda: pack(torch.zeros(2, 3), torch.tensor([-1, 3])), rg.ShapeError, r"lengths \[-1, 3\]"),
        (lambda: pack(torch.zeros(2, 3), torch.tensor([1])), rg.ShapeError, r"x has shape \(2, 3\), lengths \(1,\)"),
        (lambda: pack(torch.zeros(2, 3), torch.ones(2, 3).bool()), TypeError, r"becomes lengths by mask.sum\(-1\)"),
        (lambda: pack(torch.zeros(5), cu_seqlens=torch.tensor([0, 2, 4])), rg.ShapeError, r"lengths \[2, 2\] do not"),
        (
            lambda: pack(torch.zeros(5), cu_seqlens=torch.tensor([0, 6, 5])),
            rg.ShapeError,
            r"lengths \[6, -1\]: expected 0",
        ),
        (lambda: pack(torch.zeros(5), cu_seqlens=torch.tensor([1, 5])), rg.ShapeError, r"cu_seqlens is \[1, 5\]"),
        (lambda: pack(nested(sequences(3)), torch.tensor([1])), TypeError, "a nested tensor has its own lengths"),
        (
            lambda: Packed(torch.tensor(1.0), torch.tensor([1])),
            rg.ShapeError,
            r"expected \(total, ...\) and \(batch,\)",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], object], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        call()


def test_nested_calls_that_do_not_fit_are_refused() -> None:
    q, k, v = (nested(t).transpose(1, 2) for t in qkv())
    fewer = nested(sequences(KEY_HEADS, DV, lengths=[5, 1])).transpose(1, 2)
    other = nested(sequences(KEY_HEADS, DV, lengths=[5, 1, 1, 10, 3])).transpose(1, 2)
    dense = torch.zeros(1, KEY_HEADS, 20, DK, **DOUBLE)
    for call, error, said in (
        (lambda: rg.attention(q, dense, v), TypeError, r"k is not nested; expected torch.nested.nested_tensor"),
        (lambda: rg.attention(dense, k, v), TypeError, r"q is not nested"),
        (lambda: rg.attention(q, k, other), rg.ShapeError, r"v has lengths \[5, 1, 1, 10, 3\], k \[5, 1, 0, 11, 3\]"),
        (lambda: rg.attention(q, fewer, fewer), rg.ShapeError, r"k has 2 sequences, q 5; expected as many"),
        (lambda: rg.attention(q.transpose(1, 2), k, v), rg.ShapeError, r"expected the ragged axis before the last one"),
        (lambda: rg.attention_weights(q, k), TypeError, r"k is a nested tensor; regard.attention alone takes these"),
        (lambda: rg.attention_state(q, k, v), TypeError, r"q is a nested tensor; regard.attention alone takes these"),
        (lambda: rg.attention(q, k, v, mask=torch.ones(2)), TypeError, "mask is"),
        (lambda: rg.attention(q, k, v, score=rg.Dot), TypeError, "score is"),
    ):
        with pytest.raises(error, match=said):
            call()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
        strided = torch.nested.nested_tensor(list(dense))  # torch's default layout, and no class of its own
    for call in (
        lambda: rg.attention(strided, strided, strided),
        lambda: rg.attention(strided, dense, dense),
        lambda: rg.attention_state(strided, dense, dense),
    ):
        with pytest.raises(TypeError, match=r"q is a nested tensor; .* with layout=torch.jagged"):
            call()
    layer = rg.nn.MultiHeadAttention(12, HEADS, **DOUBLE)
    with pytest.raises(TypeError, match=r"x is a nested tensor; layers take its values: p = regard.pack\(x\)"):
        layer(nested(sequences(12)))
