"""T5 and its kin in transformers: the kernels get the table of relative positions, and no bias of queries × keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tiny_models import padded, tokens

pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")

from regard.compat import transformers as compat
from regard.compat.transformers import interface, relative_bias
from regard.compat.transformers.models import NAME
from regard.scores.modifiers import Bias, RelativeBias
from selection import few
from table_models import DECODERS, SAME_LAYERS, T5, apart, heard, score_of

CLOSE = 1e-10  # of the largest number, in float64


@pytest.fixture(autouse=True)
def tables_of_short_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of less than 64 × 64 pairs, regard reads the tensor."""
    monkeypatch.setattr(relative_bias, "FEWEST_PAIRS", 0)


@contextmanager
def sizes_of_biases() -> Iterator[list[int]]:
    """The numbers in what embeddings of tables return, and torch.zeros: what a bias of all pairs is made of."""
    found: list[int] = []
    look_up, zeros = nn.Embedding.forward, torch.zeros
    patch = pytest.MonkeyPatch()

    def forward(self: nn.Embedding, index: Tensor) -> Tensor:
        out = look_up(self, index)
        found.append(out.numel() if self.num_embeddings == 8 else 0)
        return out

    def counted(*size: Any, **options: Any) -> Tensor:
        out = zeros(*size, **options)
        found.append(out.numel())
        return out

    with patch.context() as changed:
        changed.setattr(nn.Embedding, "forward", forward)
        changed.setattr(torch, "zeros", counted)
        yield found


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", few(SAME_LAYERS, "T5"))
def test_values_and_gradients(name: str, side: str) -> None:
    eager, ours = (SAME_LAYERS[name].build(kind).double() for kind in ("eager", NAME))
    real = None if side == "none" else padded(side)
    feed = {"input_ids": tokens(), "attention_mask": real, "decoder_input_ids": tokens(7), "use_cache": False}
    out, seen = heard(ours, **feed)
    expected = eager(**feed)
    assert [score_of(call) for call in seen] == [[RelativeBias]] * 2 + [[RelativeBias], []] * 2
    assert apart(out.logits, expected.logits) < CLOSE
    for model in (out, expected):
        model.logits.sin().sum().backward()
    pairs = [(p.grad, q.grad) for p, q in zip(ours.parameters(), eager.parameters(), strict=True) if q.grad is not None]
    assert all(apart(p, q) < 1e-8 for p, q in pairs if bool(q.any()))
    tables = [p.grad for key, p in ours.named_parameters() if "relative_attention_bias" in key]
    assert len(tables) == (4 if name == "UMT5" else 2)
    assert all(grad is not None and bool(grad.any()) for grad in tables)


def drawn(*shape: int) -> Tensor:
    return torch.rand(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(6))


@pytest.mark.filterwarnings("ignore:LongT5Stack took")  # its encoder computes attention by itself
@pytest.mark.parametrize("name", DECODERS)
def test_decoders_whose_encoder_has_no_table(name: str) -> None:
    eager, ours = (DECODERS[name].build(kind).double() for kind in ("eager", NAME))
    feed: dict[str, Any] = {"input_ids": tokens(), "attention_mask": padded("right"), "use_cache": False}
    if name == "Pix2Struct":
        feed["encoder_hidden_states"] = drawn(2, 5, 32)
    else:
        feed["decoder_input_ids"] = tokens(7)
    if name == "UDOP":
        corner = drawn(2, 13, 2) / 2
        feed |= {"bbox": torch.cat([corner, corner + 0.3], -1), "pixel_values": drawn(2, 3, 8, 8)}
    out, seen = heard(ours, **feed)
    expected = eager(**feed)
    before = {"LongT5": [], "Pix2Struct": [], "UDOP": [[Bias]] * 2}
    assert [score_of(call) for call in seen] == before[name] + [[RelativeBias], []] * 2
    assert apart(out.logits, expected.logits) < CLOSE


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes_of_the_kernels(dtype: torch.dtype) -> None:
    eager, ours = T5.build("eager"), T5.build(NAME).to(dtype)
    feed = {"input_ids": tokens(), "attention_mask": padded("left"), "decoder_input_ids": tokens(7)}
    out, seen = heard(ours, **feed)
    assert score_of(seen[0]) == [RelativeBias]
    assert apart(out.logits.float(), eager(**feed).logits) < (1e-5 if dtype == torch.float32 else 5e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast(dtype: torch.dtype) -> None:
    eager, ours = T5.build("eager"), T5.build(NAME)
    feed = {"input_ids": tokens(), "attention_mask": padded("right"), "decoder_input_ids": tokens(7)}
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        out, seen = heard(ours, **feed)
    assert score_of(seen[0]) == [RelativeBias]
    out.logits.float().sin().sum().backward()
    assert apart(out.logits.float(), eager(**feed).logits) < (1e-5 if dtype == torch.float32 else 5e-2)
    assert bool(ours.encoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad.any())


@pytest.mark.parametrize("cache", few(["dynamic", "static", "growing"], "dynamic", "growing"))
@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", few(["T5", "UMT5", "Pop2Piano"], "T5"))
def test_the_same_tokens(name: str, beams: int, cache: str) -> None:
    from transformers import DynamicCache, EncoderDecoderCache

    found: list[Tensor] = []
    for kind in ("eager", NAME):
        model = SAME_LAYERS[name].build(kind)
        asked: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "num_beams": beams, "do_sample": False}
        if cache == "growing" and kind == NAME:
            own = compat.GrowingCache(model.config), DynamicCache(config=model.config)
            asked["past_key_values"] = EncoderDecoderCache(*own)
        elif cache == "static":
            asked["cache_implementation"] = "static"
        if name == "Pop2Piano":  # its generate begins with a composer's token
            asked["inputs"] = torch.randn(2, 13, 32, generator=torch.Generator().manual_seed(3))
            generate = super(type(model), model).generate
            asked["inputs_embeds"] = asked.pop("inputs")
        else:
            generate = model.generate
            asked["input_ids"] = tokens()
        out, seen = heard(generate, attention_mask=padded("left"), **asked)
        found.append(out)
        if kind == NAME:
            kinds = [(call.q.shape[-2] > 1, score_of(call)) for call in seen]
            assert {tuple(kind) for several, kind in kinds if several} == {(RelativeBias,)}
            assert {tuple(kind) for several, kind in kinds if not several} == {(Bias,), ()}
    assert torch.equal(*found)


