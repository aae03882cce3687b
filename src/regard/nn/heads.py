"""Heads: what every attention layer does before W^O, whatever its projections are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from regard.api import attention, attention_weights
from regard.backends.base import Backend
from regard.call.arguments import check_kinds
from regard.call.hooks import AttentionCall, notify
from regard.core.dropout import Dropout
from regard.core.errors import ShapeError
from regard.core.positions import Positions, resolve_positions
from regard.core.shapes import broadcast_shape, listed
from regard.core.value import Value
from regard.core.wrong_calls import instead_of, kind_of
from regard.masks.algebra import Everything, Mask
from regard.nn.cache.base import KVCache
from regard.nn.elsewhere import answers_weights_calls
from regard.nn.rotary import Rotary
from regard.nn.scores import owned
from regard.scores.algebra import Score
from regard.scores.fields import number
from regard.scores.similarity import ScaledDot


class Parallel(Protocol):
    """How a layer attends where each process holds some tokens of the sequence: a value of regard.parallel."""

    def positions(self) -> Positions:
        """Where this process's tokens stand, as queries and as keys."""
        ...

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        score: Score,
        mask: Mask,
        sink: Tensor | None,
        dropout: Dropout | None,
        backend: Backend | None,
    ) -> Tensor:
        """The output for this process's tokens, from the keys and values of all; score and mask are the whole's."""
        ...

    def with_all_keys(self, call: AttentionCall) -> AttentionCall:
        """The call of these queries on the keys of all processes, which all of them ask for: what is looked at."""
        ...


