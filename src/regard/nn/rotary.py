"""Rotary: positions as rotations of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.core.dtypes import accumulator
from regard.core.errors import ShapeError
from regard.core.shapes import listed
from regard.core.wrong_calls import answers_wrong_calls

_NAMES = {
    **dict.fromkeys(("dim", "head_dim", "d", "rotary_dim", "d_k"), "write width=, the features that are rotated"),
    **dict.fromkeys(("theta", "rope_theta"), "write base=theta"),
    **dict.fromkeys(("max_seq_len", "max_position_embeddings"), "leave it out: any position can be rotated"),
}


class Rotary(nn.Module):
    """Rotates features in pairs by angles that grow with the position: q_i · k_j then depends on i - j alone.

    Pair m of `width` features (even; the first ones of a head, any others pass unchanged) turns by
    position · base^(-2 m / width). Feature m is paired with feature m + width / 2, as in GPT-NeoX and Llama; for
    neighbours see RotaryInterleaved. Holds no parameters and no buffers. Angles are computed in float64 (on mps, which
    has none, in float32): in float32 they are off by 0.003 rad at position 100,000.
    Raises ValueError for an odd width, ShapeError for features narrower than it.
    Source: Su et al. 2021 (arXiv 2104.09864).

    >>> rotary = Rotary(4)
    >>> q, k = torch.randn(1, 4), torch.randn(1, 4)
    >>> near = rotary(q, torch.tensor([3])) @ rotary(k, torch.tensor([1])).T
    >>> far = rotary(q, torch.tensor([1003])) @ rotary(k, torch.tensor([1001])).T
    >>> torch.allclose(near, far, atol=1e-3)
    True
    """

    @answers_wrong_calls(_NAMES)
    def __init__(self, width: int, base: float = 10000.0) -> None:
        super().__init__()
        if width % 2 or width < 2:
            raise ValueError(
                f"{type(self).__name__}(width={width}): expected an even number of features, which rotate in pairs."
            )
        self.width, self.base = width, base

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x (*batch, h, n, d), or (n, d); positions (n,) or (*batch, n): integers. The same shape and dtype."""
        if x.shape[-1] < self.width:
            raise ShapeError(f"x has shape {listed(x.shape)}; {self!r} rotates the first {self.width} features.")
        precise = torch.float32 if x.device.type == "mps" else torch.float64
        turn = torch.arange(0, self.width, 2, dtype=precise, device=x.device) / self.width
        angle = positions[..., None].to(precise) * self.base**-turn  # (*batch, n, width / 2)
        angle = angle.unsqueeze(-3) if angle.dim() > 2 else angle
        cos, sin = (t.to(accumulator(x.dtype)) for t in (angle.cos(), angle.sin()))
        turned = self.rotate(x[..., : self.width], cos, sin).to(x.dtype)
        if x.shape[-1] == self.width:
            return turned
        rest = x[..., self.width :]
        return torch.cat([turned, rest.expand(*turned.shape[:-1], rest.shape[-1])], -1)

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x (..., n, width) turned by angles (..., n, width / 2)."""
        a, b = x.chunk(2, -1)
        return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

    def extra_repr(self) -> str:
        return f"{self.width}, base={self.base:g}"


class RotaryInterleaved(Rotary):
    """Rotary whose pairs are neighbours, features 2m and 2m + 1, as in the paper and in GPT-J.

    >>> RotaryInterleaved(4)(torch.ones(1, 4), torch.tensor([0]))
    tensor([[1., 1., 1., 1.]])
    """

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)
