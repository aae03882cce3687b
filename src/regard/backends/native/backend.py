"""Native: the C++ kernels as a backend: dot products, intervals of keys, tile maps and a few steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter

from regard.backends.base import Backend, Differentiable, Example, ForwardResult, Plan, Result
from regard.backends.native.args import KernelArgs, lower, why_not
from regard.backends.native.call_operands import HELD
from regard.backends.native.elementwise import described_features
from regard.backends.native.ffi import library, runnable, why_not_built
from regard.backends.native.kernel_families import family_of
from regard.backends.native.launch import (
    arguments,
    empty_results,
    empty_row_stats,
    filled_without_pairs,
    natural_row_stats,
)
from regard.backends.native.lower_mask import lower_mask, mask_as_text, program_of_mask, why_no_program
from regard.backends.native.mask_text import has_function, why_not_text, with_recorded
from regard.backends.native.modifiers.program import OPERAND_NAMES, described_modifiers, in_graph, recorded_modifiers
from regard.backends.native.modifiers.table import programmed, why_not_learned
from regard.backends.native.per_call import PerCall
from regard.backends.native.plan import ForwardPlan
from regard.backends.native.plan_limits import serves_other_calls
from regard.backends.native.products import gradients_of_product, needs_of_product, rows_made, with_product
from regard.backends.native.ragged import RaggedPlan, ragged_plan
from regard.backends.native.repeated_training_plan import RepeatedTrainingPlan
from regard.backends.native.text_calls import score_as_text
from regard.backends.native.torch_ops import traced
from regard.backends.native.training_plan import TrainingPlan
from regard.backends.streaming.backward import Cotangents, backward
from regard.backends.streaming.tiling import stream
from regard.call.problem import Problem
from regard.core.deferred import DeferredRows
from regard.core.int8_rows import Int8Rows
from regard.core.paged import Paged
from regard.core.state import RowStats
from regard.core.tracing import data_unavailable, graphed, watched
from regard.scores.additive import Additive
from regard.scores.elementwise import Elementwise
from regard.sequences.ragged_call import RaggedCall


@dataclass(frozen=True)
class Native(Backend):
    """Fused C++ kernels for the CPU: scores, softmax and values of a block in one pass, on torch's threads.

    float32, bfloat16 and float16; sums in float32. Dot products (scaled, bilinear, cosine), additive scores, sums over
    features (Elementwise), regard's own modifiers, any mask, dropout; a separate kernel for few queries (decoding). The
    backward computes the weights again, tile by tile. On processors that multiply bfloat16 (avx512bf16; neonbf16 and
    sve256: BFMMLA of Arm; sme: the matrix unit of Apple's M4; amx: that of Intel's servers), the weights of a bfloat16
    call are rounded to bfloat16 before they multiply the values. amx also multiplies float16 and float32, as exact sums
    of bfloat16 numbers, from 32 queries (float16) and 96 queries (float32) on; from 128 and 256 where a backward may
    follow. A head with fewer than 32 queries counts those of all heads that share its keys, where nothing but these
    tells heads apart. sme multiplies in the forward, in every dtype.
    The kernels are compiled once for each instruction set; regard uses the best one that runs here, or the one in the
    environment variable REGARD_ISA (base, avx2, avx512, avx512bf16, amx; base, neon, neonbf16, sve256, sme). Intel's
    matrix unit needs the system's permission, which regard requests when it first loads kernels; without it, avx512 is
    used.

    invariant: the bits of a query's row depend on no other query of the call, nor on their number: a batch of one, a
    chunk of a prompt and one token decoded against a cache agree. It is slower for few queries. Not available for
    Additive, Elementwise, Bilinear and Distance, whose rows depend on each other before the kernels read them. Of
    bfloat16, values must be finite for that: weights are not rounded for a block of queries of which some see a value
    that is not finite and some do not. The results are right, but the last bits of its rows are others.

    >>> import regard as rg
    >>> rg.Native()
    Native()
    """

    visible: ClassVar[bool] = False
    calls_again: ClassVar[bool] = False
    invariant: bool = False

    def why_not(self, problem: Problem, lse: bool) -> str | None:
        device = problem.q.device.type
        if device != "cpu":
            return f"it serves cpu tensors; these are on {device}"
        if not runnable():
            return f"it was not built: {why_not_built()}"
        own, problem = problem, with_product(problem)
        why = _why_unread(problem) or (family_of(problem).why_not_invariant(problem) if self.invariant else None)
        if why is None and self.invariant and rows_made(own):
            why = "torch makes rows of q and k, by products whose rounding depends on how many there are"
        return why or why_not(problem)

    def why_gathers(self, problem: Problem) -> str | None:
        if data_unavailable(*problem.tensors()) or watched():
            return "a graph, a transform or a mode sees the call"
        if torch.is_grad_enabled() and any(t.requires_grad for t in problem.tensors()):
            return "the backward reads ordinary tensors"
        return family_of(problem).why_gathers(problem)

    def forward(self, problem: Problem) -> Result:
        problem = with_product(problem)
        with torch.no_grad():
            args = self._kernel_args(problem)
            out, lse = empty_results(args)
            self._run(problem, args, out, lse, None)
            return out, lse

    def ragged_plan(self, problem: Problem, call: RaggedCall) -> RaggedPlan | str:
        """A plan for calls on ragged sequences; or why they do not run as one list, as a clause.

        problem: that of the call that stands for it.
        """
        if isinstance(problem.k, DeferredRows) or isinstance(problem.v, DeferredRows):
            why = self.why_gathers(problem)
            if why is not None:
                return why
        if rows_made(problem):
            return "torch makes rows of q and k for its function"
        problem = with_product(problem)
        with torch.no_grad():
            return ragged_plan(self._kernel_args(problem), problem, call)

    def forward_for_backward(self, problem: Problem) -> ForwardResult:
        problem = with_product(problem)
        with torch.no_grad():
            args = self._kernel_args(problem)
            (out, lse), row_stats = empty_results(args), empty_row_stats(args)
            self._run(problem, args, out, lse, row_stats)
            mask, numbers = args.mask_to_keep()
            return ForwardResult(out, (lse, row_stats, *mask.values()), (tuple(mask), numbers))

    def _run(self, problem: Problem, args: KernelArgs, out: Tensor, lse: Tensor, row_stats: Tensor | None) -> None:
        """Fills in the results."""
        if not filled_without_pairs(args, out, lse, row_stats):
            results = {"out": out, "lse": lse, "row_stats": row_stats}
            call = arguments(args, **{name: t for name, t in results.items() if t is not None})
            library().run(family_of(problem).struct(problem, call))

    def row_stats(self, forward: ForwardResult) -> RowStats:
        return natural_row_stats(forward.saved[1])

    def traced(self, problem: Problem) -> Differentiable:
        needs = tuple(t.requires_grad for t in problem.tensors())
        if not family_of(problem).whole:
            score = score_as_text(problem) if in_graph(problem) else "a transform sees it"
            if isinstance(score, str):
                return self.differentiable(problem)
            return traced(lower(problem, mask_as_text(problem), self.invariant, score))
        if why_not_learned(problem, needs):
            return self.differentiable(problem)
        tile = None if graphed(*problem.tensors()) else library().tile
        return traced(lower(problem, lower_mask(problem, tile), self.invariant))

    def plan(self, example: Example, training: bool) -> Plan | None:
        if rows_made(example.problem):
            return None  # each call makes them
        problem = with_product(example.problem)
        family, example = family_of(problem), replace(example, problem=problem)
        rest = len(problem.tensors()) - len(example.needs)
        if training and family.why_streamed(problem, (*example.needs, *(False,) * rest)):
            return None
        args = self._kernel_args(problem)
        if 0 in (*args.shape, *args.k.shape[-2:], args.v.shape[-1]):
            return None
        per_call = PerCall.of(family, args, example)
        if not serves_other_calls(family, args, example, per_call):
            return None
        if not training:
            return ForwardPlan(family, args, example, per_call)
        repeated = per_call.similarity is not None or per_call.modifiers is not None
        return (RepeatedTrainingPlan if repeated else TrainingPlan)(family, args, example, per_call)

    def backward(
        self, problem: Problem, forward: ForwardResult, cotangents: Cotangents, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        own, problem = problem, with_product(problem)
        family, wanted = family_of(problem), needs_of_product(own, needs)
        if family.why_streamed(problem, wanted) is not None or watched():
            # of scores rounded otherwise, neither the output nor the row statistics are those of this backward
            with torch.no_grad():
                out, stats = stream(own, self.size, quick=True)
            return backward(own, out, stats, cotangents, needs, self.size)
        lse, row_stats, *mask = forward.saved
        names, numbers = forward.kernel
        g_out, g_lse = cotangents
        pair = g_out, torch.zeros_like(lse) if g_lse is None else g_lse
        with torch.no_grad():
            kept = {**dict(zip(names, mask, strict=True)), **numbers} or None  # None: it is lowered anew
            args = self._kernel_args(problem, kept)
            found = family.backward(problem, args, (forward.out, lse, row_stats), pair, wanted)
            return gradients_of_product(own, found, needs)

    def details(self, problem: Problem) -> dict[str, str]:
        own, problem, kernels = problem, with_product(problem), library()
        args = lower_mask(problem, kernels.tile)
        found = {"kernels": f"{kernels.isa}, blocks of {kernels.tile[0]} queries × {kernels.tile[1]} keys"}
        if isinstance(problem.similarity, Elementwise):
            found["scores as"] = described_features(problem)
        elif not isinstance(problem.similarity, Additive):
            found |= self._products(problem, args)
        if rows_made(own):
            found["rows"] = "of q and k, which the score's function makes once, in PyTorch"
        if programmed(problem) and 0 not in problem.frame.shape:
            found["modifiers as"] = described_modifiers(problem)
        held = {name: mask.described for name, mask in HELD.items()}
        kinds = {**held, "tiles": "a map of tiles", "mask_code": program_of_mask(problem)}
        forms = [said for name, said in kinds.items() if name in args]
        if "k_documents" in args and problem.mask.rows(problem.frame) is None:
            forms.append("numbers of documents, compared pair by pair")
        elif args.keys() - {*kinds, "bits", *OPERAND_NAMES}:
            forms.append("an interval of keys for each query")
        found["mask as"] = " and ".join(forms) or "none: every query sees every key"
        unlowered = why_no_program(problem)
        if unlowered is not None:
            found["mask as"] += f", since no program: {unlowered}"
        said = self._in_graphs(own, problem, bool(kinds.keys() & args.keys()))
        if said:
            found["in graphs"] = said
        streamed = family_of(problem).why_streamed(problem, tuple(t.requires_grad for t in problem.tensors()))
        return {**found, "backward": f"streamed over tiles in PyTorch: {streamed}" if streamed else "the same kernels"}

    def _in_graphs(self, own: Problem, problem: Problem, pairs: bool) -> str:
        """What graphs hold of functions that a person wrote. pairs: whether the mask is no interval here."""
        said: list[str] = []
        if own is not problem:
            return f"{own.similarity!r} runs tile by tile in PyTorch"
        score = None if family_of(problem).whole else score_as_text(problem)
        if isinstance(score, str):
            return f"the score runs tile by tile in PyTorch: {score}"
        if isinstance(problem.similarity, Elementwise):
            said.append("the function of features is recorded, and becomes a program where the graph runs")
        if programmed(problem) and 0 not in problem.frame.shape:
            modifiers = recorded_modifiers(problem)
            if isinstance(modifiers, str):
                said.append(f"the modifiers run tile by tile in PyTorch: {modifiers}")
            else:
                said.append("the modifiers are a program, which is made where the graph runs")
        if has_function(problem.mask) and pairs:
            mask = with_recorded(problem.mask, problem.frame)
            unwritten = mask if isinstance(mask, str) else why_not_text(mask)
            if unwritten is None:
                said.append("the mask is a function that was recorded, which is lowered where the graph runs")
            else:
                said.append(
                    f"the mask is written out, {_bytes_of_pairs(problem) / 1e6:,.1f} MB, and what its function "
                    f"computes on the way: {unwritten}"
                )
        return "; ".join(said)

    def _products(self, problem: Problem, mask: dict[str, Any]) -> dict[str, str]:
        """What multiplies where there is a matrix unit, if tensors that require gradients get them."""
        if not library().has_matrix_unit:
            return {}
        with torch.no_grad():
            args = self._kernel_args(problem, mask)
            out = torch.empty((), dtype=torch.float32, device=args.q.device)  # a number, whatever the shape
            out = out.expand(*args.shape, args.v.shape[-1])
            training = any(t.requires_grad for t in problem.tensors())
            saved = {"row_stats": out[..., :1].expand(*args.shape, 2)} if training else {}
            parts = library().matrix_parts(arguments(args, out=out, **saved))
        if parts == 0:
            said = (
                "by vectors; the unit multiplies bfloat16 unless there are few queries, and other numbers for many "
                "queries (of all heads that share a key head) without invariant"
            )
        else:
            said = "on the matrix unit"
            said += f", each number as the sum of {parts} bfloat16 numbers" if parts > 1 else ""
        return {"products": said}

    def _kernel_args(self, problem: Problem, mask: dict[str, Any] | None = None) -> KernelArgs:
        mask = lower_mask(problem, library().tile) if mask is None else mask
        return lower(problem, mask, self.invariant)


def _bytes_of_pairs(problem: Problem) -> int:
    """Bytes of a problem's mask as booleans, a pair each."""
    frame = problem.frame
    one = problem.mask.visible(frame.region(slice(0, 1), slice(0, 1)))
    return math.prod(one.shape[:-2]) * frame.nq * frame.nk


def _why_unread(problem: Problem) -> str | None:
    """Why the kernels cannot read the tensors of a call at their addresses, as a clause; None if they can.

    A class that sees each operation (`__torch_dispatch__`) need not have memory. In a graph nobody reads yet.
    """
    for t in problem.tensors():
        kind: Any = type(t)
        if kind in (Tensor, Parameter, Paged, Int8Rows) or kind.__torch_dispatch__ is _NO_TORCH_DISPATCH:
            continue
        if not graphed(t):
            return f"a {kind.__name__} holds its numbers elsewhere than at an address"
    return None


_NO_TORCH_DISPATCH = torch._C._disabled_torch_dispatch_impl  # pyright: ignore[reportPrivateUsage]
