"""What heads add, and what a model is without them, on the byte model and layers of regard.nn."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor, nn

import regard as rg
from regard.demo.model import SEEN, Block, ByteTransformer, Shape, load
from regard.inspect.heads.stream import Stream

TEXT = list(b"Sally sells seashells by the seashore; Sally sells seashells.")


@pytest.fixture(scope="module")
def model() -> ByteTransformer:
    return load()


def blocks(model: ByteTransformer) -> list[Block]:
    return [block for block in model.blocks if isinstance(block, Block)]


def inputs_of_layers(model: ByteTransformer, ids: list[int]) -> tuple[list[Tensor], Tensor]:
    """What each attention layer reads, and what the last norm is given."""
    x, read = model.embedding(torch.tensor([ids])), list[Tensor]()
    for block in blocks(model):
        read.append(block.attention_norm(x))
        x = block(x)
    return read, x


@torch.no_grad()
def test_norms_are_those_of_each_summand(model: ByteTransformer) -> None:
    found = rg.heads.contributions(model, TEXT)
    read, _ = inputs_of_layers(model, TEXT)
    assert found.layers == tuple(f"blocks.{n}.attention" for n in range(4))
    for block, x, norms in zip(blocks(model), read, found.norms, strict=True):
        torch.testing.assert_close(norms, block.attention.per_head(x, mask=SEEN)[0].norm(dim=-1), rtol=1e-5, atol=1e-5)


def test_norms_of_halves_are_floats() -> None:
    """Of bfloat16, 255 steps between 1 and 2, the largest of 61 norms would often be that of several tokens."""
    halves, exact = (rg.heads.contributions(load().to(dtype), TEXT).norms for dtype in (torch.bfloat16, torch.float32))
    for rounded, norms in zip(halves, exact, strict=True):
        assert rounded.dtype is torch.float32
        assert not torch.equal(rounded, rounded.bfloat16().float())
        torch.testing.assert_close(rounded, norms, rtol=0.1, atol=0.1)


@torch.no_grad()
@pytest.mark.parametrize("at", [-1, 7])
def test_a_logit_is_the_sum_of_what_is_added(at: int) -> None:
    """With the embedding and the MLPs, each pushed through the frozen norm by hand, in float64."""
    model = load().double()
    ids, token = torch.tensor([TEXT]), 101
    found = rg.heads.contributions(model, TEXT, token=token, at=at).logit
    assert found is not None and (found.token, found.position) == (token, at % len(TEXT))
    read, last = inputs_of_layers(model, TEXT)
    gradient = model.norm.weight * model.embedding.weight[token] / last[0, at].square().mean().add(1e-16).sqrt()
    by_hand = [block.attention.per_head(x, mask=SEEN)[0, :, at] for block, x in zip(blocks(model), read, strict=True)]
    for mine, of_layer in zip(found.heads, by_hand, strict=True):
        torch.testing.assert_close(mine.double(), of_layer @ gradient, rtol=1e-5, atol=1e-5)
    x = model.embedding(ids)
    others = x[0, at] @ gradient
    for block in blocks(model):
        x = x + block.attention(block.attention_norm(x), mask=SEEN)
        others = others + block.mlp(block.mlp_norm(x))[0, at] @ gradient
        x = x + block.mlp(block.mlp_norm(x))
    assert found.value == pytest.approx(float(model(ids)[0, at, token]), abs=1e-5)
    assert found.rest == pytest.approx(float(others), abs=1e-5)


def test_without_a_token_the_largest_logit_is_told(model: ByteTransformer) -> None:
    found = rg.heads.contributions(model, TEXT)
    with torch.no_grad():
        assert found.logit is not None and found.logit.token == int(model(torch.tensor([TEXT]))[0, -1].argmax())
    said = " ".join(str(found).split())
    assert f"in that of {found.logit.said} at position 60 ({found.logit.value:.4g} = " in said


@pytest.mark.parametrize("seed", range(3))
def test_the_induction_head_matters_most_where_a_text_repeats(model: ByteTransformer, seed: int) -> None:
    draw = random.Random(seed)
    ids = [draw.randrange(32, 127) for _ in range(40)] * 2
    found = rg.heads.ablation(model, ids)
    assert (
        max((float(change), f"L{n}H{h}") for n, of in enumerate(found.change) for h, change in enumerate(of))[1]
        == "L3H1"
    )
    assert found.tokens == 80 and found.loss < 3.5


@torch.no_grad()
def test_ablation_is_the_loss_with_a_head_at_its_mean(model: ByteTransformer) -> None:
    told = list[tuple[int, int]]()
    found = rg.heads.ablation(model, TEXT, progress=lambda done, of: told.append((done, of)))
    assert told == [(n + 1, 16) for n in range(16)]
    layer, ids = blocks(model)[1].attention, torch.tensor([TEXT])

    def third_at_its_mean(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        joined = inputs[0].clone()
        joined[..., 64:96] = joined[..., 64:96].mean(1, keepdim=True)
        return (joined,)

    loss = [nn.functional.cross_entropy(model(ids)[0, :-1], ids[0, 1:])]
    with layer.out_proj.register_forward_pre_hook(third_at_its_mean):
        loss.append(nn.functional.cross_entropy(model(ids)[0, :-1], ids[0, 1:]))
    assert found.loss == pytest.approx(float(loss[0]), abs=1e-5)
    assert float(found.change[1][2]) == pytest.approx(float(loss[1] - loss[0]), abs=1e-5)


def test_a_text_may_be_shortened_and_the_loss_be_given(model: ByteTransformer) -> None:
    found = rg.heads.ablation(model, TEXT, most=12, loss=lambda logits: logits[0, -1].logsumexp(0))
    assert found.tokens == 12
    with torch.no_grad():
        assert found.loss == pytest.approx(float(model(torch.tensor([TEXT[:12]]))[0, -1].logsumexp(0)), abs=1e-5)


def test_a_model_is_left_as_it_was(model: ByteTransformer) -> None:
    model.train()
    rg.heads.ablation(model, TEXT[:4])
    rg.heads.contributions(model, TEXT[:4])
    hooks = [getattr(m, name) for m in model.modules() for name in ("_forward_hooks", "_forward_pre_hooks")]
    assert model.training and not any(hooks)
    model.eval()


class Normed(nn.Module):
    """A language model of two layers; the first is scaled on its way to the stream, or the logits are capped."""

    def __init__(self, factor: float = 1.0, cap: bool = False) -> None:
        super().__init__()
        self.small, self.factor, self.cap = ByteTransformer(Shape(width=16, layers=2, heads=2)), factor, cap

    def forward(self, tokens: Tensor) -> Tensor:
        small, x = self.small, self.small.embedding(tokens)
        added = blocks(small)[0].attention(blocks(small)[0].attention_norm(x), mask=SEEN)
        x = blocks(small)[1](x + (added if self.factor == 1 else self.factor * added))
        logits = small.norm(x) @ small.embedding.weight.T
        return logits.tanh() if self.cap else logits


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Normed(factor=0.5), "small.blocks.0.attention adds does not reach a last norm as it is"),
        (Normed(cap=True), "may be capped or scaled"),
    ],
    ids=["scaled", "capped"],
)
def test_what_cannot_be_told_is_said(model: Normed, said: str) -> None:
    found = rg.heads.contributions(model, TEXT)
    assert found.logit is None and said in str(found.why_not) and str(found.why_not) in " ".join(str(found).split())
    with pytest.raises(rg.Unsupported, match=said):
        rg.heads.contributions(model, TEXT, token=3)


class Functional(nn.Module):
    """Attention that calls no module for its projection."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (2, -1)).transpose(1, 2)
        out = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return out.transpose(1, 2).flatten(2)


