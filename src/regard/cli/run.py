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

import regard.cli.terminal as terminal
from regard.cli.compare import compare
from regard.core.shapes import count_of
from regard.inspect.facts.inputs import Inputs
from regard.inspect.report.report import Report
from regard.inspect.report.server import PageServer
from regard_command.encoding import of_words, read_text

# What a text may hold at most for the byte model: the facts are linear in it, the time quadratic. Other models have a
# limit of their own, in tokens.
MOST_BYTES = 65536


def run(options: Namespace) -> int:
    """Runs the command; the exit status is 0, or 1 with one line on standard error where it could not be done."""
    try:
        if options.command == "doctor":
            return _doctor(options.model)
        if options.command == "bench":
            _bench(options.seconds)
        elif options.command == "compare":
            compare(options, lambda model, name, text: _read(model, name, text, None))
        else:
            _look(options)
    except BrokenPipeError:
        raise  # the reader of the output has closed it: no error of this command
    except (OSError, ValueError, ImportError, LookupError, NotImplementedError) as error:
        print(f"regard {options.command}: {_sentence(error)}", file=sys.stderr)
        return 1
    return 0


def _look(options: Namespace) -> None:
    """Looks at a text, or at the probe's tokens, measures what the options name, and shows what was found."""
    named = _text(options)
    asked = (options.probe, options.ablate, options.carried, options.circuits, options.contributions is not None)
    if not any(asked):
        assert named is not None  # regard_command.paths has seen to it
        _show(_read(options.model, *named, _facts(options)), options)
        return
    import regard.inspect.heads as heads

    given = None if named is None else _given(options.model, *named)
    model, tokenizer = _language_model(options.model)
    results: list[Any] = []
    if options.probe:
        results.append(heads.probe(model, among=range(32, 127) if options.model is None else None))
        given = list(results[0].ids) if given is None else given
    results += _of_heads(options, model, given, tokenizer)
    if named is None and options.output is None and not (options.open or options.serve):
        terminal.show("\n\n".join(map(str, results)), terminal.REPORT)
        return
    _show(_read_language(options, model, given, tokenizer).with_heads(*results), options)


def _text(options: Namespace) -> tuple[str, str] | None:
    """What the text is called, and the text; None where the probe's tokens are to be read instead."""
    if options.command == "demo":
        return "the demo", (files("regard.demo") / "text.txt").read_text(encoding="utf-8")
    if options.words is not None:
        return of_words(options.words)
    name = options.file or options.text
    return None if name is None else read_text(name, options.encoding)


def _given(model: str | None, name: str, text: str) -> str | list[int]:
    """The text as the model reads it: for the byte model, its bytes in UTF-8 as numbers."""
    if model is not None:
        return text
    content = text.encode()
    if not 2 <= len(content) <= MOST_BYTES:
        raise ValueError(
            f"{name} holds {count_of(len(content), 'byte', ',')}; expected 2 to "
            f"{MOST_BYTES:,}{_too_long(name, content)}."
        )
    return list(content)


def _too_long(name: str, content: bytes) -> str:
    """What to do about a text that is too long: the first part of it, which ends with a whole character."""
    if len(content) < 2:
        return ""
    most = len(content[:MOST_BYTES].decode("utf-8", "ignore").encode())
    file = "" if name == "standard input" else f" {name}"
    return (
        ": the byte model takes a step a byte, and time grows with the square. Look at a part of it: "
        f"head -c {most}{file} | regard look -"
    )


def _read(model: str | None, name: str, text: str, facts: tuple[Any, ...] | None) -> Report:
    given = _given(model, name, text)
    if isinstance(given, list):
        return _read_bytes(bytes(given), facts)
    assert model is not None
    return _read_model(model, given, facts)


def _read_bytes(text: bytes, facts: tuple[Any, ...] | None) -> Report:
    from regard.demo.model import load
    from regard.demo.reading import read

    model = load()
    with _progress("layers looked at:") as progress:
        return read(model, text, progress, facts)


def _read_model(name: str, text: str, facts: tuple[Any, ...] | None) -> Report:
    from regard.compat.folder import folder_of, quiet, reader
    from regard.inspect.reading import model_report

    folder = folder_of(name)
    with quiet():
        with _progress(f"loading {name}"):
            model, tokenizer = reader(folder)
        with _progress("attention calls recorded:") as progress:
            title = _title(name)
            return model_report(model, text, tokenizer=tokenizer, title=title, facts=facts, progress=progress)


def _title(name: str) -> str:
    """What a report on the model is called: minilm, or the name of its folder."""
    return name if name == "minilm" else Path(name).resolve().name


