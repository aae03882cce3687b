"""The paths of a command, checked before anything heavy is loaded."""

from __future__ import annotations

import errno
import os
import stat
from argparse import Namespace
from pathlib import Path

COMPARED = (".html", ".json", ".npz")  # what a comparison can be written as
SUFFIXES = (".png", ".svg", ".pdf", ".html", ".json", ".npz")  # what a report can be written as


def check_paths(options: Namespace) -> None:
    """ValueError, in one sentence, for a text, a model or a report's folder that is not there."""
    if options.command in ("demo", "look", "compare") and options.output is not None:
        check_suffix(options.output, COMPARED if options.command == "compare" else SUFFIXES)
        folder = options.output.parent
        if not folder.is_dir():
            raise ValueError(f"{options.output}: there is no folder {folder}; make it first, or name another with -o.")
        if not os.access(folder, os.W_OK):
            raise ValueError(f"{options.output}: nothing can be written into {folder.resolve()}; name another with -o.")
    if options.command == "look":
        if options.words is None and not (options.file or options.text or options.probe):
            raise ValueError("there is no text; name a FILE, write -t 'some words', or --probe for random tokens.")
        _check_text(options.file or options.text)
    if options.command == "compare":
        _check_compared(options)
    for model in (getattr(options, "model", None), getattr(options, "with_model", None)):
        if model is not None and model != "minilm":
            check_model(model)


def check_suffix(path: Path, known: tuple[str, ...] = SUFFIXES) -> None:
    """ValueError where a report, or a comparison, cannot be written as what the path's suffix says."""
    if path.suffix.lower() not in known:
        what = "a comparison" if known == COMPARED else "a report"
        raise ValueError(f"{path.name} is not supported as {what}'s file: its suffix is none of {' '.join(known)}.")


def _check_compared(options: Namespace) -> None:
    """ValueError where there is no text, too many, or only one thing to compare."""
    texts = [*options.words, *(name for name in (options.file, options.other) if name is not None)]
    if not texts:
        raise ValueError("there is no text; name a FILE, or two, or write -t 'some words'.")
    if len(texts) > 2:
        raise ValueError(f"there are {len(texts)} texts; expected one or two.")
    if options.file == options.other == "-":
        raise ValueError("both texts are standard input, which can be read once; name a file for one of them.")
    if options.with_head is not None and options.head is None:
        raise ValueError("--with-head is the head after; name the one before too, as in --head L3H1.")
    if len(texts) == 1 and options.with_model in (None, options.model) and options.with_head is None:
        raise ValueError(
            "there is one text, one model and no second head; name another text, --with-model DIR, or --head and "
            "--with-head."
        )
    for name in (options.file, options.other):
        _check_text(name)


def check_model(name: str) -> Path:
    """The folder of a model of transformers. ValueError where it is none."""
    folder = Path(name)
    if not (folder / "config.json").is_file():
        way = "" if folder.exists() else " regard downloads nothing: save the model, and name its folder."
        raise ValueError(f"{name} is no model of transformers: expected a folder with config.json and weights.{way}")
    return folder


def _check_text(name: str | None) -> None:
    if name is None or name == "-":
        return
    try:
        if stat.S_ISFIFO(os.stat(name).st_mode):  # whoever writes into a pipe would lose its reader
            return
        with open(name, "rb"):
            return
    except OSError as error:
        way = ""
        if error.errno in (errno.ENOENT, errno.ENAMETOOLONG):
            way = f"; for the words themselves write -t {name!r}"
            if name.startswith(("http://", "https://")):
                way = f"; regard fetches nothing: curl -s {name} | regard look -"
        if error.errno == errno.EISDIR:
            way = f"; name a file, or a folder with a model as --model {name}"
        raise ValueError(f"{name}: {error.strerror}{way}.") from None
