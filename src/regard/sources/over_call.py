"""OverCall: a call of attention_over, its parts one after another, and its gradients."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import regard.core.arrays as arrays
from regard.api import attention_state
from regard.backends.base import Backend
from regard.backends.streaming.backward import output_cotangents
from regard.call.of_pairs import check_of_some_keys
from regard.call.of_part import mask_of_part, part_gradients, score_of_part
from regard.call.part import QueriesAndKeys
from regard.core.dtypes import accumulator, exact
from regard.core.errors import ShapeError
from regard.core.functions import with_bound
from regard.core.positions import Positions
from regard.core.region import Frame
from regard.core.shapes import count_of, listed
from regard.core.state import RowStats, State
from regard.core.wrong_calls import kind_of
from regard.masks.algebra import Cover, Everything, Mask
from regard.runtime.binding import BoundCall
from regard.runtime.dispatch import Explanation, explanation
from regard.scores.algebra import Score, as_pipeline
from regard.sources.chunks import Chunks
from regard.sources.progress import Progress, progress_bar
from regard.sources.read_ahead import ReadAhead
from regard.sources.source import Part, Source, closed_at_the_end

# Queries and keys of the tiles by which a part is known to be hidden.
TILE = (64, 4096)


@dataclass(frozen=True, eq=False)
class OverCall:
    """The arguments of one call of attention_over but q.

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

    def with_tensors(self, tensors: tuple[Tensor, ...]) -> OverCall:
        """The same call on other tensors, in the order of `tensors()`."""
        rest = iter(tensors)
        score = self.score.with_tensors(rest)
        sink = None if self.sink is None else next(rest)
        return replace(self, score=score, sink=sink, source=self.source.with_tensors(tuple(rest)))

    def query_positions(self, q: Tensor, given: Tensor | None) -> Tensor | None:
        """Where the queries stand; ShapeError where something compares positions and none are given."""
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
            many = "keys whose number or positions are not known before they are read"
            many, one = many if nk is None else count_of(nk, "key"), nq == 1
            last = "torch.arange(nk - nq, nk)" if nk is None else f"torch.arange({nk - nq}, {nk})"
            raise ShapeError(
                f"{count_of(nq, 'query')} {'meets' if one else 'meet'} {many} under {positional!r}, and the queries' "
                f"positions are not given. Pass\n  positions={last} if "
                f"{'it is the last token' if one else f'they are the last {nq} tokens'} (decoding), or "
                f"positions=torch.arange({nq}) if {'it is' if one else 'they are'} the first."
            )
        return torch.arange(first, first + nq, dtype=torch.int64, device="cpu")

    def fold(self, q: Tensor) -> State:
        """The state of all keys, in the caller's axes."""
        state: State | None = None
        heads: torch.Size | None = None
        with torch.no_grad(), exact(q.device.type), self._visits(q) as visits:
            for part, k, v in visits:
                if self.recorded and (k.requires_grad or v.requires_grad) and not self.source.tensors():
                    raise ValueError(
                        f"k or v of a part requires a gradient, which could not reach it: {self.source!r} makes its "
                        "parts anew. Pass a list of parts, or call it under torch.no_grad()."
                    )
                if heads not in (None, k.shape[-3:-2]):
                    raise ShapeError(
                        f"keys {part.first} to {part.first + part.count - 1} have {count_of(k.shape[-3], 'head')}, "
                        f"those before them {heads[0]}; expected as many."
                    )
                heads = k.shape[-3:-2]
                found = self._state(q, part, k, v, first=state is None)
                if state is not None and state.o.shape != found.o.shape:
                    raise ShapeError(
                        f"keys {part.first} to {part.first + part.count - 1} give outputs {listed(found.o.shape)}, "
                        f"those before them {listed(state.o.shape)}; expected one batch and one width of values."
                    )
                state = found if state is None else state | found
                del k, v  # before the next part is waited for
        assert state is not None, "`parts` raises where there is none"
        return state

    def gradients(self, q: Tensor, whole: RowStats, out: Tensor, g: Tensor, needs: tuple[bool, ...]) -> tuple[Any, ...]:
        """Those of q and of `tensors()` for which `needs` is true, from the cotangent of the output."""
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
                    places = [place for place in (*sums, *g_kv) if place is not None]
                    for place, g_t in zip(places, part_gradients(state, whole, g, delta, inputs), strict=True):
                        if g_t is not None:
                            place += g_t
                first = False
                del k, v
        of_tensors = (t if need else None for t, need in zip(of_source.tensors(), needs[count:], strict=True))
        known = (None if t is None else t.to(x.dtype) for t, x in zip(sums, own[:count], strict=True))
        return *known, *of_tensors

    def _state(self, q: Tensor, part: Part, k: Tensor, v: Tensor, first: bool) -> State:
        score, mask = self._values(part)
        return attention_state(
            q,
            k,
            v,
            score=score,
            mask=mask,
            positions=self.positions_of(part),
            sink=self.sink if first else None,
            backend=self.backend,
        )

    def explain(self, q: Tensor, part: Part, k: Tensor, v: Tensor) -> Explanation:
        """How a part would run."""
        given = BoundCall(q, k, v, *self._values(part), self.positions_of(part), self.sink, None)
        check_of_some_keys(given.problem)
        return explanation(given.problem, self.backend, lse=True)

    def _values(self, part: Part) -> tuple[Score, Mask]:
        """Score and mask of a part."""
        of = self._part(part)
        return score_of_part(self.score, of), mask_of_part(self.mask, of)

    def _part(self, part: Part) -> QueriesAndKeys:
        return QueriesAndKeys(None, range(part.first, part.first + part.count), None, self.source.keys)

    def positions_of(self, part: Part) -> Positions | None:
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
        with closing(self.parts()) as parts:
            for part in parts:
                if self.hides(q, part):
                    hidden = part if hidden is None and not seen else hidden
                else:
                    hidden, seen = None, True
                    yield part
            if hidden is not None:
                yield hidden

    def parts(self) -> Generator[Part, None, None]:
        """The parts of the source, one at least. ValueError where it gives none, TypeError where it gives no Part."""
        n, parts = 0, self.source.parts()
        with closed_at_the_end(parts):
            for part in parts:
                if not isinstance(part, Part):  # pyright: ignore[reportUnnecessaryIsInstance]
                    raise TypeError(
                        f"part {n} of the source {self.source!r} is {kind_of(part)}; expected a regard.sources.Part."
                    )
                yield part
                n += 1
        if not n:
            raise ValueError(
                f"the source {self.source!r} gave no part; expected one at least. An iterator that was read before "
                "gives nothing: pass a list, or a function that returns a new iterator."
            )

    def hides(self, q: Tensor, part: Part) -> bool:
        """Whether the mask says of every tile that no query sees any of its keys."""
        if type(self.mask) is Everything:
            return False
        headed = q.dim() >= 4
        batch, heads = (q.shape[:-3], q.shape[-3]) if headed else (q.shape[:-2], 1)
        at = self.positions_of(part)
        frame = Frame.of(q.shape[-2], part.count, batch=tuple(batch), heads=heads, positions=at, device=q.device)
        frame, mask = replace(frame, headed=headed), mask_of_part(self.mask, self._part(part))
        # a mask that does not fit is refused where the part is computed
        return mask.shape_error(frame) is None and bool((mask.cover(frame.tiling(*TILE)) == Cover.NONE).all())


def over_call(
    q: Tensor,
    source: Any,
    score: Score,
    mask: Mask,
    positions: Tensor | None,
    sink: Tensor | float | None,
    backend: Backend | None,
    ahead: int,
    progress: Progress,
) -> OverCall:
    """The call of arguments as attention_over takes them."""
    if ahead < 0:
        raise ValueError(f"ahead is {ahead}; expected a number of parts, or 0 to read without a thread.")
    source = source if isinstance(source, Source) else Chunks(source)
    logits = None if sink is None else torch.as_tensor(sink, dtype=accumulator(q.dtype), device=q.device)
    score, mask = with_bound(score), with_bound(mask)
    call = OverCall(source, score, mask, None, logits, backend, ahead, progress, torch.is_grad_enabled())
    return replace(call, positions=call.query_positions(q, positions))


def _wanted(part: Part, g_parts: Iterator[Part]) -> tuple[Tensor | None, ...]:
    """Where the gradients of the keys and the values of a part are summed; None where none is wanted."""
    place = next(p for p in g_parts if p.first == part.first and p.count == part.count)
    return tuple(t if isinstance(t, Tensor) and not t.is_meta else None for t in place.read())
