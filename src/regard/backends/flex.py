"""Flex: torch's FlexAttention, to which any mask and any modifier lowers by being asked about single pairs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor

from regard.backends.base import Backend, ForwardResult, Result, recorded_backward, why_leaks
from regard.backends.streaming.backward import Cotangents
from regard.call.of_pairs import check_of_pairs
from regard.call.problem import Problem
from regard.core.positions import Span, counted
from regard.core.region import Frame, Indices, moved
from regard.core.state import State
from regard.core.value import Value, is_regards_own, names
from regard.masks.algebra import Cover, Everything, Mask
from regard.scores.algebra import Modifier
from regard.scores.similarity import Bilinear, Cosine, Dot, ScaledDot

BLOCK = 128


@dataclass(frozen=True)
class Flex(Backend):
    """torch.nn.attention.flex_attention, on `devices`: dot products under any mask and modifiers.

    Compiled on CUDA, eager elsewhere (where it is dense and has no backward). Backward recomputes the forward.
    Source: Dong et al. 2024 (arXiv 2412.05496).

    >>> Flex()
    Flex()
    """

    devices: tuple[str, ...] = ("cuda",)

    def why_not(self, problem: Problem, lse: bool) -> str | None:
        frame = problem.frame
        if frame.device.type not in self.devices:
            return f"it serves {', '.join(self.devices)} tensors; these are on {frame.device.type}"
        if type(problem.similarity) not in (Dot, ScaledDot, Bilinear, Cosine):
            return f"its scores begin with a dot product, not with {problem.similarity!r}"
        if problem.dropout is not None:
            return "it has no dropout"
        if any(t.requires_grad for t in problem.score_tensors) and torch.is_grad_enabled():
            return "a tensor of the score requires a gradient"
        if 0 in problem.q.shape or 0 in problem.k.shape or 0 in problem.v.shape:
            return "an axis is empty"
        if frame.device.type == "cuda" and (
            problem.dtype == torch.float64 or min(problem.q.shape[-1], problem.dv) < 16
        ):
            return "its compiled kernels need float32 or less and widths of 16 or more"
        if type(problem.mask) is Everything:
            return None
        return why_leaks((problem.q, problem.k, problem.v), problem.accumulate)

    def forward(self, problem: Problem) -> Result:
        structure = _structure(problem)
        if structure not in _of_pairs:
            check_of_pairs(problem, 1, 1)  # here a reduction of one number is that number
            if len(_of_pairs) >= 256:
                _of_pairs.clear()
            _of_pairs.add(structure)
        with torch.no_grad():
            return _flex(problem)

    def backward(
        self, problem: Problem, forward: ForwardResult, cotangents: Cotangents, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        return recorded_backward(_flex, problem, cotangents, needs)


class Point:
    """One pair: it answers what Region answers, with one number each. b is the flat batch index."""

    def __init__(self, frame: Frame, b: Tensor, h: Tensor, row: Tensor, col: Tensor) -> None:
        self.frame, self.b, self.h, self.row, self.col = frame, b, h, row, col

    @property
    def i(self) -> Tensor:
        return self.queries(self.frame.positions.q)

    @property
    def j(self) -> Tensor:
        return self.keys(self.frame.positions.k)

    def queries(self, t: Tensor) -> Tensor:
        return self._pick(t, self.row)

    def keys(self, t: Tensor) -> Tensor:
        return self._pick(t, self.col)

    def sequences(self, t: Tensor) -> Tensor:
        return self._pick(t)

    def heads(self, t: Tensor) -> Tensor:
        return t[self.h if t.shape[0] > 1 else 0] if t.dim() else t

    def pairs(self, t: Tensor) -> Tensor:
        t = self.frame.lift(t)
        last = (self.h, self.row, self.col)[3 - min(t.dim(), 3) :]
        return self._pick(t, *last)

    def in_whole(self, whole: Frame, rows: Indices | None, cols: Indices) -> Point:
        """As Region's."""
        row, col = (
            n if some is None else moved(n, some, count, whole.device)
            for n, some, count in ((self.row, rows, self.frame.nq), (self.col, cols, self.frame.nk))
        )
        return Point(whole, self.b, self.h, cast(Tensor, row), cast(Tensor, col))

    def _pick(self, t: Tensor, *last: Tensor) -> Tensor:
        """t at this batch element and at `last`; axes of size 1 are shared."""
        lead, rest, b = t.dim() - len(last), [], self.b
        for size in self.frame.batch[::-1][:lead]:
            rest.append(b % size)
            b = b // size
        index = (*rest[::-1], *last)
        return t[tuple(n if size > 1 else n * 0 for n, size in zip(index, t.shape, strict=True))] if index else t


def score_mod(problem: Problem) -> Callable[..., Tensor] | None:
    """The modifiers of a problem as FlexAttention's function of one pair."""
    frame, modifiers = problem.frame, problem.score.parts[1:]

    def modified(s: Tensor, b: Tensor, h: Tensor, row: Tensor, col: Tensor) -> Tensor:
        at: Any = Point(frame, b, h, row, col)
        for stage in modifiers:
            assert isinstance(stage, Modifier)
            s = stage.modify(s, at)
        return s

    return modified if modifiers else None


def block_mask(problem: Problem) -> Any:
    """The BlockMask of a problem, from the mask's covers: linear in blocks, nothing is evaluated pair by pair.

    It is made once for masks of regard's own that hold no tensor, where positions are known without reading any.
    """
    frame, mask = problem.frame, problem.mask
    if frame.positions.span is None or not _of_numbers(mask):
        return _block_mask(mask, frame, differentiated=torch.is_grad_enabled())
    return _known_block_mask(mask, frame.positions.span, frame.batch, frame.heads, frame.headed)


