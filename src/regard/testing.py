"""What masks, scores and backends must satisfy, as checks that raise AssertionError: try your own with them.

Calls are generated from the `examples` of every mask and score class, so that a new class is tried on every backend
without a test of its own. What a backend answers is measured against Reference in float64: values, log-sum-exp, and the
gradients of q, k, v, the sink and every tensor of the score.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from regard.api import attention, attention_state
from regard.backends.base import Backend
from regard.backends.native.modifiers.table import STEPS
from regard.backends.reference import Reference
from regard.backends.streaming.tiled import Tiled
from regard.call.arguments import check_kinds
from regard.call.problem import Problem
from regard.core.dropout import Dropout
from regard.core.dtypes import FLOATING
from regard.core.positions import Positions, tail
from regard.core.region import Frame
from regard.core.shapes import blocks
from regard.core.value import Value, is_regards_own
from regard.core.vjp import vjp
from regard.masks.algebra import Cover, Everything, Mask
from regard.runtime.binding import BoundCall
from regard.scores.algebra import Modifier, Pipeline, Score
from regard.scores.similarity import ScaledDot

FLOAT64_TOLERANCE = 1e-12
# score, shift, exponential, weight, product: each rounds, and a short sum of few numbers shows it by chance or not
ROUNDINGS = 4 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Case(Value):
    """The arguments of one call of attention.

    >>> call = draw(frame())
    >>> call.q.shape, call.k.shape, call.v.shape
    (torch.Size([5, 6, 13, 7]), torch.Size([5, 2, 17, 7]), torch.Size([5, 2, 17, 3]))
    """

    q: Tensor
    k: Tensor
    v: Tensor
    score: Score = ScaledDot()
    sink: Tensor | None = None
    mask: Mask = Everything()
    positions: Positions | None = None
    dropout: Dropout | None = None

    @property
    def problem(self) -> Problem:
        call = BoundCall(self.q, self.k, self.v, self.score, self.mask, self.positions, self.sink, self.dropout)
        return call.problem

    @property
    def differentiable(self) -> dict[str, Tensor]:
        """By name, every tensor that may require a gradient: the first of `tensors()`, in their order."""
        found = {"q": self.q, "k": self.k, "v": self.v}
        found.update((f"score tensor {n}", t) for n, t in enumerate(self.score.tensors()))
        return found if self.sink is None else {**found, "sink": self.sink}

    def leaves(self, dtype: torch.dtype) -> Case:
        """The same call on new tensors, rounded to a dtype, that require gradients; whole numbers stay as they are."""
        fresh = [
            t.detach().to(dtype, copy=True).requires_grad_() if t.is_floating_point() else t.detach().clone()
            for t in self.differentiable.values()
        ]
        return self.with_tensors(iter([*fresh, *self.tensors()[len(fresh) :]]))

    def copied(self) -> Case:
        """The same call on copies of its tensors."""
        return self.with_tensors(t.detach().clone() for t in self.tensors())


def frame(batch: tuple[int, ...] = (5,), heads: int = 6, nq: int = 13, nk: int = 17, headed: bool = True) -> Frame:
    """A small index space, its queries the last positions.

    >>> frame().shape
    (5, 6, 13, 17)
    """
    return replace(Frame.of(nq, nk, batch=batch, heads=heads, positions=tail(nq, nk)), headed=headed)


def masks(at: Frame) -> dict[str, Mask]:
    """Every example of every mask class of regard, and some combinations, by name.

    >>> list(masks(frame()))[:3]
    ['Causal', 'Dense', 'Dense 2']
    """
    found: dict[str, Mask] = _named({kind: kind.examples(at) for kind in _kinds(Mask)})
    found["And"] = found["Causal"] & found["Lengths"]
    found["Or"] = (found["Causal"] & found["Window"]) | found["Prefix"]
    found["Not"] = ~(found["Dense"] | found["Prefix"])
    found["nothing"] = ~Everything()
    return found


def scores(at: Frame, width: int = 7) -> dict[str, Score]:
    """Every example of every score class of regard, modifiers after a scaled dot product, and a long pipeline, by name.

    >>> list(scores(frame()))[:3]
    ['Additive', 'Additive 2', 'Additive 3']
    """
    examples = {kind: kind.examples(at, width) for kind in _kinds(Score)}
    found = {name: ScaledDot() >> one if isinstance(one, Modifier) else one for name, one in _named(examples).items()}
    modifiers = [kind for kind in examples if issubclass(kind, Modifier)]
    # in the order of the native kernels; last the soft cap, which they can apply after all others
    steps = sorted(STEPS, key=lambda step: bool(step.last_step))
    order: dict[type, int] = {step.stage: n for n, step in enumerate(steps)}
    modifiers.sort(key=lambda kind: order.get(kind, -1))
    return {**found, "Pipeline": Pipeline((ScaledDot(), *(examples[kind][0] for kind in modifiers)))}


def _kinds(base: type) -> list[type[Any]]:
    """The classes of regard's own that carry examples, by name."""
    found: list[type[Any]] = []
    below = base.__subclasses__()
    while below:
        kind = below.pop()
        below += kind.__subclasses__()
        if is_regards_own(kind) and "examples" in kind.__dict__ and kind not in found:
            found.append(kind)
    return sorted(found, key=lambda kind: kind.__name__)


