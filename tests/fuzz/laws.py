"""What must hold whatever the scores are, however they are rounded. Imports nothing of regard."""

from __future__ import annotations

import torch
from torch import Tensor

from .call import Call

Results = dict[str, Tensor]


def laws(
    call: Call, way: str, found: Results, cotangents: Results, exact: Results, must: Tensor | None
) -> list[str | None]:
    """What of it does not hold, as sentences.

    found, exact: results and gradients. must: the rows of out that see a NaN, where q, k or v hold some.
    """
    if must is not None:
        named = {"attention": "out", "state": "out", "merged": "out"}.get(way)
        hidden = named is not None and bool((must & found[named].isfinite().all(-1)).any()) and call.v.shape[-1]
        return ["a NaN that a query sees is not to be seen in its output"] if hidden else []
    if call.sink is not None or not call.nk:
        return []
    return _sums(call, way, found, exact) + _values(call, way, found, cotangents, exact)


def _sums(call: Call, way: str, found: Results, exact: Results) -> list[str | None]:
    """Weights sum to 1 or, of a row that sees nothing, to 0; so does the output where all values are 1."""
    told: list[str | None] = []
    if way == "weights":
        w = found["weights"]
        told.append(_ones("weights", w.double().sum(-1), exact["weights"].sum(-1), w.dtype, call.nk**0.5))
    name = {"one query": "row"}.get(way, "out")
    if name in found and way != "nothing kept" and call.v.shape[-1] and bool((call.v[..., 0] == 1).all()):
        out = found[name]
        # the native product of bfloat16 weights and values rounds the weights first
        dtype = torch.bfloat16 if call.q.dtype == torch.bfloat16 else out.dtype
        told.append(_ones("the output where all values are 1", out[..., 0].double(), exact[name][..., 0], dtype))
    return told


def _ones(name: str, sums: Tensor, exact: Tensor, dtype: torch.dtype, factor: float = 1.0) -> str | None:
    allowed = factor * torch.finfo(dtype).eps + 64 * torch.finfo(_wide(dtype)).eps
    off = (sums - exact).abs().nan_to_num(torch.inf)
    most = float(off.max()) if off.numel() else 0.0
    return f"{name}: sums that should be 1, or 0 for empty rows, are off by {most:.2e}" if most > allowed else None


def _values(call: Call, way: str, found: Results, cotangents: Results, exact: Results) -> list[str | None]:
    """The gradient of v, summed over the keys, is that of out summed over the queries that see something."""
    name = "gradient of v"
    if name not in found or way not in ("attention", "state", "merged") or call.v is call.k or call.v is call.q:
        return []
    got, sums = found[name].double().sum(-2), exact[name].sum(-2)
    room = exact[name].abs().sum(-2) * torch.finfo(call.v.dtype).eps
    if (
        call.v.shape[: -3 if call.headed else -2] != call.batch
    ):  # a gradient for each call of the batch is rounded, then added to the others
        room = room + cotangents["out"].abs().double().sum() * torch.finfo(call.v.dtype).eps
    room = room + cotangents["out"].abs().double().sum() * 64 * torch.finfo(_wide(call.v.dtype)).eps
    off = (got - sums).abs().nan_to_num(torch.inf)
    wrong = off > room.clamp(min=1e-300)
    wrong = wrong & (exact[name].abs().amax(-2) < 0.9 * torch.finfo(call.v.dtype).max)
    return [f"the gradient of v, summed over the keys, is off by {float(off.max()):.2e}"] if bool(wrong.any()) else []


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
