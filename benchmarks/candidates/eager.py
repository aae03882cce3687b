"""The formulas in plain torch, where SDPA has none: additive, sums over features, two products with a softmax."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import dropout

from benchmarks.candidates import Unable, Way
from benchmarks.cases import Case
from benchmarks.functions import indices, score_of, term_of
from benchmarks.inputs import Inputs
from benchmarks.passes import way


def start(threads: int) -> str:
    torch.set_num_threads(threads)
    return torch.__version__


def ways(case: Case, x: Inputs) -> list[Way]:
    if case.what == "additive":
        return [way("formula", x, additive)]
    if term_of(case) is None:
        raise Unable("only where neither SDPA nor FlexAttention has such a score")
    return [way("formula", x, formula(case)), way("torch.cdist", x, formula(case, distance))]


def additive(q: Tensor, k: Tensor, v: Tensor, w: Tensor) -> Tensor:
    return (torch.tanh(q[..., :, None, :] + k[..., None, :, :]) @ w).softmax(-1) @ v


def distance(q: Tensor, k: Tensor) -> Tensor:
    """The sum of the terms of "L1 distance" by torch's own function, which makes no tensor of all features."""
    return torch.cdist(q, k, p=1) / -8.0


def formula(case: Case, similarity: Callable[[Tensor, Tensor], Tensor] | None = None) -> Callable[..., Tensor]:
    """The attention of a case with a term, over a tensor of all queries, keys and features where nothing else sums."""
    term, score, index = term_of(case), score_of(case), indices(case, torch.arange(case.shape[-2]))
    assert term is not None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = similarity(q, k) if similarity else term(q[..., :, None, :], k[..., None, :, :]).sum(-1)
        return (s if score is None else score(s, *index)).softmax(-1) @ v

    return attend


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
