"""Witnesses: who wants to know of attention calls while a model runs. Layers and guests tell, `record` listens."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from regard.masks.algebra import Everything, Mask
from regard.positions import Positions
from regard.scores.algebra import Score
from regard.scores.similarity import ScaledDot


@dataclass(frozen=True, eq=False)
class Witnessed:
    """One attention call as a layer made it: the arguments of regard.attention, and the layer, where it is known.

    q (*batch, h, nq, dk) and k (*batch, hk, nk, dk) are what the scores are made of: normed, rotated, cached.
    """

    layer: nn.Module | None
    q: Tensor
    k: Tensor
    score: Score = ScaledDot()
    mask: Mask = Everything()
    positions: Positions | None = None
    sink: Tensor | float | None = None


Witness = Callable[[Witnessed], None]

_WITNESSES: list[tuple[int, Witness]] = []


def tell(call: Callable[[], Witnessed]) -> None:
    """Tells of a call those who listen on this thread; `call` is made only for them."""
    if not _WITNESSES:
        return
    here = [hear for thread, hear in _WITNESSES if thread == threading.get_ident()]
    if here:
        told = call()
        for hear in here:
            hear(told)


@contextmanager
def listening(hear: Witness) -> Generator[None, None, None]:
    """While it is open, `hear` is told of every attention call on this thread, before the call is made.

    >>> import regard as rg, torch
    >>> layer, seen = rg.nn.MultiHeadAttention(8, heads=2), []
    >>> with listening(seen.append):
    ...     _ = layer(torch.randn(1, 5, 8))
    >>> seen[0].q.shape
    torch.Size([1, 2, 5, 4])
    """
    entry = (threading.get_ident(), hear)
    _WITNESSES.append(entry)
    try:
        yield
    finally:
        _WITNESSES.remove(entry)
