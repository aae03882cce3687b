"""Modifiers and masks as texts for graphs: what is read computes what was written, and what cannot be says why."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from needed import needs_kernels
from regard import testing
from regard.backends.native.mask_text import has_function, read_mask, why_not_text, with_recorded, write_mask
from regard.backends.native.programs.record import record_mask, record_modifiers
from regard.backends.native.programs.text import RecordedMask, RecordedModifier
from regard.core.region import Region

AT = testing.frame(batch=(2,), heads=4, nq=29, nk=37)
REGIONS = (AT.region(), AT.region(slice(3, 11), slice(30, 37)), AT.region(slice(28, 29), slice(0, 1)))
NUMBERS = torch.linspace(-1, 1, 37, dtype=torch.float64)


@dataclass(frozen=True)
class Own(rg.Modifier):
    """Whatever a function makes of a score, a region and some tensors."""

    fn: Callable[..., Tensor]
    tensors_held: tuple[Tensor, ...] = ()

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return self.fn(s, at, *self.tensors_held)


MODIFIERS: dict[str, tuple[Any, ...]] = {
    "arithmetic": (lambda s, at: (s * 2 - 1).tanh().where(at.i > at.j, s.abs().sqrt() + 0.1),),
    "heads": (lambda s, at, t: s * at.heads(t).exp(), NUMBERS[:4]),
    "queries and keys": (lambda s, at, a, b: s + at.queries(a) * at.keys(b), NUMBERS[:29], NUMBERS),
    "pairs": (lambda s, at, t: s + at.pairs(t) ** 2, torch.outer(NUMBERS[:29], NUMBERS)),
    "sequences": (lambda s, at, t: s + at.sequences(t), NUMBERS[:2]),
    "a table": (lambda s, at, t: s + t[(at.row - at.col).clamp(-5, 5) + 5], NUMBERS[:11]),
    "indices of heads": (lambda s, at, t: s + t[at.h, at.b] / (at.h + 1), NUMBERS[:8].reshape(4, 2)),
    "numbers": (lambda s, at: torch.where(at.j == 3, torch.tensor(-1e4, dtype=s.dtype), s),),
    "as large as scores": (lambda s, at: s + torch.full_like(s, 0.5) * torch.zeros_like(s),),
    "a number of its dtype": (lambda s, at: torch.where(at.i > at.j, s, s.new_zeros(())),),
}
MASKS: dict[str, rg.Mask] = {
    "a function": rg.Where(lambda b, h, i, j: (i * 3 + j * 5 + h + b) % 7 < 4),
    "beside others": rg.Causal() & ~rg.Where(lambda b, h, i, j: (i - j) % 3 == 1) | rg.Dilated(5),
}


@pytest.mark.parametrize("name", MODIFIERS)
def test_modifiers_that_are_read_compute_what_was_written(name: str) -> None:
    """In other regions and another dtype than those that were recorded."""
    fn, *held = MODIFIERS[name]
    stages = rg.SoftCap(3.0), Own(fn, tuple(held))
    read = record_modifiers(stages, AT)
    assert isinstance(read, RecordedModifier), read
    json.loads(read.text)
    for at in REGIONS:
        s = torch.randn(2, 4, *(at.row + at.col).shape[-2:], dtype=torch.float64)
        right = s
        for stage in stages:
            right = stage.modify(right, at)
        torch.testing.assert_close(read.modify(s, at), right)


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_are_read_see_what_was_written(name: str) -> None:
    mask = MASKS[name]
    own = with_recorded(mask, AT)
    assert isinstance(own, rg.Mask) and why_not_text(own) is None and has_function(own)
    text, tensors = write_mask(own, AT)
    back = read_mask(text, tensors)
    assert has_function(back)
    for at in REGIONS:
        assert back.visible(at).equal(mask.visible(at))


def reduced(s: Tensor, at: Region, t: Tensor) -> Tensor:
    return s - t.detach() * 2


def with_keys(s: Tensor, at: Region) -> Tensor:
    return s + at.j


def with_outside(s: Tensor, at: Region) -> Tensor:
    return s + OUTSIDE[at.col]


def test_an_example() -> None:
    read = record_modifiers((Own(lambda s, at, t: s * t),), AT)
    assert isinstance(read, str)
    read = record_modifiers((Own(reduced, (NUMBERS[:1],)),), AT)
    assert isinstance(read, RecordedModifier)
    assert json.loads(read.text) == [
        ["score", [], {}, True],
        ["tensor", [0], {}, True],
        ["aten.detach.default", [{"n": 1}], {}, True],
        ["aten.mul.Tensor", [{"n": 2}, 2], {}, True],
        ["aten.sub.Tensor", [{"n": 0}, {"n": 3}], {}, True],
    ]
    seen = record_mask(rg.Where(lambda b, h, i, j: i > j), AT)
    assert isinstance(seen, RecordedMask) and json.loads(seen.text)[-1][0] == "aten.gt.Tensor"


OUTSIDE = torch.randn(37)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *g: Tensor) -> Tensor:
        return g[0] * 3


@pytest.mark.parametrize(
    ("fn", "held", "why"),
    [
        (lambda s, at: s + OUTSIDE[at.col], (), "it reads a tensor that none of its fields holds"),
        (lambda s, at, t: s * t.tolist()[0], (NUMBERS,), "tolist looks at the numbers of a tensor"),
        (lambda s, at, t: s * float(t.max()), (NUMBERS,), "looks at a number"),
        (lambda s, at: s.flatten(-2).reshape(s.shape), (), "is given a shape"),
        (
            lambda s, at: s + torch.arange(s.shape[-1]),
            (),
            "it makes a tensor as large as the part of a call",
        ),
        (lambda s, at: s.softmax(-1), (), "it has no instruction"),
        (lambda s, at: Doubled.apply(s), (), "Doubled, a torch.autograd.Function, has a backward of its own"),
        (lambda s, at: s + torch.rand(()), (), ""),
    ],
)
def test_what_has_no_text(fn: Callable[..., Tensor], held: tuple[Tensor, ...], why: str) -> None:
    found = record_modifiers((Own(fn, held),), AT)
    assert isinstance(found, str) and why in found, found


def test_a_field_that_is_no_value_has_no_text() -> None:
    found = record_modifiers((Own(torch.nn.Identity()),), AT)
    assert found == "it holds a Identity"


@needs_kernels
def test_explain_says_what_graphs_hold() -> None:
    x = torch.randn(1, 4, 29, 8)

    def said(score: rg.Score, mask: rg.Mask) -> str:
        return dict(rg.explain(x, x, x, score=score, mask=mask).facts)["in graphs"]

    assert said(rg.Dot() >> Own(with_keys), MASKS["a function"]) == (
        "the modifiers are a program, which is made where the graph runs; the mask is a function that was recorded, "
        "which is lowered where the graph runs"
    )
    assert "tile by tile in PyTorch: it reads a tensor" in said(rg.Dot() >> Own(with_outside), rg.Causal())
