"""`python -m benchmarks.gpu`: attention on a GPU, each backend beside torch's own functions; needs torch with CUDA.

A time is the median of calls that take turns, the GPU idle before and after each, so that it has what Python takes.
Results are checked against float64 first. The block masks of torch's flex_attention are made before it is timed.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import regard as rg

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
BF16, F32 = torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Case:
    name: str
    shape: tuple[int, int, int, int]  # batch, heads, tokens, width
    dtype: torch.dtype
    score: rg.Score = rg.ScaledDot()
    mask: rg.Mask = rg.Everything()
    torch: Call | None = None  # scaled_dot_product_attention, where it has this
    score_mod: Callable[..., Tensor] | None = None
    mask_mod: Callable[..., Tensor] | None = None
    seen: float = 1.0  # the share of pairs that is seen
    dropout: float = 0.0


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def near(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (i >= j) & (i - j <= 255)


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # the module can be imported anywhere
SLOPES = torch.logspace(-1, -8, 16, base=2, device=DEVICE)
IDS = torch.arange(8192, device=DEVICE) // 600


def cases() -> list[Case]:
    found: list[Case] = []
    for dtype, kind in ((BF16, "bfloat16"), (F32, "float32")):
        found += [
            Case(f"{kind} full", (1, 16, 4096, 64), dtype, torch=F.scaled_dot_product_attention),
            Case(
                f"{kind} causal",
                *((1, 16, 4096, 64), dtype),
                mask=rg.Causal(),
                torch=lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
                mask_mod=causal,
                seen=0.5,
            ),
        ]
    window = rg.Window(before=255, after=0)
    return [
        *found,
        Case(
            "small call, causal",
            (1, 8, 128, 64),
            BF16,
            mask=rg.Causal(),
            torch=found[1].torch,
            mask_mod=causal,
            seen=0.5,
        ),
        Case("window of 256", (1, 16, 16384, 64), BF16, mask=window, mask_mod=near, seen=256 / 16384),
        Case(
            "slopes, causal",
            *((1, 16, 4096, 64), BF16, rg.ScaledDot() >> rg.Alibi(SLOPES), rg.Causal()),
            score_mod=lambda s, b, h, i, j: s - SLOPES[h] * (i - j).abs(),
            mask_mod=causal,
            seen=0.5,
        ),
        Case(
            "soft cap, causal",
            *((1, 16, 4096, 64), BF16, rg.ScaledDot() >> rg.SoftCap(30.0), rg.Causal()),
            score_mod=lambda s, b, h, i, j: 30.0 * torch.tanh(s / 30.0),
            mask_mod=causal,
            seen=0.5,
        ),
        Case(
            "documents of 600",
            *((1, 16, 8192, 64), BF16, rg.ScaledDot(), rg.Documents(IDS)),
            mask_mod=lambda b, h, i, j: IDS[i] == IDS[j],
            seen=600 / 8192,
        ),
        Case("dropout 0.1", (1, 16, 4096, 64), BF16, dropout=0.1),
        Case("Euclidean distance", (1, 16, 4096, 64), BF16, rg.Distance()),
    ]


def candidates(case: Case) -> dict[str, Call]:
    given = {"score": case.score, "mask": case.mask, "dropout": rg.Dropout(case.dropout) if case.dropout else None}
    found: dict[str, Call] = {}
    if case.torch is not None:
        found["torch sdpa"] = case.torch
    if not case.dropout and isinstance(case.score.stages[0], rg.ScaledDot):
        n = case.shape[2]
        blocks = None if case.mask_mod is None else create_block_mask(case.mask_mod, None, None, n, n, device="cuda")
        compiled = torch.compile(flex_attention, dynamic=False)
        found["torch flex"] = lambda q, k, v: compiled(q, k, v, score_mod=case.score_mod, block_mask=blocks)
    for backend in (None, rg.Sdpa(), rg.Flex(), rg.Tiled()):
        found["regard" if backend is None else f"regard {backend!r}"] = lambda q, k, v, b=backend: rg.attention(
            q, k, v, **given, backend=b
        )
    return found


def timed(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def peak() -> float:
    """Operations a second of a product in bfloat16."""
    a = torch.randn(8192, 8192, device="cuda", dtype=BF16)
    return 2 * 8192**3 / statistics.median(timed(lambda: a @ a) for _ in range(20))


def check(case: Case, call: Call, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises AssertionError where the last 64 rows are not those of float64."""
    n = q.shape[2]
    few = slice(n - 64, n)
    positions = rg.Positions(torch.arange(n - 64, n, device="cuda"), torch.arange(n, device="cuda"))
    mask = rg.Documents(IDS[few], IDS) if isinstance(case.mask, rg.Documents) else case.mask
    given = {"score": case.score, "mask": mask, "positions": positions, "backend": rg.Tiled()}
    with torch.no_grad():
        exact = rg.attention(*(t.double() for t in (q[..., few, :], k, v)), **given)
        off = float((call(q, k, v)[..., few, :].double() - exact).norm() / exact.norm())
    assert off < (2e-2 if case.dtype == BF16 else 1e-4), f"off by {off:.1e}"


