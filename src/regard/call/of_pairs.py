"""Whether what functions of scores and masks say of a pair depends on other pairs.

Backends that compute tiles call them for some queries and keys at a time. A function that looks at all keys of a row
(topk, mean, softmax, cumsum) would give other results for each size of tiles, without an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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

_FEW = 4  # queries, or keys, beside those that are divided
_MOST = 1 << 22  # scores that are computed to find out
_LARGE = 1 << 20  # numbers of a tensor that is not copied to float64


def check_of_pairs(problem: Problem, rows: int, keys: int) -> None:
    """Unsupported where a score or a mask of others differs between tiles of rows × keys and all in one.

    Tried on a few queries and all keys, and on all queries and a few keys, as far as they are not too many; in graphs
    and transforms on other numbers of their shapes; not where random ones are drawn.
    """
    _check(problem, rows, (keys,), _IN_PARTS)


def check_mask_of_pairs(mask: Mask, frame: Frame, rows: int, keys: int) -> None:
    """Raises Unsupported if what a mask of others answers for a pair depends on which other pairs it is asked about."""
    if _depends_on_others(mask, frame, rows, keys):
        raise Unsupported(_SAID.format("the mask", _IN_PARTS))


def check_of_some_keys(problem: Problem) -> None:
    """The same of a call for some keys, whose results are merged with those for others: of one key, and of half."""
    _check(problem, max(problem.frame.nq, 1), _small(problem), _MERGED)


def check_of_sequences(problem: Problem) -> None:
    """The same of a call in which sequences of several lengths lie behind each other, or are padded."""
    _check(problem, 1, _small(problem), _TOGETHER)


def _small(problem: Problem) -> tuple[int, ...]:
    """Numbers of keys of a part; two that follow one another, for functions of a remainder."""
    half = max(problem.frame.nk // 2, 1)
    return 1, half, half + 1


def _check(problem: Problem, rows: int, sizes: tuple[int, ...], so: str) -> None:
    """Unsupported where parts of `rows` queries, and of one of the `sizes` of keys, differ from the whole.

    so: what follows from that, and the way out
    """
    nq, nk = problem.frame.nq, problem.frame.nk
    if symbolic(nq, nk) or scripted():
        return
    for keys in sizes:
        if nq > rows or nk > keys:
            what = _what_depends(problem, rows, keys)
            if what:
                raise Unsupported(_SAID.format(what, so))


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
    "rg.attention on all keys, with backend=rg.Reference(), calls it once, with n × n scores in memory."
)
_TOGETHER = (
    "Here it is called for several sequences at once, and would read other sequences and padding. "
    "Call rg.attention for each sequence, with backend=rg.Reference()."
)


def _what_depends(problem: Problem, rows: int, keys: int) -> str:
    """Which of "the mask" and "the score" has other answers for parts than for the whole; "" if none has."""
    score, mask, frame = problem.score, problem.mask, problem.frame
    if not calls_functions_of_others((score, mask)):
        return ""
    if not data_unavailable(*problem.tensors()):
        return _found(score, mask, frame, problem.q, problem.k, rows, keys, problem.accumulate)
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
        for whole in (0, 1):  # what is hidden, or multiplied by 0, in one may not be in the other
            numbers = partial(_numbers, whole=whole)
            try:
                (score, mask), at = example(values, frame, Sizes(), numbers)
                q, k = (numbers(torch.float64, (*at.batch, *shape)) for shape in shapes)
                found = _found(score, mask, at, q, k, rows, keys, torch.float32)
            except Exception:  # the function takes no such numbers: nothing is known
                continue
            if found:
                return found
    return ""


def _numbers(dtype: torch.dtype, shape: Sequence[int], whole: int) -> Tensor:
    """Different numbers along the last two axes, of which few take memory; whole numbers are `whole` and 0 in turn."""
    counted = torch.arange(math.prod(shape[-2:]), dtype=torch.float64, device="cpu")
    numbers = counted * _GOLDEN % 1 - 0.5 if dtype.is_floating_point else counted % 2 * whole
    return numbers.to(dtype).view(shape[-2:]).expand(shape)


_GOLDEN = (math.sqrt(5) - 1) / 2  # its multiples fill the interval from 0 to 1 evenly


def _found(
    score: Pipeline, mask: Mask, frame: Frame, q: Tensor, k: Tensor, rows: int, keys: int, own: torch.dtype
) -> str:
    """The same; own: the dtype in which scores are computed. Raises what the functions raise."""
    if calls_functions_of_others(mask) and _depends_on_others(mask, frame, rows, keys):
        return "the mask"

    if not calls_functions_of_others(score):
        return ""

    def scores(at: Region, dtype: torch.dtype) -> Tensor:
        local = score.local(at)
        exact = local.with_tensors(
            t.to(dtype) if t.is_floating_point() and t.numel() <= _LARGE else t for t in local.tensors()
        )
        queries, some_keys = q[..., at.rows, :].to(dtype), k[..., at.cols, :].to(dtype)
        return evaluate(exact, queries, repeat_heads(some_keys, frame.heads), at)

    try:
        differs = _differs(partial(scores, dtype=torch.float64), frame, rows, keys, 1e-6)
    except Exception:
        if own == torch.float64:
            raise
        # it takes no float64
        differs = _differs(partial(scores, dtype=own), frame, rows, keys, 1e-3, 1e-3)
    return "the score" if differs else ""


def _depends_on_others(mask: Mask, frame: Frame, rows: int, keys: int) -> bool:
    try:
        return _differs(mask.visible, frame, rows, keys)
    except Exception:  # what it answers is no mask: where the call asks it, that is said
        return False


def _differs(
    answer: Callable[[Region], Tensor], frame: Frame, rows: int, keys: int, near: float = 0.0, share: float = 0.0
) -> bool:
    """Whether answers for parts are not those for the whole. False of functions that answer otherwise each time.

    near: how far an answer may be from another; share: of pairs that may be farther, where rounding decides a branch
    """
    devices = [frame.device] if frame.device.type == "cuda" else []
    with torch.no_grad(), torch.random.fork_rng(devices):  # random numbers are drawn as without this
        for whole, parts, axis in _divided(frame, rows, keys):
            found = _of(answer, whole)
            for part, place in parts:
                there = found.narrow(axis, place.start, place.stop - place.start)
                far = ~torch.isclose(there, _of(answer, part), rtol=near, atol=near, equal_nan=True)
                if int(far.sum()) > share * far.numel():
                    return torch.allclose(found, _of(answer, whole), rtol=0, atol=0, equal_nan=True)
    return False


def _divided(frame: Frame, rows: int, keys: int) -> Iterator[tuple[Region, list[tuple[Region, slice]], int]]:
    """Some pairs, their first and their last part and where these are, and the axis along which they lie."""
    lanes = max(math.prod(frame.batch) * frame.heads, 1)
    for n, size, others, axis in ((frame.nk, keys, frame.nq, -1), (frame.nq, rows, frame.nk, -2)):
        if n <= size:
            continue
        end = min(n, max(2 * size, _MOST // (_FEW * lanes)))
        last = (end - 1) // size * size
        places, few = [slice(0, size), slice(last, end)], slice(max(others - _FEW, 0), others)
        whole, *parts = (
            frame.region(few, part) if axis == -1 else frame.region(part, few) for part in (slice(0, end), *places)
        )
        yield whole, list(zip(parts, places, strict=True)), axis


def _of(answer: Callable[[Region], Tensor], at: Region) -> Tensor:
    """The answer for each pair of a region; booleans as numbers."""
    found = answer(at)
    found = found.expand(*found.shape[:-2], at.row.shape[-2], at.col.shape[-1])
    return found.to(torch.uint8) if found.dtype == torch.bool else found
