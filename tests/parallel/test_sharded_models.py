"""transformers' models whose sequence lies on several ranks: outputs, loss and gradients of eager attention in one."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import regard as rg
from gloo_processes import Group
from regard.parallel import SequenceParallel, Shards, ring_attention, shard, ulysses_attention, usp_attention
from selection import in_turn
from tiny_models import DECODERS, ENCODERS, VOCABULARY, N, padded, tokens

pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")

MODELS = DECODERS | ENCODERS
NAMES = ["Llama", "BERT", "Mistral", "GPT-2", "Qwen2", "GPT-OSS", "ModernBERT"]
PADDINGS = ["left", "right", "none", "documents"]
LAYOUTS = {
    "zigzag": {ranks: Shards.zigzag(N, ranks) for ranks in (1, 2, 3, 4)},
    "contiguous": {ranks: Shards.contiguous(N, ranks) for ranks in (1, 2, 3, 4)},
    "ragged": {2: Shards.of([[7, 2, 3], [*range(2), *range(4, 7), *range(8, N)]]), 3: Shards.of_lengths([5, 1, N - 6])},
}


def build(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """On regard in one process, which other tests compare with eager attention; that has softmax in float32."""
    from regard.compat.transformers import NAME

    model = MODELS[name].build(NAME).to(dtype)
    model.config.use_cache = False
    model.set_experts_implementation("eager")  # torch's grouped product has no float64
    return model


def whole_batch(padding: str) -> dict[str, Tensor]:
    """Labels are of real tokens that a real token precedes: what eager attention gives to padding is no result."""
    ids = tokens()
    labels = ids.clone()
    if padding == "documents":
        begin_anew = torch.tensor([[*range(4), *range(7), 0, 1], [*range(2), *range(N - 2)]])
        return {"input_ids": ids, "position_ids": begin_anew, "labels": labels}
    if padding == "none":
        return {"input_ids": ids, "labels": labels}
    real = padded(padding)
    labels[(real == 0) | (real.roll(1, 1) == 0)] = -100
    return {"input_ids": ids, "attention_mask": real, "labels": labels}


def results(model: Any, batch: dict[str, Tensor], cotangent: Tensor | None = None) -> dict[str, Tensor]:
    """Logits, the loss (which transformers finds in float32), and the gradients of parameters: of it, or of logits."""
    out = model(**batch)
    (out.loss if cotangent is None else (out.logits * cotangent).sum()).backward()
    found = {f"gradient of {name}": p.grad for name, p in model.named_parameters() if p.grad is not None}
    if out.loss is not None:
        found["loss"] = out.loss.detach()
    return {"logits": out.logits.detach(), **found}


def largest(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Errors, relative to the largest logit, to the loss, and to the largest gradient of any parameter."""
    assert found.keys() == truth.keys()
    worst: dict[str, float] = {}
    scale = {"gradient": max(float(t.abs().max()) for what, t in truth.items() if what.startswith("gradient"))}
    for what, t in truth.items():
        kind = what.split()[0]
        difference = float((found[what] - t).abs().max()) / scale.get(kind, float(t.abs().max()))
        worst[kind] = max(worst.get(kind, 0.0), difference)
    return worst


def batch_of(name: str, padding: str) -> dict[str, Tensor]:
    batch = whole_batch(padding)
    if name == "BERT":
        del batch["labels"]  # its loss is a mean over the tokens of a rank, and refused
    return batch


