"""The attention function as modules call it: keywords, masks made in full, packing, dropout, witnesses, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tiny_models import DECODERS, ENCODER_DECODERS, ENCODERS, N, padded, tokens

pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")

from regard.call.hooks import AttentionCall, observing
from regard.compat import transformers as compat
from regard.compat.transformers.mask_interface import lazy_mask
from regard.core.errors import Unsupported
from regard.inspect.look_tensors import look

Q, K, V = torch.randn(3, 2, 4, 5, 6, generator=torch.Generator().manual_seed(2)).unbind()


def layer(**attributes: Any) -> nn.Module:
    module = nn.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def call(mask: Any = None, module: nn.Module | None = None, q: Tensor = Q, k: Tensor = K, **keywords: Any) -> Tensor:
    module = layer(is_causal=False) if module is None else module
    out, nothing = compat.attention_forward(module, q, k, V[:, : k.shape[1], : k.shape[2]], mask, **keywords)
    assert nothing is None and out.is_contiguous()
    return out.transpose(1, 2)


def weighed(scores: Tensor, v: Tensor = V) -> Tensor:
    return scores.softmax(-1) @ v


def test_scale_cap_and_bias_in_this_order() -> None:
    bias = torch.randn(1, 4, 5, 5)
    scores = 3 * torch.tanh(0.7 * (Q @ K.mT) / 3) + bias
    torch.testing.assert_close(call(scaling=0.7, softcap=3.0, position_bias=bias), weighed(scores))


def test_without_a_scale_it_is_that_of_the_width() -> None:
    torch.testing.assert_close(call(), weighed(Q @ K.mT * 6**-0.5))


def test_a_sink_takes_mass() -> None:
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0], requires_grad=True)
    scores = torch.cat([Q @ K.mT, sink.view(1, 4, 1, 1).expand(2, 4, 5, 1)], -1)
    out = call(scaling=1.0, s_aux=sink)
    torch.testing.assert_close(out, scores.softmax(-1)[..., :-1] @ V)
    assert float(torch.autograd.grad(out.square().sum(), sink)[0].abs().min()) > 0


@pytest.mark.parametrize(
    ("attributes", "keyword", "causal"),
    [
        ({}, None, True),
        ({"is_causal": False}, None, False),
        ({"is_causal": True}, None, True),
        ({"is_causal": True}, False, False),
        ({"is_causal": False}, True, True),
    ],
)
def test_without_a_mask(attributes: dict[str, bool], keyword: bool | None, causal: bool) -> None:
    scores = Q @ K.mT
    scores = scores.masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf) if causal else scores
    torch.testing.assert_close(call(module=layer(**attributes), is_causal=keyword, scaling=1.0), weighed(scores))


def test_modules_of_transformers_that_say_nothing_see_everything() -> None:
    """Its encoders without padding get no mask; those of others are as torch's attention is called."""
    theirs = type("Attention", (nn.Module,), {"__module__": "transformers.models.splinter.modeling_splinter"})()
    scores = Q @ K.mT
    torch.testing.assert_close(call(module=theirs, scaling=1.0), weighed(scores))
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    torch.testing.assert_close(call(module=layer(), scaling=1.0), weighed(scores.masked_fill(hidden, -torch.inf)))


def test_without_a_mask_one_query_is_the_last() -> None:
    torch.testing.assert_close(call(module=layer(), q=Q[..., -1:, :], scaling=1.0), weighed(Q[..., -1:, :] @ K.mT))


def test_without_a_mask_and_of_unequal_lengths() -> None:
    with pytest.raises(Unsupported, match="2 queries meet 5 keys causally"):
        call(module=layer(is_causal=True), q=Q[..., :2, :])


@pytest.mark.parametrize("low", [-torch.inf, torch.finfo(torch.float32).min])
def test_masks_made_in_full(low: float) -> None:
    allowed = torch.rand(2, 1, 5, 5) < 0.7
    allowed[..., 0] = True
    expected = weighed((Q @ K.mT).masked_fill(~allowed, -torch.inf))
    torch.testing.assert_close(call(allowed, scaling=1.0), expected)
    torch.testing.assert_close(call(torch.zeros(2, 1, 5, 5).masked_fill(~allowed, low), scaling=1.0), expected)


def test_numbers_to_add_have_their_gradient() -> None:
    added = torch.randn(1, 4, 5, 5, requires_grad=True)
    (found,) = torch.autograd.grad(call(added, scaling=1.0).square().sum(), added)
    (expected,) = torch.autograd.grad(weighed(Q @ K.mT + added).square().sum(), added)
    torch.testing.assert_close(found, expected)


