"""Native: lowers a problem to the C++ kernels: dot products, intervals of keys, tile maps and a few steps."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.backends.base import Backend, Result
from regard.backends.library import AXES, CODES, Arguments, Operand, chosen, load, runnable
from regard.backends.tiling import stream
from regard.masks.algebra import And, Cover, Everything, Mask
from regard.masks.dense import Dense
from regard.problem import Problem
from regard.scores.algebra import Score, Similarity
from regard.scores.buckets import ClippedBuckets, T5Buckets, T5CausalBuckets
from regard.scores.modifiers import Alibi, Bias, RelativeBias, SoftCap
from regard.scores.similarity import Bilinear, Cosine, Dot, ScaledDot

_FEW = 16  # rows of a group below which the decoding kernel runs, where a mask written out is linear in the keys
_MOST = 1 << 31  # keys, and distances, are 32-bit numbers inside a block


@dataclass(frozen=True)
class Native(Backend):
    """Fused C++ kernels for the CPU: scores, softmax and values of a block in one pass, on torch's threads.

    float32, bfloat16 and float16; sums in float32. Dot products (scaled, bilinear, cosine), a soft cap, slopes, a dense
    bias and relative biases, any mask, dropout; a kernel of its own for few queries (decoding). Backward streams over
    tiles in PyTorch. Compiled once for each instruction set; the best that runs here is taken, or the one that the
    environment variable REGARD_ISA names (base, avx2, avx512, avx512bf16).

    >>> import regard as rg
    >>> rg.Native()
    Native()
    """

    def why_not(self, problem: Problem, lse: bool) -> str | None:
        frame = problem.frame
        if frame.device.type != "cpu":
            return f"it serves cpu tensors; these are on {frame.device.type}"
        if problem.dtype not in CODES:
            return f"dtype {_name(problem.dtype)}; it has float32, bfloat16, float16"
        if not runnable():
            return "it was not built: no C++ compiler was found when regard was installed"
        if len(frame.batch) > AXES:
            return f"{len(frame.batch)} batch axes; it has {AXES}"
        if max(frame.nq, frame.nk) >= _MOST:
            return "2^31 queries or keys, or more"
        return _why_not_similarity(problem.similarity) or _why_not_modifiers(problem)

    def forward(self, problem: Problem) -> Result:
        with torch.no_grad():
            return _forward(problem)

    def backward(
        self, problem: Problem, result: Result, cotangents: Result, needs: tuple[bool, ...]
    ) -> tuple[Tensor | None, ...]:
        # The weights of a row sum to 1 only with the log-sum-exp of scores that are rounded as backward rounds them.
        with torch.no_grad():
            lse = stream(replace(problem, v=problem.v[..., :0]), self.size, quick=True)[1]
        return super().backward(problem, (result[0], lse), cotangents, needs)

    def plan(self, problem: Problem) -> dict[str, str]:
        library = load(_isa())
        lowered = _lower_mask(problem, library.queries, library.keys)
        found = {"kernels": f"{library.isa}, blocks of {library.queries} queries × {library.keys} keys"}
        kinds = {"start": "an interval of keys a query", "allowed": "booleans", "tiles": "a map of tiles"}
        found["mask as"] = " and ".join(kinds[name] for name in lowered if name in kinds) or "nothing to hide"
        return {**found, "backward": "streamed over tiles in PyTorch"}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _isa() -> str:
    isa = chosen()
    assert isa is not None
    return isa


def _why_not_similarity(similarity: Similarity) -> str | None:
    if type(similarity) not in (Dot, ScaledDot, Bilinear, Cosine):
        return f"its scores begin with a dot product, not with {similarity!r}"
    return None


def _why_not_modifiers(problem: Problem) -> str | None:
    seen: list[type] = []
    for stage in problem.score.parts[1:]:
        why = _why_not_modifier(stage, problem)
        if why is None and type(stage) is SoftCap and seen:
            why = "its soft cap comes first"
        if why is None and type(stage) in seen:
            why = f"it takes one {type(stage).__name__}"
        if why is not None:
            return why
        seen.append(type(stage))
    return None


def _why_not_modifier(stage: Score, problem: Problem) -> str | None:
    # by type, not isinstance: a subclass may mean something else
    if type(stage) is SoftCap:
        return "its soft cap is a number, not a tensor" if isinstance(stage.cap, Tensor) else None
    if type(stage) is RelativeBias:
        if type(stage.buckets) not in (T5Buckets, T5CausalBuckets, ClippedBuckets):
            return f"its relative biases depend on the distance alone, not on {stage.buckets!r}"
        return None if _contiguous(problem) else "its relative biases need positions that count up by one"
    if type(stage) is Alibi:
        if stage.coordinates is not None:
            return "its slopes count positions, not coordinates"
        return None if _near(problem) else "positions lie 2^31 or more apart"
    return None if type(stage) is Bias else f"it has no step {stage!r}"


def _near(problem: Problem) -> bool:
    q, k = problem.frame.positions.q, problem.frame.positions.k
    if not q.numel() or not k.numel():
        return True
    return max(int(q.max()), int(k.max())) - min(int(q.min()), int(k.min())) < _MOST


def _contiguous(problem: Problem) -> bool:
    q, k = problem.frame.positions.q, problem.frame.positions.k
    steps = [p[..., 1:] - p[..., :-1] for p in (q, k)]
    return q.dim() == k.dim() == 1 and all(bool((step == 1).all()) for step in steps)


def _forward(problem: Problem) -> Result:
    frame = problem.frame
    out = torch.empty((*frame.batch, frame.heads, frame.nq, problem.dv), dtype=torch.float32)
    lse = torch.empty((*frame.batch, frame.heads, frame.nq), dtype=torch.float32)
    if out.numel() == 0 or frame.nk == 0:
        return out.zero_(), lse.fill_(-torch.inf)
    call, kept = Arguments(), list[Tensor]()

    def operand(t: Tensor) -> Operand:
        kept.append(t)  # alive until the kernel has run
        return _operand(t, problem)

    q, k, scale = _dot_operands(problem)
    call.batch = (ctypes.c_int64 * AXES)(*_axes(frame.batch, 1))
    call.heads, call.key_heads, call.nq, call.nk = frame.heads, problem.key_heads, frame.nq, frame.nk
    call.dk, call.dv, call.scale = q.shape[-1], problem.dv, scale
    call.dtype, call.out_dtype, call.threads = CODES[q.dtype], CODES[torch.float32], torch.get_num_threads()
    call.q, call.k, call.v = operand(q), operand(k), operand(problem.v.to(q.dtype))
    call.out, call.lse = operand(out), operand(lse[..., None])
    library = load(_isa())
    for name, t in _lower_mask(problem, library.queries, library.keys).items():
        if name == "bits":
            kept.append(t)
            call.bits = t.data_ptr()
        else:
            setattr(call, name, operand(t))
    _lower_modifiers(problem, call, kept)
    _lower_dropout(problem, call, kept)
    library.forward(call)
    return out, lse


def _axes(values: tuple[int, ...], missing: int) -> tuple[int, ...]:
    return (*(missing for _ in range(AXES - len(values))), *values)


def _operand(t: Tensor, problem: Problem) -> Operand:
    """A tensor (*batch, h, n, m), its axes broadcast to the call's where their size is 1."""
    strides = tuple(0 if size == 1 else stride for size, stride in zip(t.shape, t.stride(), strict=True))
    lead = (ctypes.c_int64 * AXES)(*_axes(strides[:-3], 0))
    return Operand(t.data_ptr(), lead, *strides[-3:])


