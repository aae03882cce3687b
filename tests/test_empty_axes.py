"""Calls of which an axis is empty: every backend gives what Reference gives, and gradients that are 0."""

from __future__ import annotations

import pytest
import torch

import regard as rg
from regard.backends.base import Backend
from regard.backends.library import runnable

NATIVE = pytest.param(rg.Native(), marks=pytest.mark.skipif(not runnable(), reason="needs the native kernels"))
BACKENDS = [NATIVE, rg.Reference(), rg.Tiled(rows=2, keys=3)]

pytestmark = pytest.mark.parametrize("backend", BACKENDS, ids=repr)


@pytest.mark.parametrize("axis", range(4), ids=["batch", "heads", "queries", "keys"])
@pytest.mark.parametrize(
    "shared", [(5, 1, 1, 1), (1, 3, 1, 1), (1, 1, 2, 1), (1, 1, 1, 7), (1, 2, 1), (7,), ()], ids=str
)
def test_a_shared_bias_beside_one_of_full_shape(backend: Backend, axis: int, shared: tuple[int, ...]) -> None:
    full = [5, 3, 2, 7]
    full[axis] = 0
    fits = zip(shared, full[4 - len(shared) :], strict=True)
    biases = [torch.ones([min(a, b) if a > 1 else 1 for a, b in fits]), torch.ones(full)]
    for t in biases:
        t.requires_grad_()
    q, k = (torch.ones(*full[:2], n, 4) for n in full[2:])
    score = rg.ScaledDot() >> rg.Bias(biases[0]) >> rg.Bias(biases[1])
    out = rg.attention(q, k, k, score=score, backend=backend)
    for t, g in zip(biases, torch.autograd.grad(out.sum(), biases), strict=True):
        assert g.shape == t.shape and not g.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("nk", [0, 7], ids=["no keys", "hidden keys"])
@pytest.mark.parametrize("score", [rg.ScaledDot(), rg.Additive(None, None, torch.ones(4)), rg.Cosine()], ids=str)
def test_a_sink_alone_is_the_whole_log_sum_exp(backend: Backend, score: rg.Score, nk: int, dtype: torch.dtype) -> None:
    """out 0, lse the sink, d lse / d sink 1, or 0 where it is -inf, which is no sink; also with create_graph."""
    if dtype == torch.float64 and backend == rg.Native():
        backend = None  # who takes what native does not
    sink = torch.tensor([-30, -torch.inf, 30], dtype=dtype).requires_grad_()
    q, k, v = (torch.ones(2, 3, n, 4, dtype=dtype) for n in (5, nk, nk))
    state = rg.attention_state(q, k, v, score=score, mask=~rg.Everything(), sink=sink, backend=backend)
    out, lse = state.finish()
    assert not out.any()
    torch.testing.assert_close(lse, sink.to(lse.dtype)[:, None].expand(2, 3, 5))
    for higher in (False, True):
        (g,) = torch.autograd.grad(lse.sum(), sink, retain_graph=True, create_graph=higher)
        torch.testing.assert_close(g, torch.tensor([10, 0, 10], dtype=dtype))
