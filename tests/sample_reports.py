"""Reports for the tests of what shows them: made of tensors, in an instant, with tokens that break what is careless."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

import regard as rg
from regard.inspect.facts.rows import TopKeys
from regard.inspect.heads.ablation import Ablation
from regard.inspect.heads.carried import CarriedNorms
from regard.inspect.heads.circuits import Circuit, Circuits
from regard.inspect.heads.contributions import Contributions, Logit
from regard.inspect.heads.probe import KINDS, Probe
from regard.inspect.heads.query_key_value import InputProjections
from regard.inspect.kinds import Kind
from regard.inspect.report.carried_layer import CarriedLayer
from regard.inspect.report.head_result import HeadResult
from regard.inspect.results import FactResults
from regard.masks.algebra import View

NASTY = (
    "</script><script>alert(1)</script>",
    "<b>",
    "&amp;",
    '"quoted"',
    "'",
    "\u2028",
    "日本語",
    " a",
    "$x^2$",
    "\n",
    "",
)


@dataclass(frozen=True, eq=False)
class Call:
    """What a tape holds of one call."""

    name: str
    seen: FactResults
    view: View
    kind: Kind = "unknown"


def call(
    q: torch.Tensor, k: torch.Tensor, mask: rg.Mask = rg.Everything(), name: str = "attention", **options: object
) -> Call:
    """q (b, h, nq, d) looks at k; of another sequence, if the name says so."""
    seen = rg.look(q, k, facts=rg.Report.FACTS, mask=mask, **options)
    view = mask.on(q.shape[-2], k.shape[-2], positions=options.get("positions"), batch=q.shape[:-3], heads=q.shape[-3])
    return Call(name, seen, view, "cross" if "cross" in name else "unknown")


def report(
    layers: int = 2,
    heads: int | Sequence[int] = 3,
    n: int = 23,
    mask: rg.Mask = rg.Causal(),
    names: Sequence[str] = (),
    **form: object,
) -> rg.Report:
    """A report on queries and keys that are random, and always the same; `heads` for each layer, or of all.

    names: of each layer.
    """
    random = torch.Generator().manual_seed(1)
    counts = [heads] * layers if isinstance(heads, int) else heads
    calls = [
        call(*torch.randn(2, 1, h, n, 8, generator=random) * 2, mask, names[at] if names else f"layers.{at}.attention")
        for at, h in enumerate(counts)
    ]
    tokens = form.pop("tokens", [f"t{i}" for i in range(n)])
    return rg.Report.of(calls, title="a model", model="Made", tokens=tokens, **form)


def stacks(encoder: int, decoder: int) -> list[str]:
    """The names of the layers of a model with so many of them on each side."""
    sides = [f"encoder.{n}.self_attn" for n in range(encoder)]
    return sides + [f"decoder.{n}.{kind}_attn" for n in range(decoder) for kind in ("self", "cross")]


def results(of: rg.Report) -> tuple[HeadResult, HeadResult, HeadResult]:
    """What rg.heads would find of that report's layers: contributions, ablation, probe; random, and always the same."""
    random = torch.Generator().manual_seed(2)
    layers = tuple(layer.name for layer in of.layers)

    def drawn(*size: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(layer.heads, *size, generator=random) for layer in of.layers)

    logit = Logit(3, 5, 7.25, drawn(), "<b> tea")
    scores = {kind.name: tuple(one.sigmoid() for one in drawn()) for kind in KINDS}
    error = {kind: tuple(torch.full_like(one, 0.01) for one in of_kind) for kind, of_kind in scores.items()}
    return (
        Contributions(layers, tuple(one.abs() for one in drawn(11)), logit),
        Ablation(layers, drawn(), 1.784, 23),
        Probe((1, 2, 1, 2), 2, layers, scores, error, (0.02,) * len(layers)),
    )


def results_of_tokens(of: rg.Report) -> tuple[CarriedNorms, Circuits]:
    """What rg.heads.carried and circuits would find, on the tokens of that report; random, and always the same."""
    random, layers = torch.Generator().manual_seed(3), tuple(layer.name for layer in of.layers)
    tokens = of.layers[0].keys.tokens
    n = len(tokens)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=random, dtype=torch.float64)

    carried = []
    for layer in of.layers:
        p = drawn(layer.heads, n, n).softmax(-1)
        norms = drawn(layer.heads, n).abs() + 0.1
        received = p.sum(1) * norms
        weights, keys = (p * norms[:, None]).topk(4)
        rest = (p * norms[:, None]).sum(-1) - weights.sum(-1)
        carried.append(CarriedLayer(norms, p.sum(1), received, TopKeys(keys, weights, rest), p * norms[:, None]))
    made = [
        Circuit(InputProjections(*(drawn(layer.heads, 6, 2) for _ in range(3))), drawn(layer.heads, 2, 6))
        for layer in of.layers
    ]
    copying = tuple(drawn(layer.heads).tanh() for layer in of.layers)
    embed, unembed = drawn(2, 31, 6)
    return (
        CarriedNorms(layers, tuple(carried), tokens),
        Circuits(layers, copying, (3, 5, 7), tuple(made), embed, unembed),
    )


def nasty(n: int = 23) -> rg.Report:
    """A report with tokens that are no words."""
    return report(n=n, tokens=[NASTY[i % len(NASTY)] for i in range(n)])
