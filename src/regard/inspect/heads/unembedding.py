"""The way from the residual stream to the logits: the last norm, its scale as it is, and the unembedding."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from regard.core.errors import Unsupported
from regard.core.wrong_calls import kind_of
from regard.inspect.heads.stream import Stream

TOLERANCE = 1e-3  # of the largest logit: how well norm and unembedding must give the model's own


@dataclass(frozen=True, eq=False)
class NormCall:
    """The last call of a norm on the residual stream: what it was given and what it made of it, (n, d)."""

    module: nn.Module
    given: Tensor
    made: Tensor
    parts: frozenset[int]  # the numbers of the layers whose outputs are in it as they are

    @property
    def centred(self) -> bool:
        """Whether the norm subtracts the mean of the features, as LayerNorm does."""
        return isinstance(self.module, nn.LayerNorm)

    @property
    def gain(self) -> Tensor:
        """What the norm multiplies each feature by, after its scale: (d,), float64."""
        if self.centred:
            weight: Tensor | None = getattr(self.module, "weight", None)
            return torch.ones_like(self.given[0]).double() if weight is None else weight.detach().double()
        # of root mean square: a large constant shows the gain, whatever is added to the weight
        return self.module(torch.full_like(self.given[0], 1e4)).detach().double()

    def folded(self, directions: Tensor) -> Tensor:
        """g with norm(x) · direction = scale(x) x · g + constant: of directions (..., d), float64."""
        g = self.gain * directions.double()
        return g - g.mean(-1, keepdim=True) if self.centred else g

    def applied(self, x: Tensor) -> Tensor:
        """norm(x) / scale(x) of x (..., d), without the bias, float64: applied(x) · u = x · folded(u)."""
        x = x.double()
        return self.gain * (x - x.mean(-1, keepdim=True) if self.centred else x)

    def scale(self, at: int) -> float:
        """What the norm multiplies the x at a position by; Unsupported for a norm that does something else."""
        x, made = self.given[at].double(), self.made[at].double()
        if self.centred:
            bias: Tensor | None = getattr(self.module, "bias", None)
            x, made = x - x.mean(), made if bias is None else made - bias.double()
        pulled = x * self.gain
        found = (made @ pulled) / (pulled @ pulled)
        if not torch.allclose(made, found * pulled, rtol=1e-2, atol=1e-3 * float(made.abs().max())):
            raise Unsupported(
                f"a norm is {kind_of(self.module)}, which is neither a LayerNorm nor one of root mean square: what a "
                "head adds to a logit is not known."
            )
        return float(found)

    def frozen(self, at: int, direction: Tensor) -> Tensor:
        """g with norm(x) · direction = x · g + constant for the x at a position, its scale taken as it is: (d,)."""
        return self.scale(at) * self.folded(direction)


@contextmanager
def last_norm(stream: Stream) -> Generator[list[NormCall], None, None]:
    """While it is open, a list that holds the last call of a norm on what is known of the stream, once there is one."""
    found: list[NormCall] = []

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        if "norm" not in type(module).__name__.lower() or not inputs or not isinstance(output, Tensor):
            return
        parts = stream.parts(inputs[0])
        if parts:
            found[:] = [NormCall(module, inputs[0].flatten(0, -2), output.flatten(0, -2), parts)]

    hook = register_module_forward_hook(after)
    try:
        yield found
    finally:
        hook.remove()


def direct_path(model: nn.Module, layers: Sequence[str], norm: list[NormCall], logits: Tensor | None) -> Tensor:
    """The unembedding (vocabulary, d), of a model whose layers all reach the last norm as they are.

    layers: the paths of the attention layers, in the order in which their outputs were put into the stream. Raises
    Unsupported where the model has no logits, a layer's output is normalised or scaled on its way, or the logits are
    not those of an unembedding.
    """
    name = type(model).__name__
    if logits is None:
        raise Unsupported(f"{name} answers no logits; expected a language model, such as AutoModelForCausalLM loads.")
    absent = [layer for n, layer in enumerate(layers) if not norm or n not in norm[0].parts]
    if absent:
        raise Unsupported(
            f"what {absent[0]} adds does not reach a last norm as it is: {name} normalises or scales the residual "
            "stream on the way, or has no last norm."
        )
    return unembedding(model, norm[0], logits)


def unembedding(model: nn.Module, norm: NormCall, logits: Tensor) -> Tensor:
    """The matrix (vocabulary, d) that makes the logits (n, vocabulary) of what the last norm made.

    The model's output embedding, or the embedding of its tokens where these are one. Raises Unsupported where neither
    gives the logits, to 0.1 % of the largest: where they are capped, scaled or made in other ways.
    """
    output = getattr(model, "get_output_embeddings", lambda: None)()
    heads = [output] if output is not None else [m for m in model.modules() if isinstance(m, nn.Embedding)]
    for head in heads:
        weight, bias = getattr(head, "weight", None), getattr(head, "bias", None)
        if not isinstance(weight, Tensor) or weight.shape != (logits.shape[-1], norm.made.shape[-1]):
            continue
        made = norm.made[-1] @ weight.T + (bias if isinstance(bias, Tensor) else 0)
        if float((made - logits[-1]).abs().max()) <= TOLERANCE * float(logits[-1].abs().max()):
            return weight.detach()
    raise Unsupported(
        f"the logits of {type(model).__name__} are not its last norm times an unembedding (they may be capped or "
        "scaled, or another layer stands between): what a head adds to a logit is not known."
    )
