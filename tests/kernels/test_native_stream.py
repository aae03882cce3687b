"""Calls of many keys, both ways: a matrix unit streams their tiles, several at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import regard as rg
from exact_checks import check_both, check_gradients, check_threads
from needed import needs_kernels
from regard import testing
from regard.core.region import Region

pytestmark = needs_kernels

SIZES = {  # nq, nk, dk, dv, heads, heads of keys
    "two groups of tiles": (130, 1187, 64, 64, 2, 2),
    "exactly one group": (64, 1024, 32, 96, 2, 1),
    "three groups, wide": (97, 2300, 64, 128, 4, 1),
    "one block of keys": (70, 32, 128, 32, 2, 2),
    "odd widths": (66, 1100, 33, 20, 2, 2),
    "rows of a group": (15, 1056, 64, 64, 8, 2),
}


@dataclass(frozen=True)
class Gated(rg.Modifier):
    """A program: it reads a number a query, a number a key, and a table by head and distance."""

    query: Tensor
    key: Tensor
    table: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        near = self.table[at.h, (at.row - at.col).clamp(-9, 9) + 9]
        return s * torch.sigmoid(at.queries(self.query)) + at.keys(self.key) * torch.tanh(s) + near


@dataclass(frozen=True)
class Holed(rg.Modifier):
    """A program that hides every other pair of rows and columns."""

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return torch.where((at.row + at.col) % 4 < 2, s * s, -torch.inf)


MASKS: dict[str, Callable[[int, int], rg.Mask]] = {
    "everything": lambda nq, nk: rg.Everything(),
    "causal": lambda nq, nk: rg.Causal(),
    "window": lambda nq, nk: rg.Window(before=nk // 3, after=7),
    "lengths": lambda nq, nk: rg.Lengths(keys=torch.tensor([nk - nk // 7, nk // 2])),
    "documents": lambda nq, nk: rg.Documents(torch.arange(nq) % 3, torch.arange(nk) % 3),
    "dense": lambda nq, nk: rg.Dense(torch.rand(nq, nk) > 0.3),
}
SCORES: dict[str, Callable[[int, int, int], rg.Modifier]] = {  # nq, nk, heads
    "bias": lambda nq, nk, heads: rg.Bias(3 * torch.randn(heads, nq, nk)),
    "bias that hides": lambda nq, nk, heads: rg.Bias(torch.where(torch.rand(nq, nk) > 0.7, -torch.inf, 0.5)),
    "soft cap": lambda nq, nk, heads: rg.SoftCap(2.0),
    "clamp": lambda nq, nk, heads: rg.Clamp(-1.0, 0.5),
    "temperature": lambda nq, nk, heads: rg.Temperature(torch.rand(heads) + 0.5),
    "slopes": lambda nq, nk, heads: rg.Alibi(0.5 ** torch.arange(1, heads + 1)),
    "slopes of points": lambda nq, nk, heads: rg.Alibi(torch.rand(heads), torch.rand(nk, 2), torch.rand(nq, 2)),
    "relative bias": lambda nq, nk, heads: rg.RelativeBias(torch.randn(32, heads), rg.T5Buckets(32, 128)),
    "program": lambda nq, nk, heads: Gated(torch.randn(nq), torch.randn(nk), torch.randn(heads, 19)),
    "program that hides": lambda nq, nk, heads: Holed(),
}


def drawn(size: str) -> tuple[Tensor, Tensor, Tensor]:
    nq, nk, dk, dv, heads, key_heads = SIZES[size]
    shapes = ((2, heads, nq, dk), (2, key_heads, nk, dk), (2, key_heads, nk, dv))
    q, k, v = (torch.randn(shape).bfloat16() for shape in shapes)
    return q, k, v


def given(size: str, mask: str) -> dict[str, object]:
    nq, nk = SIZES[size][:2]
    return {"mask": MASKS[mask](nq, nk), "positions": rg.tail(nq, nk) if nq <= nk else rg.head(nq, nk)}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("size", SIZES)
def test_every_mask(isa: str, size: str, mask: str) -> None:
    check_both(*drawn(size), **given(size, mask))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("size", SIZES)
def test_gradients_under_every_mask(isa: str, size: str, mask: str) -> None:
    tensors, call = drawn(size), given(size, mask)
    check_gradients(*tensors, torch.randn(*tensors[0].shape[:-1], tensors[2].shape[-1]).bfloat16(), **call)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mask", ["everything", "causal", "dense"])
@pytest.mark.parametrize("modifier", SCORES)
def test_scores_that_a_modifier_changes(isa: str, modifier: str, mask: str, dtype: torch.dtype) -> None:
    for size in ("two groups of tiles", "one block of keys", "odd widths"):
        nq, nk, _, _, heads, _ = SIZES[size]
        score = rg.ScaledDot() >> SCORES[modifier](nq, nk, heads)
        check_both(*(t.to(dtype) for t in drawn(size)), score=score, **given(size, mask))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [97, 128, 200, 352])
@pytest.mark.parametrize("mask", [rg.Causal(), rg.Window(33, 0), rg.Window(5, 70)])
def test_masks_that_cross_blocks(isa: str, mask: rg.Mask, n: int, dtype: torch.dtype) -> None:
    """The last row's key and value are not finite, and only rows that see them show it; both ways."""
    q, k, v = (torch.randn(2, 3, n, 64).to(dtype) for _ in range(3))
    check_both(q, k, v, mask=mask)
    check_gradients(q.clone(), k.clone(), v.clone(), torch.randn(2, 3, n, 64).to(dtype), mask=mask)
    check_holes(q, k, v, mask=mask)
    gated = Gated(torch.randn(n), torch.randn(n), torch.randn(3, 19))
    check_holes(q, k, v, mask=mask, score=rg.ScaledDot() >> gated)


