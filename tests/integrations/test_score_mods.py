"""score_mod and mask_mod of FlexAttention, read as regard's scores and masks: the same numbers, on the kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as theirs
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks, create_block_mask, or_masks

import regard as rg
from needed import needs_kernels
from regard.compat.torch import explain_flex_attention, flex_attention
from regard.compat.torch.mask_mods import MaskMod, translate_mask
from regard.compat.torch.pair_functions import NotRecorded, Sizes
from regard.compat.torch.score_mods import ScoreMod, translate_score

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:return_lse is deprecated"),
]
BATCH, HEADS, NQ, NK, WIDTH = 2, 4, 11, 13, 8
SIZES = Sizes(BATCH, HEADS, NQ, NK, torch.float32, torch.device("cpu"))
SLOPES, PER_HEAD = torch.rand(HEADS), 0.5 + torch.rand(HEADS)
TABLE = torch.randn(HEADS, 2 * 16 - 1)
BUCKETS = torch.randn(8, HEADS)
PAIRS, BY_HEAD, WIDER = torch.randn(NQ, NK), torch.randn(BATCH, HEADS, NQ, NK), torch.randn(HEADS, 16, 16)
TURNED = torch.randn(NK, HEADS, NQ)
KEYS = torch.randn(BATCH, NK)
DOCUMENTS = torch.randint(3, (BATCH, 16))
INF = float("inf")


def alibi(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """attention-gym's, whose slopes are computed from the head."""
    return s + torch.exp2(-((h + 1) * 8.0 / HEADS)) * (j - i)


