"""python -m benchmarks.errors: how far float32 results are from float64, of each instruction set and of torch.

Full attention of two heads, 256 queries on 1,024 keys with 64 features and 320 on 640 with 128, of ten distributions of
numbers: the largest error of the output, and of the gradients of q, k and v for a normal cotangent, as a share of the
largest number of the exact result; the worse of the two sizes, of three draws each. Where the processor has a matrix
unit, its kernels (amx) multiply float32 numbers as sums of three bfloat16 ones. Writes benchmarks/results/errors.md, or
what --output names.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard as rg
from benchmarks.distributions import DISTRIBUTIONS
from regard.backends.native.ffi import runnable
from regard.cli.machine import processor

SIZES = ((256, 1024, 64), (320, 640, 128))
DRAWS = 3
PAGE = Path(__file__).parent / "results" / "errors.md"
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
Errors = tuple[float, float]  # of the output, and of the gradients


@contextmanager
def instructions(isa: str) -> Iterator[None]:
    """regard's kernels for an instruction set, while this is open."""
    before = os.environ.get("REGARD_ISA")
    os.environ["REGARD_ISA"] = isa
    try:
        yield
    finally:
        del os.environ["REGARD_ISA"]
        if before is not None:
            os.environ["REGARD_ISA"] = before


def results(attention: Attention, tensors: Sequence[Tensor], cotangent: Tensor) -> list[Tensor]:
    """The output, and the gradients of q, k and v."""
    q, k, v = (x.clone().requires_grad_() for x in tensors)
    out = attention(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), cotangent.to(out.dtype))]


def largest(found: list[Tensor], exact: list[Tensor]) -> Errors:
    """The largest errors, as a share of the largest number of the exact result; 0 where that is 0."""
    shares = [
        float((x.double() - y).abs().max() / y.abs().max()) if bool(y.any()) else 0.0
        for x, y in zip(found, exact, strict=True)
    ]
    return shares[0], max(shares[1:])


def native(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """regard's kernels."""
    return rg.attention(q, k, v, backend=rg.Native())


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The formula, by torch's products."""
    return rg.attention(q, k, v, backend=rg.Reference())


def errors(distribution: str, isas: Sequence[str]) -> dict[str, Errors]:
    """The errors of each candidate."""
    worst: dict[str, Errors] = {}
    for seed in range(DRAWS):
        for size in SIZES:
            torch.manual_seed(seed)
            tensors = DISTRIBUTIONS[distribution](*size)
            cotangent = torch.randn(*tensors[0].shape[:-1], tensors[2].shape[-1])
            exact = results(plain, [x.double() for x in tensors], cotangent)
            found: dict[str, list[Tensor]] = {}
            for isa in isas:
                with instructions(isa):
                    found[isa] = results(native, tensors, cotangent)
            found["torch SDPA"] = results(sdpa, tensors, cotangent)
            found["the formula"] = results(plain, tensors, cotangent)
            for name, result in found.items():
                before, new = worst.get(name, (0.0, 0.0)), largest(result, exact)
                worst[name] = (max(before[0], new[0]), max(before[1], new[1]))
    return worst


def page(isas: Sequence[str]) -> str:
    """The table, in Markdown."""
    lines = [
        "# Errors of float32",
        "",
        f"{processor()}, torch {torch.__version__}: `python -m benchmarks.errors`, which says what is measured.",
        "The error of the output, then of the gradients, in units of 1e-7 of the largest number of an exact result:",
        "float32's last place is 0.6 to 1.2 of them. The formula: float32 by torch's own products. Numbers with",
        "offsets of 1e4, and scores of that size, lose digits before a kernel reads them: all errors are large there.",
        "",
    ]
    names = [*isas, "torch SDPA", "the formula"]
    lines += [f"| numbers | {' | '.join(names)} |", f"| --- |{' ---: |' * len(names)}"]
    for distribution in DISTRIBUTIONS:
        found = errors(distribution, isas)
        cells = [f"{found[name][0] * 1e7:.3g}, {found[name][1] * 1e7:.3g}" for name in names]
        lines.append(f"| {distribution} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.errors", description=__doc__)
    parser.add_argument("--output", type=Path, default=PAGE, help="the page that is written (default: %(default)s)")
    options = parser.parse_args(arguments)
    text = page([isa for isa in runnable() if isa not in ("amx_emulated", "avx512bf16")])  # float32 as in avx512
    print(text)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text)


if __name__ == "__main__":
    main()
