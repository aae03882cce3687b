"""float16 and float32 calls of many queries: on a matrix unit, numbers are sums of two or three bfloat16 numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from exact_checks import check_both, check_gradients, check_threads
from needed import needs_kernels

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.distributions import DISTRIBUTIONS

pytestmark = needs_kernels

DTYPES = [torch.float16, torch.float32]
SIZES = {  # nq, nk, dk, dv, heads, heads of keys
    "several groups of tiles": (130, 1187, 64, 64, 2, 2),
    "one block of keys": (70, 32, 128, 32, 2, 2),
    "odd widths": (66, 700, 33, 20, 2, 2),
    "a group of heads": (64, 640, 32, 96, 4, 2),
}
MASKS: dict[str, Callable[[int, int], rg.Mask]] = {
    "everything": lambda nq, nk: rg.Everything(),
    "causal": lambda nq, nk: rg.Causal(),
    "lengths": lambda nq, nk: rg.Lengths(keys=torch.tensor([nk - nk // 7, nk // 2])),
    "dense": lambda nq, nk: rg.Dense(torch.rand(nq, nk) > 0.3),
}
Tensors = tuple[Tensor, Tensor, Tensor]


def drawn(size: str, dtype: torch.dtype) -> Tensors:
    nq, nk, dk, dv, heads, key_heads = SIZES[size]
    shapes = ((2, heads, nq, dk), (2, key_heads, nk, dk), (2, key_heads, nk, dv))
    q, k, v = (torch.randn(shape).to(dtype) for shape in shapes)
    return q, k, v


def given(size: str, mask: str) -> dict[str, object]:
    nq, nk = SIZES[size][:2]
    return {"mask": MASKS[mask](nq, nk), "positions": rg.tail(nq, nk) if nq <= nk else rg.head(nq, nk)}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_mask(isa: str, dtype: torch.dtype, size: str, mask: str) -> None:
    check_both(*drawn(size, dtype), **given(size, mask))


@pytest.mark.parametrize("mask", ["everything", "causal"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(isa: str, dtype: torch.dtype, size: str, mask: str) -> None:
    """The backward computes the weights again by other instructions, from the row statistics of the forward."""
    tensors, call = drawn(size, dtype), given(size, mask)
    check_gradients(*tensors, torch.randn(*tensors[0].shape[:-1], tensors[2].shape[-1]).to(dtype), **call)


@pytest.mark.parametrize("size", [(128, 1024, 64), (200, 640, 128)])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_products_of_parts_are_those_of_float32(isa: str, distribution: str, size: tuple[int, int, int]) -> None:
    """No larger error than that of PyTorch's own products in float32, as what parts leave out is below float32's last
    place; other instructions, the emulated unit among them, round each sum of two numbers and stay within four times
    that."""
    q, k, v = DISTRIBUTIONS[distribution](*size)
    exact = rg.attention(q.double(), k.double(), v.double(), backend=rg.Reference())
    plain = rg.attention(q, k, v, backend=rg.Reference())
    ulp = torch.finfo(torch.float32).eps * exact.abs().max()
    times = 1 if isa == "amx" else 4
    assert (rg.attention(q, k, v) - exact).abs().max() <= times * ((plain - exact).abs().max() + ulp)


ODD_NUMBERS = [torch.nan, torch.inf, -torch.inf, 1e-30, -3e-39, 1e-42, 3e24, -2e35]


@pytest.mark.parametrize("number", ODD_NUMBERS)
@pytest.mark.parametrize("which", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_that_are_no_sum_of_parts(isa: str, dtype: torch.dtype, which: str, number: float) -> None:
    """Not finite, or of a size that parts or their products lose: in a query, a key or a value that some queries see,
    and others do not."""
    nq, nk, eps = 200, 300, torch.finfo(dtype).eps
    q, k, v = (torch.randn(2, n, 64).to(dtype) for n in (nq, nk, nk))
    q[..., 0] = 0.5 + q[..., 0].abs()
    place = {"q": q[0, nq // 2, :1], "k": k[1, 290, :1], "v": v[1, 290, :1]}[which]
    place.fill_(number)
    for mask in (rg.Everything(), rg.Causal(), rg.Lengths(keys=torch.tensor([250, 240]))):
        call: dict[str, object] = {"mask": mask, "positions": rg.tail(nq, nk)}
        exact = rg.attention(q.double(), k.double(), v.double(), backend=rg.Reference(), **call)
        plain, got = rg.attention(q, k, v, backend=rg.Reference(), **call), rg.attention(q, k, v, **call)
        wrong = ~exact.to(dtype).isfinite()
        assert torch.equal(~got.isfinite(), wrong)
        out, right, usual = (t.double().masked_fill(wrong, 0) for t in (got, exact, plain))
        most = 2 * (usual - right).norm(dim=-1) + 16 * eps * right.norm(dim=-1)
        assert ((out - right).norm(dim=-1) <= most).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits(isa: str, dtype: torch.dtype) -> None:
    """The same for one thread and two, also where some blocks hold numbers that have no parts."""
    q, k, v = (torch.randn(2, 4, 500, 64).to(dtype) for _ in range(3))
    v[0, 1, 400] = -torch.inf
    q[1, 2, 70, 3] = torch.inf
    check_threads(lambda: rg.attention(q, k, v, mask=rg.Causal()))


@pytest.mark.parametrize(
    ("dtype", "queries", "training", "mask", "said"),
    [
        (torch.bfloat16, 64, True, "everything", "on the matrix unit"),
        (torch.float16, 32, False, "causal", "on the matrix unit, each number as the sum of 2 bfloat16 numbers"),
        (torch.float32, 96, False, "causal", "on the matrix unit, each number as the sum of 3 bfloat16 numbers"),
        (torch.float32, 95, False, "everything", "by vectors"),
        (torch.float32, 255, True, "everything", "by vectors"),
        (torch.float32, 256, True, "everything", "on the matrix unit, each number as the sum of 3 bfloat16 numbers"),
        (torch.bfloat16, 2, False, "everything", "by vectors"),
        (torch.bfloat16, 2, False, "causal", "by vectors"),
    ],
)
def test_explain_says_what_multiplies(
    isa: str, dtype: torch.dtype, queries: int, training: bool, mask: str, said: str
) -> None:
    x = torch.randn(2, queries, 32).to(dtype).requires_grad_(training)
    told = dict(rg.explain(x, x, x, mask=MASKS[mask](queries, queries), backend=rg.Native()).facts)
    if isa.startswith("amx"):
        assert told["products"].partition(";")[0] == said


IN_PARTS = "on the matrix unit, each number as the sum of {} bfloat16 numbers"


@pytest.mark.parametrize(
    ("dtype", "queries", "heads", "score", "said"),
    [
        (torch.float32, 15, (32, 4), rg.ScaledDot(), IN_PARTS.format(3)),
        (torch.float32, 15, (32, 8), rg.ScaledDot(), "by vectors"),
        (torch.float16, 9, (32, 8), rg.ScaledDot(), IN_PARTS.format(2)),
        (torch.float16, 9, (32, 8), rg.ScaledDot() >> rg.Alibi(torch.rand(32)), "by vectors"),
        (torch.bfloat16, 4, (32, 8), rg.ScaledDot(), "on the matrix unit"),
        (torch.bfloat16, 2, (32, 8), rg.ScaledDot(), "by vectors"),
        (torch.float32, 24, (4, 1), rg.ScaledDot(), "by vectors"),  # too few items for many threads
    ],
)
def test_explain_counts_the_queries_of_a_group(
    isa: str, dtype: torch.dtype, queries: int, heads: tuple[int, int], score: rg.Score, said: str
) -> None:
    q, k = (torch.randn(1, n, length, 32).to(dtype) for n, length in zip(heads, (queries, 64), strict=True))
    told = dict(rg.explain(q, k, k, score=score, positions=rg.tail(queries, 64), backend=rg.Native()).facts)
    if isa.startswith("amx"):
        assert told["products"].partition(";")[0] == said
    else:
        assert "products" not in told


def products(*given: Any, **options: Any) -> str:
    return dict(rg.explain(*given, **options, backend=rg.Native()).facts).get("products", "").partition(";")[0]


def test_explain_sees_calls_as_the_kernels_do(isa: str) -> None:
    """Documents in order are intervals, batch elements that share keys are heads of a group, 0 heads are no call."""
    q, k = torch.randn(1, 32, 15, 32), torch.randn(1, 4, 64, 32)
    ordered = rg.Documents(torch.zeros(15, dtype=torch.int64), torch.arange(64) // 40)
    expanded = torch.randn(1, 8, 64, 32).expand(16, -1, -1, -1)
    on_unit = IN_PARTS.format(3) if isa.startswith("amx") else ""
    assert products(q, k, k, mask=ordered) == products(torch.randn(16, 8, 8, 32), expanded, expanded) == on_unit
    none = torch.randn(1, 0, 9, 8)
    assert products(none, none, none) == ("by vectors" if isa.startswith("amx") else "")
    many = torch.empty(()).expand(64, 10_000_000, 128)  # nothing is allocated
    assert products(many[None], many[None, :, :64], many[None, :, :64]) == on_unit


@pytest.mark.parametrize("queries", [33, 40, 48, 64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_bits_of_heads_of_a_group(isa: str, dtype: torch.dtype, queries: int) -> None:
    """How many heads an item of work has follows from the threads; no bit does."""
    q, k, v = (torch.randn(1, heads, n, 64).to(dtype) for heads, n in ((8, queries), (2, 700), (2, 700)))
    check_threads(lambda: rg.attention(q, k, v))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_small_values_of_scores_that_grow(isa: str, dtype: torch.dtype) -> None:
    """Maxima are raised by more than scores need where a modifier lets them grow: values of bfloat16 stay as exact."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 256, 64).to(dtype)
    v = (v * 2.0**-114).to(dtype) if dtype == torch.bfloat16 else v * 2.0**-85
    score = rg.ScaledDot() >> rg.Alibi(torch.tensor([0.5, 0.05]))
    out = rg.attention(q, k, v, score=score, mask=rg.Causal()).double()
    right = rg.attention(q.double(), k.double(), v.double(), score=score, mask=rg.Causal(), backend=rg.Reference())
    assert (out - right).abs().max() <= (0.02 if dtype == torch.bfloat16 else 1e-5) * right.abs().max()