def capped_alibi(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.where(i >= j, 3.0 * torch.tanh(s / 3.0) - SLOPES[h] * (i - j), -INF)


def bucket(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s + BUCKETS[(i - j).abs().clamp(max=7), h]


READ: dict[str, tuple[Callable[..., Tensor], set[type]]] = {
    "nothing": (lambda s, b, h, i, j: s, set()),
    "causal": (lambda s, b, h, i, j: torch.where(i >= j, s, -INF), set()),
    "hidden first": (lambda s, b, h, i, j: torch.where(j > i, -INF, s), set()),
    "filled": (lambda s, b, h, i, j: s.masked_fill(i < j, -INF), set()),
    "causal, added": (lambda s, b, h, i, j: s + torch.where(i >= j, 0.0, -INF), {rg.RelativeBias}),
    "documents": (lambda s, b, h, i, j: torch.where(DOCUMENTS[b, i] == DOCUMENTS[b, j], s, -INF), set()),
    "alibi": (alibi, {rg.RelativeBias}),
    "slopes": (lambda s, b, h, i, j: s - SLOPES[h] * (i - j).abs(), {rg.RelativeBias}),
    "distance": (lambda s, b, h, i, j: s + (i - j), {rg.RelativeBias}),
    "one table": (lambda s, b, h, i, j: TABLE[h, j - i + 15] + s, {rg.RelativeBias}),
    "buckets": (bucket, {rg.RelativeBias}),
    "two tables": (lambda s, b, h, i, j: s + TABLE[h][i - j + 15] - 0.1 * (i - j).abs(), {rg.RelativeBias}),
    "pairs": (lambda s, b, h, i, j: s + PAIRS[i, j], {rg.Bias}),
    "pairs of heads": (lambda s, b, h, i, j: s + BY_HEAD[b][h][i, j], {rg.Bias}),
    "a wider table": (lambda s, b, h, i, j: WIDER[h, i, j] + s, {rg.Bias}),
    "turned": (lambda s, b, h, i, j: s + TURNED[j, h, i], {rg.Bias}),
    "keys": (lambda s, b, h, i, j: s + KEYS[b, j] * SLOPES[h], {rg.Bias}),
    "a number": (lambda s, b, h, i, j: s + 0.5, {rg.Bias}),
    "factor": (lambda s, b, h, i, j: s * 0.5 / 3, set()),
    "factors": (lambda s, b, h, i, j: -2.0 * (s * PER_HEAD[h]), set()),
    "cap": (lambda s, b, h, i, j: 0.5 * torch.tanh(s / 0.5), {rg.SoftCap}),
    "cap, multiplied": (lambda s, b, h, i, j: torch.tanh(s * 0.25) * 4.0, {rg.SoftCap}),
    "cap, slopes, causal": (capped_alibi, {rg.SoftCap, rg.RelativeBias}),
    "causal, slopes": (lambda s, b, h, i, j: torch.where(i >= j, s, -INF) - SLOPES[h] * (i - j), {rg.RelativeBias}),
}


FEW = ("cap, slopes, causal", "pairs of heads")
ON_KERNELS = ("two tables", "documents", "factors")


def shown(names: Iterable[str], few: tuple[str, ...]) -> list[Any]:
    """A plain run has few of them."""
    return [name if name in few else pytest.param(name, marks=pytest.mark.full) for name in names]


def drawn(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((BATCH, HEADS, NQ, WIDTH), (BATCH, HEADS, NK, WIDTH), (BATCH, HEADS, NK, WIDTH))
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("name", shown(READ, FEW))
def test_a_score_that_is_read_is_the_one_that_is_asked_pair_by_pair(name: str) -> None:
    """In float64 too: values and gradients of the two, and the values of torch's own function."""
    fn, kinds = READ[name]
    for dtype in (torch.float64, torch.float32):
        q, k, v = drawn(dtype)
        score, mask = translate_score(fn, WIDTH**-0.5, replace(SIZES, dtype=dtype))
        assert {type(part) for part in (score >> rg.Bias(torch.zeros(1, 1))).parts[1:-1]} == kinds
        assert not any(isinstance(part, (ScoreMod, MaskMod)) for part in (score, mask))
        given = {"score": score, "mask": mask, "positions": rg.head(NQ, NK)}
        found = rg.attention(q, k, v, **given)
        expected = rg.attention(q, k, v, score=rg.ScaledDot() >> ScoreMod(fn), backend=rg.Reference())
        tolerance = {"atol": 2e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 1e-6, "rtol": 1e-6}
        torch.testing.assert_close(found, expected, **tolerance)
        torch.testing.assert_close(found, theirs.flex_attention(q.detach(), k.detach(), v.detach(), fn), **tolerance)
        seed = torch.linspace(-1, 1, found.numel(), dtype=dtype).view_as(found)
        pulled = (torch.autograd.grad(out, (q, k, v), seed) for out in (found, expected))
        torch.testing.assert_close(*pulled, **tolerance)


@needs_kernels
@pytest.mark.parametrize("name", shown(READ, ON_KERNELS))
def test_it_runs_on_the_kernels(name: str) -> None:
    q, k, v = (t.detach() for t in drawn())
    plan = explain_flex_attention(q, k, v, READ[name][0])
    assert plan.backend == rg.Native() and dict(plan.facts)["score_mod"] == "read as regard's own score and mask"
    expected = theirs.flex_attention(q, k, v, READ[name][0], return_lse=True)
    found = flex_attention(q, k, v, READ[name][0], return_lse=True)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


NOT_READ: dict[str, tuple[Callable[..., Tensor], str]] = {
    "another function": (lambda s, b, h, i, j: torch.sin(s), "aten.sin.default of a score is no step"),
    "squared": (lambda s, b, h, i, j: s * s, "depends on the pair"),
    "no cap": (lambda s, b, h, i, j: 0.5 * torch.tanh(s / 0.4), "no soft cap"),
    "tanh alone": (lambda s, b, h, i, j: torch.tanh(s), "aten.tanh.default of a score is no step"),
    "minus": (lambda s, b, h, i, j: PAIRS[i, j] - s, "a score is subtracted"),
    "a number minus it": (lambda s, b, h, i, j: 1.0 - s, "aten.rsub.Scalar of a score is no step"),
    "factor late": (lambda s, b, h, i, j: (s + PAIRS[i, j]) * 0.5, "a factor follows other steps"),
    "factor by key": (lambda s, b, h, i, j: s * KEYS[b, j], "depends on the pair"),
    "products": (lambda s, b, h, i, j: s + PAIRS[i, j] * KEYS[b, j], "neither on i - j alone nor by one index each"),
    "one index twice": (lambda s, b, h, i, j: s + WIDER[h, i, i] * KEYS[b, j], "neither on i - j alone"),
    "hidden by a number": (lambda s, b, h, i, j: torch.where(i >= j, s, -1e9), "hides pairs by -inf"),
    "hidden by the score": (lambda s, b, h, i, j: torch.where(s > 0, s, -INF), "does not depend on scores"),
    "hidden, then capped": (
        lambda s, b, h, i, j: 2.0 * torch.tanh(torch.where(i >= j, s, -INF) / 2.0),
        "hidden scores are capped",
    ),
    "hidden, then infinite": (
        lambda s, b, h, i, j: torch.where(i >= j, s, -INF) + torch.where(i - j == -2, INF, 0.0),
        "not finite",
    ),
    "another dtype": (lambda s, b, h, i, j: s + SLOPES.double()[h], "dtype torch.float64"),
    "no score": (lambda s, b, h, i, j: 0.1 * (i - j), "does not depend on the score"),
}


@pytest.mark.parametrize(("fn", "why"), NOT_READ.values(), ids=NOT_READ.keys())
def test_what_is_not_read_is_asked_pair_by_pair(fn: Callable[..., Tensor], why: str) -> None:
    with pytest.raises(NotRecorded, match=why):
        translate_score(fn, 1.0, SIZES)
    q, k, v = (t.detach() for t in drawn())
    plan = explain_flex_attention(q, k, v, fn)
    assert plan.backend == rg.Native() and why in dict(plan.facts)["score_mod"]


@pytest.mark.parametrize("name", shown(sorted(NOT_READ.keys() - {"another dtype"}), ("products",)))
def test_what_is_not_read_is_right(name: str) -> None:
    q, k, v = (t.detach() for t in drawn())
    expected = theirs.flex_attention(q, k, v, NOT_READ[name][0])
    found = flex_attention(q, k, v, NOT_READ[name][0])
    torch.testing.assert_close(found, expected, equal_nan=True, atol=2e-5, rtol=1e-4)


def window(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i - j <= 3) & (i >= j)


def same_document(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return DOCUMENTS[b, i] == DOCUMENTS[b][j]


def dilated(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i - j) % 3 == 0


def by_head(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i - j).abs() <= h


COUNTS = torch.tensor([5, 9])
CAUSAL = rg.Window(None, 0)
BY_DOCUMENT = rg.Documents(DOCUMENTS[:, :NQ], DOCUMENTS[:, :NK])
MASKS: dict[str, tuple[Callable[..., Tensor], rg.Mask | None]] = {
    "causal": (lambda b, h, i, j: i >= j, CAUSAL),
    "causal, shifted": (lambda b, h, i, j: j < i + 1, CAUSAL),
    "strictly causal": (lambda b, h, i, j: i > j, rg.Window(None, None) & ~rg.Window(0, None)),
    "ahead": (lambda b, h, i, j: j > i + 1, rg.Window(None, None) & ~rg.Window(None, 1)),
    "window": (window, rg.Window(3, 0)),
    "window, shifted": (lambda b, h, i, j: (j > i - 4) & (j <= i), rg.Window(3, 0)),
    "all": (lambda b, h, i, j: i - j < 100, rg.Everything()),
    "none": (lambda b, h, i, j: i - j > 100, rg.Dense(torch.zeros(1, 1, 1, 1, dtype=torch.bool))),
    "documents": (same_document, BY_DOCUMENT),
    "and": (and_masks(same_document, window), BY_DOCUMENT & rg.Window(3, 0)),
    "or": (or_masks(lambda b, h, i, j: i >= j, lambda b, h, i, j: j < 4), CAUSAL | rg.Prefix(4)),
    "not": (lambda b, h, i, j: ~same_document(b, h, i, j), ~BY_DOCUMENT),
    "lengths": (lambda b, h, i, j: j < COUNTS[b], rg.Prefix(COUNTS)),
    "dilated": (dilated, None),
    "by head": (by_head, None),
    "looks": (lambda b, h, i, j: torch.tensor(True) if dilated(b, h, i, j) is None else i * j < 40, None),
}


@pytest.mark.parametrize("name", shown(MASKS, ("strictly causal", "and", "or", "dilated")))
def test_masks(name: str) -> None:
    fn, expected = MASKS[name]
    mask = translate_mask(fn, SIZES)
    assert isinstance(mask, MaskMod) if expected is None else mask == expected
    both = (one.on(NQ, NK, batch=(BATCH,), heads=HEADS, positions=rg.head(NQ, NK)) for one in (mask, MaskMod(fn)))
    dense = [view.dense().expand(BATCH, HEADS, NQ, NK) for view in both]
    assert dense[0].equal(dense[1])
    q, k, v = (t.detach() for t in drawn())
    block_mask = create_block_mask(fn, BATCH, HEADS, NQ, NK, device="cpu")
    out = flex_attention(q, k, v, block_mask=block_mask)
    torch.testing.assert_close(out, theirs.flex_attention(q, k, v, block_mask=block_mask), atol=2e-5, rtol=1e-4)


def test_the_rest_of_an_and_is_asked_where_an_interval_shows_it() -> None:
    mask = translate_mask(and_masks(window, dilated), SIZES)
    assert repr(mask).startswith("Window(before=3, after=0) & MaskMod(")


def test_captured_numbers_are_read_at_each_call() -> None:
    """Nothing is remembered between calls: neither what a closure holds nor what its tensors hold."""
    cap, table = [2.0], torch.zeros(HEADS)
    q, k, v = (t.detach() for t in drawn())

    def fn(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return cap[0] * torch.tanh(s / cap[0]) + table[h] * (i - j)

    for change in (lambda: None, lambda: cap.append(cap.pop() / 4), lambda: table.fill_(0.7)):
        change()
        torch.compiler.reset()  # theirs, in torch 2.15, fails where a number that it has seen becomes another
        torch.testing.assert_close(flex_attention(q, k, v, fn), theirs.flex_attention(q, k, v, fn))


def test_functions_that_look_at_numbers_or_write_are_not_read() -> None:
    def looks(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s if i >= j else s - 1

    def writes(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s.add_(i - j)

    for fn, why in ((looks, "looks at a number"), (writes, "writes into a tensor")):
        with pytest.raises(NotRecorded, match=why):
            translate_score(fn, 1.0, SIZES)


def test_no_pairs() -> None:
    q = torch.zeros(1, 2, 0, 8)
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 1, 1, device="cpu")
    assert flex_attention(q, q, q, alibi).shape == q.shape
    assert isinstance(translate_mask(mask.mask_mod, replace(SIZES, batch=1, heads=2, nq=0, nk=5)), MaskMod)
