"""Attention pooling: a bag of instances summed up by one learned query."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.api import attention, attention_weights
from regard.core.errors import ShapeError
from regard.core.shapes import listed
from regard.core.wrong_calls import answers_wrong_calls, kind_of
from regard.masks.algebra import Everything, Mask
from regard.scores.similarity import Dot


class AttentionPooling(nn.Module):
    """z = Σ_j a_j h_j with a_j = softmax_j(w · tanh(V h_j)): a bag becomes one vector, whatever its size.

    A bag is h (*batch, n, d_model), z (*batch, d_model). It is attention of one learned query, w, to keys tanh(V h_j)
    with values h_j, in memory linear in n. An empty bag gives 0.

    hidden  width of V h_j
    heads   None: one query; a number: that many on the same keys, z is (*batch, heads, d_model)
    bias    whether V has one (the paper's formula has none, its code has)

    Masks such as Lengths(keys) say which instances are real; a mask that compares positions raises ValueError: the
    query has no position. Source: Ilse, Tomczak and Welling 2018 (arXiv 1802.04712), equation 8.

    >>> import regard as rg
    >>> pool, bags = AttentionPooling(16, hidden=8), torch.randn(3, 100, 16)
    >>> pool(bags, mask=rg.Lengths(torch.tensor([100, 7, 41]))).shape, pool.weights(bags).shape
    (torch.Size([3, 16]), torch.Size([3, 100]))
    """

    @answers_wrong_calls(
        {
            **dict.fromkeys(("embed_dim", "dim", "in_features"), "write d_model=embed_dim"),
            **dict.fromkeys(("num_heads", "n_heads"), "write heads=num_heads"),
            **dict.fromkeys(("hidden_dim", "attention_dim"), "write hidden=hidden_dim"),
        }
    )
    def __init__(
        self,
        d_model: int,
        hidden: int,
        *,
        heads: int | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.d_model, self.heads = d_model, heads
        self.v_proj = nn.Linear(d_model, hidden, bias, device=device, dtype=dtype)
        lead = () if heads is None else (heads,)
        self.query = nn.Parameter(torch.empty(*lead, hidden, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The query starts normal with variance 1 / hidden, projections as nn.Linear."""
        for linear in self.children():
            if isinstance(linear, nn.Linear):
                linear.reset_parameters()
        nn.init.normal_(self.query, std=self.query.shape[-1] ** -0.5)

    def features(self, h: Tensor) -> Tensor:
        """The keys: tanh(V h), (*batch, n, hidden)."""
        return torch.tanh(self.v_proj(h))

    def forward(self, h: Tensor, *, mask: Mask = Everything()) -> Tensor:
        """z (*batch, d_model), or (*batch, heads, d_model), of h (*batch, n, d_model)."""
        query, keys, values = self._pose(h, mask)
        return self._answer(attention(query, keys, values, score=Dot(), mask=mask), h)

    def weights(self, h: Tensor, *, mask: Mask = Everything()) -> Tensor:
        """The weight a_j of each instance: (*batch, n), or (*batch, heads, n)."""
        query, keys, _ = self._pose(h, mask)
        return self._answer(attention_weights(query, keys, score=Dot(), mask=mask), h)

    def extra_repr(self) -> str:
        return "" if self.heads is None else f"heads={self.heads}"

    def _pose(self, h: Tensor, mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
        """The query (*batch, heads, 1, hidden), keys (*batch, 1, n, hidden) and values (*batch, 1, n, d_model)."""
        if h.dim() < 2 or h.shape[-1] != self.d_model:
            raise ShapeError(f"h has shape {listed(h.shape)}; expected bags (*batch, n, {self.d_model}).")
        if not isinstance(mask, Mask):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"mask is {kind_of(mask)}; expected a Mask: Lengths(keys=counts) for bags of unlike sizes, "
                "Dense(mask[:, None, None]) of booleans (batch, n)."
            )
        if mask.compares_positions():
            raise ValueError(f"mask {mask!r} compares positions; a pooling query has none. Lengths and Dense do not.")
        bags = h if h.dim() > 2 else h[None]
        query = self.query.unflatten(-1, (1, -1)) if self.heads is not None else self.query[None, None]
        return query.expand(*bags.shape[:-2], *query.shape), self.features(bags).unsqueeze(-3), bags.unsqueeze(-3)

    def _answer(self, t: Tensor, h: Tensor) -> Tensor:
        """(*batch, heads, 1, ...) without the axes that the caller does not have."""
        t = t.squeeze(-2)
        t = t if self.heads is not None else t.squeeze(-2)
        return t if h.dim() > 2 else t[0]


class GatedAttentionPooling(AttentionPooling):
    """a_j = softmax_j(w · (tanh(V h_j) ⊙ sigmoid(U h_j))): AttentionPooling whose keys are gated.

    The gate undoes tanh's near-linearity around 0. Source: Ilse et al. 2018 (arXiv 1802.04712), equation 9.

    >>> GatedAttentionPooling(16, hidden=8, heads=2)(torch.randn(5, 16)).shape
    torch.Size([2, 16])
    """

    def __init__(
        self,
        d_model: int,
        hidden: int,
        *,
        heads: int | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, hidden, heads=heads, bias=bias, device=device, dtype=dtype)
        self.u_proj = nn.Linear(d_model, hidden, bias, device=device, dtype=dtype)

    def features(self, h: Tensor) -> Tensor:
        """tanh(V h) ⊙ sigmoid(U h), (*batch, n, hidden)."""
        return super().features(h) * torch.sigmoid(self.u_proj(h))
