"""Models, and calls of a sharded model, that one rank's tokens do not suffice for: refused with a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from gloo_processes import Group
from regard.core.errors import Unsupported
from regard.parallel import SequenceParallel, Shards
from tiny_models import (
    CHANGING,
    CLOSED,
    COMPUTING,
    DECODERS,
    ENCODER_DECODERS,
    ENCODERS,
    PICTURES,
    SOUNDS,
    N,
    Tiny,
    padded,
    tokens,
)

pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")

from regard.compat.transformers import sharded

TINY = DECODERS | ENCODERS | ENCODER_DECODERS | COMPUTING | CLOSED | CHANGING | PICTURES | SOUNDS
BERT = ENCODERS["BERT"].options
OTHERS = {
    "BERT, pooled": Tiny("BertModel", "BertConfig", BERT),
    "Llama, classifier": Tiny("LlamaForSequenceClassification", "LlamaConfig", DECODERS["Llama"].options),
    "Mamba": Tiny("MambaForCausalLM", "MambaConfig", {"hidden_size": 16, "num_hidden_layers": 1, "vocab_size": 61}),
}
WHOLE = {"input_ids": tokens(), "attention_mask": padded("right"), "labels": tokens()}
MODELS = {
    "T5": "T5ForConditionalGeneration has two sequences.",
    "BERT, pooled": "BertModel reads one token by BertPooler (add_pooling_layer=False builds it without).",
    "Llama, classifier": "LlamaForSequenceClassification is no base model, and no head",
    "Mamba": "MambaForCausalLM carries a state from token to token.",
    "DeepSeek-V4": "DeepseekV4ForCausalLM carries a state from token to token.",
    "HuBERT": "HubertModel mixes tokens by Conv1d.",
    "Bloom": "BloomModel takes no position_ids",
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    model = (TINY | OTHERS)[name].build("eager")
    with pytest.raises(Unsupported) as raised:
        sharded(model, SequenceParallel(Shards.contiguous(N, 1)))
    assert str(raised.value).startswith(MODELS[name])
    assert model.config._attn_implementation == "eager" and not model._forward_pre_hooks


@pytest.mark.filterwarnings("ignore:GPTJ.* takes its attention from a table")
def test_a_model_with_attention_of_its_own() -> None:
    with pytest.raises(Unsupported, match=r"^GPTJForCausalLM computes attention by itself"):
        sharded(CLOSED["GPT-J"].build("eager"), SequenceParallel(Shards.contiguous(N, 1)))


CALLS: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "a cache": ("Llama", lambda part: part.model(**part.batch(WHOLE), use_cache=True), "use_cache is given: a cache"),
    "generate": ("Llama", lambda part: part.model.generate(tokens(), max_new_tokens=2), "is given: a cache"),
    "no positions": ("Llama", lambda part: part.model(tokens()), "position_ids is not given; expected"),
    "another length": ("Llama", lambda part: part.model(tokens(5)), "input_ids has shape (2, 5); expected (batch, 13)"),
    "another batch": ("Llama", lambda part: part.batch({"input_ids": tokens(5)}), "expected input_ids (batch, 13)"),
    "a mask in full": (
        "Llama",
        lambda part: part.model(**part.batch({**WHOLE, "attention_mask": torch.ones(2, 1, N, N)})),
        "attention_mask has shape (2, 1, 13, 13); expected (batch, 13)",
    ),
    "labels alone": (
        "Llama",
        lambda part: part.model(tokens(), position_ids=torch.arange(N)[None], labels=tokens()),
        "labels are given without num_items_in_batch and shift_labels",
    ),
    "a loss of its own": ("DistilBERT", lambda part: part.model(**part.batch(WHOLE)), "computes a loss that is a mean"),
    "chunks": ("Llama4", lambda part: part.model(**part.batch(WHOLE)), "makes its mask of tensors or of a function"),
    "positions from padding": ("OPT", lambda part: part.batch(WHOLE), "counts positions by itself"),
    "positions from ids": ("RoBERTa", lambda part: part.batch(WHOLE), "counts positions by itself"),
    "its own attention": (
        "MPNet",
        lambda part: part.model(**part.batch({**WHOLE, "position_ids": torch.arange(N)[None], "labels": None})),
        "MPNetModel",
    ),
    "chosen keys": ("Doge", lambda part: part.model(**part.batch(WHOLE)), "computes with its attention mask"),
}


def refused(group: Any, what: str) -> tuple[str, bool]:
    """What is said, and whether the model runs as before behind the block."""
    name, call, _ = CALLS[what]
    model = TINY[name].build("eager")
    try:
        with sharded(model, SequenceParallel(Shards.contiguous(N, 1), group)) as part:
            call(part)
    except (Unsupported, ValueError) as error:
        return str(error), model(tokens()).logits.isfinite().all().item() if hasattr(model, "lm_head") else True
    return "", False


@pytest.mark.parametrize("what", CALLS)
def test_calls(gloo: Group, what: str) -> None:
    ((said, well),) = gloo.run(refused, what, ranks=1)
    assert CALLS[what][2] in said and said.endswith(".") and well


def padded_on_one_rank(group: Any) -> str:
    batch = WHOLE if dist.get_rank(group) else {"input_ids": tokens()}
    model = DECODERS["Llama"].build("eager")
    with (
        sharded(model, SequenceParallel(Shards.contiguous(N, 2), group)) as part,
        pytest.raises(ValueError, match="attention_mask") as raised,
    ):
        model(**part.batch({"input_ids": batch["input_ids"], "attention_mask": batch.get("attention_mask")}))
    return str(raised.value)


def test_ranks_that_differ(gloo: Group) -> None:
    said = gloo.run(padded_on_one_rank, ranks=2)
    assert said == ["attention_mask is given on some ranks of the group and not on others; expected one way."] * 2


def test_a_rank_without_tokens() -> None:
    model = DECODERS["Llama"].build("eager")
    with sharded(model, SequenceParallel(Shards.of_lengths([0, N]))), pytest.raises(ValueError, match="has no tokens"):
        model(tokens())


def documents_that_end_with_shards(group: Any) -> str:
    positions = torch.tensor([[*range(7), *range(N - 7)]])
    model = DECODERS["Llama"].build("eager")
    shards = Shards.of_lengths([7, N - 7])
    with sharded(model, SequenceParallel(shards, group)) as part, pytest.raises(Unsupported) as raised:
        model(**part.batch({"input_ids": tokens(), "position_ids": positions}))
    return str(raised.value)


def test_documents_that_nothing_shows(gloo: Group) -> None:
    for said in gloo.run(documents_that_end_with_shards, ranks=2):
        assert said.startswith("position_ids begin anew where shards begin")
