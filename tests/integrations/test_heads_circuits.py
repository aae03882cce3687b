"""OV and QK by token, held to the matrices vocabulary × vocabulary, written out in float64 from a model's weights."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import regard as rg

pytest.importorskip("transformers")

from regard.demo.model import ByteTransformer, Shape
from tiny_models import DECODERS, VOCABULARY

IDS = [(7 * n) % (VOCABULARY - 5) + 5 for n in range(13)]
UNIQUE = list(dict.fromkeys(IDS))
NEAR = {"rtol": 1e-4, "atol": 1e-4}

NO_CIRCUITS = {
    **dict.fromkeys(("Cohere", "Cohere2"), "capped or scaled"),
    **dict.fromkeys(("Gemma2", "Gemma3", "Granite", "OLMo2", "OLMo3"), "does not reach a last norm as it is"),
    "DeepSeek-V3": r"no module of model.layers.0.self_attn makes its values, \(4, 13, 6\).*latent attention",
}
NO_QK = ("Llama4", "Qwen3")


class Weights(NamedTuple):
    """Of one layer: gains, W_Q, W_K, W_V (d, heads of it, width), W_O (h, dv, d); then W_E and W_U (vocabulary, d)."""

    gain: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    last: Tensor
    embed: Tensor
    unembed: Tensor
    centred: bool


def gpt2(model: Any) -> Weights:
    block, body = model.transformer.h[1], model.transformer
    q, k, v = (w.unflatten(1, (4, 8)) for w in block.attn.c_attn.weight.chunk(3, 1))
    o = block.attn.c_proj.weight.unflatten(0, (4, 8))
    return Weights(block.ln_1.weight, q, k, v, o, body.ln_f.weight, body.wte.weight, model.lm_head.weight, True)


def llama(model: Any) -> Weights:
    layer, body = model.model.layers[1], model.model
    at = layer.self_attn
    q, k, v = (p.weight.T.unflatten(1, (-1, at.head_dim)) for p in (at.q_proj, at.k_proj, at.v_proj))
    o = at.o_proj.weight.T.unflatten(0, (4, at.head_dim))
    gains = layer.input_layernorm.weight, body.norm.weight
    return Weights(gains[0], q, k, v, o, gains[1], body.embed_tokens.weight, model.lm_head.weight, False)


def neox(model: Any) -> Weights:
    layer, body = model.gpt_neox.layers[1], model.gpt_neox
    fused = layer.attention.query_key_value.weight.T.unflatten(1, (4, 3, -1))
    q, k, v = fused.unbind(2)
    o = layer.attention.dense.weight.T.unflatten(0, (4, -1))
    embed, unembed = body.embed_in.weight, model.get_output_embeddings().weight
    return Weights(layer.input_layernorm.weight, q, k, v, o, body.final_layer_norm.weight, embed, unembed, True)


def byte_model(model: Any) -> Weights:
    block = model.blocks[1]
    at = block.attention
    q, k, v = (p.weight.T.unflatten(1, (-1, 8)) for p in (at.q_proj, at.k_proj, at.v_proj))
    embed = model.embedding.weight
    gain, last = block.attention_norm.weight, model.norm.weight
    return Weights(gain, q, k, v, at.out_proj.weight.T.unflatten(0, (2, 8)), last, embed, embed, False)


def small_bytes() -> nn.Module:
    torch.manual_seed(3)
    model = ByteTransformer(Shape(width=16, layers=2, heads=2)).eval()
    with torch.no_grad():
        for norm in (model.norm, model.blocks[1].attention_norm):
            norm.weight.uniform_(0.5, 2.0)
    return model


MODELS: dict[str, tuple[Callable[[], Any], Callable[[Any], Weights]]] = {
    "bytes": (small_bytes, byte_model),
    "GPT-2": (lambda: DECODERS["GPT-2"].build("eager"), gpt2),
    "Llama": (lambda: DECODERS["Llama"].build("sdpa"), llama),
    "GPT-NeoX": (lambda: DECODERS["GPT-NeoX"].build("eager"), neox),
}


def whole(weights: Weights, head: int) -> tuple[Tensor, Tensor]:
    """The OV and the QK circuit of one head, vocabulary × vocabulary."""
    double = Weights(*(t.detach().double() if isinstance(t, Tensor) else t for t in weights))
    read, last = double.embed, double.unembed
    if double.centred:
        read = read - read.mean(-1, keepdim=True)
    read = read * double.gain
    key_head = head // (len(double.o) // double.k.shape[1])
    written = read @ double.v[:, key_head] @ double.o[head]
    if double.centred:
        written = written - written.mean(-1, keepdim=True)
    ov = (written * double.last) @ last.T
    qk = (read @ double.q[:, head]) @ (read @ double.k[:, key_head]).T
    return ov - ov.mean(-1, keepdim=True), qk


@torch.no_grad()
@pytest.mark.parametrize("name", MODELS)
def test_tables_and_eigenvalues_are_those_of_the_whole_matrices(name: str) -> None:
    build, weights_of = MODELS[name]
    model = build()
    for p in model.parameters():  # gains other than 1
        if p.dim() == 1:
            p.uniform_(0.5, 1.5)
    found, weights = rg.heads.circuits(model, IDS), weights_of(model)
    for head in range(len(weights.o)):
        ov, qk = whole(weights, head)
        eigenvalues = torch.linalg.eigvals(ov)
        copying = float(eigenvalues.real.sum() / eigenvalues.abs().sum())
        assert float(found.copying[1][head]) == pytest.approx(copying, abs=1e-4)
        for table, matrix in ((found.ov((1, head), k=3), ov), (found.qk(f"L1H{head}", k=3), qk)):
            assert table.tokens.tolist() == UNIQUE
            rows = matrix[UNIQUE]
            torch.testing.assert_close(table.scores.double(), rows.topk(3, -1).values, **NEAR)
            torch.testing.assert_close(table.scores.double(), rows.gather(-1, table.ids), **NEAR)
            own = rows.gather(-1, table.tokens[:, None])
            assert table.rank.tolist() == (rows > own).sum(-1).tolist()


def test_a_table_and_the_eigenvalues_are_made_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    import regard.inspect.heads.token_table as tables

    circuits = importlib.import_module("regard.inspect.heads.circuits")  # heads.circuits is the function
    found = rg.heads.circuits(MODELS["GPT-2"][0](), IDS)
    at_once = found.ov("L0H1")
    monkeypatch.setattr(tables, "ROOM", 2 * VOCABULARY)
    in_blocks = found.ov("L0H1")
    assert torch.equal(at_once.ids, in_blocks.ids) and torch.equal(at_once.rank, in_blocks.rank)
    monkeypatch.setattr(circuits, "TOKENS", 7)
    for one, other in zip(found.copying, rg.heads.circuits(MODELS["GPT-2"][0](), IDS).copying, strict=True):
        torch.testing.assert_close(one, other)
    assert found.ov("L0H1", tokens=[]).ids.shape == (0, 5)


def test_a_head_that_copies_is_found() -> None:
    """W_V W_O = 1 of one head, -1 of the other."""
    model = small_bytes()
    with torch.no_grad():
        at = model.blocks[0].attention
        at.v_proj.weight.copy_(torch.eye(16))
        at.out_proj.weight.copy_(torch.diag(torch.tensor([1.0] * 8 + [-1.0] * 8)))
    found = rg.heads.circuits(model, "abc")
    assert float(found.copying[0][0]) > 0.95 and float(found.copying[0][1]) < -0.95
    assert found.ov("L0H0").rank.sum() < 30 and found.ov("L0H1").rank.min() > 200
    assert str(found.ov("L0H0", k=2)).startswith("L0H0 reads  and raises  rank of itself\na  ")


@pytest.mark.parametrize(
    "name", [name if name in ("Falcon", "Qwen3") else pytest.param(name, marks=pytest.mark.full) for name in DECODERS]
)
def test_every_decoder_has_circuits_or_a_reason(name: str) -> None:
    model = DECODERS[name].build("eager")
    if name in NO_CIRCUITS:
        with pytest.raises(rg.Unsupported, match=NO_CIRCUITS[name]):
            rg.heads.circuits(model, IDS)
        return
    found = rg.heads.circuits(model, IDS)
    assert found.ov("L0H0").ids.shape == (8, 5)
    if name in NO_QK:
        with pytest.raises(rg.Unsupported, match=r"no QK circuit of L0H0: the queries or keys of .* normalised"):
            found.qk("L0H0")
    else:
        assert found.qk("L0H0").ids.shape == (8, 5)


def test_wrong_calls() -> None:
    found = rg.heads.circuits(MODELS["GPT-2"][0](), IDS)
    with pytest.raises(ValueError, match="there is no head L2H0; this model has layers 0 to 1, heads 0 to 3"):
        found.ov("L2H0")
    with pytest.raises(IndexError, match="tokens holds 61; this model has tokens 0 to 60"):
        found.qk("L0H0", tokens=[61])
    with pytest.raises(ValueError, match="k=0; expected 1 to 61, the number of tokens"):
        found.ov("L0H0", k=0)
