"""Where the numbers of an output lie in memory: its axes are in the order of q's, as layers read them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard as rg
from needed import needs_kernels
from regard.runtime import plan_cache

pytestmark = needs_kernels

SHAPE = 2, 4, 9, 16
TOKENS = 4 * 9 * 16, 16, 4 * 16, 1  # strides of a tensor whose heads of a token lie beside each other
HEADS = 4 * 9 * 16, 9 * 16, 16, 1  # of one without gaps
# q's strides, and those of out
LAYOUTS = {
    "without gaps": (HEADS, HEADS),
    "heads of a token beside each other": (TOKENS, TOKENS),
    "of one projection to q, k and v": ((3 * 4 * 9 * 16, 16, 3 * 4 * 16, 1), TOKENS),
    "one for the batch": ((0, 16, 4 * 16, 1), HEADS),
    "heads alike": ((4 * 9 * 16, 0, 4 * 16, 1), HEADS),
    "rows that overlap": ((4 * 9 * 16, 9 * 16, 4, 1), HEADS),
    "columns": ((4 * 9 * 16, 9 * 16, 1, 9), HEADS),
}
CALLS = {
    "plain": lambda: {},
    "causal": lambda: {"mask": rg.Causal()},
    "soft cap": lambda: {"score": rg.ScaledDot() >> rg.SoftCap(3.0)},
    "own mask": lambda: {"mask": rg.Where(lambda b, h, i, j: (i + j) % 3 != 1)},
    "lengths": lambda: {"mask": rg.Lengths(torch.tensor([5, 9]))},
    "dropout": lambda: {"dropout": rg.Dropout(0.1, seed=3)},
    "differences": lambda: {"score": rg.Elementwise(lambda q, k: -(q - k).abs())},
}


def of_strides(strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(4000).to(dtype).as_strided(SHAPE, strides)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_to_the_kernels_lays_out_alike(name: str, layout: str, dtype: torch.dtype) -> None:
    """The first call, the next, which C++ makes, and both with gradients."""
    strides, expected = LAYOUTS[layout]
    q, k, v = (of_strides(each, dtype) for each in (strides, TOKENS, TOKENS))
    given = CALLS[name]()
    right = rg.attention(*(t.double() for t in (q, k, v)), **given, backend=rg.Reference())
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-5}
    plan_cache.clear()
    for learned in (False, False, False, True, True, True):
        out = rg.attention(q.detach().requires_grad_(learned), k, v, **given)
        assert out.stride() == expected
        torch.testing.assert_close(out.double(), right, **close)


@pytest.mark.parametrize("strides", [(36, 1, 4, 1), (180, 5, 20, 5), (36, 9, 1, 9)])
def test_rows_of_one_number(strides: tuple[int, ...]) -> None:
    q, k = torch.randn(400).as_strided((2, 4, 9, 1), strides), torch.randn(2, 4, 9, 1)
    plan_cache.clear()
    calls = [rg.attention(q.detach().requires_grad_(learned), k, k) for learned in (False, False, False, True, True)]
    assert len({out.stride() for out in calls}) == 1
    right = rg.attention(*(t.double() for t in (q, k, k)), backend=rg.Reference())
    torch.testing.assert_close(calls[-1].double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_every_layout(layout: str) -> None:
    inputs = [of_strides(each, torch.float32) for each in (LAYOUTS[layout][0], TOKENS, TOKENS)]
    exact = [t.double().requires_grad_() for t in inputs]
    right = torch.autograd.grad(rg.attention(*exact, backend=rg.Reference()).sin().sum(), exact)
    for _ in range(3):
        leaves = [t.detach().requires_grad_() for t in inputs]
        found = torch.autograd.grad(rg.attention(*leaves).sin().sum(), leaves)
        torch.testing.assert_close([g.double() for g in found], list(right), rtol=1e-4, atol=1e-5)


def test_a_patched_call_is_laid_out_as_torch_does() -> None:
    q, k, v = (of_strides(TOKENS, torch.float32) for _ in range(3))
    expected = F.scaled_dot_product_attention(q, k, v)
    with rg.patch(report=None):
        for _ in range(3):
            assert F.scaled_dot_product_attention(q, k, v).stride() == expected.stride()


@pytest.mark.parametrize("cached", [False, True])
def test_sequences_of_unequal_lengths(cached: bool) -> None:
    """Also new tokens beside a cache, of which C++ makes one list."""
    x = torch.nested.nested_tensor([torch.randn(n, 4, 16) for n in (5, 17, 3)], layout=torch.jagged)
    keys, mask = torch.randn(3, 4, 40, 16), rg.Everything() if cached else rg.Causal()
    plan_cache.clear()
    for learned in (False, False, False, True, True):
        q = x.detach().requires_grad_(learned).transpose(1, 2)
        out = rg.attention(q, *((keys, keys) if cached else (q, q)), mask=mask)
        assert (cached and learned) or out.transpose(1, 2).values().is_contiguous()
        for one, alone, key in zip(out.unbind(), q.unbind(), keys if cached else q.unbind(), strict=True):
            exact = [t.detach().double() for t in (alone, key, key)]
            right = rg.attention(*exact, mask=mask, backend=rg.Reference())
            torch.testing.assert_close(one.double(), right, rtol=1e-4, atol=1e-5)
