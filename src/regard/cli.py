"""What the command `regard` does, once its options are read: look inside a model, or measure this machine."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

from regard.inspect.report.report import Report
from regard.inspect.report.save import check_suffix

# What a text may hold at most for the byte model: the facts are linear in it, the time quadratic. Other models have a
# limit of their own, in tokens.
MOST_BYTES = 65536


def run(options: Namespace) -> int:
    """Does what was asked; the exit status is 0, or 1 with one line on standard error where it could not be done."""
    try:
        if options.command == "doctor":
            return _doctor(options.model)
        if options.command == "bench":
            _bench(options.seconds)
        else:
            check_suffix(options.output)
            _show(_read(options), options.output, options.head)
    except (OSError, ValueError, ImportError, LookupError, NotImplementedError) as error:
        print(f"regard {options.command}: {_sentence(error)}", file=sys.stderr)
        return 1
    return 0


def _read(options: Namespace) -> Report:
    if options.command == "demo":
        return _read_bytes((files("regard.demo") / "text.txt").read_bytes())
    name = options.file or options.text
    text = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    if options.model is not None:
        return _read_model(options.model, text.decode("utf-8", "replace"))
    if not 2 <= len(text) <= MOST_BYTES:
        raise ValueError(f"{name} holds {len(text):,} bytes; expected 2 to {MOST_BYTES:,}.")
    return _read_bytes(text)


def _read_bytes(text: bytes) -> Report:
    from regard.demo.model import load
    from regard.demo.reading import read

    model = load()
    with _progress("layers looked at:") as progress:
        return read(model, text, progress)


def _read_model(name: str, text: str) -> Report:
    from regard.compat.folder import folder_of, quiet, reader
    from regard.inspect.reading import model_report

    folder = folder_of(name)
    with quiet():
        with _progress(f"loading {name}"):
            model, tokenizer = reader(folder)
        title = name if name == "minilm" else folder.resolve().name
        with _progress("attention calls looked at:") as progress:
            return model_report(model, text, tokenizer=tokenizer, title=title, progress=progress)


@contextmanager
def _progress(what: str) -> Generator[Callable[[int], None], None, None]:
    """A line on standard error while something takes long; what it yields is told how much is done."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done: progress.update(task, description=f"{what} {done}")


def _show(report: Report, output: Path, head: tuple[int, int] | None) -> None:
    _, shown = report.shown(head)
    print(report)
    report.save(output, head)
    print(f"\nwrote {output}  ({shown})")


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
