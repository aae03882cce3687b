"""torch.func.linearize, which traces dual tensors into a graph, on the backend that a call takes by itself."""

from __future__ import annotations

import pytest
import torch
from torch.func import jvp, linearize

import regard as rg


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")  # torch's own
def test_linearize_is_jvp() -> None:
    q, k, v, t = (torch.randn(2, 4, 9, 8) for _ in range(4))
    score = rg.ScaledDot() >> rg.SoftCap(5.0)
    for mask in (rg.Causal(), rg.Dilated(2)):
        out, pushed = linearize(lambda q, mask=mask: rg.attention(q, k, v, score=score, mask=mask), q)
        expected = jvp(
            lambda q, mask=mask: rg.attention(q, k, v, score=score, mask=mask, backend=rg.Reference()), (q,), (t,)
        )
        torch.testing.assert_close((out, pushed(t)), expected, atol=1e-5, rtol=1e-4)
