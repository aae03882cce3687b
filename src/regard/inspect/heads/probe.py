"""The standard probe: random tokens, twice, which distinguish the kinds of heads that the literature names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.core.shapes import count_of
from regard.inspect.facts.places import Mass, Offsets
from regard.inspect.facts.rows import Visible
from regard.inspect.heads.reader import Reader, answers_head_calls, check_causal, check_model, check_number
from regard.inspect.reading import positions, text_part
from regard.inspect.record import record
from regard.inspect.report.findings import Finding, Findings, Head
from regard.inspect.report.grids import Grid
from regard.inspect.report.head_result import HeadArray, HeadResult, in_order
from regard.inspect.report.induction import deviations
from regard.inspect.stacks import places
from regard.inspect.tape import Recorded

LEAST = 0.25  # of the mass, from which a head is named
LENGTH, LEAST_TOKENS = 64, 8  # how many tokens are drawn by default, and at least


class Kind(NamedTuple):
    """A kind of head: the token that it reads in the second copy of the tokens, and the paper that describes it."""

    name: str
    looks_at: str
    source: str


KINDS = (
    Kind("induction", "the token after the first copy", "Olsson et al. 2022, arXiv 2209.11895"),
    Kind("duplicate-token", "the first copy", "Wang et al. 2022, arXiv 2211.00593"),
    Kind("previous-token", "the token before", "Wang et al. 2022, arXiv 2211.00593"),
    Kind("first-token", "the first token", "Xiao et al. 2023, arXiv 2309.17453"),
)


@dataclass(frozen=True, eq=False, repr=False)
class Probe(HeadResult):
    """The weights of a model's heads in the second copy of random tokens.

    ids     what was read: a start token, where the model has one, and `length` random tokens, twice
    layers  the paths of the attention layers, in the order of their calls
    scores  for each kind one tensor (h,) a layer: the mean weight on the keys of that kind, over the second copy; NaN
            for a layer that does not see these keys (a window)
    error   for each kind one tensor (h,) a layer: half the interval of each mean, 95 % for all heads together
            (Bonferroni), as if positions were independent; the means over several seeds have smaller intervals
    chance  for each layer the mean weight that a head with equal weights gives to such a key
    """

    ids: tuple[int, ...]
    length: int
    layers: tuple[str, ...]
    scores: dict[str, tuple[Tensor, ...]]
    error: dict[str, tuple[Tensor, ...]]
    chance: tuple[float, ...]

    def heads(self, kind: str) -> tuple[Head, ...]:
        """The heads of a kind, with their score and its interval: at least LEAST, and significantly above chance."""
        named = places(self.layers)
        found = [
            Head(layer, head, mean, (max(mean - half, 0.0), min(mean + half, 1.0)), named[layer])
            for layer, (means, halves) in enumerate(zip(self.scores[kind], self.error[kind], strict=True))
            for head, (mean, half) in enumerate(zip(means.tolist(), halves.tolist(), strict=True))
            if mean >= LEAST and mean - half > self.chance[layer]
        ]
        return tuple(sorted(found, key=lambda head: -head.value))

    @property
    def grids(self) -> tuple[Grid, ...]:
        """The grids of the kinds with at least one head."""
        return tuple(self._grid(kind) for kind in KINDS if self.heads(kind.name))

    @property
    def findings(self) -> Findings:
        every: list[Finding] = []
        for kind in KINDS:
            found = self.heads(kind.name)
            said = f"{kind.name} heads on random tokens: {', '.join(map(str, found)) or 'none'}"
            rule = f"≥ {LEAST:.0%} of the mass on {kind.looks_at}, above chance by its 95% interval ({kind.source})"
            every.append(Finding(said, rule, found))
        return Findings(every)

    @property
    def arrays(self) -> dict[str, HeadArray]:
        named = {kind.name: kind.name.replace("-", "_") for kind in KINDS}
        scores = {f"probe_{named[k]}": HeadArray("head", "mean weight", of) for k, of in self.scores.items()}
        errors = {f"probe_{named[k]}_error": HeadArray("head", "weight", of) for k, of in self.error.items()}
        return {**scores, **errors}

    @property
    def numbers(self) -> dict[str, Any]:
        return {"length": self.length, "ids": self.ids, "chance": self.chance}

    def reordered(self, order: Sequence[int]) -> Probe:
        return replace(
            self,
            layers=in_order(self.layers, order),
            scores={kind: in_order(of, order) for kind, of in self.scores.items()},
            error={kind: in_order(of, order) for kind, of in self.error.items()},
            chance=in_order(self.chance, order),
        )

    @property
    def heading(self) -> str:
        most = max(self.chance)
        return f"{self.length} random tokens, twice: the weights of the second time, {most:.1%} at most by chance"

    def __str__(self) -> str:
        return f"{self.heading}\n\n{super().__str__()}"

    def _grid(self, kind: Kind) -> Grid:
        values = tuple(tuple((100 * of_layer).tolist()) for of_layer in self.scores[kind.name])
        return Grid(f"{kind.name} on random tokens", "% of mass", values, 0.0, 100.0, tuple(places(self.layers)))


@torch.no_grad()
@answers_head_calls
def probe(model: nn.Module, *, length: int | None = None, seed: int = 0, among: Sequence[int] | None = None) -> Probe:
    """Feeds a causal model random tokens, twice, and finds its induction, duplicate-, previous- and first-token heads.

    A text may have too few repetitions, or a head may look at them for other reasons. Random tokens that are all
    different leave no other reason: a head that looks after the first copy while it reads the second looks for copies.

    model   regard's or transformers' layers. Runs once, in eval mode, and is left as it was
    length  the number of random tokens, which the model reads twice; None: 64, or fewer for a small vocabulary or few
            positions
    among   the token ids to draw from, without repetition; None: all ids of the model's embedding
    Raises ValueError for a length below 8, above the number of ids or of the model's positions, or if no layer sees the
    first copy while it reads the second; Unsupported for a model that is not causal; other errors as in look.

    >>> from regard.demo.model import load
    >>> found = probe(load(), among=range(32, 127))
    >>> [head.name for head in found.heads("induction")]
    ['L3H1']
    """
    check_model(model)
    check_number(length, "length")
    model = text_part(model)
    ids = draw(model, length, seed, among)
    length = len(ids) // 2
    reader = Reader.of(model, ids, None)
    facts = Offsets((1 - length, -length, -1)), Mass.first(1), Visible()
    with record(model, facts=facts) as tape:
        reader.run()
    check_causal(model, tape.calls, "so it does not read the copies one after the other")
    again = slice(len(ids) - length, len(ids))
    seen = [_sees(call, again, facts[0].offsets) for call in tape.calls]
    if not torch.stack(seen)[:, 0].any():
        most = max(int(call[facts[2]].max()) for call in tape.calls)
        raise ValueError(
            f"length={length}: no layer sees the first copy while it reads the second, but {most} keys at most. "
            f"Pass length={most - 1} or less."
        )
    weights = [
        torch.cat([call[facts[0]], call[facts[1]]], -1)[0, :, again].double().masked_fill(~visible, torch.nan)
        for call, visible in zip(tape.calls, seen, strict=True)
    ]
    means = [w.mean(1) for w in weights]
    halves = [deviations(sum(map(len, weights))) * w.std(1) / length**0.5 for w in weights]
    return Probe(
        tuple(ids),
        length,
        tuple(call.name for call in tape.calls),
        {kind.name: tuple(mean[:, n] for mean in means) for n, kind in enumerate(KINDS)},
        {kind.name: tuple(half[:, n] for half in halves) for n, kind in enumerate(KINDS)},
        tuple(float((1 / call[facts[2]][0, :, again].double()).mean()) for call in tape.calls),
    )


def _sees(call: Recorded, rows: slice, offsets: tuple[int, ...]) -> Tensor:
    """Whether all of these rows see the key at each offset, and the first key: boolean (len(offsets) + 1,)."""
    seen = call.view.mask.visible(call.view.frame.region(rows))
    pairs = seen.expand(*seen.shape[:-2], rows.stop - rows.start, call.view.frame.nk)
    pairs = pairs.flatten(0, -3).all(0) if pairs.dim() > 2 else pairs
    return torch.stack([*(pairs.diagonal(rows.start + n).all() for n in offsets), pairs[:, 0].all()])


def draw(model: nn.Module, length: int | None = None, seed: int = 0, among: Sequence[int] | None = None) -> list[int]:
    """The token ids of the probe: a start token, where the model has one, and `length` others, twice. See `probe`."""
    if among is None:
        among = range(_vocabulary(model))
    config = getattr(model, "config", None)
    start, *marks = (getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad"))
    others = [one for one in among if one not in (start, *marks)]
    first = [start] if isinstance(start, int) else []
    length = _length(model, length, len(others), len(first))
    order = torch.randperm(len(others), generator=torch.Generator().manual_seed(seed), dtype=torch.int64, device="cpu")
    drawn = [others[n] for n in order[:length].tolist()]
    return [*first, *drawn, *drawn]


def _length(model: nn.Module, length: int | None, others: int, first: int) -> int:
    """How many tokens are drawn of so many others, behind `first` start tokens; ValueError where that cannot be."""
    name, limit = type(model).__name__, positions(model)
    room = others if limit is None else (limit - first) // 2
    if others < LEAST_TOKENS:
        raise ValueError(f"there are {others} token ids to draw; expected {LEAST_TOKENS} or more: pass among=.")
    if room < LEAST_TOKENS:
        start = "a start token, and " if first else ""
        raise ValueError(
            f"{name} has positions for {count_of(limit or 0, 'token')}; the probe needs {2 * LEAST_TOKENS + first}: "
            f"{start}"
            f"{LEAST_TOKENS} tokens, twice."
        )
    most = min(others, room)
    if length is None:
        return min(LENGTH, most)
    if LEAST_TOKENS <= length <= most:
        return length
    if others <= room:
        why = f"the tokens that there are to draw. Pass length={most}, or more token ids as among="
    else:
        why = (
            f"of which {name} reads {2 * most + first} tokens and has positions for {limit}. Pass length={most} or less"
        )
    raise ValueError(f"length={length}: expected {LEAST_TOKENS} to {most:,}, {why}.")


def _vocabulary(model: nn.Module) -> int:
    embed = getattr(model, "get_input_embeddings", lambda: None)()
    embed = embed or next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    if not isinstance(embed, nn.Embedding):
        raise ValueError(f"{type(model).__name__} has no embedding to draw tokens of; pass among=, the ids to draw.")
    return embed.num_embeddings
