"""torch.compile(fullgraph=True) and torch.export in processes of their own: README's calls, masks, scores, models.

What an earlier test leaves behind (a table that was filled, a class that was seen) hides what fails for a user, whose
first call is compiled. So compile_calls.py runs here as a script, which forks once for each case.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from itertools import product
from pathlib import Path

import pytest

import compile_calls
from needed import needs_kernels

pytestmark = pytest.mark.full  # each process loads torch's compiler

MODELS = ["Llama", "Gemma2", "BERT", "T5", "ViT"]
GRAPHS = list(compile_calls.cases())
INDUCTOR = [name for name in GRAPHS if name.startswith("inductor")]
OF_MODELS = [f"{what} {name}" for what in ("compile", "export") for name in MODELS]
GENERATED = product(("Llama", "Gemma2"), ("static", "dynamic"), ("none", "left", "right"))
OF_MODELS += [f"generate {name} {cache} {side}" for name, cache, side in GENERATED]
FOLDER = Path(__file__).parent


@cache
def outcomes(*parts: tuple[str, ...]) -> dict[str, str | None]:
    """What went wrong in each case, None where nothing did; a process for each part, at the same time."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, str(FOLDER / "compile_calls.py"), *part],
            **{"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True, "env": environment},
        )
        for part in parts
    ]
    lines = [line for process in running for line in process.communicate()[0].splitlines()]
    assert [process.returncode for process in running] == [0] * len(running)
    return dict(json.loads(line) for line in lines)


def outcome(request: pytest.FixtureRequest) -> str | None:
    """What went wrong in the case of this test; the script runs all that the session has of this file.

    Where these are many, it runs those of the function, in two processes: each loads torch's compiler.
    """
    here = [item for item in request.session.items if item.path == request.node.path]
    if len(here) > 20:
        here = [item for item in here if item.function is request.function]
    names = sorted((item.callspec.params["name"] for item in here), key=OF_MODELS.__contains__)
    processes = 2 if len(names) > 20 else 1
    return outcomes(*(tuple(names[n::processes]) for n in range(processes)))[request.node.callspec.params["name"]]


@pytest.mark.parametrize("name", [name for name in GRAPHS if name not in INDUCTOR])
def test_a_first_call_in_a_graph(name: str, request: pytest.FixtureRequest) -> None:
    wrong = outcome(request)
    assert wrong is None, f"{name}: {wrong}"


@pytest.mark.parametrize("name", INDUCTOR)
def test_a_first_call_by_the_default_compiler(name: str, request: pytest.FixtureRequest) -> None:
    wrong = outcome(request)
    assert wrong is None, f"{name}: {wrong}"


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@needs_kernels
@pytest.mark.parametrize("name", OF_MODELS)
def test_a_model_of_transformers_is_one_graph(name: str, request: pytest.FixtureRequest) -> None:
    wrong = outcome(request)
    assert wrong is None, f"{name}: {wrong}"
