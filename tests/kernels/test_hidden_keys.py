"""Keys at the ends of a tile that a mask hides from all queries of a block: they are left out, and no bit changes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from unittest import mock

import pytest
import torch
from torch import Tensor

import regard as rg
from needed import needs_kernels
from regard import testing
from regard.backends.native.ffi import runnable
from regard.core.region import Region

pytestmark = needs_kernels

NQ, NK, HEADS = 150, 700, 2


@dataclass(frozen=True)
class Gate(rg.Modifier):
    t: Tensor

    def modify(self, s: Tensor, at: Region) -> Tensor:
        return s * torch.sigmoid(s - at.heads(self.t)) + 0.01 * (at.i - at.j)


SCORES: dict[str, rg.Score] = {
    "dots": rg.ScaledDot(),
    "soft cap": rg.ScaledDot() >> rg.SoftCap(2.0),
    "distances": rg.ScaledDot() >> rg.LogDistance(torch.rand(HEADS), 1.0),
    "bias": rg.ScaledDot() >> rg.Bias(torch.randn(HEADS, NQ, NK)),
    "program": rg.ScaledDot() >> Gate(torch.rand(HEADS)),
    "additive": rg.Additive(torch.randn(16, 6) / 4, torch.randn(16, 6) / 4, torch.randn(6)),
}


def runs(first: int) -> Tensor:
    """Queries that see a run of keys each, with holes: all keys before the first are hidden, and most behind."""
    i, j = torch.arange(NQ)[:, None], torch.arange(NK)
    return (j >= first + i // 3) & (j < first + i // 3 + 40) & ((i + j) % 5 != 0)


@pytest.mark.parametrize("isa", runnable() or ("",))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("first", [0, 1, 127, 133, 600])
def test_values_and_gradients(isa: str, dtype: torch.dtype, score: str, first: int) -> None:
    torch.manual_seed(first)
    q, k, v = torch.randn(1, HEADS, NQ, 16), torch.randn(1, HEADS, NK, 16), torch.randn(1, HEADS, NK, 12)
    case = testing.Case(q, k, v, SCORES[score], mask=rg.Dense(runs(first)), positions=rg.tail(NQ, NK))
    with mock.patch.dict(os.environ, REGARD_ISA=isa):
        testing.check(case, rg.Native(), dtype)


# A matrix unit multiplies the tiles of a window as they are, and those that have bits with all their steps.
VECTORS = [isa for isa in runnable() if not isa.startswith(("amx", "sme"))]


@pytest.mark.parametrize("isa", VECTORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_band_has_the_bits_of_a_window(isa: str, dtype: torch.dtype) -> None:
    """Which the kernels know as intervals: of a function, and of booleans, they find the same keys."""
    q, k, v = torch.randn(3, 1, HEADS, NK, 16).to(dtype).unbind(0)
    i, j = torch.arange(NK)[:, None], torch.arange(NK)
    masks = rg.Where(lambda b, h, i, j: (i - j >= 0) & (i - j <= 70)), rg.Dense((i - j >= 0) & (i - j <= 70))
    with mock.patch.dict(os.environ, REGARD_ISA=isa):
        right = rg.attention(q, k, v, mask=rg.Window(70, 0), backend=rg.Native())
        for band in masks:
            assert torch.equal(rg.attention(q, k, v, mask=band, backend=rg.Native()), right)


@pytest.mark.parametrize("isa", runnable() or ("",))
def test_hidden_numbers_may_be_any(isa: str) -> None:
    q, k, v = torch.randn(1, 1, NQ, 16), *torch.randn(2, 1, 1, NK, 16).unbind(0)
    seen = runs(133)
    hidden = ~seen.any(0)
    own = [t.masked_fill(hidden[:, None], bad) for t, bad in ((k, torch.nan), (v, torch.inf))]
    with mock.patch.dict(os.environ, REGARD_ISA=isa):
        found, right = (rg.attention(q, *kv, mask=rg.Dense(seen), backend=rg.Native()) for kv in (own, (k, v)))
    torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)