def _dot_operands(problem: Problem) -> tuple[Tensor, Tensor, float]:
    """Queries and keys whose dot product, times the scale, is the similarity."""
    similarity, q, k = problem.similarity, problem.q, problem.k
    dtype = torch.promote_types(q.dtype, k.dtype)
    q, k = q.to(dtype), k.to(dtype)
    if not isinstance(similarity, ScaledDot):
        return q, k, 1.0
    if isinstance(similarity.scale, Tensor):
        scale = similarity.scale
        return q.float() * (scale[..., None, None] if scale.dim() else scale).float(), k.float(), 1.0
    return q, k, max(q.shape[-1], 1) ** -0.5 if similarity.scale is None else similarity.scale


def _lower_mask(problem: Problem, queries: int, keys: int) -> dict[str, Tensor]:
    """The mask as intervals, as booleans that the caller has, as a tile map with bits, or as intervals and booleans."""
    mask, frame = problem.mask, problem.frame
    if type(mask) is Everything:
        return {}
    interval = mask.rows(frame)
    if interval is not None:
        return {"start": interval.start[..., None].int(), "stop": interval.stop[..., None].int()}
    if type(mask) is Dense:
        return {"allowed": _full(frame.lift(mask.allowed))}
    if type(mask) is And:
        for dense, other in ((mask.a, mask.b), (mask.b, mask.a)):
            rest = other.rows(frame) if type(dense) is Dense else None
            if type(dense) is Dense and rest is not None:
                limits = {"start": rest.start[..., None].int(), "stop": rest.stop[..., None].int()}
                return {"allowed": _full(frame.lift(dense.allowed)), **limits}
    if problem.frame.heads // problem.key_heads * frame.nq < _FEW:
        return {"allowed": _full(mask.visible(frame.region()))}
    return _tile_map(mask, problem, queries, keys)


