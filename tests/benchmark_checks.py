"""What the tests of the benchmarks share: the error of a way, and reports of made-up times."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import candidates, truth
from benchmarks.cases import Case
from benchmarks.inputs import draw
from benchmarks.measure import Entry, Row, Timed
from benchmarks.report import Report

GENERATED = {
    "growing": Case("tiny", "growing", (1, 6, 5, 8), what="growing", nk=29),
    "growing, grouped": Case("tiny", "growing, grouped", (1, 6, 5, 8), what="growing", key_heads=2, nk=29),
    "int8, grouped": Case("tiny", "int8, grouped", (1, 6, 5, 8), "bfloat16", what="int8", key_heads=2, nk=29),
    "sliding": Case("tiny", "sliding", (1, 3, 5, 8), what="sliding", nk=29, size=7),
    "left": Case("tiny", "left", (3, 2, 5, 8), what="left", nk=29, lengths=(24, 1, 13)),
    "pages": Case("tiny", "pages", (1, 3, 5, 8), what="pages", nk=29, size=3),
    "prefix": Case("tiny", "prefix", (3, 2, 5, 8), what="prefix", nk=29, size=11),
    "mixed": Case("tiny", "mixed", (1, 6, 13, 8), what="mixed", key_heads=2, nk=33, lengths=(9, 7, 12, 1, 4), size=5),
    "unsorted": Case("tiny", "unsorted", (1, 2, 84, 8), what="unsorted", size=7),
}
PATCHED = {
    "encoder": Case("tiny", "encoder", (2, 13, 64), what="encoder"),
    "encoder, training": Case("tiny", "encoder", (2, 13, 64), what="encoder", passes="both"),
    "dropout": Case("tiny", "encoder", (2, 13, 64), what="encoder", passes="both", dropout=0.1),
    "padded": Case("tiny", "padded", (2, 13, 64), what="padded", lengths=(5, 13)),
    "padded, training": Case("tiny", "padded", (2, 13, 64), what="padded", lengths=(5, 13), passes="both"),
    "decoder": Case("tiny", "decoder", (2, 12, 64), what="decoder"),
    "decoder, training": Case("tiny", "decoder", (2, 12, 64), what="decoder", passes="both"),
}
IMAGES = {
    "vit": Case("tiny", "vit", (1, 3, 32, 32), what="vit", passes="both"),
    "swin": Case("tiny", "swin", (1, 3, 224, 224), what="swin"),
    "torchvision": Case("tiny", "torchvision", (1, 3, 32, 32), what="torchvision", passes="both"),
    "unet": Case("tiny", "unet", (1, 4, 8, 8), what="unet", passes="both"),
    "dit": Case("tiny", "dit", (1, 4, 8, 8), what="dit", passes="both"),
}
LLAMA = Case("tiny", "llama", (2, 11), what="dynamic", size=5)


def right(case: Case, name: str) -> dict[str, float]:
    """The error of each way of a candidate, as a share of the limit."""
    x = draw(case)
    exact = truth.exact(case, x)
    ways = candidates.CANDIDATES[name].module().ways(case, x)
    errors: dict[str, float] = {}
    with torch.no_grad():
        for way in ways:
            way.before()
            errors[way.name] = exact.error([t.detach() for t in way.results(way.run())]) / exact.limit
    return errors


def made(*rows: Row) -> Report:
    versions = {"regard": "1", "torch": "2", "jax": "3"}
    missing = {"openvino": "not installed (openvino)"}
    return Report("inference", "A processor", "avx2", 2, 1e11, 2e10, versions, missing, list(rows))


def row(case: Case, **seconds: float) -> Row:
    return Row(case, 1e-6, {name: Entry(ways={"way": Timed(2e-7, s, [s, s, 9.0])}) for name, s in seconds.items()})
