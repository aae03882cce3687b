"""Which backend runs a call: the first that can, or the one that was named, which never falls back."""

from __future__ import annotations

import re

import pytest
import torch

import regard as rg
from regard import testing
from regard.backends.base import Backend
from regard.runtime.dispatch import BACKENDS, choose, explanation

PROBLEM = testing.draw(testing.frame()).problem
X = torch.zeros(2, 3, 5, 8, dtype=torch.float64)


def test_the_first_that_can_is_chosen() -> None:
    assert BACKENDS[-4:] == (rg.Sdpa(), rg.Flex(), rg.Tiled(), rg.Reference())
    assert choose(PROBLEM, None, lse=False) == choose(PROBLEM, None, lse=True) == rg.Tiled()


@pytest.mark.parametrize("backend", [rg.Tiled(rows=3), rg.Reference(), rg.Tiled(2, 2)])
def test_the_named_one_is_taken(backend: Backend) -> None:
    assert choose(PROBLEM, backend, lse=True) is backend
    assert rg.explain(X, X, X, backend=backend).backend is backend


@pytest.mark.parametrize("backend", [rg.Sdpa(), rg.Flex()])
@pytest.mark.parametrize("call", [rg.attention, rg.attention_state, rg.explain])
def test_the_named_one_never_falls_back(backend: Backend, call: object) -> None:
    with pytest.raises(rg.Unsupported) as raised:
        call(X, X, X, backend=backend)
    assert str(raised.value) == (
        f"backend {backend!r} cannot run this call: it serves cuda tensors; these are on cpu.\n"
        "  Tiled(), Reference() can; leave backend=None to choose. explain(...) shows the rest."
    )


@pytest.mark.parametrize(
    ("backend", "way"),
    [
        ("tiled", "expected a Backend, such as Tiled(), or None to choose."),
        (rg.Tiled, "backend is the class Tiled, not one of its values; write backend=Tiled()."),
        (3, "expected a Backend, such as Tiled(), or None to choose."),
    ],
)
def test_a_backend_is_a_value(backend: object, way: str) -> None:
    with pytest.raises(TypeError, match=re.escape(way)):
        rg.attention(X, X, X, backend=backend)


def test_a_plan_gives_every_reason() -> None:
    found = explanation(PROBLEM, rg.Reference(), lse=False)
    assert tuple(b for b, _ in found.reasons) == BACKENDS[:-1]
    assert dict(found.reasons)[rg.Tiled()] == "another was named"
    free = dict(explanation(PROBLEM, None, lse=True).reasons)
    assert free[rg.Reference()] == "Tiled() is preferred"
    assert free[rg.Sdpa()] == "it serves cuda tensors; these are on cpu"