def _named(examples: dict[type, tuple[Any, ...]]) -> dict[str, Any]:
    """Each example by the name of its class; those after the first are "Class 2", "Class 3"."""
    return {
        kind.__name__ + (f" {n}" if n > 1 else ""): one
        for kind, several in examples.items()
        for n, one in enumerate(several, 1)
    }


def draw(
    at: Frame,
    *,
    key_heads: int | None = None,
    dk: int = 7,
    dv: int = 3,
    score: Score = ScaledDot(),
    mask: Mask = Everything(),
    sink: bool = False,
    dropout: Dropout | None = None,
) -> Case:
    """A call of that frame on normal float64 numbers; key_heads: by default a third of the heads if whole."""
    if key_heads is None:
        key_heads = at.heads // 3 if at.heads % 3 == 0 else at.heads
    shapes = ((at.heads, at.nq, dk), (key_heads, at.nk, dk), (key_heads, at.nk, dv))
    q, k, v = (
        torch.randn(*at.batch, *(shape if at.headed else shape[1:]), dtype=torch.float64, device=at.device)
        for shape in shapes
    )
    logits = torch.randn(at.heads, dtype=torch.float64, device=at.device) if sink else None
    return Case(q, k, v, score, logits, mask, at.positions, dropout)


def calls(at: Frame, width: int = 7, dv: int = 3) -> Iterator[tuple[str, Case]]:
    """Every mask under every score: named calls."""
    for mask_name, mask in masks(at).items():
        for score_name, score in scores(at, width).items():
            yield f"{score_name} under {mask_name}", draw(at, dk=width, dv=dv, score=score, mask=mask)


def answers(call: Case, backend: Backend | None, dtype: torch.dtype, lse: bool = True) -> dict[str, Tensor]:
    """The results of a backend on a call rounded to a dtype: the output, the lse on request, and all gradients.

    Cotangents are drawn from a fixed seed, in the dtypes of the results. Raises Unsupported where the backend refuses.
    """
    call = call.leaves(dtype)
    given: dict[str, Any] = {"score": call.score, "mask": call.mask, "positions": call.positions, "sink": call.sink}
    results = {"out": attention(call.q, call.k, call.v, **given, dropout=call.dropout, backend=backend)}
    if lse:
        state = attention_state(call.q, call.k, call.v, **given, dropout=call.dropout, backend=backend)
        results["lse"] = state.finish()[1]
    random = torch.Generator().manual_seed(0)
    cotangents = [
        torch.randn(t.shape, generator=random, dtype=torch.float64, device="cpu").to(dtype).to(t.device, t.dtype)
        for t in results.values()
    ]
    wanted = {name: t for name, t in call.differentiable.items() if t.requires_grad}
    grads = vjp(tuple(results.values()), tuple(wanted.values()), cotangents)
    for (name, t), g in zip(wanted.items(), grads, strict=True):
        results[f"gradient of {name}"] = torch.zeros_like(t) if g is None else g
    return {name: t.detach() for name, t in results.items()}


