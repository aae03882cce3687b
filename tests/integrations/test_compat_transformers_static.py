"""generate with caches of fixed shapes: a compiled step is one graph for all tokens, which are those of sdpa."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny_models import DECODERS, ENCODER_DECODERS, padded, tokens

pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")

from transformers import CompileConfig
from transformers.masking_utils import causal_mask_function, sliding_window_causal_mask_function

from regard.compat.transformers.mask_interface import lazy_mask
from regard.compat.transformers.models import NAME
from regard.compat.transformers.static_mask import StaticMask
from regard.masks.between import Between
from regard.masks.dense import Dense

MODELS = {**DECODERS, **ENCODER_DECODERS}


@pytest.fixture(autouse=True)
def no_graphs_of_others() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def generated(name: str, kind: str, real: Tensor | None) -> tuple[Tensor, int]:
    """The tokens, and how many graphs were made for the steps."""
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    config = CompileConfig(fullgraph=True, backend=count, mode=None)
    config._compile_all_devices = True  # without it, transformers compiles nothing on a CPU
    model = MODELS[name].build(kind)
    model.generation_config.eos_token_id = None
    found = model.generate(
        tokens(),
        attention_mask=real,
        max_new_tokens=15,
        do_sample=False,
        pad_token_id=0,
        cache_implementation="static",
        compile_config=config,
    )
    return found, len(graphs)


CASES = [("Llama", "left"), ("Llama", "none")]
MORE = [("Llama", "holes"), ("Gemma3", "left"), ("Mistral", "none"), ("GPT-2", "left"), ("T5", "left")]


@pytest.mark.full  # torch's compiler takes seconds for each graph
@pytest.mark.parametrize(("name", "side"), [*CASES, *(pytest.param(*case, marks=pytest.mark.full) for case in MORE)])
def test_the_steps_are_one_graph(name: str, side: str) -> None:
    """As many as with sdpa, and no more for more tokens than torch compiles again for (8)."""
    real = None if side == "none" else padded("left" if side == "holes" else side)
    if side == "holes":  # real tokens apart from each other: no interval of keys
        real = real.index_fill(1, torch.tensor([5, 8]), 0)
    right, theirs = generated(name, "sdpa", real)
    torch._dynamo.reset()
    found, graphs = generated(name, NAME, real)
    assert torch.equal(found, right)
    assert graphs == theirs


MASKS = {"causal": causal_mask_function, "window": sliding_window_causal_mask_function(4)}


@pytest.mark.parametrize("side", ["none", "left", "holes"])
@pytest.mark.parametrize("held", [0, 3, 9])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize("kind", MASKS)
def test_what_a_graph_reads_is_the_mask(kind: str, queries: int, held: int, side: str) -> None:
    """Of 16 keys, of which the first ones are filled: the same pairs, and for each step the same kind and shapes."""
    real = torch.ones(2, held + queries, dtype=torch.bool)
    if side != "none":
        real[0, : min(held, 2)] = False
    if side == "holes" and held > 5:
        real[0, 4] = False
    offset = torch.tensor(held)
    mask = lazy_mask(2, queries, 16, offset, 0, MASKS[kind], None if side == "none" else real)
    assert isinstance(mask, StaticMask)
    read = mask.in_graphs
    # a window of one query that begins behind the hole sees an interval
    apart = side == "holes" and held > 5 and not (kind == "window" and queries == 1)
    assert isinstance(read, Dense if apart else Between)
    if isinstance(read, Between):
        assert read.start.shape == read.stop.shape == (2, queries) and read.start.dtype == torch.int32
    seen = read.on(queries, 16, batch=(2,)).dense().expand(2, 1, queries, 16)
    i, j = torch.arange(held, held + queries)[:, None], torch.arange(16)
    expected = (j <= i) & ((i - j < 4) if kind == "window" else True)
    there = torch.zeros(2, 1, 1, 16, dtype=torch.bool)
    there[:, 0, 0, : held + queries] = real
    assert torch.equal(seen, expected & there)


def test_a_cache_that_grows_has_numbers() -> None:
    assert not isinstance(lazy_mask(2, 1, 7, 6, 0), StaticMask)
