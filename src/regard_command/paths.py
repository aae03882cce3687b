"""The paths of a command, checked before anything heavy is loaded."""

from __future__ import annotations

import errno
import os
from argparse import Namespace
from pathlib import Path

SUFFIXES = (".png", ".svg", ".pdf", ".html", ".json", ".npz")  # what a report can be written as


def check_paths(options: Namespace) -> None:
    """ValueError, in one sentence, for a text, a model or a report's folder that is not there."""
    if options.command in ("demo", "look") and options.output is not None:
        check_suffix(options.output)
        folder = options.output.parent
        if not folder.is_dir():
            raise ValueError(f"{options.output}: there is no folder {folder}; make it first, or name another with -o.")
        if not os.access(folder, os.W_OK):
            raise ValueError(f"{options.output}: nothing can be written into {folder.resolve()}; name another with -o.")
    if options.command == "look":
        if options.words is None and not (options.file or options.text or options.probe):
            raise ValueError("there is no text; name a FILE, write -t 'some words', or --probe for random tokens.")
        _check_text(options.file or options.text)
    model = getattr(options, "model", None)
    if model is not None and model != "minilm":
        check_model(model)


def check_suffix(path: Path) -> None:
    """ValueError where a report cannot be written as what the path's suffix says."""
    if path.suffix.lower() not in SUFFIXES:
        known = " ".join(SUFFIXES)
        raise ValueError(f"{path.name} is not supported as a report's file: its suffix is none of {known}.")


def check_model(name: str) -> Path:
    """The folder of a model of transformers. ValueError where it is none."""
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{name} is no model of transformers: expected a folder with config.json and weights.")
    return folder


def _check_text(name: str | None) -> None:
    if name is None or name == "-":
        return
    try:
        with open(name, "rb"):
            return
    except OSError as error:
        literal = f"; for the words themselves write -t {name!r}" if error.errno == errno.ENOENT else ""
        raise ValueError(f"{name}: {error.strerror}{literal}.") from None
