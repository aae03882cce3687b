"""flex_attention on regard: torch's results, gradients that torch lacks on a CPU, and what patch leaves to torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as theirs
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import regard as rg
from regard.compat.torch import flex_attention
from selection import few

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings("ignore:return_lse is deprecated"),
]
BATCH, HEADS, KEY_HEADS, NQ, NK, WIDTH = 3, 4, 2, 11, 13, 8
BIAS, BY_HEAD = torch.randn(NQ, NK), torch.randn(BATCH, HEADS, NQ, NK)
DOCUMENTS = torch.randint(3, (BATCH, NK))
SLOPES = torch.rand(HEADS)
SCORES: dict[str, Callable[..., Tensor] | None] = {
    "none": None,
    "slopes": lambda s, b, h, i, j: s - SLOPES[h] * (i - j).abs(),
    "bias": lambda s, b, h, i, j: s + BIAS[i, j],
    "bias by head": lambda s, b, h, i, j: s + BY_HEAD[b][h][i][j],
    "cap": lambda s, b, h, i, j: 0.5 * torch.tanh(s / 0.5),
    "hides": lambda s, b, h, i, j: torch.where(i >= j, s, -float("inf")),
}
MASKS: dict[str, tuple[Callable[..., Tensor], int | None, int | None] | None] = {
    "everything": None,
    "causal": (lambda b, h, i, j: i >= j, None, None),
    "empty rows": (lambda b, h, i, j: i > j + 3, None, None),
    "documents": (lambda b, h, i, j: DOCUMENTS[b, i] == DOCUMENTS[b][j], BATCH, None),
    "by head": (lambda b, h, i, j: (i - j).abs() <= h, None, HEADS),
}


def drawn() -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((BATCH, HEADS, NQ, WIDTH), (BATCH, KEY_HEADS, NK, WIDTH), (BATCH, KEY_HEADS, NK, WIDTH))
    q, k, v = (torch.randn(shape) for shape in shapes)
    return q, k, v


def block_mask(name: str) -> Any:
    made = MASKS[name]
    return made if made is None else create_block_mask(*made, NQ, NK, device="cpu")


@pytest.mark.parametrize("mask", few(MASKS, "empty rows", "documents"))
@pytest.mark.parametrize("score", few(SCORES, "bias by head", "cap"))
def test_like_torch(score: str, mask: str) -> None:
    q, k, v = drawn()
    options = {"score_mod": SCORES[score], "block_mask": block_mask(mask), "enable_gqa": True}
    expected = theirs.flex_attention(q, k, v, **options, return_lse=True)
    torch.testing.assert_close(flex_attention(q, k, v, **options, return_lse=True), expected)
    with rg.patch(report=None) as patch:
        found = theirs.flex_attention(q, k, v, **options, scale=0.2)
    assert dict(patch.calls) == {("flex_attention", None): 1}
    torch.testing.assert_close(found, theirs.flex_attention(q, k, v, **options, scale=0.2))


@pytest.mark.parametrize("mask", ["everything", "empty rows"])
def test_an_aux_request_is_answered_as_torch_does(mask: str) -> None:
    (q, k, v), asked = drawn(), theirs.AuxRequest(lse=True)
    options = {"block_mask": block_mask(mask), "enable_gqa": True, "scale": 0.2, "return_aux": asked}
    with rg.patch(report=None) as patch:
        found = theirs.flex_attention(q, k, v, **options)
    assert dict(patch.calls) == {("flex_attention", None): 1}
    expected = theirs.flex_attention(q, k, v, **options)
    torch.testing.assert_close((found[0], found[1].lse), (expected[0], expected[1].lse))
    assert found[1].max_scores is None


@pytest.mark.parametrize("mask", ["everything", "empty rows", "documents"])
def test_gradients(mask: str) -> None:
    """Of the definition written out; torch has none on a CPU."""
    q, k, v = (t.double().requires_grad_() for t in drawn())
    out = flex_attention(q, k, v, SCORES["slopes"], block_mask(mask), enable_gqa=True)
    b, h = torch.arange(BATCH)[:, None, None, None], torch.arange(HEADS)[:, None, None]
    i, j = torch.arange(NQ)[:, None], torch.arange(NK)
    keys, values = (t.repeat_interleave(HEADS // KEY_HEADS, 1) for t in (k, v))
    s = q @ keys.mT / WIDTH**0.5 - SLOPES[h] * (i - j).abs()
    seen = {"everything": j >= 0, "empty rows": i > j + 3, "documents": DOCUMENTS[b, i] == DOCUMENTS[b, j]}[mask]
    p = s.masked_fill(~seen, -1e300).softmax(-1).masked_fill(~seen, 0)
    torch.testing.assert_close(out, p @ values)
    weight = torch.randn_like(out)
    found, expected = (torch.autograd.grad((o * weight).sum(), (q, k, v)) for o in (out, p @ values))
    torch.testing.assert_close(found, expected)


def test_a_mask_runs_natively_and_is_asked_once_for_all_heads() -> None:
    q, k, v = drawn()
    from regard.compat.torch.mask_mods import MaskMod

    mask = MaskMod(lambda b, h, i, j: i >= j)
    assert "native" in str(rg.explain(q, k, v, mask=mask)).lower().splitlines()[0]
    assert mask.on(NQ, NK, batch=(BATCH,), heads=HEADS).dense().shape == (1, 1, NQ, NK)


OF_FIVE = create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 5, 5, "cpu")
LEARNED, FACTOR = torch.randn(NQ, NQ, requires_grad=True), torch.rand(HEADS, requires_grad=True)
Q, K, V = drawn()
LEFT: dict[str, tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any], str]] = {
    "dtypes": ((Q, Q, Q.bfloat16()), {}, "expected one dtype"),
    "heads": ((Q, K, V), {}, "with enable_gqa"),
    "axes": ((Q[0], Q[0], Q[0]), {}, "expected four axes"),
    "another length": (
        (Q, Q, Q),
        {"block_mask": create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 5, 5, "cpu")},
        "crea",
    ),
    "largest": ((Q, Q, Q), {"return_aux": theirs.AuxRequest(max_scores=True)}, "largest scores"),
}


@pytest.mark.parametrize(("tensors", "options", "said"), LEFT.values(), ids=LEFT.keys())
def test_what_torch_keeps(tensors: tuple[Tensor, Tensor, Tensor], options: dict[str, Any], said: str) -> None:
    with pytest.raises(rg.Unsupported, match=said):
        flex_attention(*tensors, **options)
    with contextlib.suppress(Exception), rg.patch(report=None) as patch:  # torch's own refusal, of what it refuses too
        theirs.flex_attention(*tensors, **options)
    assert patch.calls.total() == 1 and said in str(patch)


def learned(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s * FACTOR[h] + LEARNED[i, j].sin()


def test_a_learned_score_serves_inference() -> None:
    with torch.no_grad():
        torch.testing.assert_close(flex_attention(Q, Q, Q, learned), theirs.flex_attention(Q, Q, Q, learned))


def written_out(q: Tensor, learned_bias: Tensor, factor: Tensor) -> Tensor:
    s = q @ q.mT / WIDTH**0.5 * factor[:, None, None] + learned_bias.sin()
    return s.softmax(-1) @ q


def test_training_behind_a_call_in_inference_mode() -> None:
    """What is kept of equal functions was made where tensors may not be saved for a backward."""
    slopes, bias, real = torch.rand(2), torch.rand(1, 2, 20, 20), torch.arange(20)[None] < 17
    functions: list[tuple[Callable[..., Tensor], Callable[..., Tensor]]] = [
        (lambda s, b, h, i, j: s - slopes[h] * (i - j).abs(), lambda b, h, i, j: real[b, j]),
        (lambda s, b, h, i, j: s + bias[b, h, i, j], lambda b, h, i, j: (i >= j) & real[b, j]),
    ]
    for score, mask in functions:
        block_mask = create_block_mask(mask, 1, None, 20, 20, device="cpu")
        x = torch.randn(1, 2, 20, 8)
        with torch.inference_mode():
            seen = flex_attention(x, x, x, score, block_mask=block_mask)
        q = x.clone().requires_grad_()
        out = flex_attention(q, q, q, score, block_mask=block_mask)
        assert torch.equal(out, seen)
        assert torch.autograd.grad(out.sum(), q)[0].isfinite().all()


def test_a_condition_of_numbers_with_few_queries() -> None:
    """torch.logical_and makes a condition of a tokenizer's integers; whatever the number of queries."""
    real = torch.tensor([1, 1, 1, 0] * 8)
    for n in (4, 32):
        x = torch.randn(1, 2, n, 8)
        block_mask = create_block_mask(
            lambda b, h, i, j: torch.logical_and(i >= j, real[j]), None, None, n, n, device="cpu"
        )
        found = flex_attention(x, x, x, block_mask=block_mask)
        expected = rg.attention(x, x, x, mask=rg.Causal() & rg.Dense((real[:n] > 0)[None, :]))
        torch.testing.assert_close(found, expected)


