"""What models of transformers carry, held to the vectors α v W^O of each query and key, written out in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard as rg

pytest.importorskip("transformers")

from regard.call.hooks import AttentionCall
from regard.inspect.facts.inputs import CallFact
from regard.inspect.heads.projections import at_projections, find_projections
from regard.inspect.heads.reader import Reader
from regard.inspect.report.element import TOP
from tiny_models import DECODERS, ENCODERS, VOCABULARY

IDS = [(7 * n) % (VOCABULARY - 5) + 5 for n in range(13)]
ALL = {**DECODERS, **ENCODERS}
PLAIN = ("GPT-2", "Llama", "BERT")
CASES = [
    *((name, implementation) for name in PLAIN for implementation in ("eager", "sdpa", "regard")),
    *(pytest.param(name, "eager", marks=pytest.mark.full) for name in sorted(ALL) if name not in PLAIN),
]
NEAR = {"rtol": 1e-4, "atol": 1e-5}


@dataclass(frozen=True)
class Whole(CallFact[AttentionCall]):
    """A call as it is."""

    def of_call(self, call: AttentionCall, name: str, number: int) -> AttentionCall:
        return call


def vectors(call: AttentionCall, weight: Tensor) -> Tensor:
    """p_ij v_j W^O_h of each head, (h, nq, nk, d_out)."""
    assert call.v is not None
    p = rg.attention_weights(
        call.q, call.k, score=call.score, mask=call.mask, positions=call.positions, sink=call.sink
    )[0].double()
    v = call.v[0].double().repeat_interleave(len(p) // call.v.shape[1], 0)
    return torch.einsum("hij,hjv,hvo->hijo", p, v, weight.double())


@torch.no_grad()
@pytest.mark.parametrize(("name", "implementation"), CASES)
def test_what_is_carried_is_the_length_of_each_vector(name: str, implementation: str) -> None:
    import regard.compat.transformers  # noqa: F401

    model = ALL[name].build(implementation)
    found = rg.heads.carried(model, IDS)
    reader, made = Reader.of(model, IDS, None), list[Tensor]()
    projections = find_projections(model, reader.run)
    with (
        rg.record(model, facts=(Whole(),)) as tape,
        at_projections(projections, seen=lambda _, given, out: made.append(out[0])),
    ):
        reader.run()
    for call, projection, layer, out in zip(tape.calls, projections, found.carried, made, strict=True):
        added = vectors(call[Whole()], projection.weight)
        bias = getattr(projection.module, "bias", None)
        summed = added.sum((0, 2)) + (0 if bias is None else bias)
        torch.testing.assert_close(summed, out.reshape(summed.shape).double(), **NEAR)
        carried = added.norm(dim=-1)
        torch.testing.assert_close(layer.received.double(), carried.sum(1), **NEAR)
        torch.testing.assert_close(layer.map.double(), carried, **NEAR)
        torch.testing.assert_close(layer.top.weights.double(), carried.topk(TOP.k, -1).values, **NEAR)


class Gated(nn.Module):
    """One layer whose heads are gated before their projection."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.o_proj = nn.Embedding(9, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids).unflatten(-1, (2, -1)).transpose(1, 2)
        out = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2) * self.gate)


class Attention(Gated):
    gate = 0.5


class PlainAttention(Gated):
    gate = 1.0


@pytest.mark.parametrize("kind", [Attention, PlainAttention])
def test_a_gated_layer_is_refused(kind: type[Gated]) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = kind()

        def forward(self, ids: Tensor) -> Any:
            return self.attention(ids)

    if kind is PlainAttention:
        assert rg.heads.carried(Model(), [1, 2, 3]).carried[0].norms.shape == (2, 3)
        return
    with pytest.raises(rg.Unsupported, match="the output projection of attention is given is not the sum"):
        rg.heads.carried(Model(), [1, 2, 3])


def test_a_model_without_a_projection_module_is_refused() -> None:
    torchs = nn.Sequential(nn.Embedding(9, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    with pytest.raises(rg.Unsupported, match=r"no projection was seen behind 1.self_attn.*from_torch"):
        rg.heads.carried(torchs, [1, 2, 3])


def test_the_key_with_the_most_weight_may_carry_little() -> None:
    model = DECODERS["GPT-2"].build("sdpa")
    found = rg.heads.carried(model, IDS)
    (finding,) = found.findings
    weights = torch.cat([one.weights for one in found.carried])
    assert finding.said.startswith(f"the key with the most weight, ‘{IDS[0]}’ (0), has {weights[:, 0].mean() / 13:.1%}")
    assert found.grids[0].values[1][2] == pytest.approx(float(found.carried[1].received[2].sum()) / 13)
    assert set(found.arrays) == {"value_norm", "carried_received", "carried_map", "carried_keys", "carried_norms"}
    again = found.reordered([1, 0])
    assert again.layers == found.layers[::-1] and again.carried[0] is found.carried[1]


def test_a_report_holds_what_its_own_text_carries() -> None:
    model = DECODERS["GPT-2"].build("sdpa")
    found, report = rg.heads.carried(model, IDS), rg.look(model, IDS)
    assert report.with_heads(found).grids[-1].title == "norm carried"
    with pytest.raises(ValueError, match=r"with_heads has a CarriedNorms of 5 keys; the report is of 13. Expected one"):
        report.with_heads(rg.heads.carried(model, IDS[:5]))
