"""One call of attention as plain data: tensors, and named parts with their numbers. Nothing of regard."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Part:
    """A similarity, a modifier or a mask: its kind, its tensors, its numbers, and the masks that it combines."""

    kind: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, Any] = field(default_factory=dict)
    parts: tuple[Part, ...] = ()

    def map(self, fn: Map) -> Part:
        tensors = {name: fn(t) for name, t in self.tensors.items()}
        return replace(self, tensors=tensors, parts=tuple(p.map(fn) for p in self.parts))

    def every(self) -> Iterator[Part]:
        """This part and all parts inside it."""
        yield self
        for part in self.parts:
            yield from part.every()

    def __str__(self) -> str:
        inside = [*map(str, self.parts), *(f"{n}={shown(t)}" for n, t in self.tensors.items())]
        return f"{self.kind}({', '.join([*inside, *(f'{n}={x}' for n, x in self.numbers.items())])})"


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of one call, and how regard is asked.

    score: the similarity, then the modifiers. positions: those of the queries and of the keys, or None;
    placed: "head" or "tail" where regard shall count them itself, else "given".
    needs: the names of the tensors that require a gradient (see `floats`).
    backend: None, or the name of a backend with its arguments. isa: which of the machine's instruction sets.
    poisoned: q, k or v hold NaN or inf.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    score: tuple[Part, ...]
    mask: Part
    positions: tuple[Tensor, Tensor] | None = None
    placed: str = "given"
    sink: Tensor | float | None = None
    needs: tuple[str, ...] = ()
    backend: tuple[Any, ...] | None = None
    isa: int | None = None
    poisoned: bool = False

    @property
    def headed(self) -> bool:
        return self.q.dim() >= 4

    @property
    def batch(self) -> tuple[int, ...]:
        lead = 3 if self.headed else 2
        return tuple(torch.broadcast_shapes(*(t.shape[:-lead] for t in (self.q, self.k, self.v))))

    @property
    def heads(self) -> int:
        return self.q.shape[-3] if self.headed else 1

    @property
    def key_heads(self) -> int:
        return self.k.shape[-3] if self.headed else 1

    @property
    def nq(self) -> int:
        return self.q.shape[-2]

    @property
    def nk(self) -> int:
        return self.k.shape[-2]

    @property
    def pairs(self) -> int:
        return math.prod(self.batch) * self.heads * self.nq * self.nk

    def lift(self, t: Tensor) -> Tensor:
        """q, k or v as (*batch, heads, n, d)."""
        t = t if self.headed else t.unsqueeze(-3)
        return t.expand(*self.batch, *t.shape[-3:])

    def lower(self, t: Tensor, trailing: int) -> Tensor:
        """(*batch, h, ...) in the caller's axes, `trailing` axes behind the head axis."""
        return t if self.headed else t.squeeze(-trailing - 1)

    @property
    def by_length(self) -> bool:
        """Whether the queries are the last of each sequence, whose lengths differ."""
        return self.placed == "tail" and self.positions is not None and self.positions[0].dim() > 1

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name: the floats, those of the mask, the positions that regard does not count itself."""
        masks = enumerate(self.mask.every())
        named = {f"{part.kind} {n} {name} of the mask": t for n, part in masks for name, t in part.tensors.items()}
        placed = self.positions if self.placed == "given" else None
        return {**self.floats(), **named, **dict(zip(("positions.q", "positions.k"), placed or (), strict=False))}

    def floats(self) -> dict[str, Tensor]:
        """Every floating-point tensor by name, each once: one in two roles has the name of its first."""
        named, first = self._roles(), self._first()
        return {name: t for name, t in named.items() if first[id(t)] == name}

    def _roles(self) -> dict[str, Tensor]:
        named = {"q": self.q, "k": self.k, "v": self.v}
        for n, part in enumerate(self.score):
            named |= {f"{part.kind} {n} {name}": t for name, t in part.tensors.items()}
        return {**named, "sink": self.sink} if isinstance(self.sink, Tensor) else named

    def _first(self) -> dict[int, str]:
        """The first role of each tensor."""
        return {id(t): name for name, t in reversed(self._roles().items())}

    def map(self, fn: Map) -> Call:
        """The same call with fn of each floating-point tensor; one in two roles stays one."""
        known: dict[int, Tensor] = {}

        def once(t: Tensor) -> Tensor:
            if id(t) not in known:
                known[id(t)] = fn(t)
            return known[id(t)]

        q, k, v = once(self.q), once(self.k), once(self.v)
        score = tuple(part.map(once) for part in self.score)
        sink = once(self.sink) if isinstance(self.sink, Tensor) else self.sink
        return replace(self, q=q, k=k, v=v, score=score, sink=sink)

    def keys(self, start: int, stop: int) -> Call:
        """The same call with some of the keys. Its masks and scores must allow that (see `divisible`)."""
        cut = slice(start, stop)
        assert self.positions is not None
        return replace(
            self,
            k=self.k[..., cut, :],
            v=self.v[..., cut, :],
            score=tuple(_cut_keys(part, cut, self.nk) for part in self.score),
            mask=_cut_keys(self.mask, cut, self.nk),
            positions=(self.positions[0], self.positions[1][..., cut]),
            placed="given",
        )

    def queries(self, start: int, stop: int) -> Call:
        """The same call with some of the queries."""
        cut = slice(start, stop)
        assert self.positions is not None
        return replace(
            self,
            q=self.q[..., cut, :],
            score=tuple(_cut_queries(part, cut, self.nq) for part in self.score),
            mask=_cut_queries(self.mask, cut, self.nq),
            positions=(self.positions[0][..., cut], self.positions[1]),
            placed="given",
        )

    @property
    def divisible(self) -> bool:
        """Whether the call can be made of parts of its keys or queries: positions are given, and no mask counts."""
        counted = any(part.kind == "lengths" for part in self.mask.every())
        return self.positions is not None and not counted

    def __str__(self) -> str:
        sink = shown(self.sink) if isinstance(self.sink, Tensor) else self.sink
        given = {"q": self.q, "k": self.k, "v": self.v}
        lines = [f"{name} {shown(t)} strides {tuple(t.stride())}" for name, t in given.items()]
        lines += ["score " + " >> ".join(map(str, self.score)), f"mask {self.mask}"]
        if self.positions is not None:
            lines.append(
                "positions " + ", ".join(f"{tuple(p.shape)} {p.flatten()[:8].tolist()}.." for p in self.positions)
            )
        first = self._first()
        same = [f"{name} is {first[id(t)]}" for name, t in self._roles().items() if first[id(t)] != name]
        lines += [f"sink {sink}, backend {self.backend}, isa {self.isa}, poisoned {self.poisoned}", *same]
        return "\n".join([*lines, f"needs {', '.join(self.needs) or 'no gradients'}"])


def _cut_keys(part: Part, cut: slice, nk: int) -> Part:
    """A part with what it holds for each key cut: the last axis of biases, allowed pairs, ids, ends; the first of
    points."""
    tensors = dict(part.tensors)
    for name in ("bias", "allowed", "until"):
        if name in tensors and tensors[name].dim() and tensors[name].shape[-1] == nk:
            tensors[name] = tensors[name][..., cut]
    if part.kind == "documents":
        ids = tensors.get("k_ids", tensors["q_ids"])
        tensors["k_ids"] = ids[..., cut]
    if part.kind == "points":
        points = tensors["coordinates"]
        tensors = {"query_coordinates": points, **tensors, "coordinates": points[cut]}
    return replace(part, tensors=tensors, parts=tuple(_cut_keys(p, cut, nk) for p in part.parts))


def _cut_queries(part: Part, cut: slice, nq: int) -> Part:
    """A part with what it holds for each query cut: the last axis but one of biases and allowed pairs; ids, points."""
    tensors = dict(part.tensors)
    for name in ("bias", "allowed"):
        if name in tensors and tensors[name].dim() > 1 and tensors[name].shape[-2] == nq:
            tensors[name] = tensors[name][..., cut, :]
    if part.kind == "documents":
        tensors |= {"q_ids": tensors["q_ids"][..., cut], "k_ids": tensors.get("k_ids", tensors["q_ids"])}
    if part.kind == "points":
        tensors["query_coordinates"] = tensors.get("query_coordinates", tensors["coordinates"])[cut]
    return replace(part, tensors=tensors, parts=tuple(_cut_queries(p, cut, nq) for p in part.parts))


def shown(t: Tensor) -> str:
    return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)}"
