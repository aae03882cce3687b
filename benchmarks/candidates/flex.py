"""FlexAttention, compiled for the CPU: masks as block masks, biases as score functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from benchmarks.candidates import Unable, Way
from benchmarks.cases import WINDOW, Case
from benchmarks.functions import FUNCTIONS, mask_of, score_mod, term_of
from benchmarks.inputs import Inputs


def start(threads: int) -> str:
    torch.set_num_threads(threads)
    return torch.__version__


def ways(case: Case, x: Inputs) -> list[Way]:
    if case.what == "dropout":
        raise Unable("FlexAttention has no dropout")
    if case.passes != "forward":
        raise Unable("FlexAttention has no backward on a CPU")
    if term_of(case) is not None:
        raise Unable("FlexAttention's scores are functions of a dot product")
    torch._dynamo.reset()
    flex, (q, k, v) = torch.compile(flex_attention, dynamic=False), x.four()
    given: dict[str, Any] = {"enable_gqa": k.shape[1] != q.shape[1]}
    visible = _visible(x)
    if visible is not None:
        n, batch = case.shape[-2], case.batch if case.what == "padding" else None
        heads = case.heads if case.what in FUNCTIONS else None
        given["block_mask"] = create_block_mask(visible, batch, heads, n, case.keys, device="cpu")
    if case.what == "bias":
        bias = x.learned
        assert bias is not None
        given["score_mod"] = lambda s, b, h, i, j: s + bias[i, j]
    if case.what in FUNCTIONS:
        given["score_mod"] = score_mod(case, x.learned)
    return [Way("flex_attention", lambda: flex(q, k, v, **given), lambda out: [out])]


def _visible(x: Inputs) -> Callable[..., Tensor] | None:
    mask = x.mask
    if x.case.what == "bool":
        assert mask is not None
        return lambda b, h, i, j: mask[i, j]
    if x.case.what == "padding":
        lengths = torch.tensor(x.case.lengths)
        return lambda b, h, i, j: j < lengths[b]
    if x.case.what == "ragged":
        ids = x.ids()
        return lambda b, h, i, j: ids[i] == ids[j]
    found: dict[str, Callable[..., Tensor]] = {
        "causal": lambda b, h, i, j: i >= j,
        "window": lambda b, h, i, j: (i >= j) & (i - j < WINDOW),
    }
    return found.get(x.case.what, mask_of(x.case))
