"""mask_mod of FlexAttention as a mask of regard's, where what it computes is one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.compat.torch.pair_functions import (
    ATEN,
    Node,
    NotRecorded,
    Sizes,
    each_pair,
    evaluate,
    pair_function,
    record,
)
from regard.core.arrays import of_numbers
from regard.core.region import Region
from regard.masks.algebra import Everything, Mask
from regard.masks.dense import Dense
from regard.masks.positional import Prefix, Window
from regard.masks.ragged import Documents


@dataclass(frozen=True)
class MaskMod(Mask):
    """The pairs for which fn(b, h, i, j) is True: i and j are indices."""

    positional: ClassVar[bool] = False
    fn: Callable[..., Tensor]

    def of_pair(self) -> Callable[..., Tensor]:
        return self.fn

    def visible(self, at: Region) -> Tensor:
        seen = each_pair(self.fn, at)
        for axis in (0, 1):  # what does not depend on the batch element or the head is there once
            seen = seen.narrow(axis, 0, 1) if seen.shape[axis] > 1 and seen.stride(axis) == 0 else seen
        return seen


def translate_mask(fn: Callable[..., Tensor], sizes: Sizes) -> Mask:
    """A mask_mod as a Mask: intervals by i - j, documents, what depends on a query or a key alone, and & | ~ of them.

    The rest, and every function where there are no pairs, stays a function of single pairs (MaskMod).
    """
    if not sizes.pairs:
        return MaskMod(fn)
    try:
        result = record(fn, "bhij", sizes.dtype, sizes.device)
    except NotRecorded:
        return MaskMod(fn)
    found = mask_of(result, sizes)
    return MaskMod(fn) if found is None else found


def mask_of(x: Any, sizes: Sizes) -> Mask | None:
    """The pairs for which a boolean Node is True; None where regard has no such mask."""
    if not isinstance(x, Node):
        seen = of_numbers(x, torch.bool).to(sizes.device)
        return Everything() if bool(seen) else Dense(seen.bool().expand(1, 1, 1, 1))
    if x.value.dtype != torch.bool:
        return None
    interval = _interval(x, sizes) if x.by_difference else None
    if interval is not None:
        return interval
    if not {"i", "j"} <= x.reads:
        return _by_axes(x, sizes)
    if x.op in (ATEN.bitwise_not.default, ATEN.logical_not.default):
        inner = mask_of(x.args[0], sizes)
        return None if inner is None else ~inner
    if x.op in (ATEN.bitwise_or.Tensor, ATEN.logical_or.default):
        sides = [side for side in x.args if isinstance(side, Node) or bool(side)]  # or_masks begins with False
        masks = [mask_of(side, sizes) for side in sides]
        return None if None in masks else reduce(or_, masks)
    if x.op in (ATEN.bitwise_and.Tensor, ATEN.logical_and.default):
        sides = [(side, mask_of(side, sizes)) for side in x.args]
        if all(mask is None or isinstance(mask, Everything) for _, mask in sides):
            return None
        if any(mask is None and side.value.dtype != torch.bool for side, mask in sides):
            return None  # logical_and of numbers: the sides by themselves are no masks
        a, b = (MaskMod(pair_function(side)) if mask is None else mask for side, mask in sides)
        return a & b
    return _documents(x, sizes) if x.op == ATEN.eq.Tensor else None


def _interval(node: Node, sizes: Sizes) -> Mask | None:
    """The keys at distances i - j from one number to another; None where they are no such interval."""
    if node.reads & {"b", "h"}:
        return None
    seen = sizes.by_difference(node).nonzero()[:, 0] - (sizes.nk - 1)
    if not len(seen):
        return Dense(torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=sizes.device))
    least, most = int(seen[0]), int(seen[-1])
    if len(seen) != most - least + 1:
        return None
    before = None if most == sizes.nq - 1 else most
    after = None if least == 1 - sizes.nk else -least
    if least > 0:  # behind the query, not itself
        return Window(before, None) & ~Window(least - 1, None)
    if most < 0:
        return Window(None, after) & ~Window(None, -most - 1)
    return Everything() if before is after is None else Window(before, after)


def _by_axes(node: Node, sizes: Sizes) -> Mask:
    """What depends on a query alone or a key alone; of the first keys, a Prefix, which is an interval."""
    seen = sizes.by_axes(node)
    if "j" in node.reads and not node.reads & {"h"} and bool((seen[..., :-1] | ~seen[..., 1:]).all()):
        n = seen.sum(-1)[:, 0, 0]
        return Prefix(n if "b" in node.reads else int(n))
    return Dense(seen)


def _documents(node: Node, sizes: Sizes) -> Mask | None:
    """Pairs whose query has the number that the key has."""
    a, b = node.args
    if isinstance(a, Node) and isinstance(b, Node) and "j" in a.reads:
        a, b = b, a
    for side, other in ((a, "j"), (b, "i")):
        if not isinstance(side, Node) or side.reads & {"h", other} or side.value.is_floating_point():
            return None
    return Documents(*(evaluate(side, **sizes.indices(side.reads)).long() for side in (a, b)))
