"""What the attention of a model carries on a text: weights times the norm of what each value adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.call.hooks import AttentionCall
from regard.core.errors import Unsupported
from regard.core.shapes import count_of
from regard.inspect.facts.carried import Carried
from regard.inspect.facts.chosen import Rows
from regard.inspect.facts.inputs import CallFact
from regard.inspect.facts.keys import Received
from regard.inspect.facts.pooled import Map
from regard.inspect.facts.rows import TopKeys, Visible
from regard.inspect.heads.projections import Projection, at_projections, find_projections
from regard.inspect.heads.reader import Reader, answers_head_calls
from regard.inspect.heads.value_norms import value_norms
from regard.inspect.look_tensors import survey
from regard.inspect.reading import Tokenizer, texts, tokenizer_for
from regard.inspect.record import record
from regard.inspect.report.carried_layer import CarriedLayer
from regard.inspect.report.element import CELLS, TOP
from regard.inspect.report.findings import Finding, Findings, quoted
from regard.inspect.report.grids import Grid
from regard.inspect.report.head_result import HeadArray, HeadResult, in_order
from regard.inspect.stacks import places

TOLERANCE = 0.02  # of the largest: how well Σ_j p_ij v_j must be what the projection is given


@dataclass(frozen=True, eq=False, repr=False)
class CarriedNorms(HeadResult):
    """What the attention of each head carries: ‖p_ij v_j W^O_h‖ = p_ij c_j, beside the weights p_ij.

    layers   the paths of the attention layers, in the order of their calls
    carried  a CarriedLayer for each
    tokens   the texts of the tokens, (n,)
    """

    layers: tuple[str, ...]
    carried: tuple[CarriedLayer, ...]
    tokens: tuple[str, ...]

    @property
    def grids(self) -> tuple[Grid, ...]:
        means = [one.received.sum(-1) / len(self.tokens) for one in self.carried]
        rows = tuple(tuple(of_layer.tolist()) for of_layer in means)
        most = max(float(of_layer.max()) for of_layer in means)
        unit = f"sum over keys, mean of {count_of(len(self.tokens), 'token', ',')}"
        return (Grid("norm carried", unit, rows, 0.0, most, tuple(places(self.layers))),)

    @property
    def findings(self) -> Findings:
        weights, carried = (_shares([getattr(one, name) for one in self.carried]) for name in ("weights", "received"))
        looked_at, carries = int(weights.argmax()), int(carried.argmax())
        said = (
            f"the key with the most weight, {self._name(looked_at)}, has {weights[looked_at]:.1%} of the weight and "
            f"{carried[looked_at]:.1%} of the norm carried"
        )
        if carries != looked_at:
            said += f"; {self._name(carries)} carries the most, {carried[carries]:.1%}"
        rule = (
            "the norm of weight × value × W^O, of each query and key; mean share of all heads (Kobayashi et al. 2020)"
        )
        return Findings((Finding(said, rule),))

    @property
    def arrays(self) -> dict[str, HeadArray]:
        described = {
            "value_norm": ("head, key", "norm of v W^O", "norms"),
            "carried_received": ("head, key", "weight times norm, sum of the queries", "received"),
            "carried_map": ("head, row, column", "weight times norm, sum of a cell's keys, mean of its queries", "map"),
        }
        found = {
            name: HeadArray(axes, unit, tuple(getattr(one, field) for one in self.carried))
            for name, (axes, unit, field) in described.items()
        }
        axes, tops = "head, query, rank", [one.top for one in self.carried]
        found["carried_keys"] = HeadArray(axes, "key", tuple(top.keys for top in tops))
        found["carried_norms"] = HeadArray(axes, "weight times norm", tuple(top.weights for top in tops))
        return found

    @property
    def carried_by_layer(self) -> tuple[CarriedLayer, ...]:
        return self.carried

    @property
    def numbers(self) -> dict[str, Any]:
        return {"tokens": len(self.tokens)}

    def reordered(self, order: Sequence[int]) -> CarriedNorms:
        return replace(self, layers=in_order(self.layers, order), carried=in_order(self.carried, order))

    def _name(self, key: int) -> str:
        return f"{quoted(self.tokens[key])} ({key})"


@torch.no_grad()
@answers_head_calls
def carried(model: nn.Module, given: Any, *, tokenizer: Tokenizer | None = None) -> CarriedNorms:
    """What attention carries on a text: the weights p_ij times c_j = ‖v_j W^O_h‖, the norm of what key j's value adds.

    A head's output is Σ_j p_ij v_j W^O_h, so p_ij alone does not say how much a key contributes: many heads give most
    of their weight to the first token or to separators, whose values are small. Put the result into a report, and its
    page can show what is carried in place of the weights: report.with_heads(carried(model, text)).

    model  regard's or transformers' layers: an encoder or a decoder. Runs twice, in eval mode; left as it was
    given  a text, token ids (n,), or what a tokenizer returned; tokenizer: as in look

    c_j is one number for each key and head, so memory is linear in the text; no n × n weights, and no n × n vectors.
    The bias of W^O belongs to no head and is not counted; the norm of a sum (of heads, of keys) is at most the sum of
    the norms.
    Units are those of the residual stream. float32, or float64 for a model in float64. For tensors, or other facts, see
    facts.Carried and value_norms.

    Raises Unsupported if a layer's values or output projection are not found, or if what the projection is given is not
    Σ_j p_ij v_j (it is gated or normalised first); other errors as in look.
    Source: Kobayashi et al. 2020, "Attention is Not Only a Weight" (arXiv 2004.10102).

    >>> from regard.demo.model import load
    >>> found = carried(load(), list(b"to be or not to be"))
    >>> found.carried[3].norms.shape, found.carried[3].received.shape
    (torch.Size([4, 18]), torch.Size([4, 18]))
    """
    tokenizer = tokenizer_for(model, tokenizer)
    reader = Reader.of(model, given, tokenizer)
    model = reader.model
    projections = find_projections(model, reader.run)
    called = tuple((one.layer, one.call.number) for one in projections)
    asked = _CarriedOfCall(called, tuple(one.weight for one in projections))
    rows: list[Tensor] = []

    def seen(projection: Projection, joined: Tensor, made: Tensor) -> None:
        rows.append(projection.by_head(joined)[:, tape.calls[len(rows)][asked].query])

    with record(model, facts=(asked,)) as tape, at_projections(projections, seen=seen):
        reader.run()
    for projection, call, given_row in zip(projections, tape.calls, rows, strict=True):
        _check(projection, call[asked].row, given_row)
    names = tuple(texts(tokenizer, reader.ids.tolist()))
    return CarriedNorms(tuple(name for name, _ in called), tuple(call[asked].carried for call in tape.calls), names)


class _Answer(NamedTuple):
    """What a layer carries, the last query that is no padding, and its Σ_j p_ij v_j, (h, dv)."""

    carried: CarriedLayer
    query: int
    row: Tensor


@dataclass(frozen=True)
class _CarriedOfCall(CallFact[_Answer]):
    """What each call carries; called: the layer and the number of each call, weights: its W^O (h, dv, d_out)."""

    called: tuple[tuple[str, int], ...]
    weights: tuple[Tensor, ...]

    def of_call(self, call: AttentionCall, name: str, number: int) -> _Answer:
        weight, v = self.weights[self.called.index((name, number))], call.v
        if v is None or v.shape[-1] != weight.shape[1]:
            raise Unsupported(
                f"the values of {name} are not known as a tensor of the width that its output projection takes, "
                f"{weight.shape[1]} a head: expected a layer of regard.nn or of transformers."
            )
        norms = value_norms(v, weight)
        received, top, pooled = Carried(norms), Carried(norms, TOP), Carried(norms, Map(CELLS, CELLS))
        given = call.q, call.k, (Visible(), Received(), received, top, pooled)
        seen, _ = survey(*given, call.score, call.mask, call.positions, call.sink)
        sees = (seen[Visible()][0] > 0).any(0).nonzero()
        query = int(sees[-1]) if len(sees) else -1
        row = Rows(torch.tensor([query], dtype=torch.int64, device=norms.device))
        weights_of_row, _ = survey(call.q, call.k, (row,), call.score, call.mask, call.positions, call.sink)
        values = v[0].to(norms.dtype).repeat_interleave(len(weight) // v.shape[-3], 0)
        of_keys, weights, total = (t[0].cpu() for t in (norms, seen[Received()], seen[received]))
        heaviest = TopKeys(*(t[0].cpu() for t in seen[top]))
        found = CarriedLayer(of_keys, weights, total, heaviest, seen[pooled][0].cpu())
        return _Answer(found, query, (weights_of_row[row][0].to(norms.dtype) @ values)[:, 0])


def _check(projection: Projection, expected: Tensor, given: Tensor) -> None:
    """Unsupported where the projection is not given the attended values."""
    off = float((given.to(expected.dtype) - expected).abs().max())
    if not off <= TOLERANCE * float(expected.abs().max()):
        raise Unsupported(
            f"what the output projection of {projection.layer} is given is not the sum of weights times values: the "
            "layer gates or normalises it first, so that no norm of a value says what a key adds."
        )


def _shares(received: list[Tensor]) -> Tensor:
    """The share of each key in what all keys receive, mean of all heads of all layers: (nk,)."""
    return torch.cat([(one / one.sum(-1, keepdim=True)).nan_to_num(0) for one in received]).mean(0)
