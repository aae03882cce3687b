"""Tensors that are not numbers at an address: other layouts, lazy views, zeros without memory, subclasses of Tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.masked import masked_tensor
from torch.nn.attention.bias import causal_upper_left
from torch.testing._internal.two_tensor import TwoTensor

import regard as rg
from fuzz.build import Unplanned

NQ, NK, D = 5, 7, 4
BACKENDS = (None, rg.Native(), Unplanned(), rg.Tiled(), rg.Reference())
Wrap = Callable[[Tensor], Tensor]


class Named(Tensor):
    """A subclass with torch's own __torch_function__."""


def zeros(t: Tensor) -> Tensor:
    return torch._efficientzerotensor(t.shape)


def negated(t: Tensor) -> Tensor:
    return torch._neg_view(-t)


def imaginary(t: Tensor) -> Tensor:
    return torch.complex(t, -t).conj().imag


def drawn() -> dict[str, Tensor]:
    """The tensors of a call, by the place that they have in it."""
    shapes = {"q": (2, 3, NQ, D), "k": (2, 3, NK, D), "v": (2, 3, NK, D), "bias": (3, NQ, NK), "sink": (3,)}
    return {name: torch.randn(shape) for name, shape in shapes.items()} | {"slopes": torch.rand(3)}


def called(tensors: dict[str, Tensor], backend: Any) -> Tensor:
    score = rg.ScaledDot() >> rg.Alibi(tensors["slopes"]) >> rg.Bias(tensors["bias"])
    options = {"score": score, "sink": tensors["sink"], "positions": rg.head(NQ, NK), "backend": backend}
    return rg.attention(tensors["q"], tensors["k"], tensors["v"], mask=rg.Causal(), **options)


PLACES = (*drawn(),)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("wrap", [zeros, negated, imaginary, nn.Parameter])
def test_what_stands_for_numbers_is_read_as_them(wrap: Wrap, place: str) -> None:
    tensors = drawn()
    odd = {**tensors, place: wrap(tensors[place])}
    plain = {**tensors, place: odd[place].detach().clone().resolve_neg()}
    for backend in BACKENDS:
        torch.testing.assert_close(called(odd, backend), called(plain, backend))


@pytest.mark.parametrize("wrap", [zeros, negated, imaginary, nn.Parameter])
def test_as_the_gradient_of_the_output(wrap: Wrap) -> None:
    q, k, v = (torch.randn(2, 3, NQ, D, requires_grad=True) for _ in range(3))
    seed = torch.randn(2, 3, NQ, D)
    plain = wrap(seed).detach().clone().resolve_neg()
    for backend in BACKENDS:
        for _ in range(2):  # the second has a plan
            out = rg.attention(q, k, v, backend=backend)
            found = torch.autograd.grad(out, (q, k, v), wrap(seed), retain_graph=True)
            torch.testing.assert_close(found, torch.autograd.grad(out, (q, k, v), plain))


REFUSED: dict[str, tuple[Wrap, str]] = {
    "sparse": (Tensor.to_sparse, "layout torch.sparse_coo; expected a dense tensor, torch.strided: pass x.to_dense"),
    "mkldnn": (Tensor.to_mkldnn, "layout torch._mkldnn; expected a dense tensor"),
    "quantized": (lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8), "quantized, torch.qint8; .*dequantize"),
    "complex": (lambda t: torch.complex(t, t).conj(), "dtype torch.complex64; expected float"),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("wrap", "why"), REFUSED.values(), ids=REFUSED.keys())
def test_other_layouts_and_dtypes_are_refused_by_name(wrap: Wrap, why: str, place: str) -> None:
    tensors = drawn()
    with pytest.raises(TypeError, match=f"{place} (is|has|has the) {why}"):
        called({**tensors, place: wrap(tensors[place])}, None)


SUBCLASSES: dict[str, tuple[Wrap, str]] = {
    "a subclass": (lambda t: t.as_subclass(Named), "is a Named, a subclass of torch.Tensor.*as_subclass"),
    "a causal bias": (lambda t: causal_upper_left(*t.shape[-2:]), r"is a CausalBias.* it is Causal\(\), at head"),
    "a masked tensor": (lambda t: masked_tensor(t, t == t), r"is a MaskedTensor.*x.get_data\(\)"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.parametrize(("wrap", "why"), SUBCLASSES.values(), ids=SUBCLASSES.keys())
def test_subclasses_that_mean_something_else_are_refused_beside_q_k_and_v(wrap: Wrap, why: str) -> None:
    numbers, allowed, counts = wrap(torch.rand(NQ, NK)), torch.ones(NQ, NK).bool(), torch.ones(2, 2).long()
    makes: list[Callable[[], object]] = [
        lambda: rg.Bias(numbers),
        lambda: rg.ScaledDot() >> rg.SoftCap(numbers),
        lambda: rg.Dense(wrap(allowed)),
        lambda: rg.Lengths(keys=wrap(counts)),
        lambda: rg.Prefix(wrap(counts)),
        lambda: rg.Documents(wrap(counts)),
        lambda: called({**drawn(), "sink": numbers}, None),
    ]
    for make in makes:
        with pytest.raises(TypeError, match=why):
            make()


def test_a_subclass_as_q_k_and_v_answers_in_kind() -> None:
    tensors = drawn()
    named = {name: t.as_subclass(Named) if name in "qkv" else t for name, t in tensors.items()}
    found = called(named, None)
    assert type(found) is Named
    torch.testing.assert_close(found.as_subclass(Tensor), called(tensors, None))


@pytest.mark.parametrize("place", PLACES)
def test_a_class_without_memory_is_no_matter_of_the_kernels(place: str) -> None:
    """Its operations of torch are: the output is of its class."""
    a, b = drawn(), drawn()
    both = {name: t if name != place else TwoTensor(t, b[name]) for name, t in a.items()}
    with pytest.raises(rg.Unsupported, match="a TwoTensor holds its numbers elsewhere than at an address"):
        called(both, rg.Native())
    for backend in (rg.Tiled(), rg.Reference()):
        found: Any = called(both, backend)
        torch.testing.assert_close(found.a, called(a, rg.Reference()))
        torch.testing.assert_close(found.b, called({**a, place: b[place]}, rg.Reference()))
