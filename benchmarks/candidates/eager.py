"""The formulas themselves in plain torch, where SDPA has none: the additive score, and two products with a softmax."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import dropout

from benchmarks.candidates import Unable, Way
from benchmarks.cases import Case
from benchmarks.inputs import Inputs
from benchmarks.passes import way


def start(threads: int) -> str:
    torch.set_num_threads(threads)
    return torch.__version__


def ways(case: Case, x: Inputs) -> list[Way]:
    if case.what != "additive":
        raise Unable("only where SDPA has no such score")
    return [way("formula", x, additive)]


def additive(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return (torch.tanh(q[..., :, None, :] + k[..., None, :, :]) @ w).softmax(-1) @ v


def products(name: str, x: Inputs, dropped: float) -> Way:
    """Nothing hidden: softmax of the first product, times v; the groups of heads folded into queries."""
    scale, hk = x.q.shape[-1] ** -0.5, x.k.shape[1]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        b, h, n, d = q.shape
        weights = (q.reshape(b, hk, -1, d) * scale @ k.mT).softmax(-1)
        if dropped:
            weights = dropout(weights, dropped)
        return (weights @ v).reshape(b, h, n, -1)

    return way(name, x, attend)
