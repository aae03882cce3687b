"""Which heads a model needs: how its loss changes when the output of one head is replaced by its mean over the text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from regard.core.errors import Unsupported
from regard.core.shapes import count_of
from regard.inspect.heads.projections import Projection, at_projections, find_projections
from regard.inspect.heads.reader import Reader, answers_head_calls, check_causal
from regard.inspect.reading import Tokenizer
from regard.inspect.report.findings import Finding, Findings
from regard.inspect.report.grids import Grid
from regard.inspect.report.head_result import HeadArray, HeadResult, in_order, ranked
from regard.inspect.stacks import places

Loss = Callable[[Any], Tensor]
SIGNS = ("it falls", "it grows")
OWN_LOSS = "Pass a loss of your own: ablation(model, text, loss=lambda answer: ...)"


@dataclass(frozen=True, eq=False, repr=False)
class Ablation(HeadResult):
    """The loss of a model on a text, and how much larger it is without each head.

    layers  the paths of the attention layers, in the order of their calls
    change  one tensor (h,) per layer: the loss with that head set to its mean, minus that of the whole model
    loss    the loss of the whole model: nats per token, or the value of `loss`
    tokens  how many of the text's tokens were read
    """

    layers: tuple[str, ...]
    change: tuple[Tensor, ...]
    loss: float
    tokens: int

    @property
    def grids(self) -> tuple[Grid, ...]:
        unit = f"more than {self.loss:.4g} on the first {count_of(self.tokens, 'token', ',')}"
        return (Grid.signed("loss without a head", unit, self.change, places(self.layers), SIGNS),)

    @property
    def findings(self) -> Findings:
        first, *others = ranked(self.layers, self.change)
        said = f"the loss grows most without {first.name}: {first.value:+.3g} on {self.loss:.4g}"
        if others:
            said += f" (next {others[0].name}, {others[0].value:+.3g})"
        if first.value <= 0:
            said = f"no head's removal raises the loss: it falls least without {first.name}, {first.value:+.3g}"
        rule = "one head at a time set to its mean over the text (mean ablation; Wang et al. 2022, arXiv 2211.00593)"
        return Findings((Finding(said, rule, (first,)),))

    @property
    def arrays(self) -> dict[str, HeadArray]:
        return {"loss_change": HeadArray("head", "loss without the head, less the loss", self.change)}

    @property
    def numbers(self) -> dict[str, Any]:
        return {"loss": self.loss, "tokens": self.tokens}

    def reordered(self, order: Sequence[int]) -> Ablation:
        return replace(self, layers=in_order(self.layers, order), change=in_order(self.change, order))


@torch.no_grad()
@answers_head_calls
def ablation(
    model: nn.Module,
    given: Any,
    *,
    tokenizer: Tokenizer | None = None,
    loss: Loss | None = None,
    most: int = 512,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Ablation:
    """The rise of a model's loss when one head is set to its mean over the text: one forward for each head.

    Mean ablation removes the part of the head's output that depends on the token, and keeps the constant part.

    model     regard's or transformers' layers. Runs in eval mode, and is left as it was
    given     a text, token ids (n,), or what a tokenizer returned; tokenizer: the model's, needed for a text
    loss      a function of the model's output; None: the mean cross-entropy of the next token, for causal models
    most      tokens of the text that are read
    progress  is called with the number of heads done, and of all heads

    Raises Unsupported if a projection is not found, and, without `loss`, for a model that is not causal or returns no
    logits; ValueError for fewer than 2 tokens; other errors as in look.
    Source: Wang et al. 2022 (arXiv 2211.00593), §3.1.

    >>> from regard.demo.model import load
    >>> found = ablation(load(), list(b"xkq!vJ7 wzb%Rt3 " * 2))
    >>> max((float(x), n, h) for n, of in enumerate(found.change) for h, x in enumerate(of))[1:]
    (3, 1)
    """
    reader = Reader.of(model, given, tokenizer, most)
    model = reader.model
    if len(reader.ids) < 2:
        raise ValueError(f"the text has {len(reader.ids)} token; expected 2 or more.")
    projections = find_projections(model, reader.run)
    if loss is None:
        calls = [projection.call for projection in projections]
        check_causal(model, calls, f"so predicting the next token is trivial. {OWN_LOSS}")
    own, total, done = _loss(reader, reader.run(), loss), sum(one.heads for one in projections), 0
    changes: list[Tensor] = []
    for removed in projections:
        of_layer: list[float] = []
        for head in range(removed.heads):
            with at_projections(projections, _mean_of(removed, head)):
                of_layer.append(_loss(reader, reader.run(), loss) - own)
            done += 1
            progress(done, total)
        changes.append(torch.tensor(of_layer, dtype=torch.float32, device="cpu"))
    return Ablation(tuple(one.layer for one in projections), tuple(changes), own, len(reader.ids))


def _mean_of(removed: Projection, head: int) -> Callable[[Projection, Tensor], Tensor]:
    """Sets a head of one projection to its mean over the positions."""

    def change(projection: Projection, joined: Tensor) -> Tensor:
        if projection is not removed:
            return joined
        heads = joined.clone().unflatten(-1, (removed.heads, -1))
        one = heads[..., head, :]
        one[:] = one.flatten(0, -2).mean(0)
        return heads.flatten(-2)

    return change


def _loss(reader: Reader, answer: Any, loss: Loss | None) -> float:
    if loss is not None:
        return float(loss(answer))
    logits = reader.logits(answer)
    if logits is None:
        raise Unsupported(
            f"{type(reader.model).__name__} answers no logits; expected a causal language model, such as "
            f"AutoModelForCausalLM loads. {OWN_LOSS}."
        )
    return float(cross_entropy(logits[:-1].float(), reader.ids[1:]))
