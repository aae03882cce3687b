"""Who takes part: one file for each candidate says how it makes a call."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from benchmarks.cases import Case
from benchmarks.inputs import Inputs


@dataclass(frozen=True)
class Way:
    """One way to make a call: `run` is what is timed, `results` makes tensors (batch, heads, n, dv) of its answer.

    calls: how many a run makes, one after the other. before: what is done before each run, untimed. parts: measures
    seconds of what a call is made of: "overhead" (Python, on tiny tensors), "attention" (in a whole model).
    """

    name: str
    run: Callable[[], Any]
    results: Callable[[Any], list[Tensor]]
    calls: int = 1
    before: Callable[[], object] = tuple
    parts: Callable[[], dict[str, float]] = dict


class Unable(Exception):
    """The candidate cannot express the case; the message says why."""


class Module(Protocol):
    """What a file of this folder offers. The first way is the plain call; others are tried, the fastest counts."""

    def start(self, threads: int) -> str:
        """Makes ready in a process of its own; returns the version."""
        ...

    def ways(self, case: Case, x: Inputs) -> list[Way]: ...


@dataclass(frozen=True)
class Candidate:
    """name: of the file here; title: as tables say it; packages: what must be installed."""

    name: str
    title: str
    packages: tuple[str, ...]

    @property
    def missing(self) -> list[str]:
        return [package for package in self.packages if importlib.util.find_spec(package) is None]

    def module(self) -> Module:
        return importlib.import_module(f"benchmarks.candidates.{self.name}")  # type: ignore[return-value]


CANDIDATES = {
    candidate.name: candidate
    for candidate in (
        Candidate("regard", "regard", ("torch",)),
        Candidate("torch", "torch SDPA", ("torch",)),
        Candidate("flex", "FlexAttention", ("torch",)),
        Candidate("onnx", "ONNX Runtime", ("onnx", "onnxruntime")),
        Candidate("openvino", "OpenVINO", ("openvino",)),
        Candidate("jax", "JAX", ("jax",)),
        Candidate("eager", "eager torch", ("torch",)),
        Candidate("compiled", "torch.compile", ("torch",)),
        Candidate("tiled", "regard in PyTorch", ("torch",)),
        Candidate("contiguous", "regard, contiguous keys", ("torch",)),
        Candidate("other", "regard of --against", ("torch",)),
    )
}
TAKING_PART = {
    "inference": ("regard", "torch", "flex", "onnx", "openvino", "jax"),
    "training": ("regard", "torch", "eager", "compiled"),
    "generation": ("regard", "torch", "contiguous"),
    "models": ("regard", "torch"),
    "patching": ("regard", "torch"),
    "functions": ("regard", "flex", "tiled", "eager", "compiled"),
}
