"""Functions that a compiled function makes: what torch.compile shows of them differs, so every version runs this."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import regard as rg
from needed import needs_kernels
from test_graphs_programs import Watched

pytestmark = [
    needs_kernels,
    pytest.mark.skipif(torch.__version__ < "2.13", reason="torch.compile follows no copy of a score before torch 2.13"),
]


@pytest.mark.full
def test_a_function_that_is_made_in_a_graph() -> None:
    """It may read what the graph computes; without variables around it, it is recorded as every other."""

    def inside(q: Tensor) -> tuple[Tensor, ...]:
        n, seen = q.shape[-2] // 2, q.sum((0, 1, 3)) > 0
        masks = (lambda b, h, i, j: i < j + 5), (lambda b, h, i, j: i < n), (lambda b, h, i, j: seen[j])
        return tuple([rg.attention(q, q, q, mask=rg.Where(fn)) for fn in masks])

    q, watched = torch.randn(1, 2, 37, 8), Watched()
    got = torch.compile(inside, backend=watched, fullgraph=True, dynamic=True)(q)
    torch.testing.assert_close(got, inside(q), rtol=1e-4, atol=1e-5)
    assert [bool(node["texts"].split("\n")[0]) for node in watched.nodes] == [True, False, False]