def test_the_matrix_of_another_part_is_no_projection() -> None:
    model = nn.Sequential(nn.Embedding(9, 8), Functional(), nn.Linear(8, 8))
    with pytest.raises(rg.Unsupported, match="no projection was seen behind 1, a Functional"):
        rg.heads.contributions(model, [1, 2, 3])


def test_wrong_calls(model: ByteTransformer) -> None:
    with pytest.raises(IndexError, match=r"at=61: the text has 61 tokens; expected a position from -61 to 60"):
        rg.heads.contributions(model, TEXT, at=61)
    with pytest.raises(IndexError, match=r"token=256: ByteTransformer has tokens 0 to 255"):
        rg.heads.contributions(model, TEXT, token=256)
    with pytest.raises(ValueError, match="the text has 1 token; expected 2 or more"):
        rg.heads.ablation(model, TEXT[:1])
    torchs = nn.Sequential(nn.Embedding(9, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    with pytest.raises(rg.Unsupported, match=r"no projection was seen behind 1.self_attn.*from_torch"):
        rg.heads.contributions(torchs, [1, 2, 3])


def test_the_stream_knows_sums_and_their_views_alone() -> None:
    a, b = torch.randn(2, 3), torch.randn(2, 3)
    with Stream() as stream:
        stream.put(a, 0)
        stream.put(b, 1)
        assert stream.parts(a + torch.ones(2, 3)) == {0}
        assert stream.parts((a + b).view(6)[2:]) == {0, 1} == stream.parts((a + b).clone())
        for other in (2 * a, a - b, torch.add(a, b, alpha=2), a + torch.ones(3), a.half(), a.sqrt()):
            assert not stream.parts(other)
        a += b
        assert stream.parts(a) == {0, 1}
        a *= 2
        assert not stream.parts(a)
