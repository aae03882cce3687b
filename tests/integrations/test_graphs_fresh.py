"""torch.compile(fullgraph=True) and torch.export in processes of their own: README's calls, masks, scores, models.

What an earlier test leaves behind (a table that was filled, a class that was seen) hides what fails for a user, whose
first call is compiled. So compile_calls.py and compile_models.py run here as scripts, which fork once for each case.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

import compile_calls
from regard.backends.native.ffi import runnable

MODELS = ["Llama", "Gemma2", "BERT", "T5", "ViT"]
GRAPHS = list(compile_calls.cases())
OF_MODELS = [f"{what} {name}" for what in ("compile", "export") for name in MODELS]
OF_MODELS += ["decode with Llama"]
SLOW = [name for name in GRAPHS if name.startswith("inductor")]
HALVES = [[name for name in GRAPHS if name not in SLOW][n::2] for n in range(2)]
FOLDER = Path(__file__).parent


@cache
def outcomes(script: str, *parts: tuple[str, ...]) -> dict[str, str | None]:
    """What went wrong in each case, None where nothing did; a process for each part, at the same time."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, str(FOLDER / script), *part],
            **{"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True, "env": environment},
        )
        for part in parts
    ]
    lines = [line for process in running for line in process.communicate()[0].splitlines()]
    assert [process.returncode for process in running] == [0] * len(running)
    return dict(json.loads(line) for line in lines)


@pytest.mark.parametrize("name", [name for name in GRAPHS if name not in SLOW])
def test_a_first_call_in_a_graph(name: str) -> None:
    wrong = outcomes("compile_calls.py", *map(tuple, HALVES))[name]
    assert wrong is None, wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_a_first_call_by_the_default_compiler(name: str) -> None:
    wrong = outcomes("compile_calls.py", tuple(SLOW))[name]
    assert wrong is None, wrong


@pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers")
@pytest.mark.skipif(not runnable(), reason="needs the native kernels: no C++ compiler was found")
@pytest.mark.parametrize("name", OF_MODELS)
def test_a_model_of_transformers_is_one_graph(name: str) -> None:
    wrong = outcomes("compile_models.py", *(tuple(OF_MODELS[n::2]) for n in range(2)))[name]
    assert wrong is None, wrong
