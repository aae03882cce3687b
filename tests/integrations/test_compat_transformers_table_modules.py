"""Tables of T5 in training, copies, recordings and graphs, and in modules that are not recognised."""

from __future__ import annotations

import copy
import pickle
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tiny_models import padded, tokens

pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")

import regard as rg
from recorded_models import FACTS, weights
from regard.compat.transformers import relative_bias
from regard.compat.transformers import warnings as said_once
from regard.compat.transformers.models import NAME
from regard.scores.modifiers import Bias, RelativeBias
from table_models import T5, apart, heard, score_of

CLOSE = 1e-10  # of the largest number, in float64


@pytest.fixture(autouse=True)
def tables_of_short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of less than 64 × 64 pairs, regard reads the tensor."""
    monkeypatch.setattr(relative_bias, "FEWEST_PAIRS", 0)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")  # its name in 5.0
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers(reentrant: bool) -> None:
    grads: list[list[Tensor]] = []
    for checkpointed in (False, True):
        model = T5.build(NAME)
        model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            if type(module).__name__ == "T5Attention":
                module.dropout = 0.0
        if checkpointed:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        embeds = torch.randn(2, 13, 32, generator=torch.Generator().manual_seed(4)).requires_grad_()
        targets = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(5)).requires_grad_()
        out, seen = heard(
            model,
            inputs_embeds=embeds,
            attention_mask=padded("left"),
            decoder_inputs_embeds=targets,
            use_cache=False,
        )
        assert [score_of(call) for call in seen] == [[RelativeBias]] * 2 + [[RelativeBias], []] * 2
        out.logits.sin().sum().backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(grads[0]) == len(grads[1])
    for one, two in zip(*grads, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


def test_dropout_is_that_of_the_written_out_bias() -> None:
    """The same seed drops the same weights."""
    found: list[Tensor] = []
    for watched in (False, True):
        model = T5.build(NAME).double()
        model.train()
        if watched:  # an embedding with a hook may return anything: its tensor is added
            for stack in (model.encoder, model.decoder):
                table = stack.block[0].layer[0].SelfAttention.relative_attention_bias
                table.register_forward_hook(lambda module, given, out: None)
        torch.manual_seed(7)
        out, seen = heard(model, input_ids=tokens(), decoder_input_ids=tokens(7), use_cache=False)
        kind = Bias if watched else RelativeBias
        assert [score_of(call) for call in seen] == [[kind]] * 2 + [[kind], []] * 2
        found.append(out.logits)
    assert apart(*found) < CLOSE


def test_few_pairs_and_one_query_have_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relative_bias, "FEWEST_PAIRS", 64 * 64)
    attention = T5.build(NAME).decoder.block[0].layer[0].SelfAttention
    for nq, nk, table in ((63, 64, False), (64, 64, True), (1, 9000, False), (2, 2048, True)):
        bias = attention.compute_bias(nq, nk, past_seen_tokens=nk - nq)
        assert isinstance(bias, relative_bias.RelativeTable) is table, (nq, nk)
        assert tuple(bias.shape) == (1, 4, nq, nk)


class Doubled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def _doubled(attention: Any) -> None:
    old = attention.relative_attention_bias
    attention.relative_attention_bias = Doubled(*old.weight.shape, _weight=old.weight.detach())


def _other_buckets(attention: Any) -> None:
    def bucket(relative: Tensor, bidirectional: bool = True, num_buckets: int = 32, max_distance: int = 128) -> Tensor:
        return relative.abs() % num_buckets

    attention._relative_position_bucket = bucket


def _other_bias(attention: Any) -> None:
    make = type(attention).compute_bias

    def compute(*given: Any, **named: Any) -> Any:
        return 2 * make(attention, *given, **named)

    attention.compute_bias = compute


@pytest.mark.parametrize("change", [_doubled, _other_buckets, _other_bias])
def test_what_is_not_recognised_stays_a_tensor(change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(said_once, "_SAID", {"position bias of T5Attention"})
    eager, ours = (T5.build(kind).double() for kind in ("eager", NAME))
    for model in (eager, ours):
        change(model.encoder.block[0].layer[0].SelfAttention)
    out, seen = heard(ours.encoder, input_ids=tokens(), attention_mask=padded("left"))
    assert [score_of(call) for call in seen] == [[Bias]] * 2
    expected = eager.encoder(input_ids=tokens(), attention_mask=padded("left")).last_hidden_state
    assert apart(out.last_hidden_state[padded("left").bool()], expected[padded("left").bool()]) < CLOSE


def test_a_bias_that_a_model_computes_with_is_written_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(said_once, "_SAID", set())
    attention = T5.build(NAME).encoder.block[0].layer[0].SelfAttention
    bias, expected = attention.compute_bias(3, 5), T5.build("eager").encoder.block[0].layer[0].SelfAttention
    assert isinstance(bias, relative_bias.RelativeTable) and bias.shape == (1, 4, 3, 5)
    with pytest.warns(UserWarning, match="computes with its position bias .*writes the bias out"):
        found = bias + 1
    assert torch.equal(found, expected.compute_bias(3, 5) + 1)


def test_copies_and_other_implementations() -> None:
    model = T5.build(NAME)
    feed = {"input_ids": tokens(), "attention_mask": padded("left"), "decoder_input_ids": tokens(7)}
    plain = model(**feed).logits
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        out, seen = heard(twin, **feed)
        assert torch.equal(out.logits, plain) and score_of(seen[0]) == [RelativeBias]
        weight = twin.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        assert seen[0].score.stages[1].table is weight
    model.set_attn_implementation("sdpa")
    out, seen = heard(model, **feed)
    assert not seen and apart(out.logits, plain) < 1e-5
    model.set_attn_implementation(NAME)
    assert torch.equal(model(**feed).logits, plain)


def test_weights_are_refused() -> None:
    with pytest.raises(rg.Unsupported, match="output_attentions"):
        T5.build(NAME).encoder(input_ids=tokens(), output_attentions=True)


def test_recordings_have_the_weights_of_eager() -> None:
    """Padded queries see nothing in a recording; outputs keep their bits."""
    real, ours, eager = padded("left"), T5.build(NAME), T5.build("eager")
    feed = {"input_ids": tokens(), "attention_mask": real, "decoder_input_ids": tokens(7)}
    with torch.no_grad():
        plain, out = ours(**feed).logits, eager(**feed, output_attentions=True)
        with rg.record(ours, FACTS) as tape:
            assert torch.equal(ours(**feed).logits, plain)
    expected = [p.masked_fill(real[:, None, :, None] == 0, 0) for p in out.encoder_attentions]
    for own, cross in zip(out.decoder_attentions, out.cross_attentions, strict=True):
        expected += [own, cross]
    assert len(tape) == len(expected)
    for call, p in zip(tape, expected, strict=True):
        assert RelativeBias in map(type, call[rg.facts.Inputs()].score.stages) or p.shape[-2:] == (7, 13)
        torch.testing.assert_close(weights(call), p, rtol=1e-4, atol=1e-5)


def test_a_report_is_that_of_eager() -> None:
    ids = tokens()[0]
    ours, eager = (re.sub(r", [\d.]+ s ", ", ", str(rg.look(T5.build(kind), ids))) for kind in (NAME, "eager"))
    assert ours == eager


@pytest.mark.full
def test_in_a_graph() -> None:
    """One graph, with the table and without an embedding of all pairs; its values and gradients are eager's."""
    torch._dynamo.reset()
    model, eager, graphs = T5.build(NAME), T5.build("eager"), list[torch.fx.GraphModule]()

    def watch(graph: torch.fx.GraphModule, given: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    run = torch.compile(model, backend=watch, fullgraph=True)
    for side in ("left", "right"):
        feed = {"input_ids": tokens(), "attention_mask": padded(side), "decoder_input_ids": tokens(7)}
        out, expected = run(**feed, use_cache=False).logits, eager(**feed, use_cache=False).logits
        assert apart(out, expected) < 1e-5
        grads = [torch.autograd.grad(x.sin().sum(), tables(m)) for m, x in ((model, out), (eager, expected))]
        assert all(apart(one, two) < 1e-4 for one, two in zip(*grads, strict=True))
    called = [node.target for graph in graphs for node in graph.graph.nodes]
    assert called.count(torch.nn.functional.embedding) == 2 * len(graphs)  # those of the tokens


def tables(model: Any) -> list[nn.Parameter]:
    return [p for name, p in model.named_parameters() if "relative_attention_bias" in name]
