"""The benchmark of architectures of transformers, on short texts: what is checked and run, never how fast it is."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

import pytest
import torch

from benchmark_checks import right

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

pytest.importorskip("transformers")

from benchmarks import architectures, truth
from benchmarks.cases import ARCHITECTURES, DECODERS, Case
from benchmarks.inputs import draw

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # those of transformers itself
    pytest.mark.full,
]
SHAPES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(ARCHITECTURES, (2, 24)),
    "Whisper": (1, 80, 80),
    "ViT": (1, 3, 224, 224),
}
ONE_LAYER = {
    "num_hidden_layers": 1,
    "n_layer": 1,
    "num_layers": 1,
    "num_decoder_layers": 1,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "layer_types": ["sliding_attention"],
    "max_source_positions": 40,
}
TINY = {name: Case("tiny", name, shape, what=name) for name, shape in SHAPES.items()}


@pytest.fixture(autouse=True)
def _one_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, kind in architectures.ARCHITECTURES.items():
        sizes = kind.sizes | {size: number for size, number in ONE_LAYER.items() if size in kind.sizes}
        monkeypatch.setitem(architectures.ARCHITECTURES, name, dataclasses.replace(kind, sizes=sizes))


@pytest.mark.parametrize(("passes", "dtype"), [("forward", "bfloat16"), ("both", "float32")])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_forward_and_its_gradients_are_right(name: str, passes: str, dtype: str) -> None:
    case = dataclasses.replace(TINY[name], passes=passes, dtype=dtype)
    for candidate in ("regard", "torch"):
        assert all(error <= 1 for error in right(case, candidate).values())


@pytest.mark.parametrize("name", [*DECODERS, "T5", "Whisper"])
def test_every_cache_gives_greedy_tokens(name: str) -> None:
    case = dataclasses.replace(TINY[name], size=5)
    ours, theirs = right(case, "regard"), right(case, "torch")
    assert {*ours} > {*theirs} and {"GrowingCache", "FixedCache", "PagedCache"} <= {*ours}
    assert all(error <= 1 for error in (*ours.values(), *theirs.values()))


def test_a_wrong_gradient_and_a_wrong_token_are_seen() -> None:
    x = draw(dataclasses.replace(TINY["GPT-2"], passes="both"))
    exact, (out, gradients) = truth.exact(x.case, x), architectures.results(x, architectures.model_of(x.case, "eager"))
    assert exact.error([out, gradients]) <= exact.limit < exact.error([out, gradients * 1.01])
    x = draw(dataclasses.replace(TINY["GPT-2"], size=5))
    exact = truth.exact(x.case, x)
    assert exact.error([torch.zeros(2, 5, dtype=torch.int64)]) > exact.limit
    assert exact.error([torch.zeros(2, 4, dtype=torch.int64)]) == float("inf")


def test_heads_of_a_model_do_not_see_all_tokens_alike() -> None:
    x = draw(TINY["Llama 8:8"])
    model = architectures.model_of(x.case, "eager")
    with torch.no_grad():
        weights = model(x.q, output_attentions=True).attentions[0]
    assert weights[..., -1, :].amax(-1).mean() > 2 / x.q.shape[-1]
