"""Hooks on attention calls: layers and integrations report each call to `notify`; `observing` registers an observer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.core.positions import Positions
from regard.core.tracing import data_unavailable, functorch
from regard.core.value import with_shapes
from regard.masks.algebra import Everything, Mask
from regard.scores.algebra import Score
from regard.scores.similarity import ScaledDot


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention call as a layer made it: the arguments of regard.attention, and the layer, where it is known.

    q (*batch, h, nq, dk) and k (*batch, hk, nk, dk) are what the scores are made of: normed, rotated, cached. v
    (*batch, hk, nk, dv) are the values; None where the layer does not make them as a tensor of its own (torch's fused
    kernels), or each process has some of them. cross: whether keys and values are made from another sequence than the
    queries, where the layer knows it. mask_if_cross: the mask if they are, where the layer does not know it: padded
    queries, which see nothing in `mask`, are those of one sequence.
    """

    layer: nn.Module | None
    q: Tensor
    k: Tensor
    score: Score = ScaledDot()
    mask: Mask = Everything()
    positions: Positions | None = None
    sink: Tensor | float | None = None
    v: Tensor | None = None
    cross: bool | None = None
    mask_if_cross: Mask | None = None

    def __repr__(self) -> str:
        return with_shapes("AttentionCall", vars(self))


def is_cross(query: Tensor, key: Tensor) -> bool:
    """Whether a layer that is given both, before it projects them, makes its keys from another sequence.

    Equal values are one sequence: nn.MultiheadAttention passes two views of a tensor that it was given twice.

    >>> import torch
    >>> x = torch.randn(2, 5, 8)
    >>> is_cross(x, x.clone()), is_cross(x, x + 1)
    (False, True)
    """
    if query is key:
        return False
    if (query.shape, query.dtype, query.device) != (key.shape, key.dtype, key.device):
        return True
    return not data_unavailable(query, key) and not functorch() and not torch.equal(query, key)


Observer = Callable[[AttentionCall], None]

# Of each thread, which alone writes its entry: a list of all would change while another thread goes through it.
_OBSERVERS: dict[int, tuple[Observer, ...]] = {}


def notify(call: Callable[[], AttentionCall]) -> None:
    """Passes a call to this thread's observers; `call` is made only if there are any."""
    if not _OBSERVERS:
        return
    here = _OBSERVERS.get(threading.get_ident())
    if here is not None:
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
    thread = threading.get_ident()
    _OBSERVERS[thread] = (*_OBSERVERS.get(thread, ()), observer)
    try:
        yield
    finally:
        left = list(_OBSERVERS.pop(thread))
        left.remove(observer)
        if left:
            _OBSERVERS[thread] = tuple(left)
