"""look, the verb, by what comes first: tensors, a layer of regard.nn on its input, or a model that reads something."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import singledispatch, wraps
from typing import Any, Protocol, cast, overload

import torch
from torch import Tensor, nn

import regard.inspect.look_tensors as tensors
from regard.core.positions import Positions
from regard.inspect.facts.algebra import Fact
from regard.inspect.facts.rows import Entropy, MaxScore
from regard.inspect.models import Pipeline, of_model, of_pipeline
from regard.inspect.reading import Progress, Tokenizer
from regard.inspect.report.report import Report
from regard.inspect.report.texts import TextReports
from regard.inspect.results import FactResults
from regard.masks.algebra import Everything, Mask
from regard.nn.attention import Attention
from regard.nn.elsewhere import answers_look_calls
from regard.nn.heads import Heads
from regard.scores.algebra import Score


@torch.no_grad()
@answers_look_calls
def of_layer(
    layer: Heads,
    x: Tensor,
    context: Tensor | None = None,
    *,
    facts: tuple[Fact[Any], ...] = (Entropy(), MaxScore()),
    mask: Mask = Everything(),
    positions: Positions | None = None,
) -> FactResults:
    """What the weights of a layer are like on its input: those of `layer.weights(x, context, mask=, positions=)`.

    Answers (*batch, heads, ...), of regard.nn.Attention (*batch, ...); errors as the layer's and look's.

    >>> import regard as rg
    >>> layer, x = rg.nn.MultiHeadAttention(8, heads=2), torch.randn(5, 8)
    >>> of_layer(layer, x, mask=rg.Causal())[Entropy()].shape
    torch.Size([2, 5])
    """
    q, k, _ = layer.project(x, context, positions)
    alone = x.dim() == 2
    q, k = (t[None] if alone else t for t in (q, k))
    seen = tensors.look(q, k, facts=facts, mask=mask, positions=positions, **layer.scoring())
    seen = seen.without(0, seen.key_heads) if alone else seen
    return seen.without(x.dim() - 2, None) if isinstance(layer, Attention) else seen


class Look(Protocol):
    """The verb `look`, by what comes first."""

    @overload
    def __call__(
        self,
        layer: Heads,
        x: Tensor,
        context: Tensor | None = None,
        *,
        facts: tuple[Fact[Any], ...] = ...,
        mask: Mask = ...,
        positions: Positions | None = None,
    ) -> FactResults: ...

    @overload
    def __call__(
        self,
        model: nn.Module,
        texts: list[str] | tuple[str, ...] | list[list[int]] | list[Mapping[str, Any]],
        /,
        *,
        tokenizer: Tokenizer | None = None,
        processor: Callable[..., Any] | None = None,
        title: str | None = None,
        context: int = 2,
        facts: tuple[Fact[Any], ...] = ...,
        progress: Progress = ...,
    ) -> TextReports: ...

    @overload
    def __call__(
        self,
        model: nn.Module,
        given: str | list[int] | Tensor | Mapping[str, Any],
        pair: str | None = None,
        /,
        *,
        tokenizer: Tokenizer | None = None,
        processor: Callable[..., Any] | None = None,
        title: str | None = None,
        context: int = 2,
        facts: tuple[Fact[Any], ...] = ...,
        progress: Progress = ...,
    ) -> Report: ...

    @overload
    def __call__(
        self,
        model: nn.Module,
        image: Any,
        /,
        *,
        processor: Callable[..., Any],
        title: str | None = None,
        context: int = 2,
        facts: tuple[Fact[Any], ...] = ...,
        progress: Progress = ...,
    ) -> Report: ...

    @overload
    def __call__(
        self,
        q: Any,
        k: Any,
        *,
        facts: tuple[Fact[Any], ...] = ...,
        score: Score = ...,
        mask: Mask = ...,
        positions: Positions | None = None,
        sink: Tensor | float | None = None,
    ) -> FactResults: ...


_verb = singledispatch(cast(Callable[..., Any], tensors.look))
_verb.register(nn.Module, of_model)
_verb.register(Pipeline, of_pipeline)
_verb.register(Heads, of_layer)


@_verb.register(str)
@_verb.register(type(None))
def _of_no_model(first: str | None, *given: Any, **options: Any) -> Any:
    """TypeError: a text, the name of a model, or nothing, in place of the model."""
    what = "None" if first is None else f"{first!r}, a str"
    raise TypeError(
        f"look begins with {what}; expected a model that its own library has loaded: "
        "look(model, text, tokenizer=tokenizer); or tensors: look(q, k)."
    )


@wraps(tensors.look)
def _by_first(*given: Any, **options: Any) -> Any:
    if not given:
        named = f"; {', '.join(map(repr, options))} came by name" if options else ""
        raise TypeError(
            "look takes what it looks at by position: look(model, text, tokenizer=...), look(layer, x) or look(q, k)"
            f"{named}."
        )
    return _verb(*given, **options)


look = cast(Look, _by_first)
