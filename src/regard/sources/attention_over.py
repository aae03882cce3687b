"""attention_over: attention over keys and values that come in parts, folded by State."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

import regard.core.arrays as arrays
from regard.api import attention_state
from regard.backends.base import Backend
from regard.backends.streaming.backward import output_cotangents
from regard.core.dtypes import accumulator, exact
from regard.core.errors import ShapeError, Unsupported
from regard.core.positions import Positions
from regard.core.region import Frame
from regard.core.shapes import listed
from regard.core.state import RowStats, State
from regard.masks.algebra import Cover, Everything, Mask
from regard.scores.algebra import Score, as_pipeline
from regard.scores.similarity import ScaledDot
from regard.sources.chunks import Chunks
from regard.sources.part_of_call import mask_of_part, score_of_part
from regard.sources.progress import Progress, progress_bar
from regard.sources.read_ahead import ReadAhead
from regard.sources.source import Part, Source, closed_at_the_end

# Queries and keys of the tiles by which a part is known to be hidden.
TILE = (64, 4096)


def attention_over(
    q: Any,
    source: Source | Iterable[tuple[Any, ...]] | Callable[[], Iterable[tuple[Any, ...]]],
    *,
    score: Score = ScaledDot(),
    mask: Mask = Everything(),
    positions: Tensor | None = None,
    sink: Tensor | float | None = None,
    backend: Backend | None = None,
    ahead: int = 2,
    progress: Progress = None,
) -> Any:
    """`attention` over keys and values that come in parts, from files larger than memory, say.

    q (*batch, h, nq, dk), the keys and values of each part as `attention` takes them, in q's dtype -> (*batch, h, nq,
    dv), in q's dtype whatever autocast says. The answer is that over all keys at once, but for rounding. Memory is q's,
    the answer's, and that of `ahead` + 1 parts: one in use, the others read or being read.

    source     a Source (see regard.sources), or what Chunks takes: a list, an iterator, a function that returns one
    score      as `attention`; a similarity of your own sees each part as a call of its own, with its own positions
    mask       as `attention`, over all keys; a part of which it hides all is not read, where `Mask.cover` says so
    positions  where the queries stand, integers (nq,) or (*batch, nq); the source says where keys stand, from 0 unless
               told otherwise. None: as the keys, where these are as many. torch.arange(nk - nq, nk) are the last
    sink       as `attention`
    backend    a Backend that must run every part, or None: the first that can
    ahead      how many parts a thread reads while another is in use; 0: no thread, this one reads
    progress   "tqdm", "rich" (if installed), or a function of (keys done, keys or None), called behind each part

    Differentiable once, with respect to q, the sink, the tensors of the score, and the keys and values of a source of
    tensors (Chunks of a list, Arrays of tensors): the backward reads the source a second time, with m and l of each row
    kept from the first, in as little memory. Raises ValueError where that is asked of a source that can be read once,
    or where a part requires a gradient that could not reach it; RuntimeError, its cause the error, where a part cannot
    be read; Unsupported where the mask or the score reads indices of keys and the source does not know how many there
    are; and what `attention` raises. However it ends, the thread has ended and files are closed.
    Source: the merge of Milakov and Gimelshein 2018 (arXiv 1805.02867), see State.

    >>> import regard as rg
    >>> q, k, v = torch.randn(3, 8), torch.randn(7, 8), torch.randn(7, 2)
    >>> parts = [(k[:5], v[:5]), (k[5:], v[5:])]
    >>> out = attention_over(q, parts, mask=rg.Causal(), positions=torch.arange(4, 7))
    >>> torch.allclose(out, rg.attention(q, k, v, mask=rg.Causal(), positions=rg.tail(3, 7)), atol=1e-6)
    True
    """
    if ahead < 0:
        raise ValueError(f"ahead is {ahead}; expected a number of parts, or 0 to read without a thread.")
    answer = arrays.answer_like(q)
    q = arrays.tensor(q, "q")
    source = source if isinstance(source, Source) else Chunks(source)
    logits = None if sink is None else torch.as_tensor(sink, dtype=accumulator(q.dtype), device=q.device)
    call = _Call(source, score, mask, None, logits, backend, ahead, progress, torch.is_grad_enabled())
    call = replace(call, positions=call.query_positions(q, positions))
    given = (q, *call.tensors())
    if not call.recorded or not any(t.requires_grad for t in given):
        return answer(call.fold(q).finish()[0].to(q.dtype))
    if not source.rereadable:
        raise ValueError(
            f"q or a tensor of the score requires a gradient, and the source {source!r} is an iterator: the backward "
            "would read it a second time. Pass a list, or a function that returns a new iterator; or call it under "
            "torch.no_grad()."
        )
    return answer(_AttentionOver.apply(call, *given))


@dataclass(frozen=True, eq=False)
class _Call:
    """The arguments of one call but q.

    positions: of the queries, None where nothing compares them. recorded: the grad mode of the caller.
    """

    source: Source
    score: Score
    mask: Mask
    positions: Tensor | None
    sink: Tensor | None
    backend: Backend | None
    ahead: int
    progress: Progress
    recorded: bool

    def tensors(self) -> tuple[Tensor, ...]:
        """What may have a gradient besides q: tensors of the score, the sink, those that the source consists of."""
        return (*self.score.tensors(), *(() if self.sink is None else (self.sink,)), *self.source.tensors())

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> _Call:
        """The same call on other tensors, in the order of `tensors()`."""
        rest = iter(tensors)
        score = self.score.with_tensors(rest)
        sink = None if self.sink is None else next(rest)
        return replace(self, score=score, sink=sink, source=self.source.with_tensors(tuple(rest)))

    def query_positions(self, q: Tensor, given: Tensor | None) -> Tensor | None:
        """Where the queries stand; ShapeError where something compares positions and nobody said so."""
        if isinstance(given, Positions):
            raise TypeError(
                "positions is a Positions; expected those of the queries, positions=x.q: the source says where its "
                "keys stand."
            )
        if given is not None:
            return arrays.integers(given, "positions")
        pipeline = as_pipeline(self.score)
        positional = self.mask if self.mask.compares_positions() else pipeline
        if not positional.compares_positions():
            return None
        nq, nk, first = q.shape[-2], self.source.keys, self.source.first_position
        if nk != nq or first is None:
            many = "keys whose number or positions are not known before they are read" if nk is None else f"{nk} keys"
            last = "torch.arange(nk - nq, nk)" if nk is None else f"torch.arange({nk - nq}, {nk})"
            raise ShapeError(
                f"{nq} queries meet {many} under {positional!r}, and the queries' positions are not given. Pass\n"
                f"  positions={last} if they are the last {nq} tokens (decoding), or positions=torch.arange({nq}) if "
                "they are the first."
            )
        return torch.arange(first, first + nq)

    def fold(self, q: Tensor) -> State:
        """The state of all keys, in the caller's axes."""
        state: State | None = None
        with torch.no_grad(), exact(q.device.type), self._visits(q) as visits:
            for part, k, v in visits:
                if self.recorded and (k.requires_grad or v.requires_grad) and not self.source.tensors():
                    raise ValueError(
                        f"k or v of a part requires a gradient, which could not reach it: {self.source!r} makes its "
                        "parts anew. Pass a list of parts, or call it under torch.no_grad()."
                    )
                found = self._state(q, part, k, v, first=state is None)
                if state is not None and state.o.shape != found.o.shape:
                    raise ShapeError(
                        f"keys {part.first} to {part.first + part.count - 1} give outputs {listed(found.o.shape)}, "
                        f"those before them {listed(state.o.shape)}; expected one batch and one width of values."
                    )
                state = found if state is None else state | found
                del k, v  # before the next part is waited for
        assert state is not None, "a source gives a part, or raises"
        return state

    def gradients(self, q: Tensor, whole: RowStats, out: Tensor, g: Tensor, needs: tuple[bool, ...]) -> list[Any]:
        """Those of q and of `tensors()` for which `needs` is true, from the cotangent of the output.

        With m, l of the whole and those of a part (m', l', o'):  out = Σ o' e^(m' - m) / l,  l = Σ l' e^(m' - m).  So a
        part's o' has the cotangent g e^(m' - m) / l, and its l' has -(g · out) e^(m' - m) / l.
        """
        g, delta = output_cotangents(out, whole.empty, (g.to(out.dtype), None))
        own = tuple(t.detach().requires_grad_(need) for t, need in zip((q, *self.tensors()), needs, strict=True))
        count = len(own) - len(self.source.tensors())
        sums = [torch.zeros_like(t, dtype=out.dtype) if t.requires_grad else None for t in own[:count]]
        # the gradients of a source's tensors are a source too, whose parts are views of them
        of_source = self.source.with_tensors(
            tuple(torch.zeros_like(t, device=None if t.requires_grad else "meta") for t in own[count:])
        )
        g_parts = of_source.parts() if any(needs[count:]) else None
        call, first = self.with_tensors(own[1:]), True
        with exact(q.device.type), call._visits(own[0]) as visits:
            for part, k, v in visits:
                g_kv = (None, None) if g_parts is None else _wanted(part, g_parts)
                k, v = (t.detach().requires_grad_(g_t is not None) for t, g_t in zip((k, v), g_kv, strict=True))
                inputs = [t for t in (*own[:count], k, v) if t.requires_grad]
                if inputs:
                    with torch.enable_grad():
                        state = call._state(own[0], part, k, v, first)
                    share = whole.weights(state.m[..., None])[..., 0]
                    cotangents = ((state.o, g * share[..., None]), (state.l, -delta * share))
                    results, given = zip(*(pair for pair in cotangents if pair[0].requires_grad), strict=True)
                    places = [place for place in (*sums, *g_kv) if place is not None]
                    found = cast(tuple[Any, ...], torch.autograd.grad(results, inputs, given, allow_unused=True))
                    for place, g_t in zip(places, found, strict=True):
                        if g_t is not None:
                            place += g_t
                first = False
                del k, v
        of_tensors = (t if need else None for t, need in zip(of_source.tensors(), needs[count:], strict=True))
        known = (None if t is None else t.to(x.dtype) for t, x in zip(sums, own[:count], strict=True))
        return [*known, *of_tensors]

    def _state(self, q: Tensor, part: Part, k: Tensor, v: Tensor, first: bool) -> State:
        return attention_state(
            q,
            k,
            v,
            score=score_of_part(self.score, part, self.source.keys),
            mask=mask_of_part(self.mask, part, self.source.keys),
            positions=self._positions(part),
            sink=self.sink if first else None,
            backend=self.backend,
        )

    def _positions(self, part: Part) -> Positions | None:
        return None if self.positions is None else Positions(self.positions, part.positions)

    @contextmanager
    def _visits(self, q: Tensor) -> Generator[Iterator[tuple[Part, Tensor, Tensor]], None, None]:
        """The parts that some query may see, read, on q's device."""
        parts, name, total = self._visible_parts(q), repr(self.source), self.source.keys
        with progress_bar(self.progress, total) as tell, ReadAhead(parts, self.ahead, name, self.recorded) as read:

            def visits() -> Iterator[tuple[Part, Tensor, Tensor]]:
                for part, k, v in read:
                    yield part, arrays.tensor(k, "k").to(q.device), arrays.tensor(v, "v").to(q.device)
                    del k, v
                    tell(part.first + part.count)
                if total is not None:
                    tell(total)

            yield visits()

    def _visible_parts(self, q: Tensor) -> Generator[Part, None, None]:
        """Without those that are known to be hidden; where all are, the first, which says what shape the answer has."""
        hidden, seen = None, False
        parts = self.source.parts()
        with closed_at_the_end(parts):
            for part in parts:
                if self._hides(q, part):
                    hidden = part if hidden is None and not seen else hidden
                else:
                    hidden, seen = None, True
                    yield part
            if hidden is not None:
                yield hidden

    def _hides(self, q: Tensor, part: Part) -> bool:
        """Whether the mask says of every tile that no query sees any of its keys."""
        if isinstance(self.mask, Everything):
            return False
        headed = q.dim() >= 4
        batch, heads = (q.shape[:-3], q.shape[-3]) if headed else (q.shape[:-2], 1)
        at = self._positions(part)
        frame = Frame.of(q.shape[-2], part.count, batch=tuple(batch), heads=heads, positions=at, device=q.device)
        frame, mask = replace(frame, headed=headed), mask_of_part(self.mask, part, self.source.keys)
        # a mask that does not fit is refused where the part is computed
        return mask.shape_error(frame) is None and bool((mask.cover(frame.tiling(*TILE)) == Cover.NONE).all())


def _wanted(part: Part, g_parts: Iterator[Part]) -> tuple[Tensor | None, ...]:
    """Where the gradients of the keys and the values of a part are summed; None where none is wanted."""
    place = next(p for p in g_parts if p.first == part.first and p.count == part.count)
    return tuple(t if isinstance(t, Tensor) and not t.is_meta else None for t in place.read())


class _AttentionOver(torch.autograd.Function):
    """The output, to autograd: apply(call, q, *call.tensors())."""

    @staticmethod
    def forward(ctx: Any, call: _Call, q: Tensor, *tensors: Tensor) -> Tensor:
        state = call.fold(q)
        out = state.finish()[0]
        ctx.call = call
        ctx.save_for_backward(q, out, state.m, state.l, *tensors)
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise Unsupported(
                "attention_over can be differentiated once, and this backward is asked to be differentiable "
                "(create_graph=True). attention(...) over all keys can be, to any order."
            )
        q, out, m, l, *tensors = ctx.saved_tensors
        call = ctx.call.with_tensors(tuple(tensors))
        return None, *call.gradients(q, RowStats(m, l), out, g, tuple(ctx.needs_input_grad[1:]))
