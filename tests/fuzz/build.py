"""A call as regard's own values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import regard as rg
from regard.backends.native.ffi import runnable

from .call import Call, Part

FEATURES: dict[str, Callable[..., Tensor]] = {
    "distance": lambda q, k, w: -(q - k).abs() * w,
    "square": lambda q, k, w: -(((q - k) * w) ** 2),
    "leaky relu": lambda q, k, w: w * torch.nn.functional.leaky_relu(q + k, 0.2),
}  # what a feature adds to a score


@dataclass(frozen=True)
class Temperature(rg.Modifier):
    """A modifier of a user's own, from the README."""

    positional = False
    log: torch.Tensor

    def modify(self, s: torch.Tensor, at: Any) -> torch.Tensor:
        return s * at.heads(self.log.to(s.dtype).exp())


@dataclass(frozen=True)
class Near(rg.Modifier):
    """A modifier of a user's own: a gate for each head, and a table of clipped distances."""

    gate: torch.Tensor
    table: torch.Tensor

    def modify(self, s: torch.Tensor, at: Any) -> torch.Tensor:
        reach = self.table.shape[1] // 2
        bucket = (at.i - at.j).clamp(-reach, reach) + reach
        table = self.table.to(s.dtype)  # before it is read: the gradient of each number is summed in that dtype
        return s * torch.sigmoid(at.heads(self.gate).to(s.dtype)) + table[at.h, bucket]


@dataclass(frozen=True)
class Grid(rg.Mask):
    """A mask of a user's own: neighbours in a grid."""

    columns: int
    reach: int

    def visible(self, at: Any) -> torch.Tensor:
        rows, columns = at.i // self.columns - at.j // self.columns, at.i % self.columns - at.j % self.columns
        return (rows.abs() <= self.reach) & (columns.abs() <= self.reach)


@dataclass(frozen=True)
class Stride(rg.Mask):
    """A mask of a user's own, from the README."""

    n: int

    def visible(self, at: Any) -> torch.Tensor:
        return (at.j % self.n == 0) | (at.i == at.j)


def arguments(call: Call) -> dict[str, Any]:
    """What attention takes beside q, k, v and the backend."""
    whole = score(call.score[0])
    for part in call.score[1:]:
        whole = whole >> score(part)
    return {"score": whole, "mask": mask(call.mask), "positions": positions(call), "sink": call.sink}


def positions(call: Call) -> rg.Positions | None:
    if call.positions is None:
        return None
    if call.by_length:
        return rg.tail(call.nq, (call.positions[0][:, -1] + 1).tolist())
    counted = {"head": rg.head, "tail": rg.tail}.get(call.placed)
    return rg.Positions(*call.positions) if counted is None else counted(call.nq, call.nk)


@dataclass(frozen=True)
class Unplanned(rg.Native):
    """The native kernels without plans, which serve regard's own backends: each call goes the general way."""


def backend(call: Call) -> rg.Native | rg.Tiled | rg.Reference | None:
    """Calls that name no backend have plans; those that name the kernels have some with invariant alone."""
    if call.backend is None:
        return None
    kind, *options = call.backend
    if call.backend == ("native", False):
        return Unplanned()
    return {"native": rg.Native, "tiled": rg.Tiled, "reference": rg.Reference}[kind](*options)


def isa(call: Call) -> str | None:
    """The instruction set of a call, by name, among those that this machine runs."""
    names = runnable()
    return None if call.isa is None or not names else names[call.isa % len(names)]


def score(part: Part) -> rg.Score:
    t, n = part.tensors, part.numbers
    if part.kind == "additive":
        kind, slope = n["activation"], n.get("slope", 0.0)
        activation = {"tanh": rg.Tanh(), "sigmoid": rg.Sigmoid()}.get(kind) or rg.LeakyReLU(slope)
        return rg.Additive(t.get("w_q"), t.get("w_k"), t["w"], t.get("b"), activation)
    if part.kind == "elementwise":
        return rg.Elementwise(FEATURES[n["function"]], tensors=(t["w"],))
    if part.kind == "custom":
        return rg.Custom(lambda q, k, w: (q * w).sin() @ k.mT, tensors=(t["w"],))
    if part.kind == "product":
        cap = n["cap"]
        return rg.Custom(lambda q, k, w: cap * torch.tanh(q @ k.mT / cap) + w, tensors=(t["w"],))
    if part.kind == "relative":
        return rg.RelativeBias(t["table"], _buckets(n))
    if part.kind == "points":
        return rg.Alibi(t["slopes"], t["coordinates"], t.get("query_coordinates"))
    kinds = {"dot": rg.Dot, "scaled dot": rg.ScaledDot, "cosine": rg.Cosine, "distance": rg.Distance}
    kinds |= {"bilinear": rg.Bilinear, "soft cap": rg.SoftCap, "alibi": rg.Alibi, "bias": rg.Bias}
    kinds |= {"log distance": rg.LogDistance, "power distance": rg.PowerDistance}
    kinds |= {"divided": rg.Temperature, "temperature": Temperature, "near": Near}
    return kinds[part.kind](**t, **n)


def _buckets(n: dict[str, Any]) -> rg.Buckets:
    kinds = {"clipped": rg.ClippedBuckets, "t5": rg.T5Buckets, "t5 causal": rg.T5CausalBuckets, "grid": rg.GridBuckets}
    return kinds[n["buckets"]](*[x for name, x in n.items() if name != "buckets"])


def mask(part: Part) -> rg.Mask:
    if part.kind in ("and", "or"):
        a, b = (mask(p) for p in part.parts)
        return a & b if part.kind == "and" else a | b
    if part.kind == "not":
        return ~mask(part.parts[0])
    if part.kind == "where":
        x, y = part.numbers["i"], part.numbers["j"]
        return rg.Where(lambda b, h, i, j: (i * x + j * y + h + b) % 7 < 4)
    if part.kind == "lengths" and part.numbers:  # lists instead of tensors
        return rg.Lengths(**{name: t.tolist() for name, t in part.tensors.items()})
    kinds = {"everything": rg.Everything, "causal": rg.Causal, "window": rg.Window, "prefix": rg.Prefix}
    kinds |= {"dilated": rg.Dilated, "lengths": rg.Lengths, "documents": rg.Documents, "dense": rg.Dense}
    kinds |= {"retained": rg.Retained}
    return (kinds | {"stride": Stride, "grid": Grid})[part.kind](**part.tensors, **part.numbers)
