"""Trains the byte model that `regard demo` shows: a causal transformer from regard.nn, with regard's own backward.

    python examples/train_bytes.py --out weights.safetensors

The data is on every machine: the documentation strings and sources of Python's standard library. Half of the sequences
hold a passage that repeats, so that induction heads have something to do. Deterministic by seed, for one Python
version.
"""

from __future__ import annotations

import argparse
import ast
import math
import platform
import random
import sysconfig
from collections import deque
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from torch.nn.functional import cross_entropy

from regard.demo.model import REACH, ByteTransformer, save

HELD_OUT = 10  # every tenth file is for validation


def corpus() -> tuple[Tensor, Tensor]:
    """The training and validation bytes: each module of the standard library, its documentation strings first."""
    library = Path(sysconfig.get_paths()["stdlib"])
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    modules = [
        path
        for path in sorted(library.glob("*.py")) + sorted(library.glob("[a-z]*/*.py"))
        if not {"test", "tests", "idlelib", "lib2to3", "site-packages"} & set(path.parts)
    ]
    for number, path in enumerate(modules):
        source = path.read_text(encoding="utf-8", errors="replace")
        text = "\n\n".join([*documentation(source), source])
        parts[number % HELD_OUT == 0].append(text.encode())
    train, valid = (torch.frombuffer(bytearray(b"\n\n".join(p)), dtype=torch.uint8) for p in parts)
    return train, valid


def documentation(source: str) -> list[str]:
    """The documentation strings of a module, its classes and functions."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    try:
        found = [ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    except SyntaxError:
        return []
    return [text for text in found if text]


def plain(data: Tensor, size: int, length: int, draw: random.Random) -> Tensor:
    """(size, length + 1) bytes: windows of the data."""
    starts = [draw.randrange(len(data) - length - 1) for _ in range(size)]
    return torch.stack([data[start : start + length + 1] for start in starts]).long()


def mixed(data: Tensor, size: int, length: int, draw: random.Random) -> Tensor:
    """The same, but a third of the windows repeat a passage of random letters, and a sixth one of the data."""
    windows = []
    for window in plain(data, size, length, draw):
        kind = draw.randrange(6)
        if kind < 3:
            period = draw.randrange(12, length // 2)
            if kind < 2:  # nothing but the repetition can predict these
                window[:period] = torch.tensor([draw.randrange(32, 127) for _ in range(period)])
            window = window[:period].repeat(length // period + 2)[: length + 1]
        windows.append(window)
    return torch.stack(windows)


def loss_of(model: ByteTransformer, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of the next byte, in nats."""
    return cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def rate(step: int, steps: int, peak: float) -> float:
    """A short warm-up, then level for long, so that what forms late can form; down to nothing in the last fifth."""
    return peak * min(1.0, (step + 1) / 100, 5 * (steps - step) / steps)


def train(model: ByteTransformer, data: Tensor, args: argparse.Namespace) -> None:
    """AdamW on `args.steps` batches, the loss on the bar and every hundredth step as a line."""
    draw, recent = random.Random(args.seed), deque[float](maxlen=50)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("loss {task.fields[loss]:.3f}"), TimeRemainingColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("", total=args.steps, loss=math.nan)
        for step in range(args.steps):
            for group in optimizer.param_groups:
                group["lr"] = rate(step, args.steps, args.rate)
            loss = loss_of(model, mixed(data, args.batch, args.length, draw))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            recent.append(loss.item())
            progress.update(task, advance=1, loss=sum(recent) / len(recent))
            if (step + 1) % 100 == 0:
                progress.print(f"step {step + 1:5d}  loss {sum(recent) / len(recent):.3f} nats a byte")


@torch.no_grad()
def validate(model: ByteTransformer, data: Tensor, length: int) -> float:
    """The loss on 64 plain windows of files that were not trained on."""
    draw = random.Random(0)
    return float(torch.stack([loss_of(model, plain(data, 4, length, draw)) for _ in range(16)]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1300)
    parser.add_argument("--batch", type=int, default=24)
    parser.add_argument("--length", type=int, default=REACH + 1, help="bytes of a sequence")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("weights.safetensors"))
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    data, held_out = corpus()
    model = ByteTransformer()
    count = sum(p.numel() for p in model.parameters())
    print(f"{count:,} parameters; the standard library of Python {platform.python_version()}:")
    print(f"{len(data):,} bytes to train on, {len(held_out):,} held out")
    train(model, data, args)
    for length in (args.length, 8 * args.length):
        print(f"held-out loss {validate(model, held_out, length):.3f} nats a byte at {length} bytes")
    save(model, str(args.out))
    print(f"wrote {args.out}, {args.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