def test_first_and_second_derivatives_of_what_a_score_reads() -> None:
    """Also by torch.func, where the tensors are wrapped."""
    q, bias, factor = (t.detach().double().requires_grad_() for t in (Q, LEARNED, FACTOR))

    def called(q: Tensor, bias: Tensor, factor: Tensor) -> Tensor:
        return flex_attention(q, q, q, lambda s, b, h, i, j: s * factor[h] + bias[i, j].sin()).square().sum()

    def twice(fn: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        first = torch.autograd.grad(fn(q, bias, factor), (q, bias, factor), create_graph=True)
        return (*first, *torch.autograd.grad(sum(t.square().sum() for t in first), (q, bias, factor)))

    expected = twice(lambda *given: written_out(*given).square().sum())
    torch.testing.assert_close(twice(called), expected)
    by_func = torch.func.grad(called, (0, 1, 2))(q.detach(), bias.detach(), factor.detach())
    torch.testing.assert_close(by_func, expected[:3])


def test_a_patched_call_has_the_gradients_of_what_its_score_reads() -> None:
    q = Q.detach().requires_grad_()
    with rg.patch(report=None) as patch:
        out = theirs.flex_attention(q, q, q, learned)
    assert patch.calls.total() == 1
    found, expected = (
        torch.autograd.grad(o.square().sum(), (q, LEARNED, FACTOR)) for o in (out, written_out(q, LEARNED, FACTOR))
    )
    torch.testing.assert_close(found, expected)


def test_what_stands_under_no_grad_gets_no_gradient() -> None:
    bias, factor = LEARNED.detach().requires_grad_(), FACTOR.detach().requires_grad_()

    def half(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        with torch.no_grad():
            first = bias[i, j].sin()
        return s * factor[h] + first

    found = torch.autograd.grad(flex_attention(Q, Q, Q, half).square().sum(), (bias, factor))
    expected = torch.autograd.grad(written_out(Q, bias.detach(), factor).square().sum(), factor)
    assert not found[0].any()
    torch.testing.assert_close(found[1:], expected)


def test_equal_learned_functions_share_a_plan_and_read_their_own_tensors() -> None:
    from regard.compat.torch import function_copies

    torch.manual_seed(0)

    def out_of(factor: Tensor) -> Tensor:
        return flex_attention(Q, Q, Q, lambda s, b, h, i, j: s * factor[h])

    factors = [torch.rand(HEADS, requires_grad=True) for _ in range(3)]
    outs = [out_of(factor) for factor in factors]
    known = len(function_copies._templates)
    for factor, out in zip(factors, outs, strict=True):
        expected = written_out(Q, torch.zeros(()), factor)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(torch.autograd.grad(out.sum(), factor), torch.autograd.grad(expected.sum(), factor))
    with torch.no_grad():
        factors[0].mul_(2)
    torch.testing.assert_close(out_of(factors[0]), written_out(Q, torch.zeros(()), factors[0]))
    assert len(function_copies._templates) == known


def scaled_by(factor: Tensor) -> Callable[..., Tensor]:
    """A function with a tensor of its own and one of the module, both learned."""
    return lambda s, b, h, i, j: s * factor[h] + 0 * LEARNED[i, j]


def test_tensors_of_closures_and_of_the_module_keep_their_places() -> None:
    factor = torch.rand(HEADS, requires_grad=True)
    for _ in range(2):
        out = flex_attention(Q, Q, Q, scaled_by(factor))
        right = written_out(Q, torch.zeros(()), factor)
        torch.testing.assert_close(out, right)
        found, expected = (torch.autograd.grad(o.square().sum(), (factor,))[0] for o in (out, right))
        torch.testing.assert_close(found, expected)


class Scaling(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.rand(HEADS))

    def forward(self, q: Tensor) -> Tensor:
        return flex_attention(q, q, q, lambda s, b, h, i, j: s * self.factor[h])


def test_modules_and_tables_of_a_loop() -> None:
    """Their variables have other values when the backward runs."""
    layers, tables = [Scaling() for _ in range(3)], [torch.rand(HEADS, requires_grad=True) for _ in range(3)]
    factors = [*(layer.factor for layer in layers), *tables]
    outs = list[Tensor]()
    for layer in layers:
        outs.append(flex_attention(Q, Q, Q, lambda s, b, h, i, j: s * layer.factor[h]))  # noqa: B023
    for n in range(len(tables)):
        outs.append(flex_attention(Q, Q, Q, lambda s, b, h, i, j: s * tables[n][h]))  # noqa: B023
    tables.clear()
    for factor, out in zip(factors, outs, strict=True):
        right = written_out(Q, torch.zeros(()), factor)
        found, expected = (torch.autograd.grad(o.square().sum(), (factor,))[0] for o in (out, right))
        torch.testing.assert_close(found, expected)


class ScalingByName(Scaling):
    """Nothing but its run says which attributes it reads."""

    def forward(self, q: Tensor) -> Tensor:
        return flex_attention(q, q, q, lambda s, b, h, i, j: s * getattr(self, "factor")[h])  # noqa: B009


def test_a_module_whose_parameters_are_put_back_before_the_backward() -> None:
    call, factor = torch.func.functional_call, torch.rand(HEADS)
    learned_factor = factor.clone().requires_grad_()
    right = torch.autograd.grad(written_out(Q, torch.zeros(()), learned_factor).square().sum(), learned_factor)[0]
    out = call(Scaling(), {"factor": learned_factor}, (Q,))
    torch.testing.assert_close(torch.autograd.grad(out.square().sum(), learned_factor)[0], right)
    layer = ScalingByName()
    out = call(layer, {"factor": learned_factor}, (Q,))
    with pytest.raises(RuntimeError, match="reads other tensors now than when flex_attention was called"):
        torch.autograd.grad(out.square().sum(), learned_factor)
    found = torch.func.grad(lambda f: call(layer, {"factor": f}, (Q,)).square().sum())(factor)
    torch.testing.assert_close(found, right)


class Product(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return x * y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return g * y, g * x


def test_a_function_of_autograd_is_refused() -> None:
    scale = torch.ones((), requires_grad=True)
    with pytest.raises(ValueError, match=r"such as a torch\.autograd\.Function: its gradient would be lost"):
        flex_attention(Q, Q, Q, lambda s, b, h, i, j: Product.apply(torch.tanh(s), scale))


def test_a_learned_function_of_other_arguments() -> None:
    with pytest.raises(TypeError, match=r"score_mod cannot be called as fn\(score, b, h, i, j\): too many"):
        flex_attention(Q, Q, Q, lambda s, b, h, i: s * FACTOR[h])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda i, j: None, "None"),
        (lambda i, j: 1.0, "a float"),
        (lambda i, j: (i, j), "a tuple"),
        (lambda i, j: torch.stack([i, j]), r"a tensor of shape \(2,\)"),
    ],
)
def test_what_is_no_number_of_a_pair(answer: Callable[[Tensor, Tensor], Any], said: str) -> None:
    q = torch.randn(1, 2, 9, 8)
    with pytest.raises(TypeError, match=rf"^<lambda> returned {said}; expected the new score of a pair, a tensor of"):
        flex_attention(q, q, q, lambda s, b, h, i, j: answer(i, j))
    count, index = torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    mask = theirs.BlockMask.from_kv_blocks(count, index, mask_mod=lambda b, h, i, j: answer(i, j), seq_lengths=(9, 9))
    with pytest.raises(TypeError, match=rf"^<lambda> returned {said}; expected whether a pair is visible, a tensor of"):
        flex_attention(q, q, q, block_mask=mask)


@pytest.mark.full
def test_compiled_calls_stay_with_torch() -> None:
    compiled = torch.compile(lambda q: theirs.flex_attention(q, q, q), backend="eager")
    with rg.patch(report=None) as patch:
        torch.testing.assert_close(compiled(Q), theirs.flex_attention(Q, Q, Q))
    assert [why for _, why in patch.traced] == ["it is inside torch.compile, which makes a kernel of it"]
