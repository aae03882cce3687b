"""What the tests of `record` share: small models, and the dense weights that facts are measured by."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import _len_torch_function_stack

import regard as rg
from regard.call.hooks import _OBSERVERS
from regard.inspect.tape import Recorded

FACTS = (rg.facts.Inputs(), rg.facts.Entropy(), rg.facts.Received(), rg.facts.MaxScore())


def weights(call: Recorded) -> Tensor:
    """The dense weights of a recorded call, from the inputs that were kept."""
    told = call[rg.facts.Inputs()]
    return rg.attention_weights(
        told.q, told.k, score=told.score, mask=told.mask, positions=told.positions, sink=told.sink
    )


def measure(call: Recorded, p: Tensor) -> None:
    """The inputs that were kept, and the facts, are those of the weights p (batch, h, nq, nk)."""
    torch.testing.assert_close(weights(call).reshape(p.shape), p)
    entropy, received = call[rg.facts.Entropy()], call[rg.facts.Received()]
    torch.testing.assert_close(entropy.reshape(p.shape[:-1]), -torch.special.xlogy(p, p).sum(-1))
    torch.testing.assert_close(received.reshape(*p.shape[:-2], p.shape[-1]), p.sum(-2))


class Plain(nn.Module):
    """A self-attention layer as one writes it by hand, by torch's function; `options` are those of the function."""

    def __init__(self, width: int = 12, heads: int = 3, key_heads: int = 3, **options: object) -> None:
        super().__init__()
        self.heads, self.key_heads, self.options = heads, key_heads, options
        self.q = nn.Linear(width, width)
        self.kv = nn.Linear(width, 2 * width // heads * key_heads)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.q(x).unflatten(-1, (self.heads, -1)).transpose(-3, -2)
        k, v = self.kv(x).unflatten(-1, (2 * self.key_heads, -1)).transpose(-3, -2).chunk(2, -3)
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        out = scaled_dot_product_attention(*self.project(x), **self.options)
        return out.transpose(-3, -2).flatten(-2)


class Block(nn.Module):
    """A residual block."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(12), attention

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


def model() -> nn.Sequential:
    """A plain layer, one of torch's, one of regard's."""
    return nn.Sequential(Block(Plain(is_causal=True)), Block(Own()), Block(rg.nn.MultiHeadAttention(12, heads=3)))


class Own(nn.Module):
    """torch's layer, on its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(12, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x, x, need_weights=False)[0]


NAMES = ("0.attention", "1.attention.layer", "2.attention")


def x() -> Tensor:
    return torch.randn(2, 7, 12)


def world() -> tuple[Any, ...]:
    """What a recording touches, and must leave as it was."""
    modules = nn.modules.module
    return (
        torch.overrides.has_torch_function,
        nn.MultiheadAttention.merge_masks,
        _len_torch_function_stack(),
        len(modules._global_forward_hooks) + len(modules._global_forward_pre_hooks),
        len(modules._global_forward_hooks_always_called),
        len(_OBSERVERS),
        torch.backends.mha.get_fastpath_enabled(),
        torch.is_grad_enabled(),
        torch.get_rng_state().tolist(),
    )
