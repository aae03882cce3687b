"""What a call returns, compared with a float64 evaluation."""

from __future__ import annotations

from torch import Tensor

import regard as rg
from regard import testing


def check_both(q: Tensor, k: Tensor, v: Tensor, **call: object) -> None:
    """out within twice the error of a plain evaluation in the dtype of the call, lse of one in float32."""
    exact = rg.attention_state(q.double(), k.double(), v.double(), backend=rg.Reference(), **call).finish()
    plain = rg.attention_state(q.float(), k.float(), v.float(), backend=rg.Reference(), **call).finish()[1]
    usual = rg.attention(q, k, v, backend=rg.Reference(), **call)
    out, lse = rg.attention(q, k, v, **call), rg.attention_state(q, k, v, **call).finish()[1]
    assert testing.error(out, exact[0]) <= testing.tolerance(exact[0], usual)
    assert testing.error(lse, exact[1]) <= testing.tolerance(exact[1], plain)
