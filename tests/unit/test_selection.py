"""What a run with and without --full has, by the rules of selection.py, of the tests that every mask and score has."""

from __future__ import annotations

import inspect
import os
from collections import Counter
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import regard as rg
import selection
from regard import testing
from regard.backends.native.ffi import runnable

TESTS = Path(__file__).parents[1]
# pytest's options where none is given.
USUAL = {"numprocesses": None, "maxprocesses": None, "dist": "no", "usepdb": False, "trace": False, "capture": "fd"}


def collected(request: pytest.FixtureRequest, file: str) -> list[pytest.Item]:
    """Every test of a file, whatever this run has of it."""
    folder = next(node for node in request.node.iter_parents() if node.path == TESTS)
    return list(request.session.genitems(pytest.Module.from_parent(folder, path=TESTS / file)))


def shown(items: list[pytest.Item]) -> Counter[tuple[object, str, str]]:
    """How often each mask and each score comes with each backend."""
    given = [item.callspec.params for item in items]
    return Counter((each.get("backend"), name, each[name]) for each in given for name in ("mask", "score"))


def exported(kind: type) -> list[str]:
    classes = [one for name in rg.__all__ if inspect.isclass(one := getattr(rg, name)) and issubclass(one, kind)]
    return [one.__name__ for one in classes if one not in (rg.Mask, rg.Score, rg.Modifier, rg.Similarity)]


def test_the_examples_have_every_mask_and_score_that_is_exported() -> None:
    at = testing.frame()
    assert set(exported(rg.Mask)) <= testing.masks(at).keys()
    assert set(exported(rg.Score)) <= testing.scores(at).keys()


@pytest.mark.full
@pytest.mark.parametrize("file", ["matrix/test_matrix.py", "integrations/test_flex.py"])
def test_each_mask_and_each_score_comes_with_each_backend(file: str, request: pytest.FixtureRequest) -> None:
    """Against Reference, which defines them: on Native, on Tiled, and what begins with a dot product on Flex."""
    every = [item for item in collected(request, file) if item.originalname == "test_every_mask_and_score"]
    few = selection.plain(every)
    wanted, found = shown(every), shown(few)
    assert len(few) < len(every) / 5
    assert {mask for _, name, mask in wanted if name == "mask"} == testing.masks(testing.frame()).keys()
    assert found.keys() == wanted.keys()


@pytest.mark.full
@pytest.mark.parametrize("file", ["matrix/test_offsets.py", "unit/test_autograd.py"])
def test_a_plain_run_shows_each_value_once(file: str, request: pytest.FixtureRequest) -> None:
    """A backend is a value like any other, where a test is not marked `each_backend`."""

    def values(items: list[pytest.Item]) -> set[tuple[str, str, str]]:
        given = [(item.originalname, item.callspec.params) for item in items if hasattr(item, "callspec")]
        named = [(test, name, str(value)) for test, params in given for name, value in params.items()]
        return {one for one in named if one[1] != "isa" and one[2] != "torch.float16"}

    every = [item for item in collected(request, file) if not item.get_closest_marker("full")]
    few = selection.plain(every)
    assert values(every) == values(few)
    assert len(few) < len(every) / 2


@pytest.mark.full
@pytest.mark.parametrize(
    "file",
    ["matrix/test_matrix.py", "kernels/test_native.py", "kernels/test_native_int8.py", "unit/test_own_shapes.py"],
)
def test_full_shows_every_two_values_on_every_backend(file: str, request: pytest.FixtureRequest) -> None:
    """And on the best instruction set; on the others each value, twice if it has so many tests."""
    every = collected(request, file)
    kept = set(selection.full(every))
    assert file == "unit/test_own_shapes.py" or len(kept) < len(every) / 2

    def together(item: pytest.Item) -> list[object]:
        given = {name: value for name, value in item.callspec.params.items() if name not in ("isa", "backend")}
        if " under " in str(given.get("name")):
            given["score"], given["mask"] = given.pop("name").split(" under ")
        runner = item.callspec.params.get("isa"), repr(item.callspec.params.get("backend"))
        each = [(name, str(value)) for name, value in given.items()]
        most = 2 if runner[0] in (None, runnable()[0]) else 1
        return [(item.originalname, runner, some) for n in range(most + 1) for some in combinations(each, n)]

    wanted, shown = (
        Counter(some for item in items if hasattr(item, "callspec") for some in together(item))
        for items in (every, kept)
    )
    assert wanted.keys() == shown.keys()
    others = {some for some in wanted if some[1][0] not in (None, runnable()[0])}
    assert all(shown[some] >= min(2, wanted[some]) for some in others)
    assert len(runnable()) == 1 or "kernels/" not in file or others
    assert kept >= {item for item in every if not hasattr(item, "callspec")}


