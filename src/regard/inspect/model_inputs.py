"""What a model reads as one text, besides a text alone: a pair of texts, or what a tokenizer has returned."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.core.arrays import of_numbers
from regard.core.shapes import count_of
from regard.core.wrong_calls import kind_of

TYPES = "token_type_ids"


@dataclass(frozen=True)
class TextInputs:
    """What a model reads as one text.

    arguments  token ids and what goes with them, by the names of the model's arguments, input_ids first
    second     the number of the first token of the second text of a pair; 0 for one text, and where it is not known
    """

    arguments: dict[str, list[int]]
    second: int = 0


def takes(model: nn.Module, name: str) -> bool:
    """Whether a model's forward has an argument of that name, or any."""
    parameters = inspect.signature(model.forward).parameters.values()
    return any(one.name == name or one.kind is one.VAR_KEYWORD for one in parameters)


def of_pair(model: nn.Module, tokenizer: Any, given: Any, pair: Any) -> TextInputs:
    """The token ids of two texts, and their token types where the tokenizer and the model have them."""
    if not isinstance(given, str):
        raise TypeError(
            f"look has {kind_of(given)} and a second text; expected two texts: look(model, 'a', 'b', tokenizer=...)."
        )
    if not isinstance(pair, str):
        raise TypeError(f"look has a second text that is {kind_of(pair)}; expected a string.")
    if tokenizer is None:
        raise TypeError(
            f"look has no tokenizer; pass the one of {type(model).__name__}: look(model, 'a', 'b', tokenizer=...)."
        )
    try:
        inspect.signature(tokenizer).bind(given, pair)
    except TypeError:
        raise TypeError(
            f"{type(tokenizer).__name__} reads one text at a time; of a pair pass the ids, or a mapping with input_ids."
        ) from None
    encoded = tokenizer(given, pair)
    found = {"input_ids": _row("input_ids", encoded["input_ids"])}
    if TYPES in encoded and takes(model, TYPES):
        found[TYPES] = _row(TYPES, encoded[TYPES])
    return TextInputs(found, _second(encoded))


def of_mapping(model: nn.Module, given: Mapping[str, Any]) -> TextInputs:
    """What a tokenizer returned for one text, a BatchEncoding or a dictionary, as lists of numbers."""
    if "input_ids" not in given:
        raise ValueError(f"look has a mapping without input_ids; it has {', '.join(given)}.")
    found = {"input_ids": _row("input_ids", given["input_ids"])}
    n = len(found["input_ids"])
    for name, value in given.items():
        if name == "input_ids":
            continue
        if not takes(model, name):
            raise TypeError(f"{type(model).__name__} takes no {name}; leave it out of what is looked at.")
        found[name] = _row(name, value)
        if len(found[name]) != n and not name.startswith("decoder_"):
            raise ValueError(f"{name} has {count_of(len(found[name]), 'number')}, input_ids {n}; expected as many.")
    return TextInputs(found, _second(given))


def _second(encoded: Mapping[str, Any]) -> int:
    """Where the second text begins: by token types, or by the numbers of texts that fast tokenizers know."""
    types = _row(TYPES, encoded[TYPES]) if TYPES in encoded else []
    if 1 in types:
        return types.index(1) if types == sorted(types) else 0
    numbers = getattr(encoded, "sequence_ids", None)
    try:
        texts: list[int | None] = [] if numbers is None else numbers(0)
    except ValueError:  # a tokenizer written in Python has no such numbers
        return 0
    return texts.index(1) if 1 in texts else 0


def _row(name: str, value: Any) -> list[int]:
    """Numbers (n,) or (1, n), as a list."""
    rows = of_numbers(value, torch.int64) if not isinstance(value, Tensor) else value
    if rows.dim() == 2 and len(rows) != 1:
        raise ValueError(
            f"{name} has {len(rows)} rows; expected those of one text. Of several, pass a list with a mapping for each."
        )
    return [int(one) for one in rows.flatten().tolist()]
