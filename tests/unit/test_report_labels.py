"""Which sequence a layer of a report reads is decided by shapes and by what the caller says, not by a module's name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard as rg
from regard.inspect.report.layer import Layer

ASKING, READ = list("ABCD"), list("uvwxyz")


class Reading(nn.Module):
    """A cross-attention of one's own, under a name that tells nothing."""

    def forward(self, q: Tensor, h: Tensor) -> Tensor:
        return rg.attention(q, h, h)


class Pair(nn.Module):
    """Two such modules, and one call that does both kinds of attention itself."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Reading(), Reading()

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return self.b(self.a(x, x), h) + rg.attention(rg.attention(x, x, x), h, h)


def tensors(*sizes: int) -> list[Tensor]:
    random = torch.Generator().manual_seed(3)
    return [torch.randn(1, 2, n, 8, generator=random) for n in sizes]


def layers(model: nn.Module, inputs: list[list[Tensor]], **labels: Any) -> tuple[Layer, ...]:
    with rg.record(model, facts=rg.Report.FACTS) as tape:
        for each in inputs:
            model(*each)
    return rg.Report.of(tape.calls, title="a model", model="Made", **labels).layers


def assert_crosses(layer: Layer, asking: list[str], read: list[str]) -> None:
    assert layer.queries.tokens == tuple(asking) and layer.keys.tokens == tuple(read)
    assert layer.queries.positions.tolist() == list(range(len(layer.queries)))
    assert layer.keys.positions.tolist() == list(range(len(layer.keys)))
    assert not layer.looks_at_itself


def assert_own(layer: Layer, tokens: list[str]) -> None:
    assert layer.queries.tokens == layer.keys.tokens == tuple(tokens) and layer.looks_at_itself


def test_cross_attention_of_ones_own_has_both_texts() -> None:
    (layer,) = layers(Reading(), [tensors(4, 6)], tokens=ASKING, key_tokens=READ)
    assert_crosses(layer, ASKING, READ)
    (layer,) = layers(Reading(), [tensors(6, 4)], tokens=READ, key_tokens=ASKING)
    assert_crosses(layer, READ, ASKING)


def test_a_layer_of_regard_with_a_context_has_both_texts() -> None:
    layer, x, context = rg.nn.MultiHeadAttention(16, heads=2), torch.randn(1, 4, 16), torch.randn(1, 6, 16)
    (found,) = layers(layer, [[x, context]], tokens=ASKING, key_tokens=READ)
    assert_crosses(found, ASKING, READ)


def test_key_tokens_alone_say_that_it_is_cross_attention() -> None:
    (layer,) = layers(Reading(), [tensors(4, 6)], key_tokens=READ)
    assert_crosses(layer, [], READ)


def test_queries_are_named_where_tokens_are_as_many() -> None:
    for cross in ("*", ()):
        (layer,) = layers(Reading(), [tensors(4, 6)], tokens=ASKING, cross=cross)
        assert layer.queries.tokens == tuple(ASKING) and layer.keys.tokens == ()


def test_the_last_queries_of_a_text_keep_its_end() -> None:
    (layer,) = layers(Reading(), [tensors(4, 6)], tokens=READ)
    assert layer.queries.tokens == tuple("wxyz") and layer.keys.tokens == tuple(READ)
    assert layer.queries.positions.tolist() == [2, 3, 4, 5] and layer.looks_at_itself


def test_both_kinds_in_one_model() -> None:
    found = layers(Pair(), [tensors(4, 6)], tokens=ASKING, key_tokens=READ)
    assert [layer.place for layer in found] == ["L0", "L1", "cross L0", "cross L1"]
    for layer in found[:2]:
        assert_own(layer, ASKING)
    for layer in found[2:]:
        assert_crosses(layer, ASKING, READ)


def test_steps_of_cross_attention_alone_are_one_layer() -> None:
    q, h = tensors(4, 6)
    (layer,) = layers(Reading(), [[q[:, :, n : n + 1], h] for n in range(4)], tokens=ASKING, key_tokens=READ)
    (whole,) = layers(Reading(), [[q, h]], tokens=ASKING, key_tokens=READ)
    assert_crosses(layer, ASKING, READ)
    torch.testing.assert_close(layer.entropy, whole.entropy)
    torch.testing.assert_close(layer.weights, whole.weights)


def test_an_encoder_is_known_by_its_length() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = Reading(), Reading(), Reading()

        def forward(self, x: Tensor, h: Tensor) -> Tensor:
            return self.three(self.two(x, x), self.one(h, h))

    decoder, encoder, cross = layers(Both(), [tensors(4, 6)], tokens=ASKING, key_tokens=READ)
    assert_own(encoder, READ)
    assert_own(decoder, ASKING)
    assert_crosses(cross, ASKING, READ)


def test_a_name_that_sounds_like_cross_attention_does_not_overrule_shapes() -> None:
    model = nn.Module()
    model.cross_attention = Reading()
    model.forward = model.cross_attention.forward  # type: ignore[method-assign]
    with rg.record(model, facts=rg.Report.FACTS) as tape:
        model.cross_attention(*2 * tensors(4))
        model.cross_attention(*tensors(4, 6))
    own, cross = rg.Report.of(tape.calls, title="", model="", tokens=ASKING, key_tokens=READ).layers
    assert_own(own, ASKING)
    assert_crosses(cross, ASKING, READ)


class TestEqualLengths:
    """Where both texts are as long, shapes tell nothing, and the caller has to say it."""

    def test_one_who_says_nothing_is_asked(self) -> None:
        said = r"key_tokens has 4 texts, and no layer is known to read .* cross='\*', or a pattern of names \(Reading\)"
        with pytest.raises(ValueError, match=said):
            layers(Reading(), [tensors(4, 4)], tokens=ASKING, key_tokens=list("uvwx"))

    def test_cross_says_which(self) -> None:
        (layer,) = layers(Reading(), [tensors(4, 4)], tokens=ASKING, key_tokens=list("uvwx"), cross="*")
        assert_crosses(layer, ASKING, list("uvwx"))
        found = layers(Pair(), [tensors(4, 4)], tokens=ASKING, key_tokens=list("uvwx"), cross="b", encoder=())
        by_name = {layer.name: layer for layer in found}
        assert_crosses(by_name["b"], ASKING, list("uvwx"))
        assert_own(by_name["a"], ASKING)

    def test_one_text_twice_is_no_question(self) -> None:
        (layer,) = layers(Reading(), [tensors(4, 4)], tokens=ASKING, key_tokens=ASKING)
        assert_own(layer, ASKING)

    def test_a_pattern_that_fits_nothing(self) -> None:
        with pytest.raises(ValueError, match="cross='c' fits no layer of this recording; it has Reading"):
            layers(Reading(), [tensors(4, 4)], tokens=ASKING, key_tokens=list("uvwx"), cross="c")


@pytest.mark.parametrize(
    ("labels", "said"),
    [
        ({"tokens": list("ABC"), "key_tokens": READ}, "tokens has 3 texts; the calls are of 4 and 6 tokens"),
        ({"tokens": READ, "key_tokens": list("uvwx")}, "key_tokens has 4 texts, and no layer is known to read"),
        ({"tokens": ASKING, "key_tokens": list("uvwx")}, "key_tokens has 4 texts, and no layer is known to read"),
    ],
)
def test_texts_that_do_not_fit_are_refused(labels: dict[str, list[str]], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        layers(Reading(), [tensors(4, 6)], **labels)
