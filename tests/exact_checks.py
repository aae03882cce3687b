"""What a call returns, compared with a float64 evaluation, which is computed once for all instruction sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

import regard as rg
from kernel_checks import outcome
from regard import testing
from regard.core.value import Value

Tensors = tuple[Tensor, ...]


def check_both(q: Tensor, k: Tensor, v: Tensor, **call: object) -> None:
    """out within twice the error of a plain evaluation in the dtype of the call, lse of one in float32."""
    case = testing.Case(q, k, v, **call)
    exact, usual, plain = _expected(case.copied())
    out, lse = outcome(case, None)
    assert testing.error(out, exact[0]) <= testing.tolerance(exact[0], usual)
    assert testing.error(lse, exact[1]) <= testing.tolerance(exact[1], plain)


@lru_cache(maxsize=8)
def _expected(case: testing.Case) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Reference's out and lse in float64, its out in the dtype of the call, its lse in float32."""
    double, single = (
        replace(case, q=case.q.to(dtype), k=case.k.to(dtype), v=case.v.to(dtype))
        for dtype in (torch.float64, torch.float32)
    )
    reference = rg.Reference()
    return outcome(double, reference), outcome(case, reference)[0], outcome(single, reference)[1]


@dataclass(frozen=True)
class _Differentiated(Value):
    """A call, and the cotangent of its out."""

    call: testing.Case
    cotangent: Tensor

    def gradients(self, dtype: torch.dtype, backend: rg.Backend | None) -> Tensors:
        leaves = tuple(t.to(dtype).requires_grad_() for t in (self.call.q, self.call.k, self.call.v))
        out, _ = outcome(replace(self.call, q=leaves[0], k=leaves[1], v=leaves[2]), backend)
        return torch.autograd.grad(out, leaves, self.cotangent.to(dtype))


def check_gradients(q: Tensor, k: Tensor, v: Tensor, cotangent: Tensor, **call: object) -> None:
    """Of q, k and v, within twice the error of a plain evaluation in the dtype of the call."""
    given = _Differentiated(testing.Case(q, k, v, **call), cotangent)
    exact, usual = _expected_gradients(given.with_tensors(t.clone() for t in given.tensors()))
    for got, right, plain in zip(given.gradients(q.dtype, None), exact, usual, strict=True):
        assert testing.error(got, right) <= testing.tolerance(right, plain)


@lru_cache(maxsize=8)
def _expected_gradients(given: _Differentiated) -> tuple[Tensors, Tensors]:
    """Reference's in float64, and in the dtype of the call."""
    return given.gradients(torch.float64, rg.Reference()), given.gradients(given.call.q.dtype, rg.Reference())


def check_threads(call: Callable[[], Tensor], counts: tuple[int, ...] = (1, 2)) -> Tensor:
    """What a call returns, once it has the same bits with each of these numbers of threads; NaN are alike."""
    threads, found = torch.get_num_threads(), list[Tensor]()
    try:
        for count in counts:
            torch.set_num_threads(count)
            found.append(call())
    finally:
        torch.set_num_threads(threads)
    for out in found[1:]:
        torch.testing.assert_close(out, found[0], rtol=0, atol=0, equal_nan=True)
    return found[0]
