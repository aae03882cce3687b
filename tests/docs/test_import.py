"""The package as it is imported: light, and with every public name explained by an example that runs."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import pkgutil
import subprocess
import sys

import pytest
import torch

import regard
from selection import few

OPTIONAL = ("matplotlib", "rich", "safetensors", "transformers", "jaxtyping", "hypothesis", "tqdm", "einops")
SLOW = ("torch._dynamo", "torch._inductor", "sympy")  # a second or more, which `import torch` does not take

# torch itself loads some of them (tqdm, where it is installed), so only what regard adds counts.
ADDED = f"""
import sys, torch
before = set(sys.modules)
import regard
print(*sorted((set(sys.modules) - before) & {set(OPTIONAL + SLOW)!r}))
"""

MODULES = ["regard", *sorted(found.name for found in pkgutil.walk_packages(regard.__path__, "regard."))]


def test_import_loads_nothing_optional_or_slow() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ADDED], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []


ON_DEMAND = "compat.torch.flex_attention", "parallel.ring_attention", "testing.check_mask"


@pytest.mark.parametrize("name", few(ON_DEMAND, "testing.check_mask"))
def test_modules_that_are_loaded_on_demand(name: str) -> None:
    """Messages name them: what they say can be written after `import regard` alone."""
    script = f"import regard; print(callable(regard.{name}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout == "True\n", done.stderr
    assert name.partition(".")[0] in dir(regard)


def test_public_names_exist_once() -> None:
    assert len(regard.__all__) == len(set(regard.__all__))
    assert [name for name in regard.__all__ if not hasattr(regard, name)] == []


def explained(public: object) -> bool:
    """A plain value has no docstring of its own."""
    return inspect.ismodule(public) or inspect.isclass(public) or inspect.isroutine(public)


@pytest.mark.parametrize("name", [name for name in regard.__all__ if explained(getattr(regard, name))])
def test_public_name_is_explained_by_an_example(name: str) -> None:
    public = getattr(regard, name)
    # An inherited docstring, or one that dataclass makes up, does not count.
    own = vars(public).get("__doc__") if inspect.isclass(public) else public.__doc__
    assert ">>> " in (own or ""), f"regard.{name} has no docstring with an example"


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch.onnx uses what torch deprecates
@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    """Examples see their own module's names, and `torch` and `rg` besides."""
    if name.startswith("regard.compat.transformers"):
        pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")
    if name == "regard.compat.keras":  # its backend is chosen when it is first imported
        os.environ.setdefault("KERAS_BACKEND", "torch")
        pytest.importorskip("keras")
    if name == "regard.compat.onnx":
        pytest.importorskip("onnxscript")
    failed, _ = doctest.testmod(
        importlib.import_module(name),
        extraglobs={"torch": torch, "rg": regard},
        optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE,
    )
    assert failed == 0