def tolerance(exact: Tensor, plain: Tensor) -> float:
    """Twice the error of a plain evaluation in the same dtype; in float64 1e-12, relatively.

    The plain error of a result with few numbers may be near 0 by chance; it is taken as at least that of one rounding
    to the dtype, or of four to float32.
    """
    size = _root_mean_square(exact.masked_fill(~exact.isfinite(), 0))
    if plain.dtype == torch.float64:
        return FLOAT64_TOLERANCE * max(size, 1.0)
    return 2 * max(error(plain, exact), size * max(torch.finfo(plain.dtype).eps, ROUNDINGS))


def error(got: Tensor, exact: Tensor) -> float:
    """The root mean square of the differences; infinite if one is NaN or infinite and the other is not the same."""
    got, exact = got.detach().to(exact.dtype), exact.detach()
    if got.shape != exact.shape:
        return math.inf
    same = (got == exact) | (got.isnan() & exact.isnan())
    return _root_mean_square((got - exact).masked_fill(same, 0).nan_to_num(math.inf, math.inf, -math.inf))


def _root_mean_square(t: Tensor) -> float:
    return float(t.square().mean().sqrt()) if t.numel() else 0.0


def check(
    call: Case, backend: Backend | None, dtype: torch.dtype = torch.float64, *, again: tuple[Case, ...] = ()
) -> None:
    """Compares one call on a backend in a dtype with Reference in float64 on the same rounded numbers.

    again: the call with other numbers. Errors and tolerances are then root mean squares over all calls, since for a
    gradient with few numbers a single draw says little.

    >>> check(draw(frame(), sink=True), Tiled(rows=4, keys=3))
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for one in (call, *again):
        rounded = one.leaves(dtype)
        lse = backend is None or backend.why_not(rounded.problem, True) is None
        exact, plain = _expected(one.copied(), dtype, lse)
        for name, got in answers(one, backend, dtype, lse).items():
            assert got.dtype == plain[name].dtype, f"{name} has dtype {got.dtype}; expected {plain[name].dtype}"
            found.setdefault(name, []).append((error(got, exact[name]), tolerance(exact[name], plain[name])))
    for name, pairs in found.items():
        off, allowed = (math.sqrt(sum(x * x for x in side) / len(pairs)) for side in zip(*pairs, strict=True))
        assert off <= allowed, f"{backend!r}, {dtype}: {name} is off by {off:.2e}; allowed {allowed:.2e}"


@lru_cache(maxsize=32)
def _expected(call: Case, dtype: torch.dtype, lse: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What Reference makes of a call rounded to a dtype, in float64 and in that dtype: once, for several backends."""
    rounded = call.leaves(dtype)
    return answers(rounded, Reference(), torch.float64, lse), answers(call, Reference(), dtype, lse)


def check_backend(backend: Backend, dtypes: tuple[torch.dtype, ...] = FLOATING, at: Frame | None = None) -> int:
    """Checks every call of `calls` that the backend takes, in each dtype; returns the number of calls.

    Raises AssertionError if one is wrong.

    >>> import regard as rg
    >>> check_backend(rg.Sdpa(devices=("cpu",)), at=frame((), 1, 3, 5))
    12
    """
    tried = 0
    for name, call in calls(frame() if at is None else at):
        for dtype in dtypes:
            if backend.why_not(call.leaves(dtype).problem, False) is not None:
                continue
            tried += 1
            try:
                check(call, backend, dtype)
            except AssertionError as wrong:
                raise AssertionError(f"{name}: {wrong}") from wrong
    assert tried, f"{backend!r} refuses every call"
    return tried


