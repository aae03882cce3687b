"""Run by test_graphs_fresh.py, as a script: each case is compiled, exported or traced in a process of its own.

The script imports what every user imports, and forks once for each case, before anything has run. So a case finds no
table, cache or class that an earlier one has filled. Prints a line of JSON for each: its name, and what went wrong.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._dynamo
import torch.export
from torch import Tensor

import regard as rg
from regard.testing import Case, draw, frame, masks, scores

AT = frame(batch=(2,), heads=4, nq=13, nk=17)
EQUAL = frame(batch=(2,), heads=8, nq=13, nk=13)


@dataclass(frozen=True)
class Temperature(rg.Modifier):
    """README's."""

    positional = False
    log: torch.Tensor

    def modify(self, s: Tensor, at: Any) -> Tensor:
        return s * at.heads(self.log.exp())


@dataclass(frozen=True)
class Stride(rg.Mask):
    """README's."""

    n: int

    def visible(self, at: Any) -> Tensor:
        return (at.j % self.n == 0) | (at.i == at.j)


class Layer(torch.nn.Module):
    """One call of attention, in which only q, k and v are inputs."""

    def __init__(self, call: Case, backend: rg.Backend | None) -> None:
        super().__init__()
        self.call, self.backend = call, backend

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        call = self.call
        given = {"score": call.score, "mask": call.mask, "positions": call.positions, "sink": call.sink}
        return rg.attention(q, k, v, **given, dropout=call.dropout, backend=self.backend)


def readme() -> dict[str, Case]:
    """The calls of README.md, its own classes, and what else is said to run everywhere."""
    banded = rg.Causal() & rg.Window(before=4, after=0) | rg.Prefix(1)
    log, w = torch.randn(8, dtype=torch.float64), torch.randn(7, dtype=torch.float64)
    weighted = rg.Custom(lambda q, k, w: -torch.cdist(q * w, k, p=1), (w,))
    found = {
        "eight lines": draw(EQUAL, key_heads=2, score=rg.ScaledDot() >> rg.SoftCap(50.0), mask=banded),
        "own modifier and mask": draw(EQUAL, score=rg.Dot() >> Temperature(log), mask=Stride(4)),
        "own mask": draw(EQUAL, mask=Stride(4)),
        "custom": draw(EQUAL, score=rg.Custom(lambda q, k: -torch.cdist(q, k, p=1)), mask=rg.Causal()),
        "custom with a tensor": draw(EQUAL, score=weighted),
        "sink": draw(EQUAL, mask=rg.Causal(), sink=True),
        "dropout": draw(EQUAL, dropout=rg.Dropout(0.3, seed=7)),
        "dropout without a seed": draw(EQUAL, dropout=rg.Dropout(0.3)),
    }
    return {name: replace(call, positions=None) for name, call in found.items()}  # these fit one length


def calls() -> dict[str, tuple[Case, rg.Backend | None]]:
    """By name, every call that is compiled and exported, and its backend."""
    found: dict[str, tuple[Case, rg.Backend | None]] = {}
    found |= {f"readme: {name}": (call, None) for name, call in readme().items()}
    found |= {f"mask {name}": (draw(AT, mask=mask), None) for name, mask in masks(AT).items()}
    found |= {f"score {name}": (draw(AT, score=score), None) for name, score in scores(AT).items()}
    for backend in (rg.Tiled(), rg.Tiled(rows=5, keys=7), rg.Reference()):
        found[f"backend {backend}"] = draw(AT, mask=rg.Causal(), sink=True), backend
    return found


def compiled(call: Case, backend: rg.Backend | None, dynamic: bool | None = None, compiler: str = "aot_eager") -> None:
    """torch.compile in one graph gives eager's values and gradients."""
    leaves = call.leaves(torch.float32)
    layer, wanted = Layer(leaves, backend), tuple(leaves.differentiable.values())
    found: list[tuple[Tensor, ...]] = []
    run = torch.compile(layer, backend=compiler, fullgraph=True, dynamic=dynamic)
    for forward in (run, layer):  # the compiled one first: nothing may lean on what an eager call left behind
        torch.manual_seed(0)
        out = forward(leaves.q, leaves.k, leaves.v)
        found.append((out, *torch.autograd.grad(out.sin().sum(), wanted, materialize_grads=True)))
    close(*found)


def exported(call: Case, backend: rg.Backend | None, strict: bool = False, dynamic: bool = False) -> None:
    """torch.export gives eager's values, of other numbers and, with dynamic lengths, of another length."""
    fixed = call.with_tensors(iter([t.float() if t.is_floating_point() else t for t in call.tensors()]))
    layer, given = Layer(fixed, backend), (fixed.q, fixed.k, fixed.v)
    n = torch.export.Dim("n", min=3, max=4096)
    shapes = {name: {2: n} for name in "qkv"} if dynamic else None
    program = torch.export.export(layer, given, dynamic_shapes=shapes, strict=strict).module()
    length = 2 * call.q.shape[2] if dynamic else None
    fresh = tuple(torch.randn(*t.shape[:2], length or t.shape[2], t.shape[3]) for t in given)
    torch.manual_seed(0)
    out = program(*fresh)
    torch.manual_seed(0)
    close((out,), (layer(*fresh),))


def close(got: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> None:
    for a, b in zip(got, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def cases() -> dict[str, Callable[[], None]]:
    """What is tried, by name."""
    found: dict[str, Callable[[], None]] = {}
    for name, (call, backend) in calls().items():
        found[f"compile, {name}"] = lambda call=call, backend=backend: compiled(call, backend)
        found[f"export, {name}"] = lambda call=call, backend=backend: exported(call, backend)
    for name, call in readme().items():
        if name != "dropout without a seed":  # inductor draws other seeds than eager torch
            found[f"inductor, {name}"] = lambda call=call: compiled(call, None, compiler="inductor")
        found[f"compile for every length, {name}"] = lambda call=call: compiled(call, None, dynamic=True)
        found[f"export for every length, {name}"] = lambda call=call: exported(call, None, dynamic=True)
        found[f"export strictly, {name}"] = lambda call=call: exported(call, None, strict=True, dynamic=True)
    return found


def attempt(run: Callable[[], None]) -> str | None:
    """What went wrong in a process of its own; None if nothing did."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        said = ""
        try:
            warnings.simplefilter("error")
            # torch's own, while it loads its compiler
            warnings.filterwarnings("ignore", ".*torch.jit.script(_method)?. is deprecated")
            run()
        except BaseException:
            said = traceback.format_exc()
        with os.fdopen(write, "w") as pipe:
            pipe.write(said[-6000:])
        os._exit(0 if not said else 1)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    status = os.waitpid(child, 0)[1]
    return None if status == 0 else said or f"ended with status {status}"


def load() -> None:
    """What torch imports when it first makes a graph, or one that is trained; nothing of regard runs."""
    import torch._inductor.pattern_matcher

    x = torch.ones(3)
    torch.compile(torch.nn.Identity(), backend="aot_eager", fullgraph=True)(x)
    torch.compile(lambda x: x + 1, backend="aot_eager", fullgraph=True, dynamic=True)(x)
    torch.export.export(torch.nn.Identity(), (x,)).module()(x)


def main(names: list[str]) -> None:
    """Tries the cases of these names, in this order."""
    torch.manual_seed(0)
    load()
    known = cases()
    for name in names:
        if name not in known:
            import compile_models  # loads transformers: after the calls, which must not need it

            known |= compile_models.cases()
        print(json.dumps([name, attempt(known[name])]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
