"""What reads another sequence is known by how a call was made, by lengths, and by the caller: by no module's name."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard as rg
import regard.compat.torch as compat
from regard.inspect.report.layer import Layer

ASKING, READ, AS_LONG = list("ABCD"), list("uvwxyz"), list("uvwx")


class Call(nn.Module):
    """Queries, keys and values as they come: nothing says whether they are of one sequence."""

    def forward(self, q: Tensor, k: Tensor, mask: rg.Mask = rg.Everything()) -> Tensor:
        return rg.attention(q, k, k, mask=mask)


class Hidden(nn.Module):
    """A layer in the manner of transformers, which may be given the states of another sequence."""

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None) -> Tensor:
        read = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        return rg.attention(hidden_states * 2, read * 3, read)


def named(**modules: nn.Module) -> nn.Module:
    model = nn.Module()
    for name, module in modules.items():
        model.add_module(name, module)
    return model


def rows(n: int, width: int = 8) -> Tensor:
    return torch.randn(1, n, width, generator=torch.Generator().manual_seed(n))


def layers(model: nn.Module, calls: list[tuple[str, tuple[Any, ...]]], **labels: Any) -> dict[str, Layer]:
    """The layers of a report on these calls of the model's modules, by their names."""
    with rg.record(model, facts=rg.Report.FACTS) as tape:
        for name, given in calls:
            model.get_submodule(name)(*given)
    found = rg.Report.of(tape.calls, title="a model", model="Made", **labels).layers
    return {layer.name: layer for layer in found}


def axes(layer: Layer) -> tuple[str, str, bool]:
    return "".join(layer.queries.tokens), "".join(layer.keys.tokens), layer.looks_at_itself


@pytest.mark.parametrize("name", ["cross_attn", "attn"])
class TestNamesDecideNothing:
    def test_a_layer_on_itself(self, name: str) -> None:
        for labels in ({}, {"tokens": ASKING}, {"tokens": ASKING, "key_tokens": ASKING}):
            layer = layers(named(**{name: Call()}), [(name, (rows(4), rows(4)))], **labels)[name]
            text = "".join(labels.get("tokens", ()))
            assert axes(layer) == (text, text, True)

    def test_a_layer_of_regard_is_as_it_was_called(self, name: str) -> None:
        model, both = named(**{name: rg.nn.MultiHeadAttention(8, heads=2)}), {"tokens": ASKING, "key_tokens": AS_LONG}
        assert axes(layers(model, [(name, (rows(4), rows(4)))], **both)[name]) == ("ABCD", "uvwx", False)
        assert axes(layers(model, [(name, (rows(4), rows(6)))])[name]) == ("", "", False)
        assert axes(layers(model, [(name, (rows(4),))])[name]) == ("", "", True)

    @pytest.mark.parametrize("kind", [nn.MultiheadAttention, compat.MultiheadAttention, "patched"])
    def test_a_layer_of_torch_is_as_it_was_called(self, name: str, kind: Any) -> None:
        layer = (nn.MultiheadAttention if kind == "patched" else kind)(8, 2, batch_first=True)
        model, x, h = named(**{name: layer}), rows(4), rows(4) + 1
        both = {"tokens": ASKING, "key_tokens": AS_LONG}
        with rg.patch() if kind == "patched" else nullcontext():
            assert axes(layers(model, [(name, (x, h, h))], **both)[name]) == ("ABCD", "uvwx", False)
            for itself in ((x, x, x), (x, x, h), (x, x.clone(), x)):
                assert axes(layers(model, [(name, itself)], tokens=ASKING)[name]) == ("ABCD", "ABCD", True)

    def test_states_of_an_encoder_are_another_sequence(self, name: str) -> None:
        model, both = named(**{name: Hidden()}), {"tokens": ASKING, "key_tokens": AS_LONG}
        assert axes(layers(model, [(name, (rows(4), rows(4)))], **both)[name]) == ("ABCD", "uvwx", False)
        assert axes(layers(model, [(name, (rows(4), rows(6)))])[name]) == ("", "", False)
        assert axes(layers(model, [(name, (rows(4),))])[name]) == ("", "", True)

    def test_steps(self, name: str) -> None:
        """As `generate` runs a decoder: self-attention with a cache, then cross-attention on all that was read."""
        model, calls, x, h = named(own=Call(), **{name: Call()}), [], rows(4), rows(6)
        for n in range(4):
            calls += [("own", (x[:, n : n + 1], x[:, : n + 1])), (name, (x[:, n : n + 1], h))]
        for labels in ({"key_tokens": READ}, {"cross": name}):
            found = layers(model, calls, tokens=ASKING, **labels)
            assert axes(found["own"]) == ("ABCD", "ABCD", True)
            assert axes(found[name]) == ("ABCD", "".join(labels.get("key_tokens", ())), False)


def test_labels_follow_how_layers_are_called() -> None:
    model, x = named(cross_attn=Call(), attn=rg.nn.MultiHeadAttention(8, heads=2)), rows(4)
    with rg.record(model, facts=rg.Report.FACTS) as tape:
        model.get_submodule("cross_attn")(x, x)
        model.get_submodule("attn")(x, rows(6))
    assert tape.places == {"cross_attn": "L0", "attn": "cross L0"}
    found = rg.Report.of(tape.calls, title="", model="").layers
    assert {layer.name: layer.place for layer in found} == tape.places