def check_score(score: Score, at: Frame | None = None, width: int = 7) -> None:
    """Checks that a score evaluated tile by tile has the same values and gradients, and that it reads no positions
    where its class says so (`positional = False`). A modifier runs after ScaledDot.

    >>> import regard as rg
    >>> check_score(rg.SoftCap(3.0))
    """
    check_kinds(score, Everything(), None, None)
    whole = ScaledDot() >> score if isinstance(score, Modifier) else score
    at = frame() if at is None else at
    call = draw(at, dk=width, score=whole)

    def output(at: Frame) -> Tensor:
        return answers(replace(call, positions=at.positions), Reference(), torch.float64, lse=False)["out"]

    _check_compares_positions(whole, at, output)
    check(call, Tiled(rows=4, keys=3))


def _check_compares_positions(item: Score | Mask, at: Frame, answer: Callable[[Frame], Tensor]) -> None:
    """Fails where positions change what a score or a mask answers, though it says that it compares none."""
    if item.compares_positions():
        return
    others = replace(at, positions=Positions(3 * at.positions.q + 1, 2 * at.positions.k + 5))
    once = answer(at)
    assert torch.equal(once, answer(at)), f"{item!r} answers otherwise each time: by random numbers, or by a state"
    assert torch.equal(once, answer(others)), (
        f"{item!r} reads positions: leave out `positional = False`, or let compares_positions() return True"
    )


def check_mask(mask: Mask, at: Frame | None = None) -> None:
    """Checks that a mask gives the same answer for a region as for the whole, that covers and intervals agree, also
    where keys do not stand at their index, and that it reads no positions where compares_positions() says so.

    >>> import regard as rg
    >>> check_mask(rg.Causal() & rg.Window(before=3, after=0))
    """
    check_kinds(ScaledDot(), mask, None, None)
    at = frame() if at is None else at
    _check_compares_positions(mask, at, lambda at: mask.visible(at.region()).expand(at.shape))
    _check_parts(mask, at)
    if mask.compares_positions():
        q, k = at.positions.q, at.positions.k
        for positions in (Positions(q + 10, k + 10), Positions(2 * q + 7, 2 * k + 5)):
            _check_parts(mask, replace(at, positions=positions))


def _check_parts(mask: Mask, at: Frame) -> None:
    """Of each region, tile and row of a frame: that it agrees with the whole."""
    dense = mask.visible(at.region()).expand(at.shape)
    for r, c in ((1, 1), (4, 3), (at.nq, at.nk)):
        tiling = at.tiling(r, c)
        covers = mask.cover(tiling).expand(*at.batch, at.heads, *tiling.shape)
        for m, rows in enumerate(blocks(at.nq, r)):
            for n, cols in enumerate(blocks(at.nk, c)):
                part, cover = dense[..., rows, cols], covers[..., m, n]
                seen = mask.visible(at.region(rows, cols)).expand(part.shape)
                assert torch.equal(seen, part), f"{mask!r} answers otherwise for rows {rows}, keys {cols} alone"
                wrong = ((cover == Cover.NONE) & part.any(-1).any(-1)) | ((cover == Cover.ALL) & ~part.all(-1).all(-1))
                assert not wrong.any(), f"{mask!r} has a wrong cover for rows {rows}, keys {cols}"
    interval = mask.rows(at)
    if interval is not None:
        j = torch.arange(at.nk, device=at.device, dtype=torch.int64)
        inside = (j >= interval.start[..., None]) & (j < interval.stop[..., None])
        assert torch.equal(inside.expand(at.shape), dense), f"{mask!r} has wrong intervals"
