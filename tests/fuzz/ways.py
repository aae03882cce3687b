"""The ways to ask regard about a call, and what the oracle's answer is to each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import regard as rg

from . import build
from .call import Call
from .oracle import Answer
from .tensors import Source

Results = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Way:
    """One way to ask. Both sides get the same random choices.

    wide: results have the accumulation dtype. repeated: it is asked twice, and must answer the same bits.
    parts: how many gradients, each rounded to its dtype, are added.
    """

    name: str
    regard: Callable[[Call, Source], Results]
    oracle: Callable[[Call, Answer, Source], Results]
    chance: float = 1.0
    suits: Callable[[Call], bool] = lambda call: True
    wide: bool = False
    parts: int = 1
    repeated: bool = False
    differentiable: bool = True

    def free(self, name: str, like: Tensor, free: dict[str, Tensor]) -> Tensor | None:
        """Where a result may hold anything, of a call that holds NaN or inf."""
        known = free.get(name, free.get("rest"))
        return free["rest"] if known is not None and known.dim() and known.shape != like.shape else known


def _attention(call: Call, s: Source) -> Results:
    return {"out": rg.attention(call.q, call.k, call.v, **build.arguments(call), backend=build.backend(call))}


def _state_of(call: Call) -> rg.State:
    return rg.attention_state(call.q, call.k, call.v, **build.arguments(call), backend=build.backend(call))


def _state(call: Call, s: Source) -> Results:
    return dict(zip(("out", "lse"), _state_of(call).finish(), strict=True))


def halves(call: Call, s: Source) -> tuple[Call, Call]:
    """The keys in two parts, the sink in one of them."""
    cut = s.choice.randrange(call.nk + 1)
    return call.keys(0, cut), replace(call.keys(cut, call.nk), sink=None)


def _merged(call: Call, s: Source) -> Results:
    a, b = halves(call, s)
    return dict(zip(("out", "lse"), (_state_of(b) | _state_of(a)).finish(), strict=True))


def _rows(call: Call, s: Source) -> list[int] | None:
    """All rows, or some: never as many as there are, since `Way.free` knows by the shape which of the two they are."""
    if not call.nq or s.maybe(0.5):
        return None
    rows = [s.choice.randrange(-call.nq, call.nq) for _ in range(s.choice.randrange(1, 4))]
    return [*rows, rows[0]] if len(rows) == call.nq else rows


def _weights(call: Call, s: Source) -> Results:
    return {"weights": rg.attention_weights(call.q, call.k, **build.arguments(call), rows=_rows(call, s))}


def _weights_of(call: Call, a: Answer, s: Source) -> Results:
    rows = _rows(call, s)
    return {"weights": a.weights if rows is None else a.weights[..., torch.tensor(rows) % call.nq, :]}


def _scores(call: Call, s: Source) -> Results:
    asked = {name: x for name, x in build.arguments(call).items() if name != "sink"}
    return {"scores": rg.attention_scores(call.q, call.k, **asked, rows=_rows(call, s))}


def _scores_of(call: Call, a: Answer, s: Source) -> Results:
    """Those of -inf are constants, whatever hides the pair."""
    rows, scores = _rows(call, s), call.lower(a.scores, 2)
    scores = scores.masked_fill(scores == -torch.inf, -torch.inf)
    return {"scores": scores if rows is None else scores[..., torch.tensor(rows) % call.nq, :]}


def _one_query(call: Call, s: Source) -> Results:
    """A query by itself: with Native(invariant=True) its bits are those that it has among the others."""
    row = s.choice.randrange(call.nq)
    alone = _attention(call.queries(row, row + 1), s)["out"]
    among = _attention(call, s)["out"][..., row : row + 1, :]
    if call.backend == ("native", True):
        assert torch.equal(alone.nan_to_num(1.5), among.nan_to_num(1.5)), f"query {row} alone has other bits"
    return {"row": alone}


def _one_row(call: Call, a: Answer, s: Source) -> Results:
    row = s.choice.randrange(call.nq)
    return {"row": a.out[..., row : row + 1, :]}


def _nothing(call: Call, s: Source) -> Results:
    """Dropout of everything: the output is 0, the lse what it was."""
    asked: dict[str, Any] = {**build.arguments(call), "dropout": rg.Dropout(1.0)}
    state = rg.attention_state(call.q, call.k, call.v, **asked, backend=build.backend(call))
    return dict(zip(("out", "lse"), state.finish(), strict=True))


def _entropy(call: Call, s: Source) -> Results:
    return {"entropy": rg.entropy(call.q, call.k, **build.arguments(call))}


def _entropy_of(call: Call, a: Answer, s: Source) -> Results:
    p = a.weights
    return {"entropy": a.r(-(p * a.r(p.masked_fill(p == 0, 1).log(), 1.0)).sum(-1), 1.0)}


def _first_gradients(call: Call, out: Tensor, s: Source) -> Results:
    """The gradients of everything that requires one, to be differentiated again."""
    wanted = {name: t for name, t in call.floats().items() if t.requires_grad}
    g = s.normal(*out.shape).bfloat16().to(out.dtype)  # the same numbers for every dtype
    found = torch.autograd.grad(out, list(wanted.values()), g, create_graph=True, materialize_grads=True)
    return {f"first gradient of {name}": t for name, t in zip(wanted, found, strict=True)}


def _twice(call: Call, s: Source) -> Results:
    return _first_gradients(call, _attention(call, s)["out"], s)


def _small(call: Call) -> bool:
    """Whether second derivatives are asked for: of calls of one dtype, so that no part of them is rounded to less."""
    wide = call.q.dtype in (torch.float32, torch.float64) and all(
        t.dtype == call.q.dtype for t in call.floats().values()
    )
    flat = call.score[0].kind == "cosine" and call.q.shape[-1] == 1  # a constant, whose derivatives are roundings alone
    return bool(call.needs) and wide and not call.poisoned and call.pairs < 5000 and not flat


FACTS = {
    "entropy": rg.facts.Entropy(),
    "visible": rg.facts.Visible(),
    "received": rg.facts.Received(),
    "top": rg.facts.Top(3),
    "peak": rg.facts.MaxScore(),
    "effective": rg.facts.EffectiveKeys(),
    "most": rg.facts.MaxReceived(),
}


def _facts(call: Call, s: Source) -> Results:
    names = s.choice.sample(list(FACTS), k=s.choice.randrange(1, 5))
    seen = rg.look(call.q, call.k, **build.arguments(call), facts=tuple(FACTS[name] for name in names))
    found = {name: seen[FACTS[name]] for name in names}
    answers = {name: t for name, t in found.items() if isinstance(t, Tensor)}
    if "top" in found:
        answers |= {"top": found["top"].weights, "rest": found["top"].rest}
    if "peak" in found:
        answers["peak"] = found["peak"].score
    return {**{name: t.to(seen.lse.dtype) for name, t in answers.items()}, "lse": seen.lse}


def _facts_of(call: Call, a: Answer, s: Source) -> Results:
    names = s.choice.sample(list(FACTS), k=s.choice.randrange(1, 5))
    p, shown = a.weights, call.lower(a.scores, 2) > -torch.inf
    top, order = torch.nn.functional.pad(p, (0, 3)).topk(3, -1)
    entropy = _entropy_of(call, a, s)["entropy"]
    every = {
        "entropy": entropy,
        "visible": shown.sum(-1),
        "received": p.sum(-2),
        "top": top,
        "rest": torch.nn.functional.pad(p, (0, 3)).scatter(-1, order, 0).sum(-1),
        "peak": torch.nn.functional.pad(call.lower(a.scores, 2), (1, 0), value=-torch.inf).amax(-1),
        "effective": a.r(entropy.exp()).masked_fill(~shown.any(-1), 0),
        "most": torch.nn.functional.pad(p, (0, 0, 1, 0)).amax(-2),
    }
    chosen = [*names, *(["rest"] if "top" in names else [])]
    return {**{name: every[name].to(a.lse.dtype) for name in chosen}, "lse": a.lse}


def _concentration(call: Call, s: Source) -> Results:
    fact = rg.facts.Concentration()
    return {"concentration": rg.look(call.q, call.k, **build.arguments(call), facts=(fact,))[fact]}


def _concentration_of(call: Call, a: Answer, s: Source) -> Results:
    return {"concentration": a.r(a.weights.square()).sum(-1)}


def _histogram(call: Call, s: Source) -> Results:
    """One bin for all weights: where a weight lies near an edge, roundings would decide."""
    fact = rg.facts.Histogram((0.0, 1.0))
    seen = rg.look(call.q, call.k, **build.arguments(call), facts=(fact,))
    return {"pairs": seen[fact].to(seen.lse.dtype)}


def _histogram_of(call: Call, a: Answer, s: Source) -> Results:
    shown = call.lower(a.scores, 2) > -torch.inf
    return {"pairs": shown.sum((-1, -2))[..., None].to(a.lse.dtype)}


def _divisible(call: Call) -> bool:
    return call.divisible


WAYS = (
    Way("attention", _attention, lambda call, a, s: {"out": a.out}, repeated=True),
    Way("state", _state, lambda call, a, s: {"out": a.out, "lse": a.lse}, 3, wide=True),
    Way("merged", _merged, lambda call, a, s: {"out": a.out, "lse": a.lse}, 2, _divisible, True, 2),
    Way("weights", _weights, _weights_of, 2),
    Way("one query", _one_query, _one_row, 1, lambda call: call.divisible and call.nq > 0),
    Way("nothing kept", _nothing, lambda call, a, s: {"out": a.out * 0, "lse": a.lse}, 0.3, wide=True),
    Way("entropy", _entropy, _entropy_of, 0.7, wide=True),
    Way("twice", _twice, lambda call, a, s: _first_gradients(call, a.out, s), 0.5, _small, True, 3),
    Way("facts", _facts, _facts_of, 2, wide=True, differentiable=False),
)
# Each is drawn by itself, with its chance, when WAYS have been asked: a new one changes no number of an earlier seed.
ADDED = (
    Way("scores", _scores, _scores_of, 0.25, wide=True),
    Way("concentration", _concentration, _concentration_of, 0.25, wide=True, differentiable=False),
    Way("histogram", _histogram, _histogram_of, 0.1, wide=True, differentiable=False),
)
