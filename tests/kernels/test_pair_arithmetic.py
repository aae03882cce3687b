"""Functions of a pair of one operation or two of PyTorch: all run in the kernels."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from needed import needs_kernels
from pair_definition import BATCH, HEADS, WIDTH, Mod, largest_errors
from regard.compat.torch import flex_attention

pytestmark = needs_kernels

SCORE_MODS: dict[str, Mod] = {
    "half of it": lambda s, b, h, i, j: s.to(torch.float64).mul(0.5).to(s.dtype),
    "index as float": lambda s, b, h, i, j: s - 0.01 * (i.float() - j.float()).square().sqrt(),
    "log of a distance": lambda s, b, h, i, j: s - torch.log1p((i - j).abs().to(s.dtype)),
    "of int32": lambda s, b, h, i, j: s + (i.to(torch.int32) - j.to(torch.int32)).clamp(-4, 4),
    "a condition as a number": lambda s, b, h, i, j: s + (i >= j) * 0.5,
    "filled": lambda s, b, h, i, j: s.masked_fill(i < j, -math.inf),
    "a number where hidden": lambda s, b, h, i, j: torch.where(i >= j, s, -1e9),
    "nothing by itself": lambda s, b, h, i, j: s + torch.zeros_like(s) + h.new_zeros(h.shape),
    "a number of its dtype": lambda s, b, h, i, j: torch.where(i >= j, s, s.new_zeros(())) + s.new_full(s.shape, 0.5),
    "clamped": lambda s, b, h, i, j: s.clamp(-1, 1.5),
    "least and most": lambda s, b, h, i, j: torch.maximum(torch.minimum(s, s * 2), s - 1),
    "hyperbolic": lambda s, b, h, i, j: torch.sinh(s) / torch.cosh(s) + torch.asinh(s) + torch.atanh(torch.tanh(s / 9)),
    "softplus": lambda s, b, h, i, j: F.softplus(s),
    "softsign": lambda s, b, h, i, j: F.softsign(s) + F.hardtanh(s) + F.elu(s),
    "mish": lambda s, b, h, i, j: F.mish(s),
    "gelu by tanh": lambda s, b, h, i, j: F.gelu(s, approximate="tanh"),
    "log of the sigmoid": lambda s, b, h, i, j: F.logsigmoid(s),
    "hard sigmoid": lambda s, b, h, i, j: F.hardsigmoid(s) + F.hardswish(s) + F.relu6(s),
    "interpolated": lambda s, b, h, i, j: torch.lerp(s, s * s, 0.25) + torch.addcmul(s, s, s, value=0.5),
    "one end of two": lambda s, b, h, i, j: torch.lerp(torch.full_like(s, -1e9), s, (i >= j).to(s.dtype)),
    "of huge numbers": lambda s, b, h, i, j: torch.asinh((s * s + 1) * 1e25),
    "log of a sum of two": lambda s, b, h, i, j: torch.logaddexp(s, s * 0.5),
    "a logit": lambda s, b, h, i, j: torch.logit(torch.sigmoid(s) * 0.9 + 0.05),
    "rounded": lambda s, b, h, i, j: s + torch.round(s * 2) * 0.25 + torch.trunc(s) + torch.frac(s),
    "not a number": lambda s, b, h, i, j: torch.where(torch.isinf(s) | torch.isnan(s), 0.0, s),
    "cleaned": lambda s, b, h, i, j: torch.nan_to_num(torch.where(i >= j, s, -math.inf), neginf=-5.0),
    "power": lambda s, b, h, i, j: s.abs().add(0.1).pow(1.5) + 2.0**s,
    "an error function": lambda s, b, h, i, j: torch.erf(s),
    "signs": lambda s, b, h, i, j: s + s.sign() + torch.sign(i - j),
    "heaviside": lambda s, b, h, i, j: s + torch.heaviside((i - j).float(), torch.ones(())),
    "rounded to 0": lambda s, b, h, i, j: (
        s + torch.fmod(i - j, 3) * s + torch.div(i - j, -3, rounding_mode="trunc") * h
    ),
    "remainders of floats": lambda s, b, h, i, j: torch.fmod(s, 0.7) + torch.remainder(s, 0.7) * 0.5,
    "bits": lambda s, b, h, i, j: s + ((i ^ j) & 3) + ((i >> 2) | (j << 1)) * 0.01 - (~(i - j) & -8) * 0.1,
}
MASK_MODS: dict[str, Mod] = {
    "by quotients": lambda b, h, i, j: torch.where(i % 2 == 0, i / 2 >= j, i >= j),
    "rounded to 0": lambda b, h, i, j: torch.div(i - j, 5, rounding_mode="trunc") == torch.fmod(i - j, 3),
    "bits": lambda b, h, i, j: ((i & j) == 0) | ((i ^ j) < 9) | ((j << 1) == (i >> 1)) | (~i == -j),
    "whole numbers beyond those of a float": lambda b, h, i, j: torch.relu((i - j) * 2**23 + j) <= 2**27 + 3,
    "not": lambda b, h, i, j: torch.logical_not(torch.logical_xor(i % 3 == 0, j % 3 == 0)) | ~(i != j),
}


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mods(name: str) -> None:
    errors = largest_errors(lambda numbers: SCORE_MODS[name], None)
    assert max(errors.values()) <= 3e-5, errors


@pytest.mark.parametrize("name", MASK_MODS)
def test_mask_mods(name: str) -> None:
    errors = largest_errors(None, lambda numbers: MASK_MODS[name])
    assert max(errors.values()) <= 3e-5, errors


CLAMPS = {
    "above": lambda s, n: s.clamp(max=n),
    "below": lambda s, n: s.clamp(min=n),
    "both": lambda s, n: s.clamp(-n, n),
}


@pytest.mark.parametrize("name", CLAMPS)
@pytest.mark.parametrize("bound", ["a number", "of heads"])
def test_a_bound_of_nan_makes_nan(name: str, bound: str) -> None:
    """A learned bound that diverged is seen in the output."""
    clamp, one = CLAMPS[name], bound == "a number"
    limits = torch.full((HEADS,), math.nan) if one else torch.tensor([math.nan, 0.5, 9.0, math.nan])
    x = torch.randn(BATCH, HEADS, 40, WIDTH)
    out = flex_attention(x, x, x, lambda s, b, h, i, j: clamp(s, math.nan if one else limits[h]))
    scores = clamp(x @ x.mT / WIDTH**0.5, limits[:, None, None])
    torch.testing.assert_close(out, torch.softmax(scores, -1) @ x, equal_nan=True)