REFUSED = ["block_indices", "cu_seq_lens_q", "cu_seq_lens_k", "sinks", "head_mask"]


@pytest.mark.parametrize("name", [*REFUSED, "output_attentions", "never_heard_of"])
def test_keywords_that_are_refused(name: str) -> None:
    with pytest.raises(Unsupported, match=f"cannot serve {name}="):
        call(**{name: torch.ones(2)})
    call(**{name: None})


def test_keys_that_the_model_chooses() -> None:
    """Booleans of its own, of those that the mask lets through; -1 names no key."""
    indices = torch.tensor([[[0, 1], [1, 2], [4, 2], [3, 3], [-1, 4]], [[0, 0], [0, 1], [2, 0], [1, 2], [0, 3]]])
    allowed = torch.zeros(2, 5, 6, dtype=torch.bool).scatter(-1, indices % 6, True)[:, None, :, :5]
    scores = (Q @ K.mT).masked_fill(~allowed, -torch.inf)
    torch.testing.assert_close(call(indices=indices, scaling=1.0), weighed(scores))
    causal = scores.masked_fill(~torch.ones(5, 5).tril().bool(), -torch.inf)
    for mask in (lazy_mask(2, 5, 5), torch.ones(2, 1, 5, 5).tril().bool()):
        torch.testing.assert_close(call(mask, indices=indices.int(), scaling=1.0), weighed(causal))


def test_a_bias_meets_all_keys_of_a_static_cache() -> None:
    """The mask tells that nobody sees the last two keys; a bias has numbers for them all the same."""
    bias = torch.randn(1, 4, 1, 5)
    scores = (Q[..., 2:3, :] @ K.mT) + bias
    found = call(lazy_mask(2, 1, 5, torch.tensor(2)), q=Q[..., 2:3, :], position_bias=bias, scaling=1.0)
    torch.testing.assert_close(found, weighed(scores[..., :3], V[..., :3, :]))


def test_a_window_without_a_mask_is_refused() -> None:
    call(sliding_window=5)
    with pytest.raises(Unsupported, match="a sliding window of 4 meets 5 keys"):
        call(sliding_window=4)


@pytest.mark.parametrize("mask", [torch.ones(2, 5), torch.ones(2, 1, 5, 5, dtype=torch.int64)])
def test_masks_of_another_kind_are_refused(mask: Tensor) -> None:
    with pytest.raises(Unsupported, match="attention_mask has shape"):
        call(mask)


def test_a_mask_of_another_call_is_refused() -> None:
    with pytest.raises(Unsupported, match="a mask of another call"):
        call(lazy_mask(2, 4, 4))


@pytest.mark.parametrize("real", [None, padded("right")])
def test_a_decoder_may_look_both_ways(real: Tensor | None) -> None:
    found, causal = (
        DECODERS["Llama"].build(compat.NAME)(input_ids=tokens(), attention_mask=real, is_causal=both_ways).logits[1]
        for both_ways in (False, True)
    )
    assert_near(
        found, DECODERS["Llama"].build("eager")(input_ids=tokens(), attention_mask=real, is_causal=False).logits[1]
    )
    assert not torch.allclose(found, causal)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "GPT-2", "BERT"])
@pytest.mark.parametrize("kind", ["boolean", "added"])
def test_a_user_gives_all_four_axes(name: str, kind: str) -> None:
    tiny = (DECODERS | ENCODERS)[name]
    allowed = torch.rand(2, 1, N, N) < 0.6
    allowed |= torch.eye(N, dtype=torch.bool)
    added = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    out = tiny.build(compat.NAME)(input_ids=tokens(), attention_mask=allowed if kind == "boolean" else added)
    expected = tiny.build("eager")(input_ids=tokens(), attention_mask=added).logits
    assert_near(out.logits, expected)


@pytest.mark.parametrize("name", ["Llama", "Mistral", "Llama4"])
def test_packed_sequences_do_not_meet(name: str) -> None:
    """Positions that start again are another document, and each is computed as if it were alone."""
    model = DECODERS[name].build(compat.NAME)
    at = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5]])
    ids = tokens()[:1]
    together = model(input_ids=ids, position_ids=at, use_cache=False).logits
    alone = torch.cat([model(input_ids=part).logits for part in (ids[:, :7], ids[:, 7:])], 1)
    assert_near(together, alone)


