"""Bytes as text: in UTF-8, or in the encoding that was named, and never with letters left out; and text as bytes."""

from __future__ import annotations

import codecs
import io
import os
import sys
from pathlib import Path

DEFAULT = "utf-8-sig"  # UTF-8, with or without the mark that some editors write first


def print_any_text() -> None:
    """Lets standard output and error take every letter, where their encoding has not all (Windows: its code page).

    What goes to a file or a pipe is then UTF-8; a terminal shows "?" for what it has no letter for. What goes to one
    that is closed (`>&-` in a shell) is lost.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (open until the process ends)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
            if stream.isatty():
                stream.reconfigure(errors="replace")
            else:
                stream.reconfigure(encoding="utf-8")


def decoded(name: str, content: bytes, encoding: str = DEFAULT) -> str:
    """The text in a file of that name. ValueError for a byte that the encoding does not have, and for no text.

    >>> decoded("a.txt", "né".encode())
    'né'
    >>> decoded("a.txt", "né".encode("latin-1"))
    Traceback (most recent call last):
    ...
    ValueError: a.txt is not UTF-8: byte 0xe9 at offset 1 (line 1, after 'n'): the text ends inside of a character. If
      it is a text, name its encoding, as in --encoding latin-1.
    """
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        raise ValueError(_complaint(name, content, encoding, error)) from None
    if "\0" in text:
        raise ValueError(f"{name} is no text: it has a NUL byte at offset {content.index(0)}.")
    return text


def read_text(name: str, encoding: str = DEFAULT) -> tuple[str, str]:
    """What a text is called, and the text: of a file, or of standard input for "-". Errors as `decoded`."""
    if name == "-" and sys.stdin is None:  # pyright: ignore[reportUnnecessaryComparison]
        raise ValueError("standard input is closed; expected a text in it, or the name of a file.")
    content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    called = "standard input" if name == "-" else name
    return called, decoded(called, content, encoding)


def of_words(words: str) -> tuple[str, str]:
    """The same of a text that was written on the command line."""
    # Python has read them in the terminal's encoding, and left bytes that are not of it as surrogates
    return "the text", decoded("the text", words.encode("utf-8", "surrogateescape"))


def named(name: str) -> str:
    """The name of an encoding of texts. ValueError for another."""
    try:
        "a".encode(name)
    except LookupError:
        raise ValueError(f"{name!r} is no encoding of texts; expected one such as utf-8, latin-1, utf-16.") from None
    return name


def _complaint(name: str, content: bytes, encoding: str, error: UnicodeDecodeError) -> str:
    default = encoding == DEFAULT
    before = content[: error.start].rpartition(b"\n")[2].decode(encoding, "ignore")[-12:]
    place = f"line {content[: error.start].count(10) + 1}" + (f", after {before!r}" if before else "")
    said = f"{name} is not {'UTF-8' if default else encoding.upper()}: byte 0x{content[error.start]:02x}"
    said += f" at offset {error.start} ({place})"
    if error.reason == "unexpected end of data":
        said += ": the text ends inside of a character"
    if not default:
        return f"{said}."
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return f"{said}. It begins as UTF-16 does: --encoding utf-16."
    return f"{said}. If it is a text, name its encoding, as in --encoding latin-1."
