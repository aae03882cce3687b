"""Layers: which of a model's modules are meant."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase

from regard.core.wrong_calls import kind_of

Layers = str | tuple[str, ...] | Callable[[str], bool]

SHOWN = 24


def chosen(
    layers: Layers, names: Iterable[str], argument: str = "layers", what: str = "module of this model"
) -> Callable[[str], bool]:
    """The question whether a module of that path is meant; ValueError where none of `names` is.

    argument, what: the name of the argument, and what it should fit, for that error.

    >>> chosen("*.attention", ["encoder", "encoder.attention"])("encoder.attention")
    True
    >>> chosen("*.attn", ["encoder", "encoder.attention"])
    Traceback (most recent call last):
    ...
    ValueError: layers='*.attn' fits no module of this model; it has encoder, encoder.attention.
    """
    if not isinstance(layers, (str, tuple, list)) and not callable(layers):  # pyright: ignore
        raise TypeError(
            f"{argument} is {kind_of(layers)}; expected a pattern over paths ('*' for all), several, or a function of "
            "the path."
        )
    if callable(layers):
        fits: Callable[[str], bool] = layers
    else:
        patterns = (layers,) if isinstance(layers, str) else layers
        fits = lambda name: any(fnmatchcase(name, pattern) for pattern in patterns)  # noqa: E731
    known = list(names)
    if not any(map(fits, known)):
        raise ValueError(f"{argument}={layers!r} fits no {what}; it has {some(known)}.")
    return fits


def some(names: list[str]) -> str:
    """The first of these names, and how many more there are."""
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")
