"""monitor: a few numbers a layer and a head, every so many steps of a training."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from typing_extensions import Self

import regard.core.html as html
from regard.core.arrays import whole_number
from regard.core.shapes import count_of
from regard.core.wrong_calls import kind_of
from regard.inspect.facts.rows import Entropy, MaxScore
from regard.inspect.layers import Layers
from regard.inspect.record import record
from regard.inspect.stacks import places
from regard.inspect.tables import head_grid, text_of
from regard.inspect.tape import Recorded, Tape

FACTS = (MaxScore(), Entropy())
QUANTITIES = ("max_score", "entropy")


class Monitor:
    """Looks at the model in each `every`-th block that it is entered for, the first one included; see `monitor`."""

    def __init__(self, model: nn.Module, every: int, layers: Layers) -> None:
        if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"monitor has {kind_of(model)}; expected the model, an nn.Module.")
        every = whole_number(every, "every")
        if every < 1:
            raise ValueError(f"every={every}: expected 1 (each step) or more.")
        self.model, self.every, self.layers = model, every, layers
        self.steps = 0
        self._seen = dict[str, dict[str, float]]()  # layer -> quantity -> number
        self._recording: ExitStack | None = None
        self._tape: Tape | None = None

    def __enter__(self) -> Self:
        if self._recording is not None:
            raise RuntimeError("this monitor is open already; one block is one step.")
        self._seen, self._tape = {}, None
        with ExitStack() as recording:
            if self.steps % self.every == 0:
                self._tape = recording.enter_context(record(self.model, FACTS, layers=self.layers))
            self._recording = recording.pop_all()
        self.steps += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recording, tape = self._recording, self._tape
        assert recording is not None
        self._recording = self._tape = None
        recording.__exit__(kind, error, trace)
        if error is None and tape is not None:
            self._seen = {name: _numbers(tape[name]) for name in tape.names}

    def scalars(self) -> dict[str, float]:
        """What was seen in the last block; nothing where it was not looked at, or ended in an error."""
        return {f"attention/{name}/{what}": value for name, of in self._seen.items() for what, value in of.items()}

    def __repr__(self) -> str:
        said = f"{count_of(len(self._seen), 'layer')} seen in the last" if self._seen else "nothing seen in the last"
        return f"Monitor({type(self.model).__name__}, every={self.every}: {count_of(self.steps, 'step')}, {said})"

    def _repr_html_(self) -> str:
        """What was seen in the last block for a notebook: a row a layer, and a grid of layers × heads a quantity."""
        rows = [
            (place, name, *(text_of(of[what]) for what in QUANTITIES))
            for place, (name, of) in zip(places(list(self._seen)), self._seen.items(), strict=True)
        ]
        grids = [
            head_grid(what, [[v for name, v in of.items() if name.endswith(f"/{what}")] for of in self._seen.values()])
            for what in QUANTITIES
        ]
        shown = (html.table(rows, ("", "layer", *QUANTITIES)), html.side_by_side(*grids)) if rows else ()
        return html.panel(repr(self), *shown)


def monitor(model: nn.Module, *, every: int = 100, layers: Layers = "*") -> Monitor:
    """A Monitor of a model in training: open it with `with` around each step, and log its `scalars()`.

    For each layer and each head they hold the largest score of the step over batch and queries (a score that grows is
    a sign of divergence), and the mean entropy in nats of the queries that see a key (0: the head has collapsed; NaN:
    no query sees a key):
    attention/<layer>/max_score, .../entropy, attention/<layer>/head<h>/max_score, .../entropy.

    Only each `every`-th step is observed, the first one included; the other steps cost nothing and have no scalars. An
    observed step computes the products of queries and keys about twice more, in linear memory, and changes neither
    gradients nor random numbers. `layers` and errors as in `record`; ValueError for every < 1.

    >>> import regard as rg
    >>> model = rg.nn.MultiHeadAttention(8, heads=2)
    >>> watch = monitor(model, every=2)
    >>> for step in range(3):
    ...     with watch:
    ...         loss = model(torch.ones(1, 5, 8)).sum()
    ...     print(step, sorted(watch.scalars())[:2])   # wandb.log(watch.scalars(), step=step)
    0 ['attention/MultiHeadAttention/entropy', 'attention/MultiHeadAttention/head0/entropy']
    1 []
    2 ['attention/MultiHeadAttention/entropy', 'attention/MultiHeadAttention/head0/entropy']
    """
    return Monitor(model, every, layers)


def _numbers(calls: tuple[Recorded, ...]) -> dict[str, float]:
    """Of all calls of one layer together: by head, and of all heads."""
    peaks, sees, entropies = (
        torch.cat([_by_head(of(call)) for call in calls], -1)
        for of in (lambda c: c[MaxScore()].score, lambda c: c[MaxScore()].key >= 0, lambda c: c[Entropy()])
    )
    peak = pad(peaks, (1, 0), value=-torch.inf).amax(-1)
    entropy = entropies.double().sum(-1) / sees.sum(-1)  # a query that sees nothing has none: it adds 0
    found = {"max_score": float(peak.amax()), "entropy": float(entropy.nanmean())}
    for head, (largest, mean) in enumerate(zip(peak.tolist(), entropy.tolist(), strict=True)):
        found |= {f"head{head}/max_score": largest, f"head{head}/entropy": mean}
    return found


def _by_head(t: Tensor) -> Tensor:
    """(*batch, h, n) as (h, everything)."""
    return t.movedim(-2, 0).flatten(1)
