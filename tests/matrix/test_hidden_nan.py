"""Two documents in one pack: what is no number in the one never reaches the other, in values or in gradients."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

import regard as rg
from needed import needs_kernels
from regard import testing
from regard.backends.base import Backend

NATIVE = pytest.param(rg.Native(), marks=needs_kernels)
BACKENDS = [NATIVE, rg.Tiled(rows=7, keys=9), rg.Reference()]
N, FIRST = 23, 10  # tokens of the pack, and of its first document, which is spoiled
AT = testing.frame(nq=N, nk=N, batch=(2,), heads=3)
MASK = rg.Documents((torch.arange(N) >= FIRST).long()) & rg.Causal()
WHAT = ["q", "k", "v", "cotangent of out", "cotangent of lse", "score"]


@cache
def scores() -> dict[str, rg.Score]:
    torch.manual_seed(0)
    return testing.scores(AT)


def spoilable(name: str, what: str) -> bool:
    """A score is, if a tensor of it belongs to pairs, keys or tokens."""
    return what != "score" or any(N in t.shape for t in scores()[name].tensors())


def spoiled_score(score: rg.Score, value: float) -> rg.Score:
    """A bias of one pair or key of the first document, the point of one of its tokens."""

    def part(t: Tensor) -> Tensor:
        if t.shape[-2:] == (N, N):
            t = t.clone()
            t[..., 8, 3] = value
        elif t.shape[-1:] == (N,) or t.shape == (N, 2):
            t = t.clone()
            t[3] = value
        return t

    return score.with_tensors(iter([part(t) for t in score.tensors()]))


def clean_part(name: str, t: Tensor) -> Tensor:
    """Of what belongs to tokens, pairs or keys: the part of the second document; the rest is of both."""
    if t.shape[-2:] == (N, N):
        return t[..., FIRST:, FIRST:]
    if name in ("out", "gradient of q", "gradient of k", "gradient of v") or t.shape == (N, 2):
        return t[..., FIRST:, :]
    return t[..., FIRST:] if t.shape[-1:] == (N,) else t[:0]


def answers(case: testing.Case, backend: Backend, what: str, value: float) -> dict[str, Tensor]:
    cotangents = {"out": torch.randn(2, 3, N, 3), "lse": torch.randn(2, 3, N)}
    if what in ("q", "k", "v"):
        t = getattr(case, what).detach().clone()
        t[1, :, 8, 1] = value
        case = replace(case, **{what: t})
    elif what == "score":
        case = replace(case, score=spoiled_score(case.score, value))
    else:
        cotangents[what.removeprefix("cotangent of ")][1, :, 8] = value
    case = case.leaves(case.q.dtype)
    given = {"score": case.score, "mask": case.mask, "sink": case.sink, "backend": backend}
    out, lse = rg.attention_state(case.q, case.k, case.v, **given).finish()
    wanted = case.differentiable
    grads = torch.autograd.grad(
        (out, lse), tuple(wanted.values()), tuple(g.to(out.dtype) for g in cotangents.values()), materialize_grads=True
    )
    found = {"out": out, "lse": lse, **{f"gradient of {name}": g for name, g in zip(wanted, grads, strict=True)}}
    return {name: clean_part(name, t.detach()) for name, t in found.items()}


@pytest.mark.parametrize("backend", BACKENDS, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("name", "what"), [(name, what) for name in scores() for what in WHAT if spoilable(name, what)]
)
def test_what_is_no_number_stays_in_its_document(name: str, what: str, dtype: torch.dtype, backend: Backend) -> None:
    case = testing.draw(AT, score=scores()[name], mask=MASK, sink=True).leaves(dtype)
    if backend.why_not(case.problem, True) is not None:
        assert backend == rg.Native() and (dtype == torch.float64 or name == "Custom")
        return
    near = 1e-12 if dtype == torch.float64 else 1e-5
    torch.manual_seed(1)
    clean = answers(case, backend, what, 0.0)
    for value in (torch.nan, torch.inf):
        torch.manual_seed(1)
        try:
            spoiled = answers(case, backend, what, value)
        except rg.Unsupported:
            assert backend == rg.Native() and name.startswith("Distance") and what in ("q", "k")
            continue
        leaks = [part for part, t in spoiled.items() if not torch.allclose(t, clean[part], rtol=near, atol=near)]
        assert not leaks, f"{value} reaches {leaks}"