def check_holes(q: Tensor, k: Tensor, v: Tensor, mask: rg.Mask, **given: rg.Score) -> None:
    """Where the last key or value is not finite, rows that see it are not, and others are as they were."""
    n = q.shape[-2]
    seen = rg.attention_weights(torch.ones(n, 1), torch.ones(n, 1), mask=mask)[:, -1] > 0
    for tensor, value in ((k, torch.nan), (v, torch.nan), (v, torch.inf)):
        whole = rg.attention(q, k, v, mask=mask, **given)
        holed = tensor.clone()
        holed[..., -1, :] = value
        out = rg.attention(q, holed if tensor is k else k, holed if tensor is v else v, mask=mask, **given)
        assert not out[..., seen, :].isfinite().any()
        exact = whole[..., ~seen, :].double()
        assert testing.error(out[..., ~seen, :], exact) <= testing.tolerance(exact, whole[..., ~seen, :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("nq", [256, 448, 600])
def test_gradients_of_queries_of_which_some_are_streamed(isa: str, nq: int, dtype: torch.dtype) -> None:
    """Blocks of 64 that follow one another: whole, hidden, or with holes; and 32 queries near the keys, then
    32 far from all of them."""
    q, k, v, g = (torch.randn(2, 2, n, 64).to(dtype) for n in (nq, 300, 300, nq))
    seen = torch.ones(nq, 300, dtype=torch.bool)
    seen[64:128] = torch.rand(64, 300) > 0.5
    seen[128:192] = False
    seen[384:448, 100:] = False
    check_gradients(q, k, v, g, mask=rg.Dense(seen))
    at = torch.arange(nq) // 2
    far = torch.where(at // 16 % 3 == 1, 5000 + at, at)
    check_gradients(q, k, v, g, mask=rg.Window(90, 40), positions=rg.Positions(far, torch.arange(300)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_queries_next_to_some_that_are_not_finite(isa: str, dtype: torch.dtype) -> None:
    """Row 150 shows in the gradients of the keys that it sees, alone."""
    q, k, v, g = (torch.randn(1, 2, 320, 64).to(dtype) for _ in range(4))
    holed = q.clone()
    holed[..., 150, 3] = torch.inf
    mask = rg.Window(40, 0)

    def gradients(q: Tensor) -> tuple[Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        return torch.autograd.grad(rg.attention(*leaves, mask=mask), leaves, g)

    others = torch.ones(320, dtype=torch.bool)
    others[110:151] = False
    for name, whole, one in zip(("q", "k", "v"), gradients(q), gradients(holed), strict=True):
        rows = torch.arange(320) != 150 if name == "q" else others
        assert testing.error(one[..., rows, :], whole[..., rows, :].double()) <= 1e-2
        assert not one[..., ~rows, :].isfinite().all()


@pytest.mark.parametrize("nq", [15, 48, 64, 80])
def test_gradients_of_values_whose_keys_hide_themselves(isa: str, nq: int) -> None:
    """A key of -inf scores gives its value no gradient, though places of a block without a query multiply it by 0."""
    q, k = 1 + torch.rand(2, nq, 64).bfloat16(), torch.randn(2, 160, 64).bfloat16()
    v = torch.randn(2, 160, 32).bfloat16().requires_grad_()
    k[:, 40:100, 0] = -torch.inf
    (g,) = torch.autograd.grad(rg.attention(q, k, v).float().sum(), v)
    assert not g[:, 40:100].any() and g.isfinite().all() and g[:, :40].all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("last", [5.0, 300.0, 4000.0])
def test_scores_that_rise_from_key_to_key(isa: str, size: str, last: float) -> None:
    """Maxima are raised block after block, of some rows only: the others' scores fall."""
    q, k, v = drawn(size)
    q[..., 0] = torch.where(torch.arange(q.shape[-2]) % 3 == 0, -1.0, 1.0)
    k[..., 0] = torch.linspace(0, last, k.shape[-2])
    check_both(q, k, v)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("times", [1e3, 1e5, 1e8, 1e12, 1e16])
def test_scores_of_any_size(isa: str, size: str, times: float) -> None:
    """Up to 1e34, both signs: the largest score has weight 1, whatever the last digit of such a number is worth."""
    q, k, v = drawn(size)
    q, k, v = q * times, k * times, v.requires_grad_()
    out = rg.attention(q, k, v)
    exact = rg.attention(q.double(), k.double(), v.detach().double(), backend=rg.Reference())
    plain = rg.attention(q, k, v.detach(), backend=rg.Reference())
    assert testing.error(out, exact) <= testing.tolerance(exact, plain)
    (g,) = torch.autograd.grad(out.float().sum(), v)
    assert g.double().sum() == pytest.approx(out.numel(), rel=1e-2)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scale", [-0.3, 0.0, 30.0])
def test_scales(isa: str, size: str, scale: float) -> None:
    check_both(*drawn(size), score=rg.ScaledDot(scale))


@pytest.mark.parametrize("size", SIZES)
def test_what_is_not_finite(isa: str, size: str) -> None:
    """A key of -inf scores hides itself; what is NaN or infinite shows where it is seen, and nowhere else."""
    q, k, v = drawn(size)
    nk = k.shape[-2]
    q[..., 0] = 1 + q[..., 0].abs()
    hiding = k.clone()
    hiding[..., : nk // 2, 0] = -torch.inf
    half = rg.attention(q.double(), hiding[..., nk // 2 :, :].double(), v[..., nk // 2 :, :].double())
    plain = rg.attention(q, hiding, v, backend=rg.Reference())
    assert testing.error(rg.attention(q, hiding, v), half) <= testing.tolerance(half, plain)
    for tensor, value in ((k, torch.nan), (v, torch.nan), (v, torch.inf)):
        kept = tensor[..., nk - 1, 0].clone()
        tensor[..., nk - 1, 0] = value
        assert not rg.attention(q, k, v)[..., 0].isfinite().any()
        seen = rg.attention(q, k, v, mask=rg.Lengths(keys=torch.tensor(nk - 1)))
        tensor[..., nk - 1, 0] = kept
        hidden = rg.attention(q, k, v, mask=rg.Lengths(keys=torch.tensor(nk - 1)))
        assert testing.error(seen, hidden.double()) <= testing.tolerance(hidden.double(), hidden)


def test_hidden_values_of_several_tiles_that_are_not_finite(isa: str) -> None:
    """Each tile's values are read for each block of queries, in one thread, whose item has all blocks."""
    q, k, v = (torch.randn(1, 2, n, 64).bfloat16() for n in (200, 900, 900))
    seen = torch.rand(200, 900) > 0.3
    seen[:, ::97] = False
    holes = v.clone()
    holes[:, :, ::97] = torch.nan
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        out, whole = (rg.attention(q, k, values, mask=rg.Dense(seen)) for values in (holes, v))
    finally:
        torch.set_num_threads(threads)
    assert testing.error(out, whole.double()) <= testing.tolerance(whole.double(), whole)


@pytest.mark.parametrize("size", SIZES)
def test_sinks_dropout_and_strides(isa: str, size: str) -> None:
    q, k, v = drawn(size)
    heads = SIZES[size][4]
    check_both(q, k, v, sink=torch.randn(heads))
    check_both(q, k, v, dropout=rg.Dropout(0.2, seed=3))
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert torch.equal(rg.attention(*turned), rg.attention(q, k, v))
    check_both(*(torch.stack([t, t * torch.nan], -1)[..., 0] for t in (q, k, v)))


def test_bits_of_a_window_of_several_groups_of_tiles(isa: str) -> None:
    q, k, v = (torch.randn(1, 1, 5000, 32).bfloat16() for _ in range(3))
    check_threads(lambda: rg.attention(q, k, v, mask=rg.Window(3000, 0)))


@pytest.mark.parametrize("mask", ["everything", "causal", "window"])
@pytest.mark.parametrize("size", SIZES)
def test_bits(isa: str, size: str, mask: str) -> None:
    """The same for one thread and two; with `invariant`, a row has them alone, too."""
    q, k, v = drawn(size)
    call = given(size, mask)
    check_threads(lambda: rg.attention(q, k, v, **call))
    row = q.shape[-2] // 2
    alone = call | {"positions": rg.Positions(call["positions"].q[row : row + 1], call["positions"].k)}
    backend = rg.Native(invariant=True)
    whole = rg.attention(q, k, v, backend=backend, **call)
    one = rg.attention(q[..., row : row + 1, :], k, v, backend=backend, **alone)
    assert torch.equal(one, whole[..., row : row + 1, :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mask", ["window", "causal", "holes", "window with holes"])
def test_bits_beside_numbers_that_are_not_finite(isa: str, mask: str, dtype: torch.dtype) -> None:
    """Threads divide the blocks of queries that share a tile of keys: a NaN that one of them sees changes no other."""
    n, odd = 686, torch.tensor([117, 341, 655])
    q, k, v = (torch.randn(1, 2, n, width).to(dtype) for width in (48, 48, 136))
    k[..., odd[0], 3], v[..., odd[1], 5], v[..., odd[2], 7] = torch.nan, torch.inf, torch.nan
    seen = torch.rand(n, n) > 0.3
    seen[:, odd] = False
    window, holes = rg.Window(100, 20), rg.Dense(seen)
    given = {"window": window, "causal": rg.Causal(), "holes": holes, "window with holes": window & holes}[mask]
    out = check_threads(lambda: rg.attention(q, k, v, mask=given), (1, 2, 3, 5))
    finite = testing.error(
        out.nan_to_num(0, 0, 0),
        rg.attention(q.double(), k.double(), v.double(), mask=given, backend=rg.Reference()).nan_to_num(0, 0, 0),
    )
    assert finite <= {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]
