"""Tensors in half precision are read, not computed with: what is made of them is as exact as in float32.

But for weights that multiply values of bfloat16: where an instruction multiplies bfloat16, the kernels round them.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

import regard as rg
from needed import needs_kernels
from regard import testing
from regard.backends.base import Backend
from regard.backends.native.ffi import chosen

NATIVE = pytest.param(rg.Native(), marks=needs_kernels)
BACKENDS = [NATIVE, rg.Tiled(rows=4, keys=5), rg.Reference()]
AT = testing.frame()
MULTIPLY_BFLOAT16 = ("amx", "amx_emulated", "avx512bf16")


@cache
def scores() -> dict[str, rg.Score]:
    torch.manual_seed(0)
    slopes, m = rg.Alibi.geometric(AT.heads), torch.randn(13, 17)
    return {
        **testing.scores(AT),
        "scales of tensors": rg.ScaledDot(torch.tensor(0.37)) >> rg.SoftCap(torch.tensor(1.7)) >> rg.Alibi(slopes),
        "points far off": rg.ScaledDot() >> rg.Alibi(slopes, 90 + torch.rand(17, 2), 90 + torch.rand(13, 2)),
        "biases that cancel": rg.ScaledDot() >> rg.Bias(100 + m) >> rg.Bias(-100 + torch.randn(17)),
    }


def run(case: testing.Case, backend: Backend) -> tuple[Tensor, Tensor]:
    """out and lse, in the accumulation dtype."""
    given = {"score": case.score, "positions": case.positions, "sink": case.sink, "backend": backend}
    return rg.attention_state(case.q, case.k, case.v, **given).finish()


def with_rounded_weights(case: testing.Case) -> Tensor:
    """out, of weights that were rounded to bfloat16."""
    given = {"score": case.score, "positions": case.positions, "sink": case.sink}
    weights = rg.attention_weights(case.q, case.k, **given).bfloat16().to(case.v.dtype)
    group = case.q.shape[-3] // case.v.shape[-3]
    return (weights @ case.v.repeat_interleave(group, -3)).float()


@pytest.mark.parametrize("backend", BACKENDS, ids=repr)
@pytest.mark.parametrize("inputs", ["half inputs", "float32 inputs"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", scores())
def test_every_score(name: str, dtype: torch.dtype, inputs: str, backend: Backend) -> None:
    """Against float64 on the same numbers, by the error that the same numbers have in float32."""
    with torch.no_grad():
        case = testing.draw(AT, score=scores()[name], sink=True).leaves(dtype)
        if inputs == "float32 inputs":
            case = case.with_tensors(iter([*(t.float() for t in case.tensors()[:3]), *case.tensors()[3:]]))
        if backend.why_not(case.problem, True) is not None:
            assert name == "Custom"
            return
        exact, plain = (run(case.leaves(wide), rg.Reference()) for wide in (torch.float64, torch.float32))
        if isinstance(backend, rg.Native) and case.q.dtype == torch.bfloat16 and chosen() in MULTIPLY_BFLOAT16:
            plain = (with_rounded_weights(case.leaves(torch.float64)), plain[1])
        for got, right, usual in zip(run(case, backend), exact, plain, strict=True):
            assert got.dtype == torch.float32
            assert testing.error(got, right) <= testing.tolerance(right, usual)