class TestWhatIsOpenIsSaid:
    def test_the_queries_may_be_the_last_of_the_keys_or_of_another_sequence(self) -> None:
        calls = [("attn", (rows(4), rows(6)))]
        said = r"attn has 4 queries on 6 keys, .* taken for the last 4 of these 6 tokens.* cross='attn' if .*cross=\(\)"
        for labels in ({}, {"tokens": ASKING}):
            with pytest.warns(UserWarning, match=said):
                layer = layers(named(attn=Call()), calls, **labels)["attn"]
            assert layer.looks_at_itself and layer.queries.positions.tolist() == [2, 3, 4, 5]

    @pytest.mark.parametrize("labels", [{"tokens": READ}, {"cross": ()}, {"tokens": ASKING, "cross": ()}])
    def test_one_who_says_that_it_is_one_sequence(self, labels: dict[str, Any]) -> None:
        assert layers(named(attn=Call()), [("attn", (rows(4), rows(6)))], **labels)["attn"].looks_at_itself

    @pytest.mark.parametrize(
        "labels", [{"cross": "attn"}, {"key_tokens": READ}, {"tokens": ASKING, "key_tokens": READ}]
    )
    def test_one_who_says_that_it_is_another(self, labels: dict[str, Any]) -> None:
        layer = layers(named(attn=Call()), [("attn", (rows(4), rows(6)))], **labels)["attn"]
        assert not layer.looks_at_itself and layer.queries.positions.tolist() == [0, 1, 2, 3]

    def test_keys_that_grow_are_those_of_a_cache(self) -> None:
        x = rows(7)
        layer = layers(named(attn=Call()), [("attn", (x[:, n : n + 1], x[:, : n + 1])) for n in (4, 5, 6)])["attn"]
        assert layer.looks_at_itself and layer.queries.positions.tolist() == [4, 5, 6]

    def test_positions_that_a_mask_compares_were_given(self) -> None:
        class Last(Call):
            def forward(self, q: Tensor, k: Tensor, mask: rg.Mask = rg.Causal()) -> Tensor:
                return rg.attention(q, k, k, mask=mask, positions=rg.tail(4, 6))

        assert layers(named(attn=Last()), [("attn", (rows(4), rows(6)))])["attn"].looks_at_itself

    def test_two_texts_of_one_length_may_each_be_that_of_a_self_attention(self) -> None:
        model = named(encoder=Call(), decoder=Call(), attn=Call())
        x, h = rows(4), rows(4) + 1
        calls = [("encoder", (h, h)), ("decoder", (x, x)), ("attn", (x, h))]
        both = {"tokens": ASKING, "key_tokens": AS_LONG, "cross": "attn"}
        said = "tokens and key_tokens have 4 texts each, so .* encoder and decoder .* have the tokens.* encoder="
        with pytest.warns(UserWarning, match=said):
            found = layers(model, calls, **both)
        assert axes(found["encoder"]) == axes(found["decoder"]) == ("ABCD", "ABCD", True)
        found = layers(model, calls, **both, encoder="encoder")
        assert axes(found["encoder"]) == ("uvwx", "uvwx", True)
        assert axes(found["decoder"]) == ("ABCD", "ABCD", True) and axes(found["attn"]) == ("ABCD", "uvwx", False)
        found = layers(model, calls, **both, encoder=())
        assert axes(found["encoder"]) == ("ABCD", "ABCD", True)

    def test_encoder_fits_no_layer(self) -> None:
        with pytest.raises(ValueError, match="encoder='enc' fits no layer of this recording; it has attn"):
            layers(named(attn=Call()), [("attn", (rows(4), rows(4)))], tokens=ASKING, encoder="enc")


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_modules_of_any_make_may_stand_in_the_model() -> None:
    traced = torch.jit.trace(nn.Linear(8, 8), rows(4))
    model = nn.Sequential(traced, rg.nn.MultiHeadAttention(8, heads=2))
    with torch.no_grad(), rg.record(model) as tape:
        model(rows(4))
    assert [call.kind for call in tape] == ["self"]


def test_hooks_are_gone_afterwards_and_wrong_calls_are_pythons() -> None:
    model = named(attn=Hidden())
    layer = model.get_submodule("attn")
    with pytest.raises(TypeError, match="unexpected keyword argument 'encoder'"), rg.record(model):
        layer(rows(4), encoder=rows(4))
    assert not layer._forward_pre_hooks


def test_torchs_transformer_knows_its_encoder() -> None:
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True).eval()
    with torch.no_grad(), rg.record(model, facts=rg.Report.FACTS) as tape:
        model(rows(4), rows(4) + 1)
    assert [call.kind for call in tape] == ["encoder", "self", "cross"]
    report = rg.Report.of(tape.calls, title="", model="", tokens=ASKING, key_tokens=AS_LONG)
    assert [axes(layer) for layer in report.layers] == [
        ("uvwx", "uvwx", True),
        ("ABCD", "ABCD", True),
        ("ABCD", "uvwx", False),
    ]
