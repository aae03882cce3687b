"""Scores with parameters, as modules: called, they return the Score value that holds them."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from regard.core.wrong_calls import answers_wrong_calls, kind_of
from regard.scores.activations import Activation, Tanh
from regard.scores.additive import Additive
from regard.scores.algebra import Score, as_pipeline
from regard.scores.similarity import Bilinear


@answers_wrong_calls({}, "d_q and d_k are the widths of a query and of a key.")
class BilinearScore(nn.Module):
    """Learns M of s_ij = q_i^T M k_j; calling it gives Bilinear(M).

    d_q, d_k   widths of a query and of a key, which may differ
    heads      None: one M (d_q, d_k) for all heads; a number: one each, (heads, d_q, d_k)

    M starts normal with variance 1 / (d_q d_k), so that scores of standard normal queries and keys have variance 1, as
    those of ScaledDot. Source: Luong et al. 2015 (arXiv 1508.04025), "general".

    >>> import regard as rg
    >>> score = BilinearScore(5, 3)
    >>> rg.attention(torch.randn(7, 5), torch.randn(11, 3), torch.randn(11, 2), score=score()).shape
    torch.Size([7, 2])
    """

    def __init__(
        self,
        d_q: int,
        d_k: int,
        *,
        heads: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.m = nn.Parameter(torch.empty(*_lead(heads), d_q, d_k, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises M again."""
        d_q, d_k = self.m.shape[-2:]
        nn.init.normal_(self.m, std=(d_q * d_k) ** -0.5)

    def forward(self) -> Bilinear:
        return Bilinear(self.m)

    def extra_repr(self) -> str:
        return f"m={tuple(self.m.shape)}"


@answers_wrong_calls(
    dict.fromkeys(("d_hidden", "hidden_size", "units"), "write hidden="),
    "d_q and d_k are the widths of a query and of a key, hidden that of the hidden layer.",
)
class AdditiveScore(nn.Module):
    """Learns the weights of s_ij = w · f(q_i w_q + k_j w_k + b); calling it gives Additive(w_q, w_k, w, b, f).

    d_q, d_k   widths of a query and of a key, which may differ
    hidden     width of the hidden layer
    heads      None: one set of weights for all heads; a number: one each
    key_heads  of w_k, where keys have fewer heads (grouped queries); default `heads`
    bias       whether there is a b
    activation f: Tanh(), Sigmoid() or LeakyReLU()

    w_q and w_k start normal with variance 1 / (d_q + d_k), w with variance 1 / hidden, b at 0.
    Source: Bahdanau et al. 2014 (arXiv 1409.0473); with LeakyReLU(), Brody et al. 2021, GATv2 (arXiv 2105.14491).

    >>> import regard as rg
    >>> score = AdditiveScore(5, 3, hidden=13)
    >>> rg.attention(torch.randn(7, 5), torch.randn(11, 3), torch.randn(11, 2), score=score()).shape
    torch.Size([7, 2])
    """

    def __init__(
        self,
        d_q: int,
        d_k: int,
        hidden: int,
        *,
        heads: int | None = None,
        key_heads: int | None = None,
        bias: bool = False,
        activation: Activation = Tanh(),
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation

        def empty(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self.w_q = empty(*_lead(heads), d_q, hidden)
        self.w_k = empty(*_lead(heads if key_heads is None else key_heads), d_k, hidden)
        self.w = empty(*_lead(heads), hidden)
        self.b = empty(*_lead(heads), hidden) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialises the weights again."""
        std = (self.w_q.shape[-2] + self.w_k.shape[-2]) ** -0.5
        nn.init.normal_(self.w_q, std=std)
        nn.init.normal_(self.w_k, std=std)
        nn.init.normal_(self.w, std=self.w.shape[-1] ** -0.5)
        if self.b is not None:
            nn.init.zeros_(self.b)

    def forward(self) -> Additive:
        return Additive(self.w_q, self.w_k, self.w, self.b, self.activation)

    def extra_repr(self) -> str:
        shapes = f"w_q={tuple(self.w_q.shape)}, w_k={tuple(self.w_k.shape)}"
        return shapes if self.activation == Tanh() else f"{shapes}, activation={self.activation!r}"


class OwnedScore(nn.Module):
    """A module with the tensors of any Score: they move with it; those that are nn.Parameter are trained and saved.

    The others are buffers that are not in the state_dict: pass them again when you build the layer. Layers wrap a score
    with tensors automatically.

    >>> from regard.scores.modifiers import Bias
    >>> from regard.scores.similarity import Dot
    >>> score = OwnedScore(Dot() >> Bias(nn.Parameter(torch.zeros(3, 3))))
    >>> score.double()().tensors()[0].dtype
    torch.float64
    """

    def __init__(self, score: Score) -> None:
        super().__init__()
        self._form = score.with_tensors(iter([torch.empty(0, dtype=t.dtype, device="cpu") for t in score.tensors()]))
        self._names = tuple(f"t{n}" for n in range(len(score.tensors())))
        for name, t in zip(self._names, score.tensors(), strict=True):
            if isinstance(t, nn.Parameter):
                self.register_parameter(name, t)
            else:
                self.register_buffer(name, t, persistent=False)

    def forward(self) -> Score:
        return self._form.with_tensors(cast(Tensor, getattr(self, name)) for name in self._names)

    def extra_repr(self) -> str:
        return repr(self())


def owned(score: Score | nn.Module) -> Score | nn.Module:
    """The score as an attribute of a layer: a Score that holds tensors becomes an OwnedScore."""
    if not isinstance(score, (Score, nn.Module)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"score is {kind_of(score)}; expected a Score, or a module that returns one when called.")
    if not isinstance(score, Score):
        return score
    as_pipeline(score)
    return OwnedScore(score) if score.tensors() else score


def _lead(heads: int | None) -> tuple[int, ...]:
    return () if heads is None else (heads,)
