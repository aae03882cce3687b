"""Every causal class of transformers over two ranks: the logits and the loss of one process, or a refusal."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gloo_processes import Group
from regard.core.errors import Unsupported
from regard.parallel import SequenceParallel, Shards, shard
from tiny_models import N, padded, tokens

pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")

from causal_models import NOT_BUILT, REFUSED, build, model_types

KINDS = [kind for kind in model_types() if kind not in NOT_BUILT and kind not in REFUSED]


def outcome(group: Any, kind: str) -> str | tuple[float, float]:
    """Why it is refused; or errors of logits and of the loss, relative to the largest, in float32."""
    from regard.compat.transformers import NAME, sharded

    warnings.simplefilter("ignore")
    shards, rank, real = Shards.zigzag(N, 2), dist.get_rank(group), padded("left")
    labels = tokens().where((real == 1) & (real.roll(1, 1) == 1), -100)
    positions = torch.arange(N)[None]
    batch = {"input_ids": tokens(), "attention_mask": real, "labels": labels, "position_ids": positions}
    whole, model = build(kind, NAME), build(kind, "eager")
    try:
        with torch.no_grad(), sharded(model, SequenceParallel(shards, group)) as part:
            found = model(**part.batch(batch))
    except Unsupported as error:
        return str(error)
    with torch.no_grad():
        truth = whole(**batch, use_cache=False)
    loss, seen = found.loss.clone(), shard(real, shards, rank, 1).bool()
    dist.all_reduce(loss, group=group)
    difference = (found.logits - shard(truth.logits, shards, rank))[seen].abs().max()
    return float(difference / truth.logits[real.bool()].abs().max()), float((loss - truth.loss).abs() / truth.loss)


@pytest.mark.full
def test_all_are_those_of_one_process_or_refused(gloo: Group) -> None:
    found = {kind: gloo.run(outcome, kind, ranks=2) for kind in KINDS}
    refused = {kind: said for kind, said in found.items() if isinstance(said[0], str)}
    for kind, (one, other) in found.items():
        if kind in refused:
            assert one[:40] == other[:40] and one.endswith("."), kind  # masks may be told with addresses
        else:
            assert max(*one, *other) < 1e-4, (kind, one, other)
    assert len(found) - len(refused) > 100
