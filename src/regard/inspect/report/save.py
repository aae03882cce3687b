"""Files: what a report is written as, by suffix, whole or not at all."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import BinaryIO

import regard.inspect.report.numbers as numbers
import regard.inspect.report.page as page
import regard.inspect.report.plot as plot
from regard.inspect.report.content import Content
from regard_command.paths import check_suffix

Writer = Callable[[Content, BinaryIO, tuple[int, int] | None], None]


def _picture(suffix: str) -> Writer:
    return lambda report, file, head: plot.write(report, file, suffix, head)


WRITERS: dict[str, Writer] = {
    ".png": _picture("png"),
    ".svg": _picture("svg"),
    ".pdf": _picture("pdf"),
    ".html": page.write,
    ".json": numbers.write_json,
    ".npz": numbers.write_npz,
}


def write(report: Content, path: str | PathLike[str], head: tuple[int, int] | None) -> None:
    """Writes a report in the format of the path's suffix. Raises ValueError where it is none of SUFFIXES."""
    path = Path(path)
    check_suffix(path)
    report.shown(head)  # refused before a file is begun
    with whole(path) as file:
        WRITERS[path.suffix.lower()](report, file, head)


@contextmanager
def whole(path: Path) -> Generator[BinaryIO, None, None]:
    """A file that takes its place only when it is complete; after an error, what stood there stands there still."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        with part.open("xb") as file:
            yield file
        part.replace(path)
    except OSError as error:
        if error.filename in (None, str(part)):  # a full disk names no file
            error.filename = str(path)  # the name that the caller knows
        raise
    finally:
        part.unlink(missing_ok=True)
