"""What each head adds: the norm of A_i W_i^O at each position, and its direct part in a logit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.core.errors import Unsupported
from regard.core.shapes import count_of
from regard.inspect.heads.projections import Projection, at_projections, find_projections
from regard.inspect.heads.reader import Reader, answers_head_calls, check_number
from regard.inspect.heads.stream import Stream
from regard.inspect.heads.unembedding import NormCall, direct_path, last_norm
from regard.inspect.reading import Tokenizer, texts, tokenizer_for
from regard.inspect.report.findings import Finding, Findings, quoted
from regard.inspect.report.grids import Grid
from regard.inspect.report.head_result import HeadArray, HeadResult, in_order, ranked
from regard.inspect.stacks import places

SIGNS = ("lowers it", "raises it")


@dataclass(frozen=True, eq=False)
class Logit:
    """A logit at one position, and what each head adds to it directly.

    token, position  which logit: of this token, at this position
    value            the logit
    heads            one tensor (h,) a layer: what each head adds, straight through the last norm and the unembedding
    rest             what everything else adds: embedding, MLPs, biases. value = rest + the sum over all heads
    name             the token's text, where there is a tokenizer
    """

    token: int
    position: int
    value: float
    heads: tuple[Tensor, ...]
    name: str = ""

    @property
    def rest(self) -> float:
        return self.value - sum(float(of_layer.sum()) for of_layer in self.heads)

    @property
    def said(self) -> str:
        """The token as sentences name it."""
        return quoted(self.name) if self.name else f"token {self.token}"


@dataclass(frozen=True, eq=False, repr=False)
class Contributions(HeadResult):
    """The contribution of each head of each attention call to the residual stream.

    layers  the paths of the attention layers, in the order of their calls
    norms   one tensor (h, n) a layer: |A_i W_i^O| of each head at each position
    logit   the direct parts in a logit; None if the model has no logits, or the path to them is unknown: see `why_not`
    """

    layers: tuple[str, ...]
    norms: tuple[Tensor, ...]
    logit: Logit | None = None
    why_not: str | None = None

    @property
    def grids(self) -> tuple[Grid, ...]:
        named, means = places(self.layers), [of_layer.mean(-1) for of_layer in self.norms]
        most = max(float(of_layer.max()) for of_layer in means)
        rows = tuple(tuple(of_layer.tolist()) for of_layer in means)
        norms = Grid(
            "norm of what a head adds", f"mean of {count_of(self.tokens, 'token', ',')}", rows, 0.0, most, tuple(named)
        )
        if self.logit is None:
            return (norms,)
        title, unit = f"part in the logit of {self.logit.said}", f"at position {self.logit.position}"
        return norms, Grid.signed(title, unit, self.logit.heads, named, SIGNS)

    @property
    def findings(self) -> Findings:
        if self.logit is None:
            why = "what each layer adds has to reach the last norm"
            return Findings((Finding(f"no parts in a logit: {self.why_not}", why),))
        logit = self.logit
        head = max(ranked(self.layers, logit.heads), key=lambda one: abs(one.value))
        added = logit.value - logit.rest
        parts = f"{logit.value:.4g} = {logit.rest:.4g} {'−' if added < 0 else '+'} {abs(added):.4g} by heads"
        where = f"in that of {logit.said} at position {logit.position}"
        said = f"largest part in a logit: {head.name}, {head.value:+.3g} {where} ({parts})"
        rule = (
            "what the head adds, times the scale of the last norm and the token's row of the unembedding; what later "
            "layers make of it is not counted (Elhage et al. 2021)"
        )
        return Findings((Finding(said, rule, (head,)),))

    @property
    def tokens(self) -> int:
        """How many tokens were read."""
        return self.norms[0].shape[-1]

    @property
    def arrays(self) -> dict[str, HeadArray]:
        found = {"added_norm": HeadArray("head, query", "norm of what the head adds", self.norms)}
        if self.logit is not None:
            found["logit_part"] = HeadArray("head", "part in the logit", self.logit.heads)
        return found

    @property
    def numbers(self) -> dict[str, Any]:
        if self.logit is None:
            return {"logit": None, "why_not": self.why_not}
        of = ("token", "name", "position", "value", "rest")
        return {"logit": {name: getattr(self.logit, name) for name in of}}

    def reordered(self, order: Sequence[int]) -> Contributions:
        logit = None if self.logit is None else replace(self.logit, heads=in_order(self.logit.heads, order))
        return replace(self, layers=in_order(self.layers, order), norms=in_order(self.norms, order), logit=logit)


@torch.no_grad()
@answers_head_calls
def contributions(
    model: nn.Module, given: Any, *, tokenizer: Tokenizer | None = None, token: int | None = None, at: int = -1
) -> Contributions:
    """What each head adds to the residual stream of a model on a text, and to a logit.

    Multi-head attention is a sum over heads, Σ_i A_i W_i^O + b. The result has the norm of each summand at every
    position. If the model has an unembedding, it also has the direct part of each head in one logit: A_i W_i^O is added
    to the residual stream, which goes through the last norm, with its actual scale, and is multiplied by the token's
    row of the unembedding. The effect through later layers is not counted. Memory is linear in the text: no weights, no
    n × n.

    model      regard's or transformers' layers: an encoder or a decoder. Runs twice, in eval mode; left as it was
    given      a text, token ids (n,), or what a tokenizer returned; tokenizer: as in look
    token, at  the logit: of this token (None: of the largest), at this position (-1: the last)

    Raises Unsupported if a layer's projection is not found or is not a plain matrix, and, with a token, for a model
    that normalises or scales the output of its layers, or caps its logits; IndexError for a position or a token that
    does not exist; other errors as in look.
    Source: Elhage et al. 2021 (transformer-circuits.pub/2021/framework), direct logit attribution.

    >>> from regard.demo.model import load
    >>> found = contributions(load(), list(b"to be or not to be"), token=ord("e"), at=-2)
    >>> found.layers[0], found.norms[0].shape, found.logit.heads[3].argmax()
    ('blocks.0.attention', torch.Size([4, 18]), tensor(1))
    """
    check_number(token, "token")
    tokenizer = tokenizer_for(model, tokenizer)
    reader = Reader.of(model, given, tokenizer)
    model = reader.model
    at = _position(at, len(reader.ids))
    projections = find_projections(model, reader.run)
    stream, inputs, norms = Stream(), list[Tensor](), list[Tensor]()

    def seen(projection: Projection, joined: Tensor, made: Tensor) -> None:
        stream.put(made, len(norms))
        heads = projection.by_head(joined)
        inputs.append(heads[:, at])
        wide = torch.promote_types(heads.dtype, torch.float32)
        each = [(a @ w).to(wide).norm(dim=-1) for a, w in zip(heads, projection.weight, strict=True)]
        norms.append(torch.stack(each).cpu())

    with stream, last_norm(stream) as norm, at_projections(projections, seen=seen):
        logits = reader.logits(reader.run())
    layers = tuple(projection.layer for projection in projections)
    try:
        logit = _logit(model, projections, inputs, norm, logits, token, at)
    except Unsupported as error:
        if token is not None:
            raise
        return Contributions(layers, tuple(norms), why_not=str(error))
    if tokenizer is not None:
        logit = replace(logit, name=texts(tokenizer, [logit.token])[0])
    return Contributions(layers, tuple(norms), logit)


def _position(at: int, n: int) -> int:
    if not -n <= at < n:
        raise IndexError(f"at={at}: the text has {count_of(n, 'token')}; expected a position from {-n} to {n - 1}.")
    return at % n


def _logit(
    model: nn.Module,
    projections: tuple[Projection, ...],
    inputs: list[Tensor],
    norm: list[NormCall],
    logits: Tensor | None,
    token: int | None,
    at: int,
) -> Logit:
    """The direct parts in a logit; Unsupported where they are not known."""
    matrix = direct_path(model, [one.layer for one in projections], norm, logits)
    assert logits is not None
    token = int(logits[at].argmax()) if token is None else token
    if not 0 <= token < len(matrix):
        raise IndexError(f"token={token}: {type(model).__name__} has tokens 0 to {len(matrix) - 1}.")
    gradient = norm[0].frozen(at, matrix[token])
    added = [
        torch.einsum("hv,hvo,o->h", a.double(), one.weight.double(), gradient).float()
        for a, one in zip(inputs, projections, strict=True)
    ]
    return Logit(token, at, float(logits[at, token]), tuple(added))