@pytest.mark.full
def test_shares_are_the_whole(request: pytest.FixtureRequest) -> None:
    every = collected(request, "matrix/test_matrix.py")
    full, plain = selection.full(every), selection.plain(every)
    shares = [selection.shared(full, plain, part, 3) for part in range(3)]
    times = Counter(item for share in shares for item in share)
    assert times.keys() == {*full}
    assert all(times[item] == (3 if item in plain else 1) for item in full)
    assert max(map(len, shares)) < 0.6 * len(full)


def test_values_in_turn_meet_each_one_of_every_axis() -> None:
    axes = "cdefg", "hij", "kl"
    found = selection.in_turn("ab", *axes)
    assert [one[1:] for one in found] == list(product(*axes))
    for n, axis in enumerate(axes, 1):
        assert {(one[0], one[n]) for one in found} == set(product("ab", axis))


@pytest.mark.skipif(len(runnable()) < 2, reason="one instruction set runs here")
@pytest.mark.parametrize("file", ["kernels/test_native.py", "kernels/test_native_additive.py"])
def test_the_best_instruction_set_and_one_half_dtype(file: str, request: pytest.FixtureRequest) -> None:
    found = collected(request, file)
    for of, isas, halves in (
        (found, set(runnable()), {torch.bfloat16, torch.float16}),
        (selection.plain(found), {runnable()[0]}, {torch.bfloat16}),
    ):
        given = [item.callspec.params for item in of if hasattr(item, "callspec")]
        assert {params["isa"] for params in given if "isa" in params} == isas
        assert {params["dtype"] for params in given if "dtype" in params} - {torch.float32} == halves


@pytest.mark.parametrize(
    ("given", "processes"),
    [
        ({}, 4),
        ({"maxprocesses": 3}, 3),
        ({"numprocesses": 3}, 3),
        ({"numprocesses": 0}, 0),
        ({"dist": "loadfile"}, None),
        ({"usepdb": True}, None),
        ({"trace": True}, None),
        ({"capture": "no"}, None),
        ({"names a file": True}, None),
        ({"is a worker": True}, None),
    ],
    ids=str,
)
def test_a_run_that_names_no_file_takes_each_core(
    given: dict[str, object], processes: object, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 2, 5}, raising=False)
    source = pytest.Config.ArgsSource
    config = SimpleNamespace(
        option=SimpleNamespace(**(USUAL | given)),
        args_source=source.ARGS if "names a file" in given else source.TESTPATHS,
    )
    if "is a worker" in given:
        config.workerinput = {}
    conftest = request.config.pluginmanager.get_plugin(str(TESTS / "conftest.py"))
    conftest.pytest_cmdline_main(config)
    assert config.option.numprocesses == processes
    assert (config.option.dist == "worksteal") == (given.keys() <= {"maxprocesses"})


def test_one_core_has_one_process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3}, raising=False)
    config = SimpleNamespace(option=SimpleNamespace(**USUAL), args_source=pytest.Config.ArgsSource.TESTPATHS)
    request.config.pluginmanager.get_plugin(str(TESTS / "conftest.py")).pytest_cmdline_main(config)
    assert config.option.numprocesses is None and config.option.dist == "no"
