"""Whether what functions of scores and masks say of a pair depends on other pairs.

Backends that compute tiles call them for some queries and keys at a time. A function that looks at all keys of a row
(topk, mean, softmax, cumsum) would give other results for each size of tiles, without an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from regard.call.problem import Problem
from regard.core.errors import Unsupported
from regard.core.region import Frame, Region
from regard.core.shapes import repeat_heads
from regard.core.tracing import data_unavailable, symbolic
from regard.core.value import calls_functions_of_others
from regard.masks.algebra import Mask
from regard.scores.algebra import evaluate

_FEW = 4  # queries, or keys, beside those of two tiles
_NEAR = 1e-6  # of scores in float64
_LARGE = 1 << 20  # numbers of a tensor that is not copied to float64


def check_of_pairs(problem: Problem, rows: int, keys: int) -> None:
    """Unsupported where a score or a mask of others differs between two tiles of rows × keys and both in one.

    Tried in float64 on a few queries and keys; not where numbers cannot be read or random ones are drawn, nor where a
    function does not run in float64.
    """
    frame = problem.frame
    tiles = frame.nq > rows or frame.nk > keys
    if symbolic(frame.nq, frame.nk) or not tiles or data_unavailable(*problem.tensors()):
        return
    if calls_functions_of_others(problem.mask):
        check_mask_of_pairs(problem.mask, frame, rows, keys)
    if not calls_functions_of_others(problem.score):
        return

    def scores(at: Region) -> Tensor:
        local = problem.score.local(at)
        exact = local.with_tensors(
            t.double() if t.is_floating_point() and t.numel() <= _LARGE else t for t in local.tensors()
        )
        q, k = problem.q[..., at.rows, :].double(), problem.k[..., at.cols, :].double()
        return evaluate(exact, q, repeat_heads(k, frame.heads), at)

    if _depends_on_others(scores, frame, rows, keys):
        raise Unsupported(_SAID.format("the score"))


def check_mask_of_pairs(mask: Mask, frame: Frame, rows: int, keys: int) -> None:
    """The same of a mask of others."""
    if _depends_on_others(mask.visible, frame, rows, keys):
        raise Unsupported(_SAID.format("the mask"))


_SAID = (
    "{0} of a pair depends on other pairs: a function of it reads several queries or keys at once, as topk, mean, "
    "softmax and cumsum do. It is called for a part of them at a time, so results would depend on the size of the "
    "parts. backend=rg.Reference() calls it once, with n × n scores in memory."
)


def _depends_on_others(answer: Callable[[Region], Tensor], frame: Frame, rows: int, keys: int) -> bool:
    """Whether answers for two parts are not those for both. False of functions that answer otherwise each time."""
    devices = [frame.device] if frame.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices):  # random numbers are drawn as without this
        try:
            for regions, axis in _divided(frame, rows, keys):
                if not _alike(answer, regions, axis):
                    return torch.equal(answer(regions[0]), answer(regions[0]))
        except Exception:  # of another dtype than it takes: where the call runs it raises again
            return False
    return False


def _divided(frame: Frame, rows: int, keys: int) -> Iterator[tuple[list[Region], int]]:
    """Some pairs, then the same in two parts; and the axis along which these lie."""
    for n, size, others, axis in ((frame.nk, keys, frame.nq, -1), (frame.nq, rows, frame.nk, -2)):
        if n > size:
            few, end = slice(0, min(others, _FEW)), min(n, 2 * size)
            parts = slice(0, end), slice(0, size), slice(size, end)
            regions = [frame.region(few, part) if axis == -1 else frame.region(part, few) for part in parts]
            yield regions, axis


def _alike(answer: Callable[[Region], Tensor], regions: list[Region], axis: int) -> bool:
    found = [answer(at) for at in regions]
    whole, *parts = (t.expand(*t.shape[:-2], *_size(at)) for t, at in zip(found, regions, strict=True))
    joined = torch.cat(parts, axis)
    if whole.dtype == torch.bool:
        return torch.equal(whole, joined)
    return torch.allclose(whole, joined, rtol=_NEAR, atol=_NEAR, equal_nan=True)


def _size(at: Region) -> tuple[int, int]:
    return at.row.shape[-2], at.col.shape[-1]
