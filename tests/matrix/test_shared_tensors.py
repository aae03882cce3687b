"""One tensor in several roles of a call: its gradient is the sum of those that tensors apart would have."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import regard as rg
from needed import needs_kernels
from regard import testing
from regard.backends.base import Backend

N, HEADS, F64 = 5, 5, torch.float64  # square, so that one tensor fits everywhere
NATIVE = pytest.param(rg.Native(), marks=needs_kernels)
BACKENDS = [NATIVE, None, rg.Tiled(rows=3, keys=2), rg.Reference()]

# From one tensor a head (HEADS,), positive, and one square one: the score.
ROLES: dict[str, Callable[[Tensor, Tensor], rg.Score]] = {
    "Additive w b": lambda x, m: rg.Additive(None, None, x, x),
    "Additive w_q w_k w b": lambda x, m: rg.Additive(m, m, m, m),
    "Additive w_q w": lambda x, m: rg.Additive(m, None, m),
    "Additive w_k b": lambda x, m: rg.Additive(None, m, x, m),
    "Additive w, Bias": lambda x, m: rg.Additive(None, None, m) >> rg.Bias(m),
    "Bias twice": lambda x, m: rg.ScaledDot() >> rg.Bias(m) >> rg.Bias(m),
    "Bilinear, Bias": lambda x, m: rg.Bilinear(m) >> rg.Bias(m),
    "points": lambda x, m: rg.ScaledDot() >> rg.Alibi(x, coordinates=m, query_coordinates=m),
    "points, Bias": lambda x, m: rg.ScaledDot() >> rg.Alibi(x, coordinates=m) >> rg.Bias(m),
    "table, Bias": lambda x, m: rg.ScaledDot() >> rg.RelativeBias(m, rg.ClippedBuckets(2, 2)) >> rg.Bias(m),
    "scale, slopes": lambda x, m: rg.ScaledDot(x) >> rg.Alibi(x),
    "cosine, cap, slopes": lambda x, m: rg.Cosine(x) >> rg.SoftCap(x) >> rg.Alibi(x),
    "weight, rate": lambda x, m: rg.ScaledDot() >> rg.LogDistance(x, x),
    "gamma, slopes": lambda x, m: rg.Distance(x) >> rg.Alibi(x),
    "Custom": lambda x, m: rg.Custom(lambda q, k, a, b: (q * a) @ (k * b).mT, tensors=(x, x)),
}


def gradients(case: testing.Case, backend: Backend | None, higher: bool) -> tuple[Tensor, ...]:
    given = {"score": case.score, "sink": case.sink, "mask": rg.Causal(), "backend": backend}
    out = rg.attention(case.q, case.k, case.v, **given)
    cotangent = torch.linspace(-1, 1, out.numel(), dtype=F64).reshape(out.shape).to(out.dtype)
    wanted = dict.fromkeys(case.differentiable.values())  # each once
    return torch.autograd.grad(out, tuple(wanted), cotangent, create_graph=higher)


def summed(case: testing.Case) -> list[Tensor]:
    """The same of tensors apart, by the definition in float64, added up for each tensor of the case."""
    apart = gradients(case.leaves(F64), rg.Reference(), False)
    total: dict[Tensor, Tensor] = {}
    for t, g in zip(case.differentiable.values(), apart, strict=True):
        total[t] = total[t] + g if t in total else g
    return list(total.values())


@pytest.mark.parametrize("backend", BACKENDS, ids=repr)
@pytest.mark.parametrize("higher", [False, True], ids=["first order", "create_graph"])
@pytest.mark.parametrize("role", ROLES)
def test_its_gradient_is_the_sum_over_its_roles(role: str, higher: bool, backend: Backend | None) -> None:
    dtype = F64 if isinstance(backend, (rg.Tiled, rg.Reference)) else torch.float32
    x, m, same = (torch.rand(HEADS) + 0.5, torch.randn(N, N), torch.randn(2, HEADS, N, N))
    x, m, same = (t.to(dtype).requires_grad_() for t in (x, m, same))
    case = testing.Case(same, same, same, ROLES[role](x, m), sink=x)
    if backend is not None and backend.why_not(case.problem, False):
        with pytest.raises(rg.Unsupported):
            gradients(case, backend, higher)
        return
    distinct = case.leaves(dtype)
    for _ in range(2):  # a structure that is kept from tensors apart must not serve this one
        gradients(distinct, backend, higher)
    for got, right in zip(gradients(case, backend, higher), summed(case), strict=True):
        torch.testing.assert_close(got.to(F64), right, rtol=0, atol=1e-12 if dtype == F64 else 1e-5)
