"""torch.nn.attention.bias.causal_upper_left and causal_lower_right: rules that have the class of a tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import regard as rg
from regard.compat.torch import MultiheadAttention, scaled_dot_product_attention
from regard.masks.convert import from_sdpa

Make = Callable[[int, int], Any]
MAKES: dict[str, tuple[Make, Callable[[int, int], Tensor]]] = {
    "upper left": (causal_upper_left, lambda nq, nk: torch.ones(nq, nk).tril().bool()),
    "lower right": (causal_lower_right, lambda nq, nk: torch.ones(nq, nk).tril(nk - nq).bool()),
}
BOTH = pytest.mark.parametrize(("make", "allowed"), MAKES.values(), ids=MAKES.keys())


def drawn(nq: int, nk: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(2, 3, n, 8, dtype=dtype, requires_grad=True) for n in (nq, nk, nk)]


def results(function: Callable[..., Tensor], tensors: list[Tensor], mask: Any) -> tuple[Tensor, ...]:
    out = function(*tensors, attn_mask=mask)
    return out, *torch.autograd.grad(out, tensors, torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out))


@BOTH
@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
@pytest.mark.parametrize(("nq", "nk"), [(5, 7), (7, 5), (6, 6), (1, 7)])
def test_the_function(make: Make, allowed: Make, nq: int, nk: int) -> None:
    tensors = drawn(nq, nk)
    expected = results(scaled_dot_product_attention, tensors, allowed(nq, nk))
    for _ in range(2):  # the second has a plan
        found = results(scaled_dot_product_attention, tensors, make(nq, nk))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@BOTH
def test_patched(make: Make, allowed: Make) -> None:
    for dtype, why in ((torch.float32, None), (torch.float64, "its tensors are float64, which the kernels are not")):
        tensors = drawn(5, 7, dtype)
        expected = results(F.scaled_dot_product_attention, tensors, allowed(5, 7))
        for mask in (make(5, 7), allowed(5, 7)):
            with rg.patch(report=None) as patch:
                found = results(F.scaled_dot_product_attention, tensors, mask)
            assert dict(patch.calls) == {("scaled_dot_product_attention", why): 1}
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@BOTH
def test_converted_and_recorded(make: Make, allowed: Make) -> None:
    read = from_sdpa(make(5, 7), 5, 7)
    assert read.mask == rg.Causal() and read.bias is None
    assert read.mask.dense(5, 7, positions=read.positions).squeeze().equal(allowed(5, 7))

    class Model(nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, k, attn_mask=make(5, 7))

    model, (q, k, _) = Model(), drawn(5, 7)
    with rg.record(model, (rg.facts.Visible(),)) as tape:
        model(q, k)
    assert tape[tape.names[0]][0][rg.facts.Visible()][0, 0].equal(allowed(5, 7).sum(-1))


def test_what_does_not_fit_is_refused_and_left_to_torch_when_patched() -> None:
    (q, k, v), mask = drawn(5, 7), causal_upper_left(5, 5)
    with pytest.raises(RuntimeError, match=r"of 5 queries and 5 keys; the call has 5 and 7.*causal_upper_left\(5, 7\)"):
        scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with pytest.raises(TypeError, match=r"mask is a CausalBias of float32; write mask=Causal\(\), at positions=head"):
        rg.attention(q, k, v, mask=mask)
    with pytest.raises(RuntimeError, match="both given"):
        scaled_dot_product_attention(q, q, q, attn_mask=mask, is_causal=True)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with rg.patch(report=None) as patch:
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert found.equal(expected)
    assert list(patch.calls) == [("scaled_dot_product_attention", "attn_mask is a causal bias of other lengths")]


class Named(Tensor):
    """A subclass that regard does not know."""


def test_masks_of_other_subclasses_stay_with_torch() -> None:
    (q, k, v), mask = drawn(5, 7), torch.randn(5, 7).as_subclass(Named)
    with pytest.raises(RuntimeError, match="attn_mask is a Named, a subclass"):
        scaled_dot_product_attention(q, k, v, attn_mask=mask)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    with rg.patch(report=None) as patch:
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert type(found) is Named and found.equal(expected)
    assert list(patch.calls.values()) == [1] and "left to torch: an argument is a Named, a subclass" in str(patch)


@pytest.mark.parametrize("name", ["attn_mask", "key_padding_mask"])
def test_masks_of_other_subclasses_of_a_layer(name: str) -> None:
    layer, x = MultiheadAttention(8, 1), torch.randn(5, 1, 8)
    theirs = nn.MultiheadAttention(8, 1)
    shape = (5, 5) if name == "attn_mask" else (1, 5)
    mask = {name: torch.randn(shape).as_subclass(Named)}
    with pytest.raises(RuntimeError, match=f"{name} is a Named, a subclass"):
        layer(x, x, x, **mask)
    expected = theirs(x, x, x, **mask)[0]
    with rg.patch(report=None) as patch:
        assert theirs(x, x, x, **mask)[0].equal(expected)
    assert "0 of 1 attention calls ran on regard" in str(patch) and "an argument is a Named" in str(patch)


def test_a_causal_bias_is_no_mask_of_a_layer() -> None:
    layer, x = MultiheadAttention(8, 1), torch.randn(5, 1, 8)
    with pytest.raises(RuntimeError, match=r"attn_mask is a CausalBias.*causal_upper_left"):
        layer(x, x, x, attn_mask=causal_upper_left(5, 5))
    with rg.patch(report=None) as patch:  # torch adds what it holds
        nn.MultiheadAttention(8, 1)(x, x, x, attn_mask=causal_upper_left(5, 5))
    assert "0 of 1 attention calls ran on regard" in str(patch) and "an argument is a CausalBias" in str(patch)


@pytest.mark.full
@BOTH
def test_compiled_under_a_patch(make: Make, allowed: Make) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    q, k, v = (t.detach() for t in drawn(5, 7))
    expected = call(q, k, v, allowed(5, 7))
    with rg.patch(report=None):
        found = torch.compile(call, backend="aot_eager")(q, k, v, make(5, 7))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