def _of_numbers(item: Any) -> bool:
    """Whether a value consists of classes of regard's own and of numbers, which nobody can change."""
    if isinstance(item, Value):
        kind = type(item)
        return is_regards_own(kind) and all(_of_numbers(getattr(item, name)) for name in names(kind))
    return item is None or type(item) in (int, float, bool)


@lru_cache(maxsize=64)
def _known_block_mask(mask: Mask, span: Span, batch: tuple[int, ...], heads: int, headed: bool) -> Any:
    positions = counted(span.q, span.k, span.device)
    with torch.inference_mode(False):  # a backward saves no tensor that such a mode has made
        frame = Frame.of(span.q[1], span.k[1], batch=batch, heads=heads, positions=positions)
        made = _block_mask(mask, replace(frame, headed=headed), differentiated=True)
    if made.kv_indices.is_cuda:
        torch.cuda.current_stream(made.kv_indices.device).synchronize()  # the next call may be on another stream
    return made


def _block_mask(mask: Mask, frame: Frame, differentiated: bool) -> Any:
    """differentiated: with the blocks of queries of each block of keys, which the backward alone reads."""
    from torch.nn.attention.flex_attention import BlockMask

    def mask_mod(b: Tensor, h: Tensor, row: Tensor, col: Tensor) -> Tensor:
        at: Any = Point(frame, b, h, row, col)
        return mask.visible(at)

    count, tiling = math.prod(frame.batch), frame.tiling(BLOCK, BLOCK)
    cover = mask.cover(tiling)
    heads = cover.shape[-3] if cover.dim() > 2 else 1  # 1 where all have the same
    cover = cover.expand(*frame.batch, heads, *tiling.shape).reshape(count, heads, *tiling.shape)
    partial, full = ((cover == which).to(torch.int32) for which in (Cover.SOME, Cover.ALL))
    order = [kind.argsort(dim=-1, descending=True, stable=True).to(torch.int32) for kind in (partial, full)]
    return BlockMask.from_kv_blocks(
        partial.sum(-1, dtype=torch.int32),
        order[0],
        full.sum(-1, dtype=torch.int32),
        order[1],
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(frame.nq, frame.nk),
        compute_q_blocks=differentiated,
    )


_numbers = count()
_of_pairs: set[Any] = set()  # structures of calls whose functions answer for each pair by itself


@lru_cache(maxsize=256)
def _compiled(structure: Any) -> Callable[..., Any]:
    """flex_attention, compiled for calls of one structure apart from all others.

    torch compiles one piece of code for 8 structures, and for a ninth runs it as it is, with n × n weights: so every
    structure gets code of its own, and fullgraph raises an error where torch would not compile.
    """
    from torch.nn.attention.flex_attention import flex_attention

    kernel: Callable[..., Any] = flex_attention

    def flex(*given: Any, **options: Any) -> Any:
        return kernel(*given, **options)

    flex.__code__ = flex.__code__.replace(co_name=f"flex_{next(_numbers)}")  # so that no two are equal
    return torch.compile(flex, fullgraph=True)


def _structure(problem: Problem) -> Any:
    """What torch compiles a call for: all but its numbers, and sizes of 2 and more, which one code serves."""
    tensors = problem.q, problem.k, problem.v
    sizes = [(t.dtype, t.shape[-1], *(size == 1 for size in t.shape)) for t in tensors]
    kinds = _kinds(problem.score), _kinds(problem.mask)
    return (*sizes, *kinds, problem.frame.heads == problem.key_heads, torch.is_grad_enabled(), problem.frame.device)


def _kinds(item: Any) -> Any:
    """The classes of which a value is made; of a function its code and what it closes over, of a tensor dtype and axes.

    torch compiles again where a global differs that a function reads.
    """
    if isinstance(item, Value):
        return type(item), *(_kinds(getattr(item, name)) for name in names(type(item)))
    if isinstance(item, tuple):
        return tuple(map(_kinds, cast(tuple[Any, ...], item)))
    if isinstance(item, Tensor):
        return item.dtype, *(size == 1 for size in item.shape)
    if isinstance(item, FunctionType):
        return item.__code__, *(_kinds(cell.cell_contents) for cell in item.__closure__ or ())
    return item if callable(item) else type(item)


def _out_and_lse(kernel: Callable[..., Any], *given: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """What flex_attention, or what is compiled of it, returns."""
    from torch.nn.attention.flex_attention import AuxRequest

    out, aux = kernel(*given, **options, return_aux=AuxRequest(lse=True))
    return out, aux.lse


def _flex(problem: Problem) -> Result:
    from torch.nn.attention.flex_attention import flex_attention

    similarity, batch = problem.similarity, problem.frame.batch
    q = problem.q
    scale: float | None = 1.0
    if isinstance(similarity, ScaledDot):
        scale = None if isinstance(similarity.scale, Tensor) else similarity.scale
        if isinstance(similarity.scale, Tensor):
            q, scale = q * similarity.scale[..., None, None].to(q.dtype), 1.0
    q, k, v = (t.flatten(0, len(batch) - 1) if batch else t[None] for t in (q, problem.k, problem.v))
    masked = type(problem.mask) is not Everything
    kernel: Callable[..., Any] = _compiled(_structure(problem)) if q.is_cuda else flex_attention
    found = _out_and_lse(
        kernel,
        q,
        k.to(q.dtype),
        v.to(q.dtype),
        score_mod=score_mod(problem),
        block_mask=block_mask(problem) if masked else None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    out, lse = (t.unflatten(0, batch) if batch else t[0] for t in found)
    return (out, lse) if problem.sink is None else problem.joined(State.of_lse(out, lse)).finish()
