"""Calls of a graph whose mask or score are texts: read where the graph runs, and computed as outside of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from regard.backends.native.args import KernelArgs, kernel_args, lower, why_not, with_places
from regard.backends.native.backward import LEARNED
from regard.backends.native.ffi import library
from regard.backends.native.kernel_families import family_of
from regard.backends.native.launch import (
    MOST_FLOAT,
    KernelResults,
    arguments,
    empty_in_graph,
    filled_without_pairs,
)
from regard.backends.native.lower_mask import MASK_TENSORS, lower_mask
from regard.backends.native.mask_text import read_mask
from regard.backends.native.modifiers.program import OPERAND_NAMES, recorded_modifiers
from regard.backends.native.programs.text import RecordedModifier
from regard.backends.native.similarity_text import read_similarity, write_similarity
from regard.backends.streaming.backward import backward as backward_by_tiles
from regard.backends.streaming.tiling import Size, stream
from regard.call.problem import Problem
from regard.core.dropout import BITS, Dropout
from regard.core.errors import ShapeError
from regard.core.positions import Positions
from regard.core.region import Frame
from regard.core.state import RowStats
from regard.core.tracing import seen_by_autograd
from regard.scores.algebra import Pipeline, Similarity
from regard.scores.similarity import ScaledDot

Pair = tuple[Tensor, Tensor]


def score_as_text(problem: Problem) -> dict[str, Any] | str:
    """The score of a call in a graph as texts and tensors; or why that cannot be, as a clause."""
    similarity = write_similarity(problem)
    if isinstance(similarity, str):
        return similarity
    found, held = {"similarity_text": similarity.text}, similarity.tensors
    if len(problem.score.parts) > 1:
        modifiers = recorded_modifiers(problem)
        if isinstance(modifiers, str):
            return modifiers
        found["score_text"], held = modifiers.text, (*held, *modifiers.held)
    if len(held) > len(OPERAND_NAMES):
        return f"it holds {len(held)} tensors; a node of a graph has room for {len(OPERAND_NAMES)}"
    return {**found, **dict(zip(OPERAND_NAMES, held, strict=False))}


def with_mask(args: KernelArgs) -> KernelArgs:
    """The same call, its mask as these kernels read it, where it is a text."""
    if not args.mask_text:
        return args
    problem = _problem(args)
    mask = with_places(lower_mask(problem, library().tile), problem)
    rest = {name: t for name, t in args.operands.items() if name not in MASK_TENSORS}
    return kernel_args(args.q, args.k, args.v, {**rest, **args.numbers, **mask})


def forward_of_text(args: KernelArgs) -> KernelResults:
    """out, lse and row_stats of a call whose score is a text."""
    problem = _problem(args)
    results = empty_in_graph(args)
    if filled_without_pairs(args, *results):
        return results
    if why_not(problem) is not None:
        return _by_tiles(problem)
    known = lower(problem, lower_mask(problem, library().tile), bool(args.number("invariant")))
    out, lse, row_stats = results
    call = arguments(known, out=out, lse=lse, row_stats=row_stats)
    library().run(family_of(problem).struct(problem, call))
    return results


def gradients_of_text(args: KernelArgs, saved: KernelResults, cotangents: Pair, wanted: set[str]) -> dict[str, Tensor]:
    """The gradients of what is wanted of such a call, by the names of operands."""
    problem = _problem(args)
    family = family_of(problem)
    names = ["q", "k", "v", *(name for name in OPERAND_NAMES if name in args.operands)]
    names += [""] * (len(problem.tensors()) - len(names))
    if problem.sink is not None:
        names[-1] = "sink"
    needs = tuple([name in wanted for name in names])
    with seen_by_autograd():
        if why_not(problem) is None and family.why_streamed(problem, needs) is None:
            known = lower(problem, lower_mask(problem, library().tile), bool(args.number("invariant")))
            found = family.backward(problem, known, saved, cotangents, needs)
        else:
            found = backward_by_tiles(problem, *_streamed(problem), cotangents, needs, Size())
    named = {name: g for name, g in zip(names, found, strict=True) if g is not None and name in LEARNED}
    return {name: g[..., None, None] if name == "sink" else g for name, g in named.items()}


def _by_tiles(problem: Problem) -> KernelResults:
    """The same by tiles in PyTorch, of a program that the kernels cannot run on these tensors or lengths."""
    out, stats = _streamed(problem)
    m = (stats.m / math.log(2)).clamp(-MOST_FLOAT, MOST_FLOAT).masked_fill(stats.empty, 0)
    inverse = (1 / stats.l).masked_fill(stats.empty, 0)
    return out, stats.lse, torch.stack([m, inverse], -1)


def _streamed(problem: Problem) -> tuple[Tensor, RowStats]:
    with torch.no_grad():
        return stream(problem, Size(), quick=True)


def _problem(args: KernelArgs) -> Problem:
    """The call of which the operator was given the tensors and texts."""
    *batch, heads, nq = args.shape
    texts = [args.operands[name] for name in MASK_TENSORS if name in args.operands]
    positions, mask = Positions(*texts[:2]), read_mask(args.mask_text, texts[2:])
    frame = Frame.of(nq, args.k.shape[-2], batch=tuple(batch), heads=heads, positions=positions)
    complaint = mask.shape_error(frame)
    if complaint is not None:
        raise ShapeError(complaint)
    similarity: Similarity = ScaledDot(args.number("scale"))
    held: Sequence[Tensor] = [args.operands[name] for name in OPERAND_NAMES if name in args.operands]
    if args.similarity_text:
        similarity, held = read_similarity(args.similarity_text, held)
    score = Pipeline((similarity,))
    if args.score_text:
        score = score >> RecordedModifier(args.score_text, tuple(held))
    sink, threshold = args.operands.get("sink"), args.number("threshold")
    return Problem(
        *(args.q, args.k, args.v, score, mask, frame),
        dropout=Dropout(threshold / (1 << BITS), args.number("seed")) if threshold else None,
        dtype=args.q.dtype,
        sink=None if sink is None else sink[..., 0, 0],
    )
