"""The benchmark of whole models under regard.patch, on small ones: what is checked and run, never how fast it is."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from benchmark_checks import IMAGES, PATCHED, right

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import candidates, patched, truth
from benchmarks.cases import Case
from benchmarks.inputs import draw

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of the libraries themselves
    pytest.mark.full,
]


@pytest.mark.parametrize("what", PATCHED)
def test_every_way_of_torchs_layers_is_right(what: str) -> None:
    for name, count in (("torch", 1), ("regard", 2)):
        errors = right(PATCHED[what], name)
        assert len(errors) == count and all(error <= 1 for error in errors.values())


@pytest.mark.parametrize("case", IMAGES.values(), ids=list(IMAGES))
def test_every_way_of_other_libraries_models_is_right(case: Case) -> None:
    if case.lacking:
        pytest.skip(f"could not import {case.lacking[0]}")
    for name in candidates.TAKING_PART["patching"]:
        assert all(error <= 1 for error in right(case, name).values())


def test_a_wrong_gradient_is_seen() -> None:
    x = draw(PATCHED["encoder, training"])
    exact, (out, gradients) = truth.exact(x.case, x), patched.results(patched.model_of(x.case), x.q)
    assert exact.error([out, gradients]) <= exact.limit < exact.error([out, gradients * 1.01])


def test_a_model_that_runs_nothing_on_regard_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(patched.MAKERS, "encoder", lambda case: torch.nn.Linear(64, 64))
    (way,) = patched.patched_ways(draw(PATCHED["encoder"]))
    with pytest.raises(candidates.Unable, match="no call of the model ran on regard"):
        way.run()
