"""What the command `regard` does, once its options are read: look inside a model, or measure this machine."""

from __future__ import annotations

import sys
import tempfile
import webbrowser
from argparse import Namespace
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import regard.terminal as terminal
from regard.inspect.report.report import Report

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
            if options.command == "look" and options.probe:
                _probe(options)
                return 0
            name, text = _text(options)
            _show(_read(options, name, text), options.output, options.head, options.open)
            if options.command == "look" and (options.contributions is not None or options.ablate):
                _show_heads(options, *_language_model(options.model, text))
    except BrokenPipeError:
        raise  # whoever read the output has left: that is no error of ours
    except (OSError, ValueError, ImportError, LookupError, NotImplementedError) as error:
        print(f"regard {options.command}: {_sentence(error)}", file=sys.stderr)
        return 1
    return 0


def _text(options: Namespace) -> tuple[str, bytes]:
    """The text, and what it is called."""
    if options.command == "demo":
        return "the demo", (files("regard.demo") / "text.txt").read_bytes()
    if options.words is not None:
        return "the text", options.words.encode("utf-8", "surrogateescape")
    name = options.file or options.text
    return name, sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()


def _read(options: Namespace, name: str, text: bytes) -> Report:
    if options.command == "look" and options.model is not None:
        return _read_model(options.model, text.decode("utf-8", "replace"))
    if not 2 <= len(text) <= MOST_BYTES:
        raise ValueError(f"{name} holds {len(text):,} bytes; expected 2 to {MOST_BYTES:,}{_too_long(name, text)}.")
    return _read_bytes(text)


def _too_long(name: str, text: bytes) -> str:
    if len(text) < 2:
        return ""
    return (
        f": the byte model takes a step a byte, and time grows with the square. Look at a part of it: "
        f"head -c {MOST_BYTES} {name} | regard look -"
    )


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


def _probe(options: Namespace) -> None:
    """Which heads are of the known kinds, on the standard probe; and whatever else is asked for, on the same tokens."""
    import regard.inspect.heads as heads
    from regard.demo.reading import read
    from regard.inspect.reading import model_report

    model, _, tokenizer = _language_model(options.model, b"")
    found = heads.probe(model, among=range(32, 127) if options.model is None else None)
    print(found)
    ids = list(found.ids)
    _show_heads(options, model, ids, tokenizer)
    if options.output is not None or options.open:
        print()
        report = read(model, bytes(ids)) if options.model is None else model_report(model, ids, tokenizer=tokenizer)
        _show(report, options.output, options.head, options.open)


def _show_heads(options: Namespace, model: Any, given: Any, tokenizer: Any) -> None:
    """What each head adds, and how much larger the loss is without it, where these are asked for."""
    import regard.inspect.heads as heads

    if options.contributions is not None:
        token = _one_token(tokenizer, options.contributions) if options.contributions else None
        print(f"\n{heads.contributions(model, given, tokenizer=tokenizer, token=token)}")
    if options.ablate:
        with _progress("heads left out:") as progress:
            found = heads.ablation(model, given, tokenizer=tokenizer, progress=lambda done, of: progress(done))
        print(f"\n{found}")


def _language_model(name: str | None, text: bytes) -> tuple[Any, Any, Any]:
    """The model with its head, what it is given, and its tokenizer; of the byte model bytes and none."""
    if name is None:
        from regard.demo.model import load

        return load(), list(text), None
    from regard.compat.folder import folder_of, own_model, quiet, tokenizer_of

    folder = folder_of(name)
    with quiet(), _progress(f"loading {name}"):
        return own_model(folder), text.decode("utf-8", "replace"), tokenizer_of(folder)


def _one_token(tokenizer: Any, text: str) -> int:
    ids = list(text.encode()) if tokenizer is None else tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ValueError(f"--contributions {text!r}: that is {len(ids)} tokens of the model; expected one.")
    return ids[0]


@contextmanager
def _progress(what: str) -> Generator[Callable[[int], None], None, None]:
    """A line on standard error while something takes long; what it yields is told how much is done."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done: progress.update(task, description=f"{what} {done}")


def _show(report: Report, output: Path | None, label: str | None, in_browser: bool) -> None:
    head = None if label is None else report.find(label)
    _, shown = report.shown(head)
    terminal.show(report.text(terminal.width()), terminal.REPORT)
    if output is not None:
        report.save(output, head)
        print(f"\nwrote {output}  ({shown})")
    if in_browser:
        page = output if output is not None and output.suffix.lower() == ".html" else _page(report, head)
        if not webbrowser.open(page.resolve().as_uri()):
            raise ValueError(f"no browser could be started; open {page} by hand.")


def _page(report: Report, head: tuple[int, int] | None) -> Path:
    """The page among the temporary files, where it stays: the browser reads it after the command has ended."""
    page = Path(tempfile.mkdtemp(prefix="regard-")) / "report.html"
    report.save(page, head)
    print(f"\nwrote {page}")
    return page


def _doctor(model: str | None) -> int:
    from regard.compat.doctor import examine, here

    terminal.show(terminal.hanging(here()), terminal.DOCTOR)
    if model is None:
        return 0
    found = examine(model)
    print()
    terminal.show(terminal.hanging(str(found)), terminal.DOCTOR)
    return 0 if found.sound else 1


def _bench(seconds: float) -> None:
    from regard.bench import HEAD, bench

    found = bench(seconds)
    print(found.machine)
    try:
        from rich.live import Live
        from rich.table import Table
    except ImportError:
        for row in (HEAD, *found.rows):
            print("  ".join(f"{cell:>{width}}" for cell, width in zip(row, (16, 18, 15, 15, 6, 9), strict=True)))
    else:
        table = Table(box=None, pad_edge=False, collapse_padding=True, padding=(0, 1))  # all of it in 80 columns
        for number, name in enumerate(HEAD):
            table.add_column(name, justify="right" if number > 1 else "left", no_wrap=True)
        with Live(table):
            for row in found.rows:
                table.add_row(*row)
    for note in found.notes():
        print(f"\n{note}")


def _sentence(error: Exception) -> str:
    from regard.compat.folder import said

    if isinstance(error, ModuleNotFoundError) and error.name:
        extra = "hf" if error.name == "transformers" else "demo"
        return f"needs {error.name}; install it with: pip install 'regard[{extra}]'"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return said(error)
