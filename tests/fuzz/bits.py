"""python -m tests.fuzz.bits FILE: hashes of all results of random calls, to compare two states of regard by.

With --against OTHER: prints what differs from an earlier file, instead of writing one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import warnings
from pathlib import Path

import torch
from torch import Tensor

import regard as rg

from . import build
from .check import instructions, ways_of
from .draw import draw_first
from .gradients import leaves_of, with_gradients
from .tensors import Source


def main() -> int:
    """How many results differ, at most 1."""
    read = argparse.ArgumentParser(description=__doc__)
    read.add_argument("file", type=Path)
    read.add_argument("--against", type=Path)
    read.add_argument("--calls", type=int, default=1000)
    read.add_argument("--first", type=int, default=0)
    given = read.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    found: dict[str, str] = {}
    for seed in range(given.first, given.first + given.calls):
        found |= {f"{seed} {name}": value for name, value in bits(seed).items()}
    given.file.write_text(json.dumps(found, indent=0))
    if given.against is None:
        print(f"{len(found)} results of {given.calls} calls")
        return 0
    earlier = json.loads(given.against.read_text())
    different = [name for name in {**earlier, **found} if earlier.get(name) != found.get(name)]
    print("\n".join(different) or f"{len(found)} results are the same")
    return bool(different)


def bits(seed: int) -> dict[str, str]:
    """Of one call: a hash by the way that was asked and the name of the result; what was raised, if anything."""
    call, s, found = draw_first(seed), Source.of(seed + 1), dict[str, str]()
    with instructions(build.isa(call)):
        for way in ways_of(s, call):
            own, leaves = leaves_of(call, None)
            random = s.choice.randrange(1 << 40)
            try:
                results = way.regard(own, Source.of(random))
                cotangents = {name: s.normal(*t.shape).to(t.dtype) for name, t in results.items()}
                answers = with_gradients(results, leaves, cotangents) if way.differentiable else results
            except (rg.Unsupported, rg.ShapeError) as refusal:
                found[way.name] = str(refusal)
                continue
            found |= {f"{way.name}: {name}": _hash(t) for name, t in answers.items()}
    return found


def _hash(t: Tensor) -> str:
    # a copy: one number may have any stride, and is contiguous all the same
    numbers = t.detach().reshape(-1).clone(memory_format=torch.contiguous_format)
    memory = numbers.view(torch.uint8) if t.numel() else torch.empty(0, dtype=torch.uint8)
    return f"{t.dtype} {tuple(t.shape)} {hashlib.sha256(memory.numpy().tobytes()).hexdigest()[:16]}"


if __name__ == "__main__":
    raise SystemExit(main())
