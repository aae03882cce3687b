"""regard.compat.torch.MultiheadAttention side by side with torch's, alone and inside of torch's transformer layers."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard as rg
from mha_calls import a_call, answer, difference
from regard.compat.torch import MultiheadAttention
from regard.compat.torch.multihead import multi_head_attention_forward


def pair(**options: Any) -> tuple[MultiheadAttention, nn.MultiheadAttention]:
    """regard's layer and torch's, with the same parameters."""
    theirs = nn.MultiheadAttention(12, 3, **options)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.3)
    ours = MultiheadAttention(12, 3, **options)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def check(layers: tuple[nn.Module, nn.Module], *inputs: Tensor, **options: Any) -> None:
    """The same output and weights, and the same gradients of parameters and inputs."""
    inputs = tuple(t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in inputs)
    if len(inputs) == 1:
        inputs *= 3
    elif len(inputs) == 2:
        inputs = (*inputs, inputs[1])
    both = []
    for layer in layers:
        out, weights = layer(*inputs, **options)
        results = [t for t in (out, weights) if t is not None]
        seeds = [torch.linspace(-1, 1, t.numel()).view_as(t) for t in results]
        leaves = [*{id(t): t for t in inputs}.values(), *layer.parameters()]
        both.append((*results, *torch.autograd.grad(results, leaves, seeds)))
    torch.testing.assert_close(*both, atol=2e-5, rtol=1e-4)


HIDDEN = torch.zeros(2, 7, dtype=torch.bool)
HIDDEN[0, 5:], HIDDEN[1, 2:] = True, True
NEEDS = ({}, {"need_weights": False}, {"average_attn_weights": False})


@pytest.mark.parametrize("needs", NEEDS, ids=str)
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"bias": False}, {"kdim": 5, "vdim": 11}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str
)
def test_arguments(options: dict[str, Any], batch_first: bool, needs: dict[str, bool]) -> None:
    layers = pair(**options, batch_first=batch_first)
    shapes = ((2, 5, 12), (2, 7, options.get("kdim", 12)), (2, 7, options.get("vdim", 12)))
    q, k, v = (torch.randn(shape) if batch_first else torch.randn(shape).transpose(0, 1) for shape in shapes)
    check(layers, q, k, v, **needs)
    check(layers, q, k, v, **needs, key_padding_mask=HIDDEN)
    check(layers, q, k, v, **needs, attn_mask=torch.randn(6, 5, 7))
    blocked = torch.rand(5, 7) < 0.4
    blocked[:, 0] = False
    check(layers, q, k, v, **needs, attn_mask=blocked, key_padding_mask=HIDDEN)
    if not options:
        check(layers, k, **needs)
        check(layers, q, k, **needs)


@pytest.mark.parametrize("needs", NEEDS, ids=str)
def test_the_causal_hint(needs: dict[str, bool]) -> None:
    x, mask = torch.randn(2, 7, 12), nn.Transformer.generate_square_subsequent_mask(7)
    check(pair(batch_first=True), x, attn_mask=mask, is_causal=True, **needs)
    padding = torch.zeros(2, 7).masked_fill(HIDDEN, -torch.inf)
    check(pair(batch_first=True), x, attn_mask=mask, is_causal=True, key_padding_mask=padding, **needs)
    check(pair(add_zero_attn=True, batch_first=True), x, attn_mask=mask, is_causal=True, **needs)


def test_without_a_batch() -> None:
    q, k = torch.randn(5, 12), torch.randn(7, 12)
    for options in ({}, {"batch_first": True}, {"add_bias_kv": True}):
        check(pair(**options), q, k, key_padding_mask=HIDDEN[0])
        check(pair(**options), q.T.contiguous().T, k, attn_mask=torch.randn(3, 5, 7))


def test_a_query_that_sees_nothing_gets_the_bias_of_the_projection() -> None:
    layer, x = pair(batch_first=True)[0], torch.randn(2, 7, 12, requires_grad=True)
    out, weights = layer(x, x, x, key_padding_mask=torch.ones(2, 7, dtype=torch.bool))
    out.sum().backward()
    assert out.equal(layer.out_proj.bias.expand_as(out)) and (weights == 0).all()
    assert x.grad is not None and (x.grad == 0).all()


def test_the_output_does_not_depend_on_the_weights_that_are_wanted() -> None:
    layer, x = pair(batch_first=True, dropout=0.5)[0], torch.randn(2, 7, 12)
    outs = []
    for needs in NEEDS:
        torch.manual_seed(1)
        outs.append(layer(x, x, x, **needs)[0])
    assert outs[0].equal(outs[1]) and outs[0].equal(outs[2])
    assert not outs[0].equal(layer.eval()(x, x, x)[0])


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout: torch.layout) -> None:
    layer = pair(batch_first=True)[0]
    rows = [torch.randn(n, 12, requires_grad=True) for n in (5, 2, 7)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
        x = torch.nested.as_nested_tensor(rows, layout=layout)
        out, weights = layer(x, x, x, need_weights=False)
        assert weights is None and out.layout == layout
        for one, added, row in zip(out.unbind(), (x + out).unbind(), rows, strict=True):  # as in a residual block
            torch.testing.assert_close(added, one + row)
        for one, row in zip(out.unbind(), rows, strict=True):
            expected = layer(row, row, row)[0]
            torch.testing.assert_close(one, expected)
            (found,) = torch.autograd.grad(one.sum(), row, retain_graph=True)
            torch.testing.assert_close(found, torch.autograd.grad(expected.sum(), row)[0], atol=1e-5, rtol=1e-5)
        with pytest.raises(rg.Unsupported, match="need_weights=False"):
            layer(x, x, x)
        with pytest.raises(rg.Unsupported, match="no mask, is_causal included"):
            layer(x, x, x, need_weights=False, is_causal=True)  # torch computes without it


PADDING = torch.arange(7) >= torch.tensor([7, 4, 2])[:, None]
CAUSAL = nn.Transformer.generate_square_subsequent_mask(7)


def replaced(model: nn.Module) -> nn.Module:
    """The model with regard's layers in the place of torch's."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.MultiheadAttention:
                ours = MultiheadAttention(child.embed_dim, child.num_heads, child.dropout, batch_first=True)
                ours.load_state_dict(child.state_dict())
                setattr(module, name, ours.train(child.training))
    return model


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("masks", [{}, {"mask": CAUSAL}, {"src_key_padding_mask": PADDING}], ids=lambda m: [*m])
def test_torchs_encoder(masks: dict[str, Tensor], grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under no_grad the fast path makes a nested tensor of padded sequences, and would call a kernel of its own."""
    theirs = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 2, 24, batch_first=True), 2).eval()
    ours, x = replaced(theirs), torch.randn(3, 7, 12)
    with torch.set_grad_enabled(grad), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
        expected = theirs(x, **masks)
        monkeypatch.setattr(torch, "_transformer_encoder_layer_fwd", None)
        torch.testing.assert_close(ours(x, **masks), expected, atol=1e-5, rtol=1e-4)


def test_torchs_decoder_and_its_gradients() -> None:
    theirs = nn.TransformerDecoder(nn.TransformerDecoderLayer(12, 2, 24, dropout=0.0, batch_first=True), 2)
    models, x, memory = (replaced(theirs), theirs), torch.randn(3, 7, 12), torch.randn(3, 5, 12)
    both = []
    for model in models:
        out = model(x, memory, tgt_mask=CAUSAL, tgt_key_padding_mask=CAUSAL.new_zeros(3, 7).masked_fill(PADDING, -1e9))
        both.append((out, *torch.autograd.grad(out.square().sum(), list(model.parameters()))))
    torch.testing.assert_close(*both, atol=1e-4, rtol=1e-4)


@pytest.mark.full
def test_it_is_copied_pickled_compiled_and_recorded() -> None:
    layer, x = pair(batch_first=True)[0], torch.randn(2, 7, 12)
    expected = layer(x, x, x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other(x, x, x)[0].equal(expected[0])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, x, x, key_padding_mask=HIDDEN), layer(x, x, x, key_padding_mask=HIDDEN))
    with rg.record(layer, (rg.facts.Entropy(),)) as tape:
        layer(x, x, x)
    assert len(tape) == 1


WRONG: dict[str, dict[str, Any]] = {
    "an integer mask": {"attn_mask": torch.zeros(5, 7).long()},
    "a mask of another length": {"attn_mask": torch.zeros(4, 7)},
    "padding of another length": {"key_padding_mask": torch.zeros(2, 6)},
    "padding of one axis": {"key_padding_mask": torch.zeros(7)},
    "a hint without its mask": {"is_causal": True},
}


@pytest.mark.parametrize("options", WRONG.values(), ids=WRONG.keys())
def test_what_torch_refuses_is_refused(options: dict[str, Any]) -> None:
    for layer in pair(batch_first=True):
        with pytest.raises((AssertionError, RuntimeError)):
            layer(torch.randn(2, 5, 12), torch.randn(2, 7, 12), torch.randn(2, 7, 12), **options)


def a_function_call(**options: Any) -> dict[str, Any]:
    q, k = torch.randn(5, 2, 12), torch.randn(7, 2, 12)
    call = {"query": q, "key": k, "value": k, "embed_dim_to_check": 12, "num_heads": 3, "dropout_p": 0.0}
    call |= {"in_proj_weight": torch.randn(36, 12), "in_proj_bias": None, "bias_k": None, "bias_v": None}
    call |= {"add_zero_attn": False, "out_proj_weight": torch.randn(12, 12), "out_proj_bias": None}
    return {**call, **options}


ONE, STATIC = torch.randn(1, 1, 12), torch.randn(6, 4, 4)
WRONG_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "static_k with bias_k": ({"bias_k": ONE, "bias_v": ONE, "static_k": STATIC, "static_v": STATIC}, "with static_k"),
    "bias_k alone": ({"bias_k": ONE}, "bias_k is given and bias_v is None"),
    "bias_v alone": ({"bias_v": ONE}, "bias_v is given and bias_k is None"),
    "static_k of another batch": ({"static_k": STATIC[:3], "static_v": STATIC[:3]}, r"static_k has shape \(3, 4, 4\)"),
    "static_v of another width": ({"static_k": STATIC, "static_v": torch.randn(6, 4, 5)}, "static_v has shape"),
    "keys of another batch": ({"key": torch.randn(7, 1, 12), "value": torch.randn(7, 1, 12)}, "expected one batch"),
    "values of another batch": ({"value": torch.randn(7, 1, 12)}, "key has shape .*value"),
    "heads that do not divide": ({"num_heads": 5}, "embed_dim is 12, num_heads 5"),
    "another number of weights": ({"in_proj_weight": torch.randn(30, 12)}, "in_proj_weight has shape"),
    "a mask of float64": ({"attn_mask": torch.randn(5, 7).double()}, "masks add up to torch.float64"),
    "bias_k of a dtype": ({"bias_k": ONE.double(), "bias_v": ONE.double()}, "k has dtype torch.float64"),
}


@pytest.mark.parametrize(("options", "why"), WRONG_CALLS.values(), ids=WRONG_CALLS.keys())
def test_what_torchs_function_refuses_is_refused(options: dict[str, Any], why: str) -> None:
    call = a_function_call(**options)
    with pytest.raises((AssertionError, RuntimeError)):
        nn.functional.multi_head_attention_forward(**call)
    with pytest.raises((AssertionError, RuntimeError), match=why):
        multi_head_attention_forward(**call)


def test_several_keys_appended_and_recorded() -> None:
    for shape in ((2, 1, 12), (12,)):
        call = a_function_call(bias_k=torch.randn(shape), bias_v=torch.randn(shape))
        model = Function(call)
        with rg.record(model, (rg.facts.Visible(),)) as tape:
            expected = model()
        torch.testing.assert_close(multi_head_attention_forward(**call), expected, atol=1e-4, rtol=1e-4)
        assert (tape[tape.names[0]][0][rg.facts.Visible()] == expected[1].shape[-1]).all()


class Function(nn.Module):
    """torch's function as a model."""

    def __init__(self, call: dict[str, Any]) -> None:
        super().__init__()
        self.call = call

    def forward(self) -> Any:
        return nn.functional.multi_head_attention_forward(**self.call)


def test_a_mask_that_torch_never_reads_may_be_anything() -> None:
    """The hint is believed where no weights are wanted and nothing is padded; under a patch too."""
    for mask in (torch.ones(2, 3), torch.ones(5, 7).long()):
        call = a_function_call(attn_mask=mask, is_causal=True, need_weights=False)
        expected = nn.functional.multi_head_attention_forward(**call)[0]
        torch.testing.assert_close(multi_head_attention_forward(**call)[0], expected, atol=1e-4, rtol=1e-4)
        with rg.patch(report=None) as patch:
            found = nn.functional.multi_head_attention_forward(**call)[0]
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert patch.calls.total() == 1
        with pytest.raises((AssertionError, RuntimeError)):
            multi_head_attention_forward(**{**call, "need_weights": True})


@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.full) for n in range(100, 2000, 100))])
def test_random_calls_are_answered_or_refused_as_by_torch(first: int) -> None:
    found = {seed: difference(seed) for seed in range(first, first + 100)}
    assert {seed: why for seed, why in found.items() if why is not None} == {}
    refused = sum(answer(nn.functional.multi_head_attention_forward, a_call(seed)) is None for seed in found)
    assert 20 < refused < 80


def test_the_signatures_are_torchs() -> None:
    functional = nn.functional.multi_head_attention_forward
    for ours, theirs in (
        (MultiheadAttention.__init__, nn.MultiheadAttention.__init__),
        (MultiheadAttention.forward, nn.MultiheadAttention.forward),
        (multi_head_attention_forward, functional),
    ):
        named = [{n: p.default for n, p in inspect.signature(f).parameters.items()} for f in (ours, theirs)]
        assert named[0] == named[1]
