"""What is measured: named calls, and how each candidate makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import regard as rg


@dataclass(frozen=True)
class Case:
    """One call: q (batch, heads, nq, d), k and v (batch, key heads, nk, d or dv)."""

    name: str
    shape: tuple[int, int, int, int]
    dtype: str = "float32"
    mask: str = "full"
    key_heads: int | None = None
    nk: int | None = None
    dv: int | None = None

    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        b, h, nq, d = self.shape
        hk, nk = self.key_heads or h, self.nk or nq
        random = torch.Generator().manual_seed(0)
        shapes = ((b, h, nq, d), (b, hk, nk, d), (b, hk, nk, self.dv or d))
        q, k, v = (torch.randn(s, generator=random).to(getattr(torch, self.dtype)) for s in shapes)
        return q, k, v

    @property
    def operations(self) -> float:
        """Floating-point operations of both products, the visible pairs counted."""
        b, h, nq, d = self.shape
        nk = self.nk or nq
        pairs = {"full": nq * nk, "causal": nq * (nq + 1) // 2, "bool": nq * nk, "bias": nq * nk}
        pairs["window"] = sum(min(i + 1, 256) for i in range(nq))
        return 2.0 * b * h * pairs[self.mask] * (d + (self.dv or d))


SHAPES = ((8, 12, 128, 64), (1, 12, 512, 64), (1, 12, 2048, 64), (1, 8, 4096, 128))
CASES = (
    *(
        Case(f"{dtype} {mask}", s, dtype, mask)
        for dtype in ("float32", "bfloat16")
        for mask in ("full", "causal")
        for s in SHAPES
    ),
    *(Case("float16 full", s, "float16") for s in SHAPES[1:3]),
    Case("bool mask n × n", SHAPES[2], mask="bool"),
    Case("float bias n × n", SHAPES[2], mask="bias"),
    Case("window of 256 (torch: n × n mask)", (1, 12, 8192, 64), mask="window"),
    Case("dv = 128, dk = 64", (1, 12, 1024, 64), dv=128),
    *(
        Case(f"decode {dtype} {h}:{hk}", (1, h, 1, 128), dtype, key_heads=hk, nk=8192)
        for dtype in ("float32", "bfloat16")
        for h, hk in ((32, 32), (32, 8))
    ),
)


WINDOW = rg.Window(before=255, after=0)


def meaning(case: Case) -> dict[str, Any]:
    """The score and mask of a case, as arguments of regard.attention."""
    n, random = case.shape[2], torch.Generator().manual_seed(1)
    if case.mask == "bool":
        return {"mask": rg.Dense(torch.rand(n, n, generator=random) > 0.3)}
    if case.mask == "bias":
        return {"score": rg.ScaledDot() >> rg.Bias(torch.randn(n, n, generator=random))}
    return {"mask": {"full": rg.Everything(), "causal": rg.Causal(), "window": WINDOW}[case.mask]}


def regard(case: Case) -> Callable[[], Tensor]:
    q, k, v = case.inputs()
    given = meaning(case)
    return lambda: rg.attention(q, k, v, **given)


def torch_sdpa(case: Case) -> Callable[[], Tensor]:
    q, k, v = case.inputs()
    given: dict[str, Any] = {"enable_gqa": q.shape[1] != k.shape[1], "is_causal": case.mask == "causal"}
    if case.mask == "bool":
        given["attn_mask"] = meaning(case)["mask"].allowed
    if case.mask == "bias":
        given["attn_mask"] = meaning(case)["score"].parts[1].bias
    if case.mask == "window":
        given["attn_mask"] = WINDOW.dense(q.shape[-2])
    return lambda: scaled_dot_product_attention(q, k, v, **given)


CANDIDATES = {"regard": regard, "torch": torch_sdpa}