@pytest.mark.parametrize("cut", [1, 4, 5])
@pytest.mark.parametrize("static", [False, True])
def test_a_chunk_behind_cached_tokens(cut: int, static: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several queries at the end of the keys, and one alone; of a static cache the filled part is read."""
    from transformers import DynamicCache, EncoderDecoderCache, StaticCache

    widths: list[int] = []
    run = interface.attention

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        widths.append(k.shape[-2])
        return run(q, k, v, **options)

    monkeypatch.setattr(interface, "attention", attention)
    found: list[Tensor] = []
    for kind in ("eager", NAME):
        model = T5.build(kind).double()
        own = StaticCache(config=model.config, max_cache_len=11) if static else DynamicCache(config=model.config)
        cache = EncoderDecoderCache(own, DynamicCache(config=model.config))
        feed = {"encoder_outputs": model.encoder(input_ids=tokens()), "past_key_values": cache}
        parts: list[Tensor] = []
        widths.clear()
        for part in (slice(0, cut), slice(cut, 6), slice(6, 7)):
            out, seen = heard(model, attention_mask=padded("left"), decoder_input_ids=tokens(7)[:, part], **feed)
            parts.append(out.logits)
            if kind == NAME:
                expected = Bias if part.stop - part.start == 1 else RelativeBias
                assert [score_of(call) for call in seen] == [[expected], []] * 2
                assert widths[-4:] == [part.stop, 13] * 2
        found.append(torch.cat(parts, 1))
    assert apart(found[1], found[0]) < CLOSE


@pytest.mark.parametrize("name", few(["T5", "MT5", "Pop2Piano", "Switch"], "T5"))
def test_no_bias_of_all_pairs_is_made(name: str) -> None:
    n, ids = 301, torch.randint(3, 60, (1, 301), generator=torch.Generator().manual_seed(0))
    for kind in ("eager", NAME):
        model = SAME_LAYERS[name].build(kind)
        model(input_ids=ids[:, :5], decoder_input_ids=ids[:, :5])  # a class is looked at once
        with sizes_of_biases() as sizes, torch.no_grad():
            model(input_ids=ids, attention_mask=torch.ones_like(ids), decoder_input_ids=ids)
        assert (max(sizes) >= 4 * n * n) is (kind == "eager")


def test_masks_that_the_user_makes() -> None:
    """Booleans and numbers of all pairs beside the table."""
    eager, ours = (T5.build(kind).double() for kind in ("eager", NAME))
    allowed = torch.rand(2, 1, 13, 13, generator=torch.Generator().manual_seed(2)) < 0.7
    allowed[..., 0] = True
    numbers = torch.where(allowed, torch.randn(2, 1, 13, 13, dtype=torch.float64), float("-inf"))
    hidden = torch.zeros(2, 1, 13, 13, dtype=torch.float64).masked_fill(~allowed, float("-inf"))
    for given, same in ((allowed, hidden), (numbers, numbers)):
        out, seen = heard(ours.encoder, input_ids=tokens(), attention_mask=given)
        assert score_of(seen[0])[0] is RelativeBias
        expected = eager.encoder(input_ids=tokens(), attention_mask=same).last_hidden_state
        assert apart(out.last_hidden_state, expected) < CLOSE