class Heads(nn.Module):
    """A layer's heads: A_i = Attention(Q_i, K_i, V_i) of projections of x and c. Abstract; a subclass adds `forward`.

    q_proj, k_proj, v_proj are modules and are called, whatever they are; their outputs are cut into `heads`,
    `key_heads` and `key_heads` equal parts. q_width and k_width are the widths of a query and of a key.
    """

    def __init__(
        self,
        q_proj: nn.Module,
        k_proj: nn.Module,
        v_proj: nn.Module,
        out_proj: nn.Module,
        *,
        d_model: int,
        d_context: int,
        heads: int,
        key_heads: int,
        q_width: int,
        k_width: int,
        score: Score | nn.Module | None,
        rotary: Rotary | None,
        qk_norm: Callable[[int], nn.Module] | None,
        sink: Tensor | float | None,
        dropout: float,
        backend: Backend | None,
        parallel: Parallel | None,
        place: dict[str, Any],
    ) -> None:
        super().__init__()
        self.d_model, self.d_context, self.heads, self.key_heads = d_model, d_context, heads, key_heads
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = q_proj, k_proj, v_proj, out_proj
        if isinstance(qk_norm, nn.Module):
            raise TypeError(f"qk_norm is {kind_of(qk_norm)}; expected a class, or a function that makes it of a width.")
        norms = (None if qk_norm is None else qk_norm(width).to(**place) for width in (q_width, k_width))
        self.q_norm, self.k_norm = norms
        self.score: Score | nn.Module = owned(ScaledDot() if score is None else score)
        if rotary is not None and not isinstance(rotary, Rotary):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"rotary is {kind_of(rotary)}; expected a Rotary, such as Rotary({q_width}), or None.")
        if rotary is not None and rotary.width > min(q_width, k_width):
            raise ValueError(f"{rotary!r} turns {rotary.width} features; a query has {q_width}, a key {k_width}.")
        self.rotary, self.backend, self.parallel = rotary, backend, parallel
        self.dropout = Dropout(dropout)
        self.sink = None if sink is None else nn.Parameter(_logits(sink, heads, place))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier-uniform weights and zero biases for the projections."""
        for linear in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            if isinstance(linear, nn.Linear):
                nn.init.xavier_uniform_(linear.weight)
                if linear.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
                    nn.init.zeros_(linear.bias)

    def attend(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask = Everything(),
        positions: Positions | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """The heads' outputs A_i before W^O: (*batch, heads, n, d_v)."""
        if self.parallel is not None:
            return self._attend_parallel(self.parallel, x, context, mask, positions, cache)
        if cache is not None and not isinstance(cache, KVCache):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(
                f"cache is {kind_of(cache)}; expected a cache of regard.nn, such as GrowingCache(), or None."
            )
        own = positions if cache is None else self._next_positions(x, context, positions, cache)
        q, k, v = (_batched(t) for t in self.project(x, context, own))
        dropout, scoring = self._dropout(), self.scoring()
        if cache is not None:
            check_kinds(scoring["score"], mask, positions, dropout)  # before the cache takes the tokens
            k, v = cache.append(k, v)
            mask, positions = mask & cache.mask, cache.positions
        cross = context is not None and context is not x
        try:
            notify(lambda: AttentionCall(self, q, k, mask=mask, positions=positions, v=v, cross=cross, **scoring))
            out = attention(q, k, v, mask=mask, positions=positions, dropout=dropout, backend=self.backend, **scoring)
        except BaseException:
            if cache is not None:  # the caller will pass these tokens again
                cache.take_back(x.shape[-2])
            raise
        return out if x.dim() > 2 else out[0]

    @answers_weights_calls
    def weights(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask = Everything(),
        positions: Positions | None = None,
        rows: Any = None,
    ) -> Tensor:
        """The attention weights of each head, (*batch, heads, n, m), or of some rows; see regard.attention_weights."""
        if self.parallel is not None:
            raise ValueError(
                f"weights(...) of a layer with parallel={self.parallel!r} would be those of this process's keys alone. "
                "Set layer.parallel = None and pass the whole sequence, or look at it: record(...) sees all keys."
            )
        q, k, _ = (_batched(t) for t in self.project(x, context, positions))
        p = attention_weights(q, k, mask=mask, positions=positions, rows=rows, **self.scoring())
        return p if x.dim() > 2 else p[0]

    def project(
        self, x: Tensor, context: Tensor | None = None, positions: Positions | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q (*batch, heads, n, d_k), k (*batch, key_heads, m, d_k), both normed and rotated, v (..., m, d_v)."""
        c = self._read(x, context)
        try:
            q = self.q_proj(x).unflatten(-1, (self.heads, -1)).transpose(-3, -2)
            k = self.k_proj(c).unflatten(-1, (self.key_heads, -1)).transpose(-3, -2)
            v = self.v_proj(c).unflatten(-1, (self.key_heads, -1)).transpose(-3, -2)
        except RuntimeError:
            _check_dtype("x", x, self.q_proj)
            _check_dtype("context", c, self.k_proj)
            raise
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotary is not None:
            if positions is not None and not isinstance(positions, Positions):  # pyright: ignore[reportUnnecessaryIsInstance]
                check_kinds(self.scoring()["score"], Everything(), positions, None)  # which raises
            batch = broadcast_shape(x.shape[:-2], c.shape[:-2])
            at = resolve_positions(positions, q.shape[-2], k.shape[-2], batch, self.rotary, x.device)
            q, k = self.rotary(q, at.q), self.rotary(k, at.k)
        return q, k, v

    def scoring(self) -> dict[str, Any]:
        """The score and the sink of this layer, as arguments of regard.attention."""
        score = self.score if isinstance(self.score, Score) else self.score()
        return {"score": score, "sink": self.sink}

    def extra_repr(self) -> str:
        parts = [f"heads={self.heads}"]
        parts += [f"key_heads={self.key_heads}"] if self.key_heads != self.heads else []
        parts += [f"score={self.score!r}"] if isinstance(self.score, Score) else []
        parts += [f"dropout={self.dropout.p}"] if self.dropout.p else []
        return ", ".join(parts)

    def _dropout(self) -> Dropout | None:
        return self.dropout if self.training and self.dropout.p else None

    def _attend_parallel(
        self,
        parallel: Parallel,
        x: Tensor,
        context: Tensor | None,
        mask: Mask,
        positions: Positions | None,
        cache: KVCache | None,
    ) -> Tensor:
        """`attend` of this process's tokens x, whose keys and values the other processes read too."""
        for name, given in (("context", context), ("positions", positions), ("cache", cache)):
            if given is not None:
                raise ValueError(
                    f"{name} is given to a layer with parallel={parallel!r}, which attends to its own sequence, from "
                    "position 0 on. Set layer.parallel = None for this call."
                )
        q, k, v = (_batched(t) for t in self.project(x, None, parallel.positions()))
        scoring = self.scoring()
        notify(lambda: parallel.with_all_keys(AttentionCall(self, q, k, mask=mask, cross=False, **scoring)))
        out = parallel.attention(q, k, v, mask=mask, dropout=self._dropout(), backend=self.backend, **scoring)
        return out if x.dim() > 2 else out[0]

    def _next_positions(
        self, x: Tensor, context: Tensor | None, positions: Positions | None, cache: KVCache
    ) -> Positions | None:
        """Where the tokens x stand that a cache is about to take; None where nothing is rotated."""
        if context is not None or positions is not None:
            given = "context" if context is not None else "positions"
            raise ValueError(
                f"{given} and cache are both given; a cache holds the keys of x itself, and knows their positions."
            )
        if self.rotary is None:
            return None
        at = cache.next_positions(x.shape[-2])
        return Positions(at, at)

    def _read(self, x: Tensor, context: Tensor | None) -> Tensor:
        """The sequence that keys and values are made from, once both are known to fit."""
        if not isinstance(x, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"x is {kind_of(x)}; expected a tensor (*batch, n, {self.d_model}){instead_of(x)}.")
        if x.is_nested:
            raise TypeError(
                "x is a nested tensor; layers take its values: p = regard.pack(x), "
                "then p.with_values(layer(p.values, mask=p.mask & ...)).nested()."
            )
        if x.dim() < 2 or x.shape[-1] != self.d_model:
            raise ShapeError(f"x has shape {listed(x.shape)}; expected (*batch, n, {self.d_model}).")
        if context is None and self.d_context != self.d_model:
            raise ShapeError(f"this layer reads a context of width {self.d_context}; pass it: layer(x, context).")
        c = x if context is None else context
        if isinstance(c, Value):  # pyright: ignore[reportUnnecessaryIsInstance]
            way = f"write {c.argument}={c!r}" if c.argument else "expected a tensor, or None"
            raise TypeError(f"context is {kind_of(c)}; {way}.")
        try:
            broadcast_shape(x.shape[:-2], c.shape[:-2])
            fits = c.dim() == x.dim() and c.shape[-1] == self.d_context
        except ShapeError:
            fits = False
        if not fits:
            raise ShapeError(
                f"context has shape {listed(c.shape)}; expected (*batch, m, {self.d_context}) "
                f"with the batch axes of x, which has shape {listed(x.shape)}."
            )
        return c


def plain(module: nn.Module) -> bool:
    """Whether a projection computes x W^T + b from its weight and bias, and nothing else."""
    return type(module).forward is nn.Linear.forward


def _check_dtype(name: str, x: Tensor, projection: nn.Module) -> None:
    """TypeError where torch refused to project x for its dtype, which its error does not say."""
    weight = getattr(projection, "weight", None)
    if isinstance(weight, Tensor) and x.dtype != weight.dtype:
        way = "convert with .to(...)" if x.is_floating_point() else "embed token ids first"
        raise TypeError(
            f"{name} has dtype {x.dtype}; expected {weight.dtype}, as this layer's weights: {way}."
        ) from None


def _logits(sink: Tensor | float, heads: int, place: dict[str, Any]) -> Tensor:
    logits = torch.as_tensor(number(sink, "sink"), **place)
    if tuple(logits.shape) not in ((), (1,), (heads,)):
        raise ShapeError(f"sink has shape {listed(logits.shape)}; expected a number, or one logit a head, ({heads},).")
    return logits.expand(heads).clone()


def _batched(t: Tensor) -> Tensor:
    """(heads, n, d) with a batch axis, so that the heads are not taken for one."""
    return t if t.dim() > 3 else t[None]
