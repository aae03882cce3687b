"""The command `regard`: look inside a model, or measure this machine, from a terminal."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

# What a text may hold at most: the facts are linear in it, the time quadratic.
MOST_BYTES = 65536


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; the exit status is 0, or 1 with one line on standard error where it could not be done."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "doctor":
            return _doctor(options.model)
        if options.command == "bench":
            _bench(options.seconds)
        else:
            text = _demo_text() if options.command == "demo" else _text(options.file)
            _show(text, options.output, options.head)
    except (OSError, ValueError, ImportError, NotImplementedError) as error:
        print(f"regard {options.command}: {_sentence(error)}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="regard", description="Exact attention that lets you look inside.", epilog="More: regard COMMAND --help"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo", help="a small language model reads a text; see what its heads do", description=_SHOWN
    )
    on_file = commands.add_parser("look", help="the same on a text of yours", description=_SHOWN)
    on_file.add_argument("file", metavar="FILE", help="a text, or - for standard input")
    for command in (demo, on_file):
        name = f"regard-{command.prog.split()[-1]}.png"
        where = f"where the picture goes: .png, .svg or .pdf (default {name})"
        command.add_argument("-o", "--output", type=Path, default=Path(name), metavar="PICTURE", help=where)
        command.add_argument(
            "--head", type=_head, default=None, metavar="L,H", help="the head to draw, for example 2,5"
        )
    bench = commands.add_parser("bench", help="regard against torch on this machine", description=_MEASURED)
    bench.add_argument("--seconds", type=float, default=30.0, help="how long, about (default %(default)g)")
    doctor = commands.add_parser("doctor", help="what runs here, and whether a model is served", description=_EXAMINED)
    doctor.add_argument("model", nargs="?", metavar="MODEL", help="a model's folder, or minilm")
    return parser


_EXAMINED = (
    "Printed: versions, the kernels of this processor, optional packages. With a MODEL of transformers: which of its "
    "modules regard serves, the largest difference to its own eager attention, whether it generates the same tokens, "
    "and what runs the calls. The exit status is 1 where it is not served."
)
_MEASURED = (
    "Attention by regard and by torch's scaled_dot_product_attention, forward, on the threads that torch has: checked "
    "against float64 first, then timed in turns. Printed: medians, their ratio, and the share of what the machine can "
    "do at most, which is measured too. REGARD_ISA names other kernels."
)
_SHOWN = (
    "The byte model that comes with regard reads the text. Printed: a line of facts, grids of layers × heads, and "
    "findings, each with its rule and number. Drawn: the pooled attention map of one head, on a logarithmic scale."
)


def _head(text: str) -> tuple[int, int]:
    try:
        layer, head = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no head; expected layer,head, for example 2,5") from None
    return layer, head


def _demo_text() -> bytes:
    return (files("regard.demo") / "text.txt").read_bytes()


def _text(file: str) -> bytes:
    text = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    if not 2 <= len(text) <= MOST_BYTES:
        raise ValueError(f"{file} holds {len(text):,} bytes; expected 2 to {MOST_BYTES:,}.")
    return text


def _show(text: bytes, output: Path, head: tuple[int, int] | None) -> None:
    from rich.console import Console
    from rich.progress import Progress

    from regard.demo.model import load
    from regard.demo.report import describe, picture, read

    model, start = load(), time.perf_counter()
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("looking", total=len(model.blocks))
        reading = read(model, text, lambda done: progress.update(task, completed=done))
    print(describe(reading, time.perf_counter() - start))
    title = picture(reading, output, head)
    print(f"\nwrote {output}  ({title})")


def _doctor(model: str | None) -> int:
    from regard.compat.doctor import examine, here

    print(here())
    if model is None:
        return 0
    found = examine(model)
    print(f"\n{found}")
    return 0 if found.sound else 1


def _bench(seconds: float) -> None:
    from regard.bench import HEAD, bench

    found = bench(seconds)
    print(found.machine)
    try:
        from rich.box import SIMPLE_HEAD
        from rich.live import Live
        from rich.table import Table
    except ImportError:
        for row in (HEAD, *found.rows):
            print("  ".join(f"{cell:>{width}}" for cell, width in zip(row, (22, 18, 8, 8, 8, 18), strict=True)))
        return
    table = Table(box=SIMPLE_HEAD, padding=(0, 1))
    for number, name in enumerate(HEAD):
        table.add_column(name, justify="right" if number > 1 else "left", no_wrap=True)
    with Live(table):
        for row in found.rows:
            table.add_row(*row)


def _sentence(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        extra = "hf" if error.name == "transformers" else "demo"
        return f"needs {error.name}; install it with: pip install 'regard[{extra}]'"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


if __name__ == "__main__":
    raise SystemExit(main())