@torch.no_grad()
def _without_gradients(call: Call, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return call(q, k, v)


def measure(case: Case, limit: float) -> None:
    """A line for each candidate: forward without gradients, forward that keeps what its backward needs, and both.

    limit: seconds for each.
    """
    batch, heads, n, d = case.shape
    q, k, v = (torch.randn(case.shape, device="cuda", dtype=case.dtype, requires_grad=True) for _ in range(3))
    g = torch.randn_like(q)
    calls: dict[str, Call] = {}
    for name, call in candidates(case).items():
        try:
            torch.autograd.grad(call(q, k, v), (q, k, v), g)
            if not case.dropout:
                check(case, call, q, k, v)
            calls[name] = call
        except rg.Unsupported:
            continue
        except Exception as error:
            print(f"  {name:<16} {type(error).__name__}: {str(error).splitlines()[0][:150]}", flush=True)
    given = {"score": case.score, "mask": case.mask, "dropout": rg.Dropout(case.dropout) if case.dropout else None}
    print(f"{case.name} {case.shape}: regard takes {rg.explain(q, k, v, **given).backend!r}", flush=True)
    passes: dict[str, Callable[[Call], object]] = {
        "inference": lambda call: _without_gradients(call, q, k, v),
        "forward": lambda call: call(q, k, v),
        "both": lambda call: torch.autograd.grad(call(q, k, v), (q, k, v), g),
    }
    for kind, run in passes.items():
        found: dict[str, list[float]] = {name: [] for name in calls}
        end = time.monotonic() + limit
        while time.monotonic() < end:
            for name, call in calls.items():
                found[name].append(timed(partial(run, call)))
        medians = {name: statistics.median(times) for name, times in found.items()}
        work = 4 * batch * heads * n * n * d * case.seen * (3.5 if kind == "both" else 1)
        for name, t in medians.items():
            times = f"{t * 1e6:9.0f} µs  {t / medians['regard']:6.2f}  {work / t / PEAK:5.1%}"
            print(f"  {kind:<10} {name:<16} {times}", flush=True)


if __name__ == "__main__":
    if DEVICE == "cpu":
        sys.exit("benchmarks.gpu: torch sees no GPU here; expected an environment whose torch has CUDA.")
    torch._dynamo.config.recompile_limit = 100  # torch's flex_attention compiles each case
    PEAK = peak()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; bfloat16 product: {PEAK / 1e12:.0f} TFLOP/s")
    print("time, time / regard's, share of that product's speed")
    wanted = sys.argv[1:]
    for one in cases():
        if not wanted or any(word in one.name for word in wanted):
            measure(one, 0.7)
