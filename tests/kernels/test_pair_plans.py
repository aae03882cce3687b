"""Plans of calls with a bias, or booleans, of pairs: one serves all lengths, however its tensors lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard as rg
from fuzz.build import Unplanned
from needed import needs_kernels
from regard.core.region import Region
from regard.runtime import plan_cache

pytestmark = needs_kernels

LENGTHS = ((1, 5), (1, 6), (1, 64), (7, 9), (7, 1), (20, 33), (1, 1), (33, 20), (1, 7))
LEADS = {"heads": (1, 4), "batch": (2, 1), "both": (2, 4), "neither": (1, 1)}
LYING: dict[str, Callable[[tuple[int, ...]], Tensor]] = {
    "as it was made": lambda shape: torch.randn(shape),
    "transposed": lambda shape: torch.randn(*shape[:-2], shape[-1], shape[-2]).mT,
    "with gaps": lambda shape: torch.randn(*shape[:-2], 2 * shape[-2], 3 * shape[-1])[..., ::2, ::3],
    "expanded": lambda shape: torch.randn(*shape[:-2], 1, shape[-1]).expand(shape),
}


def call(nq: int, nk: int, pairs: Tensor, what: str, causal: bool, backend: rg.Backend | None = None) -> list[Tensor]:
    """The output, and the gradients of q, k and v."""
    torch.manual_seed(nq * 100 + nk)
    given = [torch.randn(2, 4, n, 16, requires_grad=True) for n in (nq, nk, nk)]
    options: dict[str, Any] = {"positions": rg.tail(nq, nk) if nq <= nk else rg.head(nq, nk)}
    rest = rg.Causal() if causal else rg.Everything()
    if what == "bias":
        options |= {"score": rg.ScaledDot() >> rg.Bias(pairs), "mask": rest}
    else:
        options |= {"mask": rg.Dense(pairs > -1) & rest}
    out = rg.attention(*given, **options, backend=backend)
    with torch.no_grad():
        alone = rg.attention(*given, **options, backend=backend)
    return [out.detach(), alone, *torch.autograd.grad(out.square().sum(), given)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("what", ["bias", "booleans"])
@pytest.mark.parametrize("lead", LEADS)
def test_one_plan_has_the_bits_of_calls_without_one(lead: str, what: str, causal: bool, isa: str) -> None:
    plan_cache.clear()
    for nq, nk in LENGTHS:
        for rows, cols in {(nq, nk), (1, nk), (nq, 1)}:
            for lying in LYING.values():
                pairs = lying((*LEADS[lead], rows, cols))
                mine, expected = (call(nq, nk, pairs, what, causal, by) for by in (None, Unplanned()))
                for a, b in zip(mine, expected, strict=True):
                    torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert len(plan_cache.plans()) == 2  # without gradients, and with


@pytest.mark.parametrize("shape", [(1, 4, 6, 9), (1, 4, 5, 8), (1, 3, 5, 9), (3, 4, 5, 9), (1, 1, 4, 5, 9)])
def test_another_shape_is_an_error_beside_a_plan(shape: tuple[int, ...]) -> None:
    plan_cache.clear()
    q, k, v = torch.randn(2, 4, 5, 16), torch.randn(2, 4, 9, 16), torch.randn(2, 4, 9, 16)
    for right in ((1, 4, 5, 9), (2, 4, 1, 9)):
        for _ in range(2):
            rg.attention(q, k, v, score=rg.ScaledDot() >> rg.Bias(torch.randn(right)))
            rg.attention(q, k, v, mask=rg.Dense(torch.randn(right) > 0))
    with pytest.raises(rg.ShapeError, match="Bias"):
        rg.attention(q, k, v, score=rg.ScaledDot() >> rg.Bias(torch.randn(shape)))
    with pytest.raises(rg.ShapeError, match="Dense"):
        rg.attention(q, k, v, mask=rg.Dense(torch.randn(shape) > 0))


def test_statistics_of_rows() -> None:
    plan_cache.clear()
    for nk in (9, 30, 31):
        q, k, v = torch.randn(2, 4, 5, 16), torch.randn(2, 4, nk, 16), torch.randn(2, 4, nk, 16)
        given = {"score": rg.ScaledDot() >> rg.Bias(torch.randn(1, 4, 5, nk))}
        for _ in range(2):
            found = rg.attention_state(q, k, v, **given).finish()
            expected = rg.attention_state(q, k, v, **given, backend=Unplanned()).finish()
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_a_bias_beside_a_modifier_of_ones_own() -> None:
    """Its graph follows from all shapes, also from which sizes are 1."""

    class Tilted(rg.Modifier):
        def modify(self, s: Tensor, at: Region) -> Tensor:
            return s - (at.i - at.j).abs() * 0.01

    plan_cache.clear()
    score = rg.ScaledDot() >> Tilted()
    for nq, nk, rows, cols in ((20, 30, 20, 30), (20, 30, 1, 30), (20, 31, 20, 1), (17, 30, 17, 30), (17, 40, 1, 40)):
        q, k, v = torch.randn(2, 4, nq, 16), torch.randn(2, 4, nk, 16), torch.randn(2, 4, nk, 16)
        bias = rg.Bias(torch.randn(1, 4, rows, cols))
        for _ in range(2):
            found, expected = (
                rg.attention(q, k, v, score=score >> bias, positions=rg.tail(nq, nk), backend=backend)
                for backend in (None, Unplanned())
            )
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
