"""How many tiles of a mask the native kernels skip, and how many they multiply: a count, without the products."""

from __future__ import annotations

from typing import NamedTuple

import torch

from regard.backends.native.args import lower
from regard.backends.native.ffi import library
from regard.backends.native.launch import arguments, empty_results
from regard.backends.native.lower_mask import lower_mask
from regard.backends.native.products import with_product
from regard.call.problem import Problem


class TileCounts(NamedTuple):
    """The tiles of a forward that takes queries in blocks, over the batch and all heads.

    skipped  hidden as intervals, a map of tiles, or the ranges of a program's whole numbers say: no pair is looked at
    hidden   hidden once their pairs were looked at: they cost no product where a program hides them
    whole    seen by all of their queries
    mixed    the others
    """

    skipped: int
    hidden: int
    whole: int
    mixed: int

    @property
    def visited(self) -> int:
        """All but those that are skipped."""
        return self.hidden + self.whole + self.mixed


def count_tiles(problem: Problem) -> TileCounts:
    """What the kernels do with each tile of a problem that they can run."""
    problem = with_product(problem)
    with torch.no_grad():
        args = lower(problem, lower_mask(problem, library().tile), invariant=False)
        out, lse = empty_results(args)
        return TileCounts(*library().count_tiles(arguments(args, out=out, lse=lse)))
