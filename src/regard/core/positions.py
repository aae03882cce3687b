"""Positions: where queries and keys stand in their sequence, and the sentence when nobody said so."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.core.errors import ShapeError
from regard.core.shapes import listed
from regard.core.tracing import data_unavailable
from regard.core.value import Value


@dataclass(frozen=True)
class Positions(Value):
    """Absolute positions of the queries and of the keys: integer tensors (n,) or (*batch, n).

    Positional masks and scores (Causal, Window, Prefix, Dilated, Where, Alibi, RelativeBias) compare these numbers, not
    indices. They need be neither sorted nor contiguous; where keys are sorted, masks reduce to intervals.

    >>> Positions(q=torch.tensor([7]), k=torch.arange(9))   # one token decoded at position 7
    Positions(q=int64[1], k=int64[9])
    """

    q: Tensor
    k: Tensor

    def __post_init__(self) -> None:
        for name, x in (("q", self.q), ("k", self.k)):
            if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(
                    f"Positions.{name} is a {type(x).__name__}; expected an integer tensor (n,) or (*batch, n)."
                )
            if x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool:
                raise TypeError(f"Positions.{name} has dtype {x.dtype}; expected integers, such as torch.arange(n).")
            if x.dim() == 0:
                raise ShapeError(f"Positions.{name} has shape (); expected (n,) or (*batch, n).")

    @property
    def consecutive(self) -> bool:
        """Whether queries and keys count up by one each: known of `head` and `tail`, found out by looking otherwise.

        False where nobody may look (while compiling, on the meta device).
        """
        known = self.__dict__.get("_known")
        if known is _OURS or (known is not None and known == _versions(self.q, self.k)):
            return True
        if data_unavailable(self.q, self.k) or self.q.dim() != 1 or self.k.dim() != 1:
            return False
        return all(bool((p[1:] - p[:-1] == 1).all()) for p in (self.q, self.k))


_OURS = "no one else holds these tensors"


def _versions(q: Tensor, k: Tensor) -> tuple[int, int] | None:
    """What changes when a tensor is changed in place; None where torch does not count, or a compiler cannot watch."""
    if torch.compiler.is_compiling() or q.is_inference() or k.is_inference():
        return None
    return q._version, k._version


def _counted(q: Tensor, k: Tensor) -> Positions:
    made = Positions(q, k)
    # made inside a graph, they are used there alone
    made.__dict__["_known"] = _OURS if torch.compiler.is_compiling() else _versions(q, k)
    return made


def head(nq: int, nk: int, device: torch.device | str | None = None) -> Positions:
    """The queries are the first nq positions: query i stands at i, key j at j.

    Raises ValueError for negative counts (from torch.arange).

    >>> head(2, 4)
    Positions(q=int64[2], k=int64[4])
    """
    return _counted(torch.arange(nq, device=device), torch.arange(nk, device=device))


def tail(nq: int, nk: int, device: torch.device | str | None = None) -> Positions:
    """The queries are the last nq positions, as in decoding: query i stands at nk - nq + i, key j at j.

    With more queries than keys the first queries stand before every key, and see none of them under Causal.

    >>> tail(2, 4).q
    tensor([2, 3])
    """
    return _counted(torch.arange(nk - nq, nk, device=device), torch.arange(nk, device=device))


def resolve_positions(
    positions: Positions | None,
    nq: int,
    nk: int,
    batch: tuple[int, ...],
    positional: object | None,
    device: torch.device | str | None,
) -> Positions:
    """The positions of one call, checked; `positional` is what compares them, None if nothing does."""
    if positions is None:
        if nq != nk and positional is not None:
            raise ShapeError(
                f"{nq} queries meet {nk} keys under {positional!r}, and their positions are not given. Pass\n"
                f"  positions=tail({nq}, {nk}) if the queries are the last {nq} tokens (decoding), or "
                f"positions=head({nq}, {nk}) if they are the first."
            )
        made = head(nq, nk, device)
        made.__dict__["_known"] = _OURS
        return made
    for name, x, n in (("q", positions.q, nq), ("k", positions.k, nk)):
        lead, rest = tuple(x.shape[:-1]), batch[len(batch) - x.dim() + 1 :]
        if (
            x.shape[-1] != n
            or x.dim() > len(batch) + 1
            or any(a not in (1, b) for a, b in zip(lead, rest, strict=True))
        ):
            raise ShapeError(
                f"positions.{name} has shape {listed(x.shape)}; expected ({n},)"
                + (f" or {listed((*batch, n))}." if batch else ".")
            )
    # int64: the small types would wrap in differences
    made = Positions(positions.q.to(device, torch.int64), positions.k.to(device, torch.int64))
    if positions.q.is_cpu and positions.consecutive:
        made.__dict__["_known"] = _OURS
    return made
