"""What heads add in models of transformers: summands that sum up, logits by hand, and what cannot be told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard as rg

pytest.importorskip("transformers")

from regard.inspect.heads.projections import Projection, at_projections, find_projections
from regard.inspect.heads.reader import Reader
from tiny_models import DECODERS, ENCODERS, PICTURES, VOCABULARY

IDS = [(7 * n) % (VOCABULARY - 5) + 5 for n in range(13)]
CAUSAL, BOTH = sorted(DECODERS), sorted({**DECODERS, **ENCODERS})
# What their logits or their residual stream lack, in the words of the error.
NO_LOGITS = {
    "Cohere": "capped or scaled",
    "Cohere2": "capped or scaled",
    "Gemma2": "does not reach a last norm as it is",
    "Gemma3": "does not reach a last norm as it is",
    "Granite": "does not reach a last norm as it is",
    "OLMo2": "does not reach a last norm as it is",
    "OLMo3": "does not reach a last norm as it is",
}


def each(names: list[str], *plain: str) -> list[Any]:
    """All names, but for those in the plain run only with --full."""
    return [name if name in plain else pytest.param(name, marks=pytest.mark.full) for name in names]


@torch.no_grad()
def test_what_a_tokenizer_returned_is_read_as_a_whole() -> None:
    model = ENCODERS["BERT"].build("sdpa")
    inputs = {"input_ids": IDS, "token_type_ids": [0] * 6 + [1] * 7, "attention_mask": [1] * 11 + [0] * 2}
    found, plain = (rg.heads.carried(model, given).carried for given in (inputs, IDS))
    reader = Reader.of(model, inputs, None)
    assert not torch.allclose(found[0].norms, plain[0].norms)
    assert not found[0].received[:, 11:].any(), "the padding is masked"
    logits = model(**{name: torch.tensor([row]) for name, row in inputs.items()}).logits
    assert torch.equal(reader.run().logits, logits)


@torch.no_grad()
@pytest.mark.parametrize("name", each(BOTH, "GPT-2", "Llama", "BERT"))
def test_heads_and_bias_sum_up_to_what_the_projection_makes(name: str) -> None:
    model = {**DECODERS, **ENCODERS}[name].build("eager")
    reader = Reader.of(model, IDS, None)
    projections, checked = find_projections(model, reader.run), list[str]()

    def seen(projection: Projection, joined: Tensor, made: Tensor) -> None:
        summed = (projection.by_head(joined) @ projection.weight).sum(0)
        bias = getattr(projection.module, "bias", None)
        torch.testing.assert_close(
            made.reshape(summed.shape), summed + (0 if bias is None else bias), rtol=1e-5, atol=1e-5
        )
        checked.append(projection.layer)

    with at_projections(projections, seen=seen):
        reader.run()
    assert len(checked) == model.config.num_hidden_layers
    found = rg.heads.contributions(model, IDS)
    assert [norms.shape for norms in found.norms] == [(model.config.num_attention_heads, len(IDS))] * len(checked)


@torch.no_grad()
@pytest.mark.parametrize("name", each(CAUSAL, "GPT-2", "Llama"))
def test_direct_parts_are_those_of_a_frozen_norm(name: str) -> None:
    """A head's part: the logit with what it adds in the last norm's input, less that without, at one scale."""
    model, token, at = DECODERS[name].build("eager"), 17, 6
    if name in NO_LOGITS:
        with pytest.raises(rg.Unsupported, match=NO_LOGITS[name]):
            rg.heads.contributions(model, IDS, token=token)
        return
    found = rg.heads.contributions(model, IDS, token=token, at=at).logit
    assert found is not None
    reader, added, given = Reader.of(model, IDS, None), list[Tensor](), list[Tensor]()
    projections = find_projections(model, reader.run)
    (norm,) = [m for path, m in model.named_modules() if path.split(".")[-1] in LAST_NORMS and path.count(".") < 3]
    with (
        at_projections(
            projections,
            seen=lambda one, x, _: added.append(torch.einsum("hv,hvd->hd", one.by_head(x)[:, at], one.weight)),
        ),
        norm.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0][0, at])),
    ):
        logits = reader.logits(reader.run())
    assert logits is not None and found.value == pytest.approx(float(logits[at, token]), abs=1e-5)
    for mine, heads in zip(found.heads, added, strict=True):
        by_hand = torch.stack([_frozen(norm, given[0], head) for head in heads])
        expected = by_hand @ model.get_output_embeddings().weight[token]
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


LAST_NORMS = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "layer_norm")


def _frozen(norm: nn.Module, x: Tensor, change: Tensor) -> Tensor:
    """What the norm makes of a part of x, at the scale of x."""
    if isinstance(norm, nn.LayerNorm):
        return (change - change.mean()) / (x.var(correction=0) + norm.eps).sqrt() * norm.weight
    gain = norm(torch.full_like(x, 1e4))
    return change / x.square().mean().sqrt() * gain


@pytest.mark.parametrize("name", each(CAUSAL, "Llama"))
def test_causal_models_are_ablated(name: str) -> None:
    found = rg.heads.ablation(DECODERS[name].build("eager"), IDS)
    assert found.loss > 0 and any(bool(of_layer.any()) for of_layer in found.change)


def test_a_shared_layer_is_told_apart_by_its_calls() -> None:
    found = rg.heads.contributions(ENCODERS["ALBERT"].build("eager"), IDS)
    assert len(set(found.layers)) == 1 and len(found.norms) == 2
    assert not torch.equal(*found.norms)


def test_an_encoder_needs_a_loss_of_its_own() -> None:
    model = ENCODERS["BERT"].build("eager")
    with pytest.raises(
        rg.Unsupported, match=r"BertForMaskedLM is not causal: bert.encoder.layer.0.attention.self sees"
    ):
        rg.heads.ablation(model, IDS)
    found = rg.heads.ablation(model, IDS, loss=lambda answer: answer.logits[0, 3].logsumexp(0))
    assert len(found.change) == 2


def test_models_that_read_no_text() -> None:
    with pytest.raises(ValueError, match="ViTModel reads pixel_values, not text"):
        rg.heads.contributions(PICTURES["ViT"].build("eager"), IDS)
