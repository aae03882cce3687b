"""Calls that several ranks make: what each must answer is its part of what one process answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import regard as rg
from regard.parallel import Shards, ring_attention_state, shard

N, NQ = 37, 23
VALUES = ("score", "mask", "positions")


def every_second(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """A mask of one's own, of the positions."""
    return (i - j) % 2 == 0


def layouts(n: int, ranks: int) -> dict[str, Shards]:
    """Ways to deal n tokens out, with a rank that has none where there are several."""
    ragged = {1: [n], 2: [0, n], 3: [0, n - 3, 3], 4: [n - 7, 0, 2, 5]}[ranks]
    order = torch.randperm(n, generator=torch.Generator().manual_seed(1)).tolist()
    return {
        "contiguous": Shards.contiguous(n, ranks),
        "zigzag": Shards.zigzag(n, ranks),
        "striped": Shards.striped(n, ranks),
        "ragged": Shards.of_lengths(ragged),
        "any": Shards.of([sorted(order[r::ranks]) for r in range(ranks)]),
    }


MASKS: dict[str, Callable[[int, int], rg.Mask]] = {
    "full": lambda nq, nk: rg.Everything(),
    "causal": lambda nq, nk: rg.Causal(),
    "window": lambda nq, nk: rg.Causal() & rg.Window(before=6, after=0),
    "documents": lambda nq, nk: rg.Documents(torch.arange(nq) // 9, torch.arange(nk) // 9) & rg.Causal(),
    "unsorted documents": lambda nq, nk: rg.Documents(torch.arange(nq) % 3, torch.arange(nk) % 3),
    "prefix": lambda nq, nk: rg.Causal() | rg.Prefix(5),
    "lengths": lambda nq, nk: rg.Lengths(keys=torch.tensor([nk, nk // 2]), queries=torch.tensor([nq - 3, nq])),
    "dense": lambda nq, nk: rg.Dense(torch.rand(2, 1, nq, nk, generator=torch.Generator().manual_seed(2)) > 0.5),
    "your own": lambda nq, nk: rg.Where(every_second),
}


def scores(nq: int, nk: int, heads: int, dtype: torch.dtype) -> dict[str, rg.Score]:
    """With tensors that have gradients."""
    draw = torch.Generator().manual_seed(3)

    def of(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=dtype)

    return {
        "scaled": rg.ScaledDot(),
        "slopes, bias": rg.ScaledDot() >> rg.Alibi(of(heads).abs()) >> rg.Bias(of(heads, nq, nk)),
        "padding bias, cap": rg.ScaledDot() >> rg.SoftCap(3.0) >> rg.Bias(of(2, 1, 1, nk)),
        "table": rg.ScaledDot() >> rg.RelativeBias(of(9, heads), rg.ClippedBuckets(4, 4)),
        "additive": rg.Additive(of(6, 5), of(6, 5), of(5)),
        "points": rg.ScaledDot() >> rg.Alibi(of(heads).abs(), of(nk, 2), of(nq, 2)),
    }


@dataclass(frozen=True)
class Case:
    """One call: names of its layout, mask and score, and what else there is."""

    layout: str = "contiguous"
    mask: str = "causal"
    score: str = "scaled"
    dtype: torch.dtype = torch.float64
    nq: int = N
    heads: tuple[int, int] = (4, 2)
    sink: bool = False
    dropout: float = 0.0
    backend: str = "None"
    wire: torch.dtype | None = None
    device: str = "cpu"


def whole(case: Case) -> tuple[dict[str, Any], list[Tensor], Tensor, Tensor]:
    """The arguments of the call in one process, its tensors, and the cotangents of out and lse."""
    h, hk = case.heads
    draw = torch.Generator().manual_seed(0)
    sizes = ((2, h, case.nq, 6), (2, hk, N, 6), (2, hk, N, 5), (2, h, case.nq, 5), (2, h, case.nq))
    q, k, v, g_out, g_lse = (torch.randn(*size, generator=draw, dtype=case.dtype) for size in sizes)
    score = scores(case.nq, N, h, case.dtype)[case.score]
    score = score.with_tensors(iter([t.clone().requires_grad_(t.is_floating_point()) for t in score.tensors()]))
    sink = torch.linspace(-1, 1, h, dtype=case.dtype).requires_grad_() if case.sink else None
    given = {
        "score": score,
        "mask": MASKS[case.mask](case.nq, N),
        "positions": None if case.nq == N else rg.tail(case.nq, N),
        "sink": sink,
        "dropout": rg.Dropout(case.dropout, seed=5) if case.dropout else None,
        "backend": None if case.backend == "None" else getattr(rg, case.backend)(),
    }
    learned = [t for t in (*score.tensors(), *(() if sink is None else (sink,))) if t.requires_grad]
    return given, [*(t.requires_grad_() for t in (q, k, v)), *learned], g_out, g_lse


def moved(given: dict[str, Any], device: str) -> tuple[dict[str, Any], list[Tensor]]:
    """The arguments of a call on a device, and the tensors among them that have gradients."""

    def there(t: Tensor) -> Tensor:
        return t.detach().to(device).requires_grad_(t.requires_grad)

    found = {
        name: there(x) if isinstance(x, Tensor) else x.with_tensors(map(there, x.tensors())) if name in VALUES else x
        for name, x in given.items()
        if x is not None
    }
    tensors = [*found["score"].tensors(), *([found["sink"]] if "sink" in found else [])]
    return found, [t for t in tensors if t.requires_grad]


def results(state: rg.State, inputs: list[Tensor], g_out: Tensor, g_lse: Tensor) -> list[Tensor]:
    """out, lse and the gradients of the inputs."""
    out, lse = state.finish()
    finite = lse.detach().isfinite()
    loss = (out * g_out).sum() + (lse.masked_fill(~finite, 0) * g_lse).sum()
    found = torch.autograd.grad(loss, inputs, allow_unused=True)
    return [out, lse, *(torch.zeros_like(t) if g is None else g for t, g in zip(inputs, found, strict=True))]


def in_one_process(case: Case) -> list[Tensor]:
    """What one process answers: results of the whole call, which are the same for every layout and number of ranks."""
    return _in_one_process(replace(case, layout="", wire=None, device="cpu"))


@lru_cache(maxsize=4)
def _in_one_process(case: Case) -> list[Tensor]:
    given, tensors, g_out, g_lse = whole(case)
    found = results(rg.attention_state(*tensors[:3], **given), tensors, g_out, g_lse)
    return [t.detach() for t in found]


def errors(group: Any, case: Case) -> list[float]:
    """By how much out, lse and the gradients of q, k, v and of each learned tensor differ from one process's.

    Relative to the largest number of each, where that is more than 1.
    """
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    given, tensors, g_out, g_lse = whole(case)
    expected = in_one_process(case)
    shards, keys = layouts(case.nq, ranks)[case.layout], layouts(N, ranks)[case.layout]
    of_qkv = (shards, keys, keys)
    mine = [
        shard(t.detach(), of, rank).to(case.device).requires_grad_() for t, of in zip(tensors[:3], of_qkv, strict=True)
    ]
    there, learned = moved(given, case.device)
    options = {**there, "shards": shards, "key_shards": keys, "group": group, "wire": case.wire, "timeout": 60.0}
    state = ring_attention_state(*mine, **options)
    cotangents = shard(g_out, shards, rank).to(case.device), shard(g_lse, shards, rank, -1).to(case.device)
    got = [t.detach().cpu() for t in results(state, [*mine, *learned], *cotangents)]
    wanted = [shard(expected[0], shards, rank), shard(expected[1], shards, rank, -1)]
    wanted += [shard(t, of, rank) for t, of in zip(expected[2:5], of_qkv, strict=True)]
    for t in got[5:]:
        dist.all_reduce(t, group=group)
    pairs = zip(got, [*wanted, *expected[5:]], strict=True)
    return [_error(a, b) if a.numel() else 0.0 for a, b in pairs]


def _error(a: Tensor, b: Tensor) -> float:
    size = b.masked_fill(~b.isfinite(), 0).abs().max().clamp(min=1)
    return float((a - b).masked_fill(a == b, 0).abs().max() / size)
