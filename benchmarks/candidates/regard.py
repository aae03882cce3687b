"""regard: the plain call, whatever the case."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

import regard as rg
from benchmarks.candidates import Way
from benchmarks.cases import DROPPED, WINDOW, Case
from benchmarks.inputs import BUCKETS, Inputs
from benchmarks.passes import way


def start(threads: int) -> str:
    torch.set_num_threads(threads)
    try:
        return version("regard")
    except PackageNotFoundError:
        return "from source"


def ways(case: Case, x: Inputs) -> list[Way]:
    masks: dict[str, dict[str, Any]] = {
        "full": {},
        "causal": {"mask": rg.Causal()},
        "window": {"mask": rg.Window(before=WINDOW - 1, after=0)},
        "dropout": {"dropout": rg.Dropout(DROPPED, seed=7)},
    }
    if case.what == "bool":
        return [_way("Dense", x, mask=rg.Dense(x.mask))]
    if case.what == "ragged":
        return [_way("Documents", x, mask=rg.Documents(x.ids()))]
    if case.what == "padding":
        lengths = rg.Lengths(keys=torch.tensor(case.lengths))
        return [_way("Dense", x, mask=rg.Dense(x.mask)), _way("Lengths", x, mask=lengths)]
    return [_way("attention", x, **masks.get(case.what, {}))]


def _way(name: str, x: Inputs, **given: Any) -> Way:
    def attend(q: Tensor, k: Tensor, v: Tensor, learned: Tensor | None = None) -> Tensor:
        if x.case.what == "additive":
            return rg.attention(q, k, v, score=rg.Additive(None, None, learned))
        if x.case.what == "bias":
            return rg.attention(q, k, v, score=rg.ScaledDot() >> rg.Bias(learned))
        if x.case.what == "t5":
            return rg.attention(q, k, v, score=rg.ScaledDot() >> rg.RelativeBias(learned, BUCKETS))
        return rg.attention(q, k, v, **given)

    return way(name, x, attend)
