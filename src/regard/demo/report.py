"""The byte model reads a text, and what its attention does: one line of facts, grids, findings, a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from regard.demo.findings import CONTEXT, INDUCTION, PREVIOUS, Head, heads_above, induction, largest, previous_token
from regard.demo.model import REACH, SEEN, ByteTransformer
from regard.inspect.facts import Entropy, Map, MaxScore, Received, Top
from regard.inspect.look import look
from regard.inspect.plot import possible, save_map
from regard.inspect.seen import Seen
from regard.inspect.text import grid, side_by_side
from regard.nn.multihead import MultiHeadAttention

CELLS = 128
FACTS = (Entropy(), MaxScore(), Top(4), Received(), Map(CELLS, CELLS))


@dataclass(frozen=True, eq=False)
class Reading:
    """What was seen while the model read `tokens` (n,). Tensors are (layers, heads, ...)."""

    tokens: Tensor
    loss: float
    entropy: Tensor
    max_score: Tensor
    top: Tensor
    received: Tensor
    maps: Tensor

    @property
    def kept(self) -> int:
        """Bytes that the facts take."""
        facts = (self.entropy, self.max_score, self.top, self.received, self.maps)
        return sum(t.numel() * t.element_size() for t in facts)

    @property
    def dense(self) -> int:
        """Bytes that the weights would take in float32."""
        return 4 * self.entropy.shape[0] * self.entropy.shape[1] * len(self.tokens) ** 2


def read(model: ByteTransformer, text: bytes, progress: Callable[[int], None] = lambda layer: None) -> Reading:
    """Runs the model on a text of 2 bytes or more and looks at each layer; `progress` is told how many are done."""
    if len(text) < 2:
        raise ValueError(f"the text has {len(text)} bytes; expected 2 or more.")
    tokens, seen = torch.tensor(list(text)), list[Seen]()

    def watch(layer: MultiHeadAttention, inputs: tuple[Tensor], options: dict[str, Any]) -> None:
        q, k, _ = layer.project(*inputs)
        seen.append(look(q, k, facts=FACTS, mask=options["mask"], **layer.scoring()))
        progress(len(seen))

    layers = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    hooks = [layer.register_forward_pre_hook(watch, with_kwargs=True) for layer in layers]
    try:
        with torch.no_grad():
            loss = cross_entropy(model(tokens[None])[0, :-1], tokens[1:])
    finally:
        for hook in hooks:
            hook.remove()

    def stack(of: Callable[..., Tensor]) -> Tensor:
        return torch.stack([of(one)[0] for one in seen])

    return Reading(
        tokens,
        float(loss),
        stack(lambda one: one[Entropy()]),
        stack(lambda one: one[MaxScore()].score),
        stack(lambda one: one[Top(4)].keys),
        stack(lambda one: one[Received()]),
        stack(lambda one: one[Map(CELLS, CELLS)]),
    )


def describe(reading: Reading, seconds: float) -> str:
    """The report as text."""
    n, (layers, heads) = len(reading.tokens), reading.entropy.shape[:2]
    first = reading.received[..., 0] / min(n, REACH + 1)
    entropy = reading.entropy.mean(-1)
    share, rows = induction(reading.top[..., 0], reading.tokens, REACH)
    facts = (
        f"byte model  {n:,} bytes, {layers} × {heads} heads, loss {reading.loss:.2f} nats a byte, {seconds:.1f} s   "
        f"kept {_size(reading.kept)} (dense weights: {_size(reading.dense)})"
    )
    pictures = side_by_side(
        grid("entropy", entropy.tolist(), 0, round(float(entropy.max()), 1), "nats"),
        grid("first byte", (100 * first).tolist(), 0, 100, "% of mass"),
        grid("induction", (100 * share).tolist(), 0, 100, "% of rows"),
    )
    return "\n".join([facts, "", *pictures, "", *_findings(reading, first, share, rows)])


def _findings(reading: Reading, first: Tensor, share: Tensor, rows: int) -> list[str]:
    peaks = reading.max_score.amax(-1)
    peak, next_peak, most = largest(peaks), float(peaks.flatten().topk(2).values[-1]), largest(first)
    before, n = previous_token(reading.top[..., 0]), len(reading.tokens)
    copied = f"the {rows:,} rows that repeat {CONTEXT} bytes within {REACH}, the heaviest key is one that followed them"
    copies = f"induction heads: no row repeats {CONTEXT} bytes within {REACH}, so none can be seen in this text"
    return [
        _named("previous-token heads", "rows, the heaviest key is the byte before", before, PREVIOUS),
        _named("induction heads", copied, share, INDUCTION) if rows else copies,
        f"the first byte receives {float(first.mean()):.1%} of the mass of the {min(n, REACH + 1)} rows "
        f"that see it, most from {most}",
        f"max score {peak.share:.1f} at L{peak.layer}H{peak.head} (next head {next_peak:.1f})",
    ]


def _named(name: str, rule: str, shares: Tensor, least: float) -> str:
    """The heads that a rule finds, and the rule."""
    found = heads_above(shares, least)
    text = ", ".join(map(str, found)) if found else f"none; the nearest is {largest(shares)}"
    return f"{name}: {text}\n    rule: in ≥ {least:.0%} of {rule}"


def shown_head(reading: Reading) -> tuple[Head, str]:
    """The head worth a picture: the strongest induction head, or where none is found, the previous-token head."""
    share, _ = induction(reading.top[..., 0], reading.tokens, REACH)
    best = largest(share)
    if best.share >= INDUCTION:
        return best, f"induction head, {best.share:.0%} of the rows with an earlier copy"
    best = largest(previous_token(reading.top[..., 0]))
    return best, f"looks one byte back in {best.share:.0%} of rows"


def picture(reading: Reading, path: Path, head: tuple[int, int] | None = None) -> str:
    """Writes the pooled map of one head and returns its title."""
    if head is None:
        best, why = shown_head(reading)
        head, title = (best.layer, best.head), f"L{best.layer}H{best.head}: {why}"
    else:
        title = f"L{head[0]}H{head[1]}"
    layers, heads = reading.maps.shape[:2]
    if not (0 <= head[0] < layers and 0 <= head[1] < heads):
        raise ValueError(f"there is no head {title}; this model has layers 0 to {layers - 1}, heads 0 to {heads - 1}.")
    n, pooled = len(reading.tokens), reading.maps[head]
    save_map(path, pooled, possible(SEEN.on(n), *pooled.shape), title, n, n)
    return title


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count < 1e9 else f"{count / 1e9:,.1f} GB"
