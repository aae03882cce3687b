"""Models of transformers that are compiled, exported, and decode in a graph, for compile_calls.py to run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

import regard.compat.transformers
from compile_calls import close
from tiny_models import DECODERS, ENCODER_DECODERS, ENCODERS, PICTURES, padded, tokens

MODELS = {"Llama": DECODERS, "Gemma2": DECODERS, "BERT": ENCODERS, "T5": ENCODER_DECODERS, "ViT": PICTURES}


def built(name: str) -> Any:
    model = MODELS[name][name].build(regard.compat.transformers.NAME)
    model.config.use_cache = False
    return model


def feed(name: str, side: str) -> dict[str, Any]:
    if name == "ViT":
        return {"pixel_values": torch.randn(2, 3, 12, 12)}
    given = {"input_ids": tokens(), "attention_mask": padded(side)}
    return {**given, "decoder_input_ids": tokens(7), "use_cache": False} if name == "T5" else given


def compiled(name: str) -> None:
    """One graph, whose outputs and gradients are eager's; it serves another padding too."""
    model = built(name)
    run, weights = torch.compile(model, backend="aot_eager", fullgraph=True), tuple(model.parameters())
    for given in (feed(name, "right"), feed(name, "left")):
        found: list[tuple[Tensor, ...]] = []
        for forward in (run, model):
            out = forward(**given)[0]
            grads = torch.autograd.grad(out.sin().sum(), weights, allow_unused=True, materialize_grads=True)
            found.append((out, *grads))
        close(*found)


def exported(name: str) -> None:
    model, given = built(name), feed(name, "right")
    with torch.no_grad():
        program = torch.export.export(model, (), given).module()
        for one in (given, feed(name, "left")):
            close((program(**one)[0],), (model(**one)[0],))


# steps of a generation: the prompt, then tokens one by one
STEPS = ((0, 5), *((n, n + 1) for n in range(5, 11)))
CACHES: dict[str, Callable[[Any], Any]] = {
    "static": lambda config: StaticCache(config=config, max_cache_len=16),
    "dynamic": lambda config: DynamicCache(config=config),
}


def generated(name: str, cache: str, side: str) -> None:
    """Each step is one graph, and there are few for all of them: the prompt's, the first token's, the others'."""
    model, ids, graphs = built(name), tokens(11), list[torch.fx.GraphModule]()
    real = padded(side, 11) if side != "none" else torch.ones_like(ids)
    if side == "right":  # of the prompt, behind which the first sequence goes on
        real = torch.ones_like(ids).index_fill(1, torch.tensor([3, 4]), 0)

    def count(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    found: list[tuple[Tensor, ...]] = []
    for run in (torch.compile(model, backend=count, fullgraph=True), model):
        kept, each = CACHES[cache](model.config), list[Tensor]()
        for first, last in STEPS:
            at = torch.arange(first, last)[None]
            mask = {} if side == "none" else {"attention_mask": real[:, :last]}
            with torch.no_grad():
                each.append(
                    run(ids[:, first:last], position_ids=at, past_key_values=kept, use_cache=True, **mask).logits
                )
        found.append(tuple(each))
    close(*found)
    assert len(graphs) <= 4, f"{len(graphs)} graphs"


def cases() -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {}
    for name in MODELS:
        found[f"compile {name}"], found[f"export {name}"] = partial(compiled, name), partial(exported, name)
    for name, cache, side in product(("Llama", "Gemma2"), CACHES, ("none", "left", "right")):
        found[f"generate {name} {cache} {side}"] = partial(generated, name, cache, side)
    return found
