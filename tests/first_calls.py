"""As a program: what each kind of call imports that takes a second or more, printed as `call: modules`.

torch.compile and torch.func import these themselves. A mode of torch's dispatcher (see regard.core.dispatch_mode) and
torch.autograd.grad (see regard.core.vjp) do so where nobody expects it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

import regard as rg
from regard.compat.torch import flex_attention
from regard.demo.model import load
from regard.nn import GrowingCache, MultiHeadAttention

SLOW = ("torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes", "sympy")


@dataclass(frozen=True, eq=False)
class Learned(rg.Modifier):
    table: Tensor

    def modify(self, s: Tensor, at: Any) -> Tensor:
        return torch.tanh(s) + at.heads(self.table) * torch.sin((at.i - at.j) * 0.1)


@dataclass(frozen=True)
class Stride(rg.Mask):
    n: int

    def visible(self, at: Any) -> Tensor:
        return (at.j % self.n == 0) | (at.i == at.j)


def run(learned: tuple[Tensor, ...] = (), gradients: bool = False, **call: Any) -> None:
    """A call, and its backward with a cotangent that is no sum's."""
    q, k, v = (torch.randn(2, 2, 41, 16, requires_grad=gradients) for _ in range(3))
    out = rg.attention(q, k, v, **call)
    if gradients:
        backward(out, q, k, v, *learned)


def backward(out: Tensor, *wanted: Tensor) -> None:
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.square().sum(), wanted))


def scores() -> Iterator[tuple[str, rg.Score, tuple[Tensor, ...]]]:
    def learned(*shape: int) -> Tensor:
        return torch.randn(shape, requires_grad=True)

    yield "scaled dot", rg.ScaledDot(), ()
    table, w, shift = learned(2), learned(16), learned(2, 41, 41)
    yield "a modifier of one's own", rg.ScaledDot() >> Learned(table), (table,)
    yield "a bias", rg.ScaledDot() >> rg.Bias(shift), (shift,)
    yield "an elementwise score", rg.Elementwise(lambda q, k, w: -((q - k) * w).abs(), tensors=(w,)), (w,)
    yield "a score of one's own", rg.Custom(lambda q, k, w: (q * w) @ k.mT / 4, tensors=(w,)), (w,)
    w_q, w_k, v = learned(16, 8), learned(16, 8), learned(8)
    yield "additive", rg.Additive(w_q, w_k, v), (w_q, w_k, v)
    m = learned(16, 16)
    yield "bilinear", rg.Bilinear(m), (m,)
    yield "distance", rg.Distance(), ()
    yield "soft cap", rg.ScaledDot() >> rg.SoftCap(5.0), ()


def masks() -> Iterator[tuple[str, rg.Mask]]:
    yield "causal", rg.Causal()
    yield "a mask of one's own", Stride(3) & rg.Causal()
    yield "a function", rg.Where(lambda b, h, i, j: (i - j) % 2 == 0)
    yield "lengths", rg.Lengths(torch.tensor([30, 41]))
    yield "a matrix", rg.Dense(torch.rand(41, 41) > 0.3)


def calls() -> Iterator[tuple[str, Callable[[], object]]]:
    for backend in (None, rg.Tiled(), rg.Reference()):
        for gradients in (False, True):
            run_so = partial(run, gradients=gradients, backend=backend)
            kind = f"{backend}, gradients" if gradients else f"{backend}"
            for name, score, learned in scores():
                yield f"{kind}, {name}", partial(run_so, learned, score=score)
            for name, mask in masks():
                yield f"{kind}, {name}", partial(run_so, mask=mask)
            yield f"{kind}, dropout", partial(run_so, dropout=rg.Dropout(0.1, seed=7))
    yield from other_calls()


def other_calls() -> Iterator[tuple[str, Callable[[], object]]]:
    q, k, v = (torch.randn(2, 2, 41, 16, requires_grad=True) for _ in range(3))
    plain = [t.detach() for t in (q, k, v)]
    yield "explain", lambda: rg.explain(*plain, score=rg.ScaledDot() >> Learned(torch.ones(2)))
    yield "weights", lambda: rg.attention_weights(*plain[:2], mask=Stride(2))
    yield "facts", lambda: rg.look(*plain[:2], facts=(rg.facts.Entropy(), rg.facts.Top(3), rg.facts.Received()))
    yield "differentiable entropy", lambda: backward(rg.entropy(q, k), q, k)

    def flex() -> Tensor:
        # create_block_mask imports the compiler itself
        count, index = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
        block = BlockMask.from_kv_blocks(count, index, mask_mod=lambda b, h, i, j: i >= j, seq_lengths=(41, 41))
        table = torch.randn(2, requires_grad=True)
        backward(flex_attention(q, k, v, lambda s, b, h, i, j: s + table[h] * (i - j)), q, k, v, table)
        return flex_attention(plain[0], plain[1], plain[2], lambda s, b, h, i, j: torch.tanh(s) * h, block_mask=block)

    yield "FlexAttention", flex

    def patched() -> None:
        layer = torch.nn.TransformerEncoderLayer(16, 4, batch_first=True)
        with rg.patch(report=None):
            backward(layer(torch.randn(2, 9, 16)), *layer.parameters())

    yield "patch", patched

    def generation() -> None:
        layer, cache = MultiHeadAttention(32, heads=2, key_heads=1).eval(), GrowingCache()
        with torch.no_grad():
            for n in (5, 1, 1):
                layer(torch.randn(1, n, 32), cache=cache, mask=rg.Causal())

    yield "a cache", generation

    def packed() -> None:
        p, layer = rg.pack([torch.randn(4, 16), torch.randn(7, 16)]), MultiHeadAttention(16, heads=2)
        backward(layer(p.values, mask=p.mask & rg.Causal()), *layer.parameters())

    yield "packed", packed
    text = list(b"to be or not to be")
    yield "the report of a text", lambda: rg.look(load(), text)
    yield "what heads add", lambda: rg.heads.contributions(load(), text)


def main() -> None:
    torch.manual_seed(0)
    before, count = set(sys.modules), 0
    for name, call in calls():
        call()
        found = {module for module in SLOW if module in sys.modules} - before
        if found:
            print(f"{name}: {', '.join(sorted(found))}")
        before |= found
        count += 1
    print(count, "calls")


if __name__ == "__main__":
    main()