def _full(t: Tensor) -> Tensor:
    return t.reshape((1,) * (3 - t.dim()) + tuple(t.shape)) if t.dim() < 3 else t


def _tile_map(mask: Mask, problem: Problem, queries: int, keys: int) -> dict[str, Tensor]:
    """Which tiles are NONE (-1) or ALL (-2), and for the rest the number of their bits: never n × n."""
    frame = problem.frame
    tiling = frame.tiling(queries, keys)
    cover = mask.cover(tiling)
    cover = _full(cover.expand(*cover.shape[:-2], *tiling.shape))
    tiles = torch.full(cover.shape, -2, dtype=torch.int32).masked_fill(cover == Cover.NONE, -1)
    found = list[Tensor]()
    count = 0
    for n, rows in enumerate(tiling.row_blocks):
        for m, cols in enumerate(tiling.col_blocks):
            some = cover[..., n, m] == Cover.SOME
            if not bool(some.any()):
                continue
            seen = mask.visible(frame.region(rows, cols))
            lead = torch.broadcast_shapes(seen.shape[:-2], cover.shape[:-2])
            if tuple(cover.shape[:-2]) != tuple(lead):  # the mask tells batch elements apart, its cover did not
                cover, tiles = (t.expand(*lead, *tiling.shape).clone() for t in (cover, tiles))
                some = cover[..., n, m] == Cover.SOME
            seen = seen.expand(*lead, rows.stop - rows.start, cols.stop - cols.start)[some]
            found.append(_packed(seen, keys))
            tiles[..., n, m] = tiles[..., n, m].masked_scatter(
                some, torch.arange(count, count + len(seen), dtype=torch.int32)
            )
            count += len(seen)
    bits = torch.cat(found) if found else torch.zeros(1, keys, dtype=torch.int64)
    return {"tiles": tiles, "bits": bits}


def _packed(seen: Tensor, keys: int) -> Tensor:
    """Booleans (tiles, r, c), r ≤ 64, as (tiles, keys) words: bit i of word j is row i, key j."""
    rows = torch.arange(seen.shape[-2])[:, None]
    words = (seen.long() << rows).sum(-2)
    return torch.nn.functional.pad(words, (0, keys - words.shape[-1])).contiguous()


def _lower_modifiers(problem: Problem, call: Arguments, kept: list[Tensor]) -> None:
    frame = problem.frame
    for stage in problem.score.parts[1:]:
        if isinstance(stage, SoftCap):
            assert isinstance(stage.cap, float)
            call.cap = stage.cap
        elif isinstance(stage, Alibi):
            slopes = stage.slopes.float().contiguous()
            kept.append(slopes)
            call.slopes, call.slope_stride = slopes.data_ptr(), int(slopes.numel() > 1)
            _lower_positions(problem, call, kept)
        elif isinstance(stage, Bias):
            bias = _full(frame.lift(stage.bias))
            bias = bias if bias.dtype in CODES else bias.float()
            kept.append(bias)
            call.bias, call.bias_dtype = _operand(bias, problem), CODES[bias.dtype]
        elif isinstance(stage, RelativeBias):
            distances = torch.arange(frame.nq + frame.nk - 1) - (frame.nk - 1)
            ahead = distances + (frame.positions.q[0] - frame.positions.k[0])
            index = stage.buckets.index(ahead, torch.zeros_like(ahead))
            offsets = stage.table.float()[index].T.contiguous()
            kept.append(torch.nn.functional.pad(offsets, (0, 64)))
            call.offsets, call.offset_stride = kept[-1].data_ptr(), kept[-1].shape[1] if len(offsets) > 1 else 0


def _lower_dropout(problem: Problem, call: Arguments, kept: list[Tensor]) -> None:
    drop = problem.dropout
    call.keep = 1.0
    if drop is None:
        return
    assert drop.seed is not None
    call.seed, call.threshold, call.keep = drop.seed & (2**64 - 1), drop.threshold, drop.scale
    _lower_positions(problem, call, kept)


def _lower_positions(problem: Problem, call: Arguments, kept: list[Tensor]) -> None:
    for name, p in (("q_at", problem.frame.positions.q), ("k_at", problem.frame.positions.k)):
        p = p.long().contiguous()
        kept.append(p)
        setattr(call, name, p.data_ptr())
        strides = tuple(0 if size == 1 else step for size, step in zip(p.shape[:-1], p.stride()[:-1], strict=True))
        setattr(call, f"{name}_batch", (ctypes.c_int64 * AXES)(*_axes(strides, 0)))
