"""Models of transformers that are compiled, exported, and decode in a graph, for compile_calls.py to run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import StaticCache

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


def decoded(name: str) -> None:
    """Token by token into a static cache, in one graph for all of them."""
    model, ids, graphs = built(name), tokens(9), list[torch.fx.GraphModule]()

    def count(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    found: list[tuple[Tensor, ...]] = []
    for run in (torch.compile(model, backend=count, fullgraph=True, dynamic=False), model):
        cache = StaticCache(config=model.config, max_cache_len=16)
        given = {"past_key_values": cache, "use_cache": True}
        with torch.no_grad():
            each = [run(ids[:, n : n + 1], position_ids=torch.tensor([[n]]), **given).logits for n in range(9)]
        found.append(tuple(each))
    close(*found)
    assert len(graphs) <= 2  # the first token makes the memory of the cache


def cases() -> dict[str, Callable[[], None]]:
    found: dict[str, Callable[[], None]] = {}
    for name in MODELS:
        found[f"compile {name}"], found[f"export {name}"] = partial(compiled, name), partial(exported, name)
    found["decode with Llama"] = partial(decoded, "Llama")
    return found
