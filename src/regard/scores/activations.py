"""Activations: what the hidden layer of an additive score applies to each of its numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.core.value import Value
from regard.core.wrong_calls import answers_wrong_calls

# exp(±2 · 30) and their products stay within float32, but for those whose activation is at its end
_EXPONENT = 30.0


@dataclass(frozen=True)
class Activation(Value):
    """A function f of one number, monotone, that knows its derivative from its own value."""

    def of(self, x: Tensor) -> Tensor:
        """f(x)."""
        raise NotImplementedError(f"{type(self).__name__} does not define of(x).")

    def of_sums(self, q: Tensor, k: Tensor) -> Tensor:
        """f(q + k) of finite numbers, where both broadcast: by what is done once an element, if that is cheaper."""
        return self.of(q + k)

    def slope_(self, y: Tensor) -> Tensor:
        """f'(x) where y = f(x), in the memory of y."""
        raise NotImplementedError(f"{type(self).__name__} does not define slope_(y).")


@dataclass(frozen=True)
class Tanh(Activation):
    """tanh x. Source: Bahdanau et al. 2014 (arXiv 1409.0473).

    >>> Tanh().of(torch.tensor([0.0, 50.0]))
    tensor([0., 1.])
    """

    def of(self, x: Tensor) -> Tensor:
        return torch.tanh(x)

    def of_sums(self, q: Tensor, k: Tensor) -> Tensor:
        if not _moderate(q, k):
            return (q + k).tanh_()
        # tanh x = 1 - 2 / (exp 2x + 1), and exp(2q + 2k) is a product: no exponential a pair
        return ((2 * q).exp() * (2 * k).exp()).add_(1).reciprocal_().mul_(-2).add_(1)

    def slope_(self, y: Tensor) -> Tensor:
        return y.square_().neg_().add_(1)


@dataclass(frozen=True)
class Sigmoid(Activation):
    """1 / (1 + exp -x).

    >>> Sigmoid().of(torch.tensor([0.0, 50.0]))
    tensor([0.5000, 1.0000])
    """

    def of(self, x: Tensor) -> Tensor:
        return torch.sigmoid(x)

    def of_sums(self, q: Tensor, k: Tensor) -> Tensor:
        if not _moderate(q, k):
            return (q + k).sigmoid_()
        return ((-q).exp() * (-k).exp()).add_(1).reciprocal_()

    def slope_(self, y: Tensor) -> Tensor:
        return y.sub_(y.square())


@answers_wrong_calls({"negative_slope": "write LeakyReLU(slope=negative_slope)"})
@dataclass(frozen=True)
class LeakyReLU(Activation):
    """max(x, slope · x), 0 ≤ slope ≤ 1: the activation of GATv2, with its slope.

    Raises ValueError for another slope. Source: Brody et al. 2021, "How Attentive are Graph Attention Networks?"
    (arXiv 2105.14491), equation 7.

    >>> LeakyReLU(0.5).of(torch.tensor([-4.0, 4.0]))
    tensor([-2.,  4.])
    """

    slope: float = 0.2

    def __post_init__(self) -> None:
        if not 0 <= self.slope <= 1:
            raise ValueError(f"LeakyReLU(slope={self.slope}): expected a slope from 0 to 1.")

    def of(self, x: Tensor) -> Tensor:
        return torch.nn.functional.leaky_relu(x, self.slope)

    def slope_(self, y: Tensor) -> Tensor:
        return torch.full_like(y, self.slope).masked_fill_(y > 0, 1)


def _moderate(*tensors: Tensor) -> bool:
    """Whether no number is so large that an exponential of its double, or a product of two, leaves float32."""
    return all(float(t.abs().amax()) <= _EXPONENT for t in tensors if t.numel())