def _language_model(name: str | None) -> tuple[Any, Any]:
    """The model with its head, and its tokenizer."""
    if name is None:
        from regard.demo.model import ByteTokenizer, load

        return load(), ByteTokenizer()
    from regard.compat.folder import folder_of, own_model, quiet, tokenizer_of

    folder = folder_of(name)
    with quiet(), _progress(f"loading {name}"):
        return own_model(folder), tokenizer_of(folder)


def _of_heads(options: Namespace, model: Any, given: Any, tokenizer: Any) -> list[Any]:
    """The results of --contributions, --carried, --circuits and --ablate, as far as these options are given."""
    import regard.inspect.heads as heads

    found: list[Any] = []
    if options.contributions is not None:
        token = _one_token(tokenizer, options.contributions) if options.contributions else None
        found.append(heads.contributions(model, given, tokenizer=tokenizer, token=token))
    if options.carried:
        found.append(heads.carried(model, given, tokenizer=tokenizer))
    if options.circuits:
        found.append(heads.circuits(model, given, tokenizer=tokenizer))
    if options.ablate:
        with _progress("heads left out:") as progress:
            found.append(heads.ablation(model, given, tokenizer=tokenizer, progress=lambda done, of: progress(done)))
    return found


def _read_language(options: Namespace, model: Any, given: Any, tokenizer: Any) -> Report:
    """The report on the model whose heads were measured, so that its layers have the same paths."""
    from regard.demo.reading import read
    from regard.inspect.reading import model_report

    facts = _facts(options)
    with _progress("attention calls recorded:") as progress:
        if options.model is None:
            return read(model, bytes(given), progress, facts)
        title = _title(options.model)
        return model_report(model, given, tokenizer=tokenizer, title=title, facts=facts, progress=progress)


def _one_token(tokenizer: Any, text: str) -> int:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(ids) != 1:
        raise ValueError(f"--contributions {text!r}: that is {count_of(len(ids), 'token')} of the model; expected one.")
    return ids[0]


@contextmanager
def _progress(what: str) -> Generator[Callable[[int], None], None, None]:
    """A line on standard error while something takes long; yields a function that is called with how much is done."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done: progress.update(task, description=f"{what} {done}")


def _show(report: Report, options: Namespace) -> None:
    head = None if options.head is None else report.find(options.head)
    _, shown = report.shown(head)
    output: Path | None = options.output
    terminal.show(report.text(terminal.width()), terminal.REPORT)
    if output is not None:
        report.save(output, head)
        print(f"\nwrote {output}  ({shown})")
    if options.serve:
        _serve(report, head, options)
    elif options.open:
        page = output if output is not None and output.suffix.lower() == ".html" else _page(report, head)
        if not webbrowser.open(page.resolve().as_uri()):
            raise ValueError(f"no browser could be started; open {page} by hand.")


def _serve(report: Report, head: tuple[int, int] | None, options: Namespace) -> None:
    """Serves the page until it is interrupted."""
    with PageServer(report, head) as server:
        print(f"\nserving {server.url}  on this machine only, with exact rows from q and k; Ctrl-C ends it", flush=True)
        if options.open and not webbrowser.open(server.url):
            print("no browser could be started; open that address by hand.", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nregard look: no longer served")


def _facts(options: Namespace) -> tuple[Any, ...] | None:
    """What is recorded: queries and keys too, if a server computes rows from them, or the file holds weights."""
    if options.serve:
        return (*Report.FACTS, Inputs())
    of_weights = options.output is not None and options.output.suffix.lower() == ".npz"
    return None if of_weights else Report.FACTS


def _page(report: Report, head: tuple[int, int] | None) -> Path:
    """The page among the temporary files, where it stays: the browser reads it after the command has ended."""
    page = Path(tempfile.mkdtemp(prefix="regard-")) / "report.html"
    report.save(page, head)
    print(f"\nwrote {page}")
    return page


def _doctor(model: str | None) -> int:
    from regard.cli.doctor import examine, here

    terminal.show(terminal.hanging(here()), terminal.DOCTOR)
    if model is None:
        return 0
    found = examine(model)
    print()
    terminal.show(terminal.hanging(str(found)), terminal.DOCTOR)
    return 0 if found.sound else 1


def _bench(seconds: float) -> None:
    from regard.cli.bench import HEAD, bench

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
        package = error.name.partition(".")[0]  # the module may be transformers.utils
        extra = "hf" if package == "transformers" else "demo"
        return f"needs {package}; install it with: pip install 'regard[{extra}]'"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'standard output'}: {error.strerror}"  # a file has its name
    return said(error)