def test_dropout_follows_torchs_generator() -> None:
    model = DECODERS["Llama"].build(compat.NAME)
    model.config.attention_dropout = 0.4
    for block in model.model.layers:
        block.self_attn.attention_dropout = 0.4
    plain = model(input_ids=tokens()).logits
    model.train()

    def run(seed: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(seed)
        model.zero_grad()
        logits = model(input_ids=tokens()).logits
        logits.square().sum().backward()
        return logits.detach(), model.model.layers[0].self_attn.q_proj.weight.grad.clone()

    first, again, other = run(1), run(1), run(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0]) and not torch.equal(first[0], plain)
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning")  # its name in 5.0
def test_checkpointing_repeats_the_dropout() -> None:
    model = DECODERS["Llama"].build(compat.NAME).train()
    for block in model.model.layers:
        block.self_attn.attention_dropout = 0.4

    def gradient() -> Tensor:
        torch.manual_seed(3)
        model.zero_grad()
        model(input_ids=tokens(), use_cache=False).logits.square().sum().backward()
        return model.model.layers[0].self_attn.q_proj.weight.grad.clone()

    expected = gradient()
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(gradient(), expected)


def assert_near(found: Tensor, expected: Tensor) -> None:
    """Within 1e-5 of the largest number, in float32."""
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.detach().abs().max()))


def told(name: str, **feed: Any) -> list[AttentionCall]:
    model = (DECODERS | ENCODERS | ENCODER_DECODERS)[name].build(compat.NAME)
    seen: list[AttentionCall] = []
    with observing(seen.append):
        model(**feed)
    return seen


def dense(seen: AttentionCall) -> Tensor:
    nq, nk = seen.q.shape[-2], seen.k.shape[-2]
    return seen.mask.on(nq, nk, positions=seen.positions, batch=(2,)).dense().expand(2, 1, nq, nk)[:, 0]


@pytest.mark.parametrize("name", ["Llama", "BERT"])
def test_witnesses_hear_of_real_queries_only(name: str) -> None:
    seen = told(name, input_ids=tokens(), attention_mask=padded("left"))
    causal = torch.ones(N, N).tril().bool() if name == "Llama" else torch.ones(N, N).bool()
    real = padded("left").bool()
    expected = causal & real[:, :, None] & real[:, None, :]
    assert all(torch.equal(dense(each), expected) for each in seen)
    assert [type(each.layer).__name__ for each in seen] == [type(seen[0].layer).__name__] * 2
    assert all(isinstance(each.layer, nn.Module) for each in seen)


def test_witnesses_of_a_mask_that_is_a_tensor() -> None:
    real = padded("right").bool()
    given = torch.where(real[:, None, None, :].expand(2, 1, N, N), 0.0, torch.finfo(torch.float32).min)
    seen = told("BERT", input_ids=tokens(), attention_mask=given)
    assert all(torch.equal(dense(each), real[:, :, None] & real[:, None, :]) for each in seen)
    assert all(each.mask_if_cross is not None for each in seen)


def test_witnesses_of_a_decoder_that_reads_an_encoder() -> None:
    """The decoder's tokens are not the encoder's, though there are as many: its padding hides keys alone."""
    seen = told("BART", input_ids=tokens(), attention_mask=padded("right"), decoder_input_ids=tokens())
    real = padded("right").bool()
    encoder, decoder, across = seen[0], seen[2], seen[3]
    assert torch.equal(dense(encoder), real[:, :, None] & real[:, None, :])
    assert torch.equal(dense(decoder), torch.ones(2, N, N).tril().bool())
    assert torch.equal(dense(across), real[:, None, :].expand(2, N, N))


def test_facts_of_what_was_told() -> None:
    (first, _) = told("GPT-OSS", input_ids=tokens(), attention_mask=padded("left"))
    facts = look(first.q, first.k, score=first.score, mask=first.mask, positions=first.positions, sink=first.sink)
    assert facts.lse.shape == (2, 4, N)
    assert first.sink is not None


def test_the_names_are_registered() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    assert AttentionInterface()[compat.NAME] is compat.attention_forward
    assert AttentionMaskInterface()[compat.NAME] is lazy_mask


def test_a_first_layer_without_keys() -> None:
    """transformers asks it how many keys there are, and makes a mask of one token."""
    import transformers

    config = transformers.MiniMaxConfig(
        **{"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": 2},
        **{"layer_types": ["linear_attention", "full_attention"], "eos_token_id": None, "pad_token_id": 0},
    )
    model, given = transformers.MiniMaxForCausalLM(config).eval(), torch.arange(3, 12)[None]
    found = []
    for name in ("eager", compat.NAME):
        model.set_attn_implementation(name)
        found.append(model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=6, do_sample=False))
    assert torch.equal(*found)
