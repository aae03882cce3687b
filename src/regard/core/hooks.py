"""Hooks on attention calls: layers and integrations notify of each call; `observing` registers who wants to know."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn

from regard.core.positions import Positions
from regard.masks.algebra import Everything, Mask
from regard.scores.algebra import Score
from regard.scores.similarity import ScaledDot


@dataclass(frozen=True, eq=False)
class AttentionCall:
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


Observer = Callable[[AttentionCall], None]

_OBSERVERS: list[tuple[int, Observer]] = []  # with the thread that each belongs to


def notify(call: Callable[[], AttentionCall]) -> None:
    """Passes a call to this thread's observers; `call` is made only if there are any."""
    if not _OBSERVERS:
        return
    here = [observer for thread, observer in _OBSERVERS if thread == threading.get_ident()]
    if here:
        made = call()
        for observer in here:
            observer(made)


@contextmanager
def observing(observer: Observer) -> Generator[None, None, None]:
    """While it is open, `observer` is called with every attention call of this thread, before the call is made.

    >>> import regard as rg, torch
    >>> layer, seen = rg.nn.MultiHeadAttention(8, heads=2), []
    >>> with observing(seen.append):
    ...     _ = layer(torch.randn(1, 5, 8))
    >>> seen[0].q.shape
    torch.Size([1, 2, 5, 4])
    """
    entry = (threading.get_ident(), observer)
    _OBSERVERS.append(entry)
    try:
        yield
    finally:
        _OBSERVERS.remove(entry)