def cotangent() -> Tensor:
    """Of the logits: the same on each rank."""
    return torch.randn(2, N, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@cache
def in_one_process(name: str, padding: str, dtype: torch.dtype, of_logits: bool) -> dict[str, Tensor]:
    """What one process finds, whose result serves every layout and number of ranks."""
    batch = {"position_ids": torch.arange(N)[None], **batch_of(name, padding)}
    return results(build(name, dtype), batch, cotangent() if of_logits else None)


def errors(
    group: Any, name: str, attend: Any, layout: str, padding: str, dtype: torch.dtype, *mesh: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Of one rank's logits and the sums of losses and gradients, and of one process in dtype; against float64 there."""
    from regard.compat.transformers import sharded

    batch, exact = batch_of(name, padding), dtype == torch.float64
    shards, rank = LAYOUTS[layout][dist.get_world_size(group)], dist.get_rank(group)
    of_logits = exact or name == "BERT"
    truth = in_one_process(name, padding, torch.float64, of_logits)
    plain = in_one_process(name, padding, dtype, of_logits)
    parallel = SequenceParallel(shards, init_device_mesh("cpu", mesh) if mesh else group, attend)
    own = shard(cotangent(), shards, rank).to(dtype) if of_logits else None
    with sharded(build(name, dtype), parallel) as part:
        found = results(part.model, part.batch(batch), own)
    whole = truth["logits"].to(dtype, copy=True)
    whole[:, shards.indices[rank]] = found.pop("logits")
    for t in found.values():
        dist.all_reduce(t, group=group)
    return largest({"logits": whole, **found}, truth), largest(plain, truth)


def assert_small(found: list[tuple[dict[str, float], dict[str, float]]], bound: float) -> None:
    """bound, or twice the error of one process; the loss is a sum in float32 whatever the dtype."""
    for errors, plain in found:
        for kind, error in errors.items():
            assert error < max(2e-6 if kind == "loss" else bound, 2 * plain[kind]), (kind, errors, plain)


DEALT = [(layout, ranks) for layout, of_ranks in LAYOUTS.items() for ranks in of_ranks]
CASES = [  # an encoder of transformers does not look for documents
    (name, attend, padding, *dealt)
    for attend, name, padding, dealt in in_turn([ring_attention, ulysses_attention], NAMES, PADDINGS, DEALT)
    if name in DECODERS or padding != "documents"
]


@pytest.mark.full
@pytest.mark.parametrize(("name", "attend", "padding", "layout", "ranks"), CASES)
def test_float64(gloo: Group, name: str, attend: Any, padding: str, layout: str, ranks: int) -> None:
    assert_small(gloo.run(errors, name, attend, layout, padding, torch.float64, ranks=ranks), 1e-12)


@pytest.mark.full
@pytest.mark.parametrize("padding", ["left", "none"])
@pytest.mark.parametrize("name", ["Llama", "Mistral", "Gemma2", "BERT"])
def test_float32(gloo: Group, name: str, padding: str) -> None:
    """On the native kernels, and with the gradients of the loss."""
    assert_small(gloo.run(errors, name, ring_attention, "zigzag", padding, torch.float32, ranks=2), 2e-6)


@pytest.mark.full
@pytest.mark.parametrize("name", ["Llama", "Mistral", "BERT"])
@pytest.mark.parametrize("mesh", [(2, 2), (4, 1), (1, 4)])
def test_a_mesh(gloo: Group, name: str, mesh: tuple[int, int]) -> None:
    found = gloo.run(errors, name, usp_attention, "zigzag", "right", torch.float64, *mesh, ranks=4)
    assert_small(found, 1e-12)


def checkpointed(group: Any) -> tuple[float, float, bool]:
    """Errors of the output and of a gradient, with dropout and checkpoints, and whether the model is as before."""
    from regard.compat.transformers import sharded

    shards, rank = Shards.zigzag(N, 2), dist.get_rank(group)
    whole, model = build("Llama").train(), MODELS["Llama"].build("eager").double().train()
    for made in (whole, model):
        for layer in made.model.layers:
            layer.self_attn.attention_dropout = 0.4
        made.gradient_checkpointing_enable()
    torch.manual_seed(11)
    out = whole(tokens(), position_ids=torch.arange(N)[None]).logits
    out.square().sum().backward()
    torch.manual_seed(11 + rank)
    with sharded(model, SequenceParallel(shards, group)) as part:
        found = model(**part.batch({"input_ids": tokens()})).logits
        found.square().sum().backward()  # within the block, as attention is computed again
    here, there = model.lm_head.weight.grad, whole.lm_head.weight.grad
    dist.all_reduce(here, group=group)
    as_before = model.config._attn_implementation == "eager" and not model._forward_pre_hooks
    return (
        float((found - shard(out, shards, rank)).abs().max() / out.abs().max()),
        float((here - there).abs().max() / there.abs().max()),
        as_before,
    )


def test_dropout_and_checkpoints(gloo: Group) -> None:
    for output, gradient, as_before in gloo.run(checkpointed, ranks=2):
        assert output < 1e-12 and gradient < 1e-12 and as_before


def recorded(group: Any) -> float:
    from regard.compat.transformers import sharded

    shards, rank = Shards.striped(N, 2), dist.get_rank(group)
    batch, entropy = {"input_ids": tokens(), "attention_mask": padded("left")}, rg.facts.Entropy()
    whole, model = build("Llama"), build("Llama")
    with torch.no_grad(), rg.record(whole, (entropy,)) as expected:
        whole(**batch)
    with torch.no_grad(), sharded(model, SequenceParallel(shards, group)) as part, rg.record(model, (entropy,)) as seen:
        model(**part.batch(batch))
    assert len(seen) == len(expected) == 2
    pairs = [
        (a[entropy], b[entropy][..., shards.indices[rank]]) for a, b in zip(seen.calls, expected.calls, strict=True)
    ]
    return max(float((a - b).abs().max()) for a, b in pairs)


def test_recorded_facts_are_those_of_one_process(gloo: Group) -> None:
    assert max(gloo.run(recorded, ranks=2)) < 1e-12
