"""The standard probe: kinds of heads, on random tokens that are read twice."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import regard as rg
from regard.demo.model import SEEN, Block, ByteTransformer, Shape, load
from regard.inspect.heads.probe import KINDS, Probe, draw

LETTERS = range(32, 127)


@torch.no_grad()
def test_scores_are_means_of_the_weights_themselves() -> None:
    model, n = load(), 20
    found = rg.heads.probe(model, length=n, seed=3, among=LETTERS)
    assert len(found.ids) == 2 * n == 2 * len(set(found.ids)) and found.ids[:n] == found.ids[n:]
    x = model.embedding(torch.tensor([found.ids]))
    second = torch.arange(n, 2 * n)
    for layer, block in enumerate(b for b in model.blocks if isinstance(b, Block)):
        p = block.attention.weights(block.attention_norm(x), mask=SEEN)[0]
        x = block(x)
        wanted = {
            "induction": p[:, second, second - n + 1],
            "duplicate-token": p[:, second, second - n],
            "previous-token": p[:, second, second - 1],
            "first-token": p[:, second, 0],
        }
        for kind in KINDS:
            mean = found.scores[kind.name][layer]
            torch.testing.assert_close(mean.float(), wanted[kind.name].mean(1), rtol=1e-4, atol=1e-6)
            error = 2.955 * wanted[kind.name].std(1) / n**0.5  # of 16 heads: 95 % for all together
            torch.testing.assert_close(found.error[kind.name][layer].float(), error, rtol=1e-3, atol=1e-6)
    assert found.chance == pytest.approx([float((1 / (second + 1.0)).mean())] * 4, abs=1e-6)


@pytest.mark.parametrize("length", [24, 90])
def test_the_byte_models_heads_are_named_with_their_intervals(length: int) -> None:
    found = rg.heads.probe(load(), length=length, among=LETTERS)
    (head,) = found.heads("induction")
    assert head.name == "L3H1" and head.interval is not None
    assert found.chance[3] < head.interval[0] < head.value < head.interval[1]
    assert [head.name for head in found.heads("previous-token")][:1] == ["L1H1"]
    assert not found.heads("duplicate-token") and not found.heads("first-token")
    assert f"induction heads on random tokens: {head}\n" in str(found) and "Olsson et al. 2022" in str(found)


@pytest.mark.parametrize("seed", range(3))
def test_random_weights_have_no_such_heads(seed: int) -> None:
    torch.manual_seed(seed)
    found = rg.heads.probe(ByteTransformer(), seed=seed)
    assert not any(found.heads(kind.name) for kind in KINDS)
    assert str(found).count("heads on random tokens: none") == len(KINDS)


def test_a_score_that_may_be_chance_names_no_head() -> None:
    scores = {kind.name: (torch.tensor([0.5, 0.5]),) for kind in KINDS}
    error = {kind.name: (torch.tensor([0.46, 0.44]),) for kind in KINDS}
    found = Probe((), 8, ("attention",), scores, error, chance=(0.05,))
    assert [head.name for head in found.heads("induction")] == ["L0H1"]


def made(token: int) -> nn.Module:
    """A layer whose head 0 looks at tokens like its own, and head 1 at the start token."""
    layer, embedding = rg.nn.MultiHeadAttention(64, heads=2, bias=False), nn.Embedding(31, 64)
    asks, has = torch.zeros(64, 64), torch.zeros(64, 64)
    asks[:32, :32], has[:32, :32] = 30 * torch.eye(32), torch.eye(32)
    asks[32:, 63], has[32:, 62] = 300.0, 1.0  # every query asks for feature 62, which the start token alone has
    with torch.no_grad():
        getattr(layer, "q_proj").weight.copy_(asks)  # noqa: B009
        getattr(layer, "k_proj").weight.copy_(has)  # noqa: B009
        embedding.weight.zero_()[:, :31] = torch.eye(31)
        embedding.weight[:, 63] = 1.0
        embedding.weight[token, 62] = 1.0

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.attention = embedding, layer
            self.config = SimpleNamespace(bos_token_id=token)

        def forward(self, ids: Tensor) -> Tensor:
            return self.attention(self.embedding(ids), mask=rg.Causal())

    return Model()


def test_duplicate_and_first_token_heads_are_told_apart() -> None:
    found = rg.heads.probe(made(token=30), length=16)
    assert found.ids[0] == 30 and found.ids.count(30) == 1
    assert [head.name for head in found.heads("duplicate-token")] == ["L0H0"]
    assert [head.name for head in found.heads("first-token")] == ["L0H1"]
    assert not found.heads("induction") and not found.heads("previous-token")


@pytest.mark.full
def test_a_model_trained_on_repeats_has_induction_heads() -> None:
    """Two layers, sequences of unlike lengths, so that no fixed distance serves. In float64, where bits matter less."""
    torch.manual_seed(0)
    model = ByteTransformer(Shape(width=32, layers=2, heads=2)).double()
    assert not rg.heads.probe(model, length=14, among=range(32)).heads("induction")
    optimizer, recent = torch.optim.AdamW(model.parameters(), lr=5e-3, betas=(0.9, 0.98), weight_decay=0.1), 2.0
    for _ in range(900):
        n = int(torch.randint(8, 16, ()))
        tokens = torch.rand(32, 32).argsort(1)[:, :n].repeat(1, 2)
        loss = cross_entropy(model(tokens)[:, n - 1 : -1].flatten(0, 1), tokens[:, n:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recent = 0.95 * recent + 0.05 * float(loss.detach())
        if recent < 0.4:
            break
    found = rg.heads.probe(model, length=14, among=range(32))
    assert {head.layer for head in found.heads("induction")} == {1}
    assert {head.layer for head in found.heads("previous-token")} == {0}
    strongest = found.heads("induction")[0].head
    assert rg.heads.ablation(model, list(found.ids)).change[1][strongest] > 0.1


class Local(nn.Module):
    """Layers with a window of 16 keys, or (1) without one."""

    def __init__(self, *wide: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(200, 8)
        self.layers = nn.ModuleList(rg.nn.MultiHeadAttention(8, heads=2) for _ in wide)
        self.masks = [rg.Causal() if one else rg.Causal() & rg.Window(before=15, after=0) for one in wide]

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer, mask in zip(self.layers, self.masks, strict=True):
            x = layer(x, mask=mask)
        return x


def test_a_layer_that_does_not_see_the_first_copy_has_no_score() -> None:
    found = rg.heads.probe(Local(0, 1), length=32)
    for kind in KINDS:
        near, wide = found.scores[kind.name]
        assert bool(near.isnan().all()) == (kind.name != "previous-token") and not wide.isnan().any()
    assert not rg.heads.probe(Local(0), length=15).scores["duplicate-token"][0].isnan().any()


def test_a_mask_that_is_written_out() -> None:
    """One of two axes, queries and keys alone, gives the scores of Causal()."""
    model = Local(1)
    stated = rg.heads.probe(model, length=12)
    model.masks = [rg.Dense(torch.ones(24, 24).tril() > 0)]
    written = rg.heads.probe(model, length=12)
    assert written.ids == stated.ids
    for kind in KINDS:
        torch.testing.assert_close(written.scores[kind.name], stated.scores[kind.name])


def placed(places: int) -> Local:
    """A model that has so many positions, and a start token."""
    model = Local(1)
    model.config = SimpleNamespace(bos_token_id=3, max_position_embeddings=places)
    return model


def test_the_default_length_is_64_or_what_the_model_has_room_for() -> None:
    assert rg.heads.probe(Local(1)).length == 64
    assert rg.heads.probe(Local(1), among=range(63)).length == 63
    found = rg.heads.probe(placed(100))
    assert found.length == 49 and len(found.ids) == 99  # with the start token
    assert rg.heads.probe(placed(129)).length == 64


def test_a_length_that_the_model_has_no_positions_for() -> None:
    said = (
        r"length=50: expected 8 to 49, of which Local reads 99 tokens and has positions for 100. Pass length=49 or less"
    )
    with pytest.raises(ValueError, match=said):
        rg.heads.probe(placed(100), length=50)
    with pytest.raises(
        ValueError, match=r"Local has positions for 16 tokens; the probe needs 17: a start token, and 8 "
    ):
        rg.heads.probe(placed(16))


def test_wrong_probes() -> None:
    model = load()
    with pytest.raises(ValueError, match=r"length=7: expected 8 to 256, the tokens that there are to draw"):
        rg.heads.probe(model, length=7)
    with pytest.raises(
        ValueError, match=r"length=96: expected 8 to 95, .* Pass length=95, or more token ids as among="
    ):
        rg.heads.probe(model, length=96, among=LETTERS)
    with pytest.raises(ValueError, match=r"there are 7 token ids to draw; expected 8 or more: pass among="):
        rg.heads.probe(model, among=range(7))
    with pytest.raises(ValueError, match=r"Linear has no embedding to draw tokens of; pass among="):
        draw(nn.Linear(2, 2))
    seeing_all = nn.Sequential(nn.Embedding(99, 8), rg.nn.MultiHeadAttention(8, heads=2))
    with pytest.raises(rg.Unsupported, match=r"Sequential is not causal: 1 sees later tokens, so it does not read"):
        rg.heads.probe(seeing_all)
    with pytest.raises(
        ValueError, match=r"length=64: no layer sees the first copy.*but 16 keys at most. Pass length=15 or less"
    ):
        rg.heads.probe(Local(0, 0), length=64)
    assert draw(model, seed=1) == draw(model, seed=1) != draw(model, seed=2)
