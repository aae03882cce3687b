"""Whether what functions of scores and masks say of a pair depends on other pairs.

Backends that compute tiles call them for some queries and keys at a time. A function that looks at all keys of a row
(topk, mean, softmax, cumsum) would give other results for each size of tiles, without an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.call.described import Sizes, described, described_frame, example
from regard.call.problem import Problem
from regard.core.errors import Unsupported
from regard.core.region import Frame, Region
from regard.core.shapes import repeat_heads
from regard.core.tracing import constant_in_graphs, data_unavailable, scripted, symbolic, unwatched
from regard.core.value import calls_functions_of_others
from regard.masks.algebra import Mask
from regard.scores.algebra import Pipeline, evaluate

_FEW = 4  # queries, or keys, beside those of two tiles
_NEAR = 1e-6  # of scores in float64
_LARGE = 1 << 20  # numbers of a tensor that is not copied to float64


def check_of_pairs(problem: Problem, rows: int, keys: int) -> None:
    """Unsupported where a score or a mask of others differs between two tiles of rows × keys and both in one.

    Tried in float64 on a few queries and keys, in graphs and transforms on other numbers of their shapes; not where
    random ones are drawn, nor where a function does not run in float64.
    """
    frame = problem.frame
    if not symbolic(frame.nq, frame.nk) and not scripted() and (frame.nq > rows or frame.nk > keys):
        what = _what_depends(problem, rows, keys)
        if what:
            raise Unsupported(_SAID.format(what, _IN_PARTS))


def check_mask_of_pairs(mask: Mask, frame: Frame, rows: int, keys: int) -> None:
    """The same of a mask of others."""
    if _depends_on_others(mask.visible, frame, rows, keys):
        raise Unsupported(_SAID.format("the mask", _IN_PARTS))


def check_of_some_keys(problem: Problem) -> None:
    """The same of a call for some queries and keys, whose results are merged with those for others: of its halves."""
    frame = problem.frame
    if not symbolic(frame.nq, frame.nk) and not scripted():
        what = _what_depends(problem, max(-(-frame.nq // 2), 1), max(-(-frame.nk // 2), 1))
        if what:
            raise Unsupported(_SAID.format(what, _MERGED))


_SAID = (
    "{0} of a pair depends on other pairs: a function of it reads several queries or keys at once, as topk, mean, "
    "softmax and cumsum do. {1}"
)
_IN_PARTS = (
    "It is called for a part of them at a time, so results would depend on the size of the parts. "
    "backend=rg.Reference() calls it once, with n × n scores in memory."
)
_MERGED = (
    "Here it is called for some keys alone, and the result is merged with those of other keys. "
    "rg.attention(q, k, v, backend=rg.Reference()) calls it once for all of them, with n × n scores in memory."
)


def _what_depends(problem: Problem, rows: int, keys: int) -> str:
    """ "the mask" or "the score", whose answers for two parts are not those for both; "" where neither's are."""
    score, mask, frame = problem.score, problem.mask, problem.frame
    if not calls_functions_of_others((score, mask)):
        return ""
    if not data_unavailable(*problem.tensors()):
        return _found(score, mask, frame, problem.q, problem.k, rows, keys)
    unknown: list[str] = []
    values = tuple([described(x, (frame.nq, frame.nk), unknown) for x in (score, mask)])
    if unknown:  # nobody can make another one of it
        return ""
    shapes = tuple([(t.shape[-3], t.shape[-2], t.shape[-1]) for t in (problem.q, problem.k)])
    return _found_in_example(values, described_frame(frame), shapes, rows, keys)


@constant_in_graphs
def _found_in_example(
    values: tuple[Any, ...], frame: tuple[Any, ...], shapes: tuple[tuple[int, ...], ...], rows: int, keys: int
) -> str:
    """The same of a score and a mask of other numbers; shapes: of q and k, without batch axes."""
    with unwatched():
        (score, mask), at = example(values, frame, Sizes(), _numbers)
        q, k = (_numbers(torch.float64, (*at.batch, *shape)) for shape in shapes)
        return _found(score, mask, at, q, k, rows, keys)


def _numbers(dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """Different numbers along the last two axes, of which few take memory; whole numbers are 0."""
    if not dtype.is_floating_point:
        return torch.zeros((), dtype=dtype, device="cpu").expand(shape)
    counted = torch.arange(math.prod(shape[-2:]), dtype=torch.float64, device="cpu")
    return (counted * _GOLDEN % 1 - 0.5).to(dtype).view(shape[-2:]).expand(shape)


_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples fill the interval from 0 to 1 evenly


def _found(score: Pipeline, mask: Mask, frame: Frame, q: Tensor, k: Tensor, rows: int, keys: int) -> str:
    if calls_functions_of_others(mask) and _depends_on_others(mask.visible, frame, rows, keys):
        return "the mask"

    def scores(at: Region) -> Tensor:
        local = score.local(at)
        exact = local.with_tensors(
            t.double() if t.is_floating_point() and t.numel() <= _LARGE else t for t in local.tensors()
        )
        queries, some_keys = q[..., at.rows, :].double(), k[..., at.cols, :].double()
        return evaluate(exact, queries, repeat_heads(some_keys, frame.heads), at)

    return "the score" if calls_functions_of_others(score) and _depends_on_others(scores, frame, rows, keys) else ""


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
