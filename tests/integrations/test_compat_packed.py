"""packed(model): outputs and gradients of the padded model, without its padding, and the model back as it was."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny_models import ENCODERS, VOCABULARY, Tiny

pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")

from regard.call.hooks import AttentionCall, observing
from regard.compat.transformers import NAME, packed
from regard.core.errors import Unsupported

CLOSE = 1e-5  # of the largest number, in float32
N = 13
BERT = Tiny("BertModel", "BertConfig", ENCODERS["BERT"].options)


def batch(side: str = "right") -> dict[str, Tensor]:
    """Four sequences of 9, N, 2 and no tokens."""
    real = torch.arange(N) < torch.tensor([9, N, 2, 0])[:, None]
    real = real.flip(1) if side == "left" else real
    ids = torch.randint(4, VOCABULARY, (4, N), generator=torch.Generator().manual_seed(5))
    return {"input_ids": ids * real, "attention_mask": real.long()}


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).detach().abs().max() / b.detach().abs().max())


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["BERT", "RoBERTa", "ALBERT", "ModernBERT"])
def test_logits_and_gradients(name: str, side: str) -> None:
    eager, ours = ENCODERS[name].build("sdpa").double(), ENCODERS[name].build("sdpa").double()
    feed = batch(side)
    real = feed["attention_mask"].bool()
    weights = torch.cos(torch.arange(real.sum() * VOCABULARY)).view(-1, VOCABULARY).double()
    with packed(ours) as packing:
        logits = [model(**feed).logits[real] for model in (eager, ours)]
        for each in logits:
            (each * weights).sum().backward()
    assert packing.real == 2 * int(real.sum())
    assert apart(logits[1], logits[0]) < 1e-12
    for (which, p), q in zip(ours.named_parameters(), eager.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        if q.grad is not None and float(q.grad.abs().max()) > 1e-9:
            assert apart(p.grad, q.grad) < 1e-10, which


@pytest.mark.parametrize("side", ["right", "left"])
@torch.no_grad()
def test_all_that_a_model_returns(side: str) -> None:
    eager, ours, feed = BERT.build("eager"), BERT.build("eager"), batch(side)
    feed["token_type_ids"] = (torch.arange(4 * N).view(4, N) % 3 == 0).long()
    feed["position_ids"] = torch.arange(4 * N).view(4, N) % 17
    packing = packed(ours)
    out, expected = (model(**feed, output_hidden_states=True) for model in (ours, eager))
    real = feed["attention_mask"].bool()
    assert torch.equal(out.hidden_states[0], expected.hidden_states[0])
    for a, b in zip((out[0], *out.hidden_states[1:]), (expected[0], *expected.hidden_states[1:]), strict=True):
        assert a.shape == b.shape and not a[~real].any()
        assert apart(a[real], b[real]) < CLOSE
    # a sequence whose first token is padding is pooled from zeros
    first = real[:, 0]
    assert apart(out.pooler_output[first], expected.pooler_output[first]) < CLOSE
    assert apart(out.pooler_output, ours.pooler(torch.zeros(4, 1, 32).where(~first[:, None, None], out[0]))) == 0
    embeds = feed.pop("input_ids")
    tuples = ours(inputs_embeds=ours.get_input_embeddings()(embeds), **feed, return_dict=False)
    assert torch.equal(tuples[0], out[0])
    with pytest.raises(Unsupported, match=r"output_attentions=\.\.\.: the weights are never built"):
        ours(**feed, inputs_embeds=expected[0], output_attentions=True)
    packing.remove()


@torch.no_grad()
def test_layers_see_real_tokens_alone() -> None:
    model, seen, sizes = BERT.build("eager"), list[AttentionCall](), list[tuple[int, ...]]()
    linear = model.encoder.layer[0].attention.self.query
    linear.register_forward_hook(lambda _, given, out: sizes.append(tuple(out.shape)))
    with packed(model), observing(seen.append):
        model(**batch())
    assert sizes == [(1, 9 + N + 2, 32)]
    assert [call.q.shape for call in seen] == 2 * [(1, 4, 9 + N + 2, 8)]
    ids = torch.tensor([0, 1, 2]).repeat_interleave(torch.tensor([9, N, 2]))
    assert torch.equal(seen[0].mask.on(9 + N + 2).dense().squeeze(), ids == ids[:, None])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("lengths", [(1,), (4,), (3, 1, 2), (1, 1)])
def test_small_batches(lengths: tuple[int, ...], mode: Any) -> None:
    eager, ours = BERT.build("eager"), BERT.build("eager")
    real = torch.arange(5) < torch.tensor(lengths)[:, None]
    feed = {"input_ids": torch.full(real.shape, 7), "attention_mask": real.long()}
    with packed(ours) as packing, mode():
        assert apart(ours(**feed)[0][real], eager(**feed)[0][real]) < CLOSE
    assert (packing.real, packing.padded) == (2 * sum(lengths), 10 * len(lengths))


@pytest.mark.parametrize("mask", [None, "ones", "zeros", "four axes"])
@torch.no_grad()
def test_what_runs_as_it_is(mask: str | None) -> None:
    plain, ours = BERT.build(NAME), BERT.build(NAME)
    masks = {"ones": torch.ones(3, 5), "zeros": torch.zeros(3, 5), "four axes": torch.ones(3, 1, 5, 5).tril().bool()}
    feed = {"input_ids": torch.full((3, 5), 7), "attention_mask": masks.get(mask or "")}
    with packed(ours) as packing:
        assert torch.equal(ours(**feed)[0], plain(**feed)[0])
    assert (packing.calls, packing.packed, packing.real) == (2, 0, 30)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision(dtype: torch.dtype) -> None:
    exact, plain, ours = (BERT.build("sdpa") for _ in range(3))
    feed = batch()
    real = feed["attention_mask"].bool()
    expected = exact(**feed)[0][real]
    error = apart(plain.to(dtype)(**feed)[0][real].float(), expected)
    with packed(ours.to(dtype)):
        out = ours(**feed)[0]
    assert out.dtype == dtype and apart(out[real].float(), expected) < 2 * error


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
def test_training_with_checkpoints() -> None:
    options = {**BERT.options, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    plain, ours = (Tiny("BertModel", "BertConfig", options).build("sdpa").double().train() for _ in range(2))
    ours.gradient_checkpointing_enable()
    feed = batch()
    real = feed["attention_mask"].bool()
    with packed(ours) as packing:
        for model in (plain, ours):
            out = model(**feed)[0][real]
            (out * torch.cos(torch.arange(out.numel())).view_as(out)).sum().backward()
    assert packing.calls == 2  # what is computed again is packed already
    table, expected = (model.get_input_embeddings().weight.grad for model in (ours, plain))
    assert apart(table, expected) < 1e-12


@torch.no_grad()
def test_the_model_comes_back() -> None:
    model, feed = BERT.build("sdpa"), batch()
    before = model(**feed)[0]
    with packed(model):
        assert model.config._attn_implementation == NAME
        packing = model.encoder.layer[0].forward.packing
    with packed(model), pytest.raises(IndexError):
        model(input_ids=torch.full((1, 3), VOCABULARY))
    assert model.config._attn_implementation == "sdpa"
    assert not any("forward" in vars(module) for module in model.modules())
    assert torch.equal(model(**feed)[0], before)
    packing.remove()  # a second time
    assert repr(packing) == (
        "BertModel: no longer packed; 0 of 0 calls of layers were packed, 0 of 0 tokens computed (0% saved)"
    )


@torch.no_grad()
def test_a_copy_has_weights_of_its_own() -> None:
    model, feed = BERT.build("eager"), batch()
    with packed(model) as packing:
        out = model(**feed)[0]
        twin = copy.deepcopy(model)
        for p in model.parameters():
            p.zero_()
        calls = packing.calls
        assert torch.equal(twin(**feed)[0], out)
        assert packing.calls == calls


def test_a_head_around_it() -> None:
    tiny = Tiny("BertForSequenceClassification", "BertConfig", BERT.options)
    eager, ours, feed = tiny.build("eager"), tiny.build("eager"), batch()
    with packed(torch.nn.Sequential(ours)) as packing:
        assert apart(ours(**feed).logits[:3], eager(**feed).logits[:3]) < CLOSE
    assert packing.packed == 2


def test_what_is_refused() -> None:
    model = BERT.build("eager")
    with packed(model), pytest.raises(Unsupported, match=r"not its class's: the model is packed already"):
        packed(model)
    with pytest.raises(Unsupported, match=r"^Linear has no layers of a known class"):
        packed(torch.nn.Linear(2, 2))
    with pytest.raises(Unsupported, match=r"^BertModel is a decoder"):
        packed(Tiny("BertModel", "BertConfig", {**BERT.options, "is_decoder": True}).build("eager"))

    class BertLayer(type(model.encoder.layer[0])):  # another's, which may do what it likes
        pass

    BertLayer.__module__ = "others.models.bert"
    model.encoder.layer[1].__class__ = BertLayer
    with pytest.raises(Unsupported, match=r"^BertModel has layers of class BertLayer\. Packing needs layers"):
        packed(model)
    assert model.config._attn_implementation == "eager"
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.full
def test_compiled_it_is_refused() -> None:
    model = BERT.build("eager")
    with packed(model), pytest.raises(Exception, match="a packed model cannot be compiled"):
        torch.compile(model, backend="eager", fullgraph=True)(**batch())
