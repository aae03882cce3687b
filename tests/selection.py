"""Which combinations of a test's parameters run: `pytest` shows every value, `--full` every pair, `--every` all."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from typing import Any
from zlib import crc32

import pytest
import torch

Item = pytest.Item
Values = dict[str, tuple[int, Any]]

# What a test runs on: parameters that every pair of the others meets with --full.
RUNNERS = ("isa", "backend")


def plain(items: Sequence[Item]) -> list[Item]:
    """The tests that run without --full, in the order given.

    Left out: what is marked `full`; all instruction sets but the best; float16, where a test has bfloat16 too. Of the
    combinations of parameters that remain, so many are kept that each value comes once; with each backend, if the test
    is marked `each_backend`. Which ones depends on the numbers of the values in their lists alone.
    """
    kept: set[Item] = set()
    for group in functions(item for item in items if not item.get_closest_marker("full")):
        shown_by = _with_backend if group[0].get_closest_marker("each_backend") else _each
        kept.update(_cover(_one_half_dtype(_best_instruction_set(parameters(group))), shown_by, 1))
    return [item for item in items if item in kept]


def full(items: Sequence[Item]) -> list[Item]:
    """The tests that run with --full, in the order given.

    Of each test as many combinations of its parameters as show every two values together that any combination has, on
    the best instruction set and on each backend anew. Where a test has at most two parameters beside these, that is
    all. On the other instruction sets, which compile the same source, each value comes twice.
    """
    kept: set[Item] = set()
    for group in functions(items):
        given = parameters(group)
        best = _best_instruction_set(given)
        kept.update(_cover(best, _pairs, 1))
        others = {item: values for item, values in given.items() if item not in best}
        kept.update(_cover(others, _singles, 2))
    return [item for item in items if item in kept]


def shared(items: Sequence[Item], always: Iterable[Item], part: int, parts: int) -> list[Item]:
    """Of some tests those that always run, and one part of the others, in the order given: all parts are the whole."""
    kept = set(always)
    return [item for item in items if item in kept or crc32(item.nodeid.encode()) % parts == part]


def few(values: Iterable[Any], *kept: Any) -> list[Any]:
    """The values of a parameter of which a run without --full has only those that are `kept`."""
    return [value if value in kept else pytest.param(value, marks=pytest.mark.full) for value in values]


def in_turn(values: Sequence[Any], *axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Every combination of the axes, before which the values stand in turn: not with every combination each.

    Each value meets each one of every axis, where another axis is as long as the list of values.
    """
    places = product(*(range(len(axis)) for axis in axes))
    return [(values[sum(at) % len(values)], *(axis[n] for axis, n in zip(axes, at, strict=True))) for at in places]


def by_case(items: Sequence[Item]) -> list[Item]:
    """The same tests; those that differ in backend or instruction set alone come one after another.

    So the reference's result, of which the checks keep a few, is computed once for each case and dtype.
    """
    place: dict[Any, int] = {}
    key: dict[Item, int] = {}
    for function, group in enumerate(functions(items)):
        for item, values in parameters(group).items():
            case = [(name, number) for name, (number, _) in values.items() if name not in ("isa", "backend")]
            key[item] = place.setdefault((function, *case), len(place))
    return sorted(items, key=key.__getitem__)


def functions(items: Iterable[Item]) -> list[list[Item]]:
    """The items of each test function."""
    found: dict[tuple[Any, ...], list[Item]] = defaultdict(list)
    for item in items:
        found[item.path, getattr(item, "cls", None), getattr(item, "originalname", item.name)].append(item)
    return list(found.values())


def parameters(group: Sequence[Item]) -> dict[Item, Values]:
    """For each item of a function, by parameter: the value's number in the list of values, and the value."""
    numbers: dict[str, dict[Any, int]] = defaultdict(dict)
    found: dict[Item, Values] = {}
    for item in group:
        given: dict[str, Any] = item.callspec.params if hasattr(item, "callspec") else {}
        found[item] = {}
        for name, value in given.items():
            key = value if isinstance(value, str) else id(value)
            found[item][name] = numbers[name].setdefault(key, len(numbers[name])), value
    return found


def _best_instruction_set(group: dict[Item, Values]) -> dict[Item, Values]:
    return {item: values for item, values in group.items() if values.get("isa", (0,))[0] == 0}


def _one_half_dtype(group: dict[Item, Values]) -> dict[Item, Values]:
    dtypes = {values["dtype"][1] for values in group.values() if "dtype" in values}
    left_out = torch.float16 if torch.bfloat16 in dtypes else None
    return {item: values for item, values in group.items() if left_out is None or values["dtype"][1] != left_out}


def _cover(group: dict[Item, Values], shown_by: Callable[[Values], Sequence[Any]], times: int) -> list[Item]:
    """Items that show each feature so many times; first those that show most of what is still wanted."""
    features = {item: shown_by(values) for item, values in group.items()}
    order = sorted(group, key=lambda item: crc32(repr([number for number, _ in group[item].values()]).encode()))
    shown: Counter[Any] = Counter()
    kept: dict[Item, None] = {item: None for item in group if not features[item]}

    def wanted(item: Item) -> int:
        return sum(shown[feature] < times for feature in features[item])

    for most in range(max(map(len, features.values()), default=0), 0, -1):
        for item in order:
            if item not in kept and wanted(item) == most:
                kept[item] = None
                shown.update(features[item])
    return list(kept)


def _with_backend(values: Values) -> list[Any]:
    """Each value of an item's parameters, together with the backend."""
    backend = values["backend"][0]
    return [(value, backend) for value in _each(values)]


def _pairs(values: Values) -> list[Any]:
    """Every two values of an item's parameters, and each one, together with the instruction set and the backend."""
    return _together(values, 2)


def _singles(values: Values) -> list[Any]:
    """Each value of an item's parameters, together with the instruction set and the backend."""
    return _together(values, 1)


def _together(values: Values, most: int) -> list[Any]:
    on = tuple(values[name][0] for name in RUNNERS if name in values)
    each = _each(values, *RUNNERS)
    return [(on, *some) for count in range(most + 1) for some in combinations(each, count)]


def _each(values: Values, *but: str) -> list[tuple[Any, ...]]:
    """The values of other parameters than these; a name such as "SoftCap under Causal" (testing.calls) is two."""
    found: list[tuple[Any, ...]] = []
    for name, (number, value) in values.items():
        if name not in but:
            parts = value.split(" under ") if isinstance(value, str) else [number]
            found += [(name, n, part) for n, part in enumerate(parts)]
    return found
