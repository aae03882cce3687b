"""`regard compare`: two texts, two models, or two heads; read, compared, shown and written."""

from __future__ import annotations

import tempfile
import webbrowser
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import regard.cli.terminal as terminal
from regard.inspect.report.comparison import Comparison
from regard.inspect.report.findings import percent
from regard.inspect.report.report import Report
from regard_command.encoding import of_words, read_text

Reader = Callable[[str | None, str, str], Report]  # of a model's name, what the text is called, and the text


def compare(options: Namespace, read: Reader) -> None:
    """Reads one text or two with one model or two; prints what differs, and writes it to -o."""
    texts = [of_words(words) for words in options.words]
    texts += [read_text(name, options.encoding) for name in (options.file, options.other) if name is not None]
    models = (options.model, options.model if options.with_model is None else options.with_model)
    before = read(models[0], *texts[0])
    again = len(texts) == 1 and models[0] == models[1]
    after = before if again else read(models[1], *texts[-1])
    found = before.compare(after)
    heads = _heads(options, found)
    terminal.show(found.text(terminal.width()), terminal.REPORT)
    if heads is not None:
        print(f"\n{heads[0]} before, {heads[1]} after: {percent(found.between(*heads))} of the mass is on other keys")
    output: Path | None = options.output
    if output is not None:
        found.save(output, heads)
        print(f"\nwrote {output}")
    if options.open:
        _open(found, output, heads)


def _heads(options: Namespace, found: Comparison) -> tuple[str, str] | None:
    """The heads that are shown first, where they are named; with one name, that head before and after."""
    if options.head is None:
        return None
    heads = (options.head, options.head if options.with_head is None else options.with_head)
    found.find(*heads)  # refused before anything is shown
    return heads


def _open(found: Comparison, output: Path | None, heads: tuple[str, str] | None) -> None:
    page = output if output is not None and output.suffix.lower() == ".html" else None
    if page is None:
        page = Path(tempfile.mkdtemp(prefix="regard-")) / "comparison.html"  # the browser reads it after we have ended
        found.save(page, heads)
        print(f"\nwrote {page}")
    if not webbrowser.open(page.resolve().as_uri()):
        raise ValueError(f"no browser could be started; open {page} by hand.")
