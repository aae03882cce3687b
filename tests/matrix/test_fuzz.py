"""Random calls against an oracle that imports nothing of regard: a minute of them with --full, seconds without.

More: python -m tests.fuzz.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

import regard as rg
from fuzz.check import Outcome, run
from fuzz.draw import draw

CALLS, CHUNK = 1000, 50  # a plain run has the first chunk


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The calls are small: more threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def outcome(seed: int) -> Outcome:
    return run(seed)


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(CHUNK, CALLS, CHUNK))])
def test_random_calls_answer_what_the_documentation_says(first: int) -> None:
    found = {seed: findings for seed in range(first, first + CHUNK) if (findings := outcome(seed).findings)}
    told = [f"seed {seed}\n{draw(seed)}\n  " + "\n  ".join(findings) for seed, findings in found.items()]
    assert not told, "python -m tests.fuzz --seed N repeats one:\n" + "\n\n".join(told)


@pytest.mark.full
def test_few_calls_are_refused() -> None:
    refused = sum(outcome(seed).refused is not None for seed in range(100))
    assert refused <= 15


def slightly_more(out: torch.Tensor) -> torch.Tensor:
    return out * 1.05


def one_row_wrong(out: torch.Tensor) -> torch.Tensor:
    return torch.cat([out[..., :1, :] + 1, out[..., 1:, :]], -2)


@pytest.mark.full
@pytest.mark.parametrize("wrong", [slightly_more, one_row_wrong])
@pytest.mark.parametrize(("first", "calls"), [(200, 5), (220, 10)])
def test_a_wrong_answer_is_found(wrong: object, first: int, calls: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in calls without values, nor where rounding leaves nothing: in most."""
    right = rg.attention
    monkeypatch.setattr(rg, "attention", lambda *tensors, **given: wrong(right(*tensors, **given)))
    seeds = [seed for seed in range(first, first + calls) if draw(seed).pairs]
    assert seeds and sum(bool(run(seed).findings) for seed in seeds) >= 0.8 * len(seeds)


def test_a_seed_is_one_call() -> None:
    assert all(str(draw(seed)) == str(draw(seed)) for seed in range(50))
    assert all(torch.equal(draw(seed).v.nan_to_num(), draw(seed).v.nan_to_num()) for seed in range(50))


@pytest.mark.full
def test_the_oracle_imports_nothing_of_regard() -> None:
    """Nor does what draws the calls and compares the results."""
    modules = "call, compare, draw, gradients, laws, oracle, reach, subclasses, variations"
    program = f"import sys; sys.modules['regard'] = None\nfrom fuzz import {modules}"
    subprocess.run([sys.executable, "-c", program], cwd=Path(__file__).parents[1], check=True)
