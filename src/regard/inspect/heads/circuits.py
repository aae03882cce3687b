"""The OV and QK circuits of each head by token: which tokens it copies, and which it seeks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from regard.core.errors import Unsupported
from regard.core.shapes import blocks
from regard.core.value import with_shapes
from regard.inspect.heads.projections import Projection, at_projections, find_projections
from regard.inspect.heads.query_key_value import InputProjections, find_input_projections
from regard.inspect.heads.reader import Reader, answers_head_calls
from regard.inspect.heads.stream import Stream
from regard.inspect.heads.token_table import TokenTable, heaviest
from regard.inspect.heads.unembedding import direct_path, last_norm
from regard.inspect.reading import Tokenizer, texts, tokenizer_for
from regard.inspect.report.circuit_layer import CircuitLayer, TokenRows
from regard.inspect.report.findings import Finding, Findings
from regard.inspect.report.grids import Grid
from regard.inspect.report.head_result import HeadArray, HeadResult, in_order, ranked
from regard.inspect.stacks import places
from regard_command.labels import parse_head

TOKENS = 4096  # of the vocabulary that are in float64 at once
ROWS = 10_000  # (head, token) pairs whose circuits a page holds
READ = 16  # tokens of the text that the model reads, to find its matrices


@dataclass(frozen=True, eq=False)
class Circuit:
    """The matrices of one layer: those that make its queries, keys and values, and W_O with the last norm folded in.

    w_o  (h, dv, d), float64
    """

    inputs: InputProjections
    w_o: Tensor

    def __repr__(self) -> str:
        return with_shapes("Circuit", vars(self))


@dataclass(frozen=True, eq=False, repr=False)
class Circuits(HeadResult):
    """The circuits of each head of a model, as Elhage et al. 2021 define them; made by rg.heads.circuits.

    layers    the paths of the attention layers, in the order of their calls
    copying   one tensor (h,) a layer: Σ λ / Σ |λ| of the eigenvalues of the OV circuit, from -1 to 1; 1 where all are
              positive: reading a token raises its own logit, and those of similar tokens
    tokens    the ids of the text's tokens, each once; the default of `ov` and `qk`
    circuits  the matrices of each layer
    embed     W_E (vocabulary, d), and unembed, W_U as (vocabulary, d): those of the model, not copied
    """

    layers: tuple[str, ...]
    copying: tuple[Tensor, ...]
    tokens: tuple[int, ...]
    circuits: tuple[Circuit, ...]
    embed: Tensor
    unembed: Tensor
    tokenizer: Tokenizer | None = None

    def ov(self, head: str | tuple[int, int], tokens: Sequence[int] | None = None, k: int = 5) -> TokenTable:
        """What a head writes when it reads a token: the k output tokens whose logits it raises most.

        Row t of W_E W_V W_O W_U for each token t: per unit of weight, without norms' scales, before later layers.
        Scores are relative to the mean of the row, which a softmax does not see.
        `rank` is the place of the token itself among all output tokens, 0 for the first: a copying head has small ones.

        head    "L3H1" or (layer, head); tokens: ids (t,), by default those of the text; k: 1 or more
        Memory: t × vocabulary numbers at most, in blocks of t. Raises ValueError for a head or k that does not exist,
        IndexError for a token that does not exist.
        """
        layer, number = self._find(head)
        circuit, ids = self.circuits[layer], self._ids(tokens)
        written = self.embed[ids].double() @ circuit.inputs.w_v[number] @ circuit.w_o[number]
        table = self._table(f"{self._label(layer, number)} reads", "and raises", ids, written, self.unembed, k)
        mean = written @ self.unembed.mean(0, dtype=torch.float64)
        return replace(table, scores=table.scores - mean[:, None].to(table.scores))

    def qk(self, head: str | tuple[int, int], tokens: Sequence[int] | None = None, k: int = 5) -> TokenTable:
        """Which tokens a head seeks: for each query token the k key tokens with the largest scores.

        Row t of W_E W_Q W_K^T W_E^T for each token t: the part of the score that depends on both tokens, without
        positions (of rotary ones: at distance 0), biases and the norms' scales. Only the order of a row, and signs,
        have a meaning. `rank` is the place of the token itself among all keys.

        Arguments, memory and errors as in `ov`; Unsupported where the scores are not products of projected tokens.
        """
        layer, number = self._find(head)
        inputs, ids = self.circuits[layer].inputs, self._ids(tokens)
        if inputs.w_q is None or inputs.w_k is None:
            raise Unsupported(f"there is no QK circuit of {self._label(layer, number)}: {inputs.why_not}.")
        query = self.embed[ids].double() @ inputs.w_q[number] @ inputs.w_k[number].T
        return self._table(f"{self._label(layer, number)} at", "seeks", ids, query, self.embed, k)

    @property
    def circuits_by_layer(self) -> tuple[CircuitLayer, ...]:
        return self._by_layer

    @cached_property
    def _by_layer(self) -> tuple[CircuitLayer, ...]:
        """Both circuits of every head at the first tokens of the text, for the page: at most 10,000 rows of each."""
        ids = self.tokens[: max(1, ROWS // sum(self.head_counts))]
        return tuple(self._at_tokens(layer, ids) for layer in range(len(self.layers)))

    def _at_tokens(self, layer: int, ids: tuple[int, ...]) -> CircuitLayer:
        def rows(table: TokenTable) -> TokenRows:
            return TokenRows(tuple(map(tuple, table.others)), table.rank)

        k, heads = min(5, len(self.embed)), range(len(self.copying[layer]))
        inputs = self.circuits[layer].inputs
        known = inputs.w_q is not None and inputs.w_k is not None
        raised = tuple(rows(self.ov((layer, head), ids, k)) for head in heads)
        sought = tuple(rows(self.qk((layer, head), ids, k)) for head in heads) if known else ()
        return CircuitLayer(tuple(texts(self.tokenizer, list(ids))), raised, sought)

    @property
    def grids(self) -> tuple[Grid, ...]:
        signs = ("suppresses what it reads", "copies what it reads")
        return (Grid.signed("copying, eigenvalues of OV", "", self.copying, places(self.layers), signs),)

    @property
    def findings(self) -> Findings:
        best = ranked(self.layers, self.copying)[:3]
        listed = ", ".join(f"{head.name} ({head.value:+.2f})" for head in best)
        said = f"heads that copy most, by their OV circuits: {listed}"
        rule = "Σ λ / Σ |λ| over the eigenvalues of W_E W_V W_O W_U, from -1 to 1 (Elhage et al. 2021)"
        return Findings((Finding(said, rule, tuple(best)),))

    @property
    def arrays(self) -> dict[str, HeadArray]:
        return {"copying": HeadArray("head", "sum of eigenvalues over the sum of their absolute values", self.copying)}

    @property
    def numbers(self) -> dict[str, Any]:
        return {"tokens": self.tokens}

    def reordered(self, order: Sequence[int]) -> Circuits:
        layers, copying, circuits = (in_order(of, order) for of in (self.layers, self.copying, self.circuits))
        return replace(self, layers=layers, copying=copying, circuits=circuits)

    def _find(self, head: str | tuple[int, int]) -> tuple[int, int]:
        place, number = parse_head(head) if isinstance(head, str) else head
        named = dict(enumerate(places(self.layers)))
        layer = next((n for n, name in named.items() if place in (n, name)), -1)
        if layer < 0 or not 0 <= number < len(self.copying[layer]):
            last, heads = len(self.layers) - 1, max(map(len, self.copying))
            raise ValueError(f"there is no head {head}; this model has layers 0 to {last}, heads 0 to {heads - 1}.")
        return layer, number

    def _label(self, layer: int, number: int) -> str:
        return f"{places(self.layers)[layer]}H{number}"

    def _ids(self, tokens: Sequence[int] | None) -> list[int]:
        ids = list(self.tokens if tokens is None else tokens)
        strange = [one for one in ids if not 0 <= one < len(self.embed)]
        if strange:
            raise IndexError(f"tokens holds {strange[0]}; this model has tokens 0 to {len(self.embed) - 1:,}.")
        return ids

    def _table(self, what: str, does: str, ids: list[int], rows: Tensor, columns: Tensor, k: int) -> TokenTable:
        if not 1 <= k <= len(columns):
            raise ValueError(f"k={k}; expected 1 to {len(columns):,}, the number of tokens.")
        own = torch.tensor(ids, dtype=torch.int64, device=columns.device)
        found, scores, rank = (t.cpu() for t in heaviest(rows.to(columns.dtype), columns, own, k))
        others = [texts(self.tokenizer, row) for row in found.tolist()]
        return TokenTable(what, does, own.cpu(), found, scores, rank, texts(self.tokenizer, ids), others)


@torch.no_grad()
@answers_head_calls
def circuits(model: nn.Module, given: Any, *, tokenizer: Tokenizer | None = None) -> Circuits:
    """The OV and QK circuits of each head by token: which tokens it copies, which it seeks. From the weights alone.

    With W_E the embedding (vocabulary, d) and W_U the unembedding (d, vocabulary), the OV circuit of a head is
    W_E W_V W_O W_U: row t says how a head that attends to token t changes the logits. The QK circuit is
    W_E W_Q W_K^T W_E^T: row t says which keys a query at token t prefers. Neither is built: rows of chosen tokens are
    computed on demand (`ov`, `qk`), and the eigenvalues of OV from a matrix dv × dv that has the same ones besides 0.

    As in TransformerLens, the gain of the norm before the attention is folded into W_Q, W_K and W_V, that of the last
    norm into W_U, LayerNorm's mean is taken out, and W_U is centred over the vocabulary; the scales of the norms,
    biases and positions are left out. So are the layers in between: a head of a late layer reads more than embeddings.

    model  a causal language model of regard's or transformers' layers. Reads the first 16 tokens three times, in eval
           mode, to find its matrices; left as it was. Grouped queries: a key head's matrices are those of each of its
           queries. Fused projections (GPT-2, GPT-NeoX, Falcon) are taken apart
    given  a text, token ids (n,), or what a tokenizer returned; its tokens are what the tables show by default.
           tokenizer: as in look

    Raises Unsupported if a layer's projections are not found, for a model without logits or an embedding of the width
    of its stream, and one that normalises or scales what its layers add; other errors as in look.
    Source: Elhage et al. 2021 (transformer-circuits.pub/2021/framework), "Splitting Attention Head terms into Circuits"
    and "Detecting Copying Behavior".

    >>> from regard.demo.model import load
    >>> found = circuits(load(), "be")
    >>> found.copying[0].shape, found.ov("L3H1").ids.shape
    (torch.Size([4]), torch.Size([2, 5]))
    """
    tokenizer = tokenizer_for(model, tokenizer)
    whole, reader = (Reader.of(model, given, tokenizer, most) for most in (None, READ))
    model = reader.model
    projections = find_projections(model, reader.run)
    inputs = find_input_projections(model, reader.run)
    stream, seen = Stream(), list[Projection]()

    def add(projection: Projection, joined: Tensor, made: Tensor) -> None:
        stream.put(made, len(seen))
        seen.append(projection)

    with stream, last_norm(stream) as norm, at_projections(projections, seen=add):
        logits = reader.logits(reader.run())
    layers = tuple(projection.layer for projection in projections)
    matrix = direct_path(model, layers, norm, logits)
    norm[0].scale(-1)
    embed, tokens = _embedding(model, matrix), tuple(dict.fromkeys(whole.ids.tolist()))
    found = tuple(Circuit(one, norm[0].applied(of.weight)) for one, of in zip(inputs, projections, strict=True))
    through = _through_vocabulary(matrix, embed)
    copying = tuple(_copying(circuit, through) for circuit in found)
    return Circuits(layers, copying, tokens, found, embed, matrix, tokenizer)


def _through_vocabulary(unembed: Tensor, embed: Tensor) -> Tensor:
    """W_U W_E (d, d), W_U centred over the vocabulary; float64, of some tokens at a time."""
    mean = unembed.mean(0, dtype=torch.float64)
    parts = blocks(len(embed), TOKENS)
    return sum(((unembed[part].double() - mean).T @ embed[part].double() for part in parts), mean.new_zeros(()))


def _copying(circuit: Circuit, through: Tensor) -> Tensor:
    """Σ λ / Σ |λ| of W_E W_V W_O W_U for each head, by the eigenvalues of W_O (W_U W_E) W_V: (h,)."""
    values = torch.linalg.eigvals(circuit.w_o @ through @ circuit.inputs.w_v)
    return (values.real.sum(-1) / values.abs().sum(-1)).nan_to_num(0).float().cpu()


def _embedding(model: nn.Module, unembedding: Tensor) -> Tensor:
    """W_E (vocabulary, d); Unsupported where the model has none of the width of its residual stream."""
    embed = getattr(model, "get_input_embeddings", lambda: None)()
    candidates = [embed] if embed is not None else [m for m in model.modules() if isinstance(m, nn.Embedding)]
    for one in candidates:
        weight = getattr(one, "weight", None)
        if isinstance(weight, Tensor) and weight.shape == unembedding.shape:
            return weight.detach()
    raise Unsupported(
        f"{type(model).__name__} has no embedding of {len(unembedding):,} tokens of width {unembedding.shape[-1]}; "
        "expected one of the width of its residual stream."
    )
