"""Shards: which tokens of a sequence each rank of a group holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.call.part import select
from regard.core.arrays import of_numbers
from regard.core.cotangents import linear_in
from regard.core.errors import ShapeError
from regard.core.region import Indices
from regard.core.shapes import blocks, count_of, listed
from regard.core.tracing import outside_of_graphs
from regard.masks.algebra import Cover, Mask
from regard.parallel.comparison import CallDescription, PartOfTokens, agree, described
from regard.parallel.ranks import Ranks

TILE, LEAST = 128, 8  # tokens that `balanced` deals out together at most, and how many such pieces a rank has at least


@dataclass(frozen=True, eq=False)
class Shards:
    """The tokens of each rank, by index: `of_ranks[r]` are those of rank r, in their order on that rank.

    >>> Shards.zigzag(8, 2).indices
    (tensor([0, 1, 6, 7]), tensor([2, 3, 4, 5]))
    """

    of_ranks: tuple[Indices, ...]

    @staticmethod
    def contiguous(n: int, ranks: int) -> Shards:
        """Rank r holds the r-th piece; the first n % ranks pieces have a token more."""
        ends = [r * (n // ranks) + min(r, n % ranks) for r in range(ranks + 1)]
        return Shards(tuple(range(a, b) for a, b in pairwise(ends)))

    @staticmethod
    def of_lengths(lengths: Sequence[int]) -> Shards:
        """Consecutive pieces of these lengths, which may be 0."""
        ends = [sum(lengths[:r]) for r in range(len(lengths) + 1)]
        return Shards(tuple(range(a, b) for a, b in pairwise(ends)))

    @staticmethod
    def zigzag(n: int, ranks: int) -> Shards:
        """Rank r holds the r-th piece of 2 · ranks from the front and the r-th from the end: balanced for Causal().

        Source: Brandon et al. 2023 (arXiv 2311.09431) name the imbalance; the layout is ring-flash-attention's.
        """
        pieces = Shards.contiguous(n, 2 * ranks).indices
        return Shards(tuple(torch.cat([pieces[r], pieces[-1 - r]]) for r in range(ranks)))

    @staticmethod
    def striped(n: int, ranks: int) -> Shards:
        """Rank r holds tokens r, r + ranks, ...: Striped Attention (Brandon et al. 2023, arXiv 2311.09431)."""
        return Shards(tuple(range(r, n, ranks) for r in range(ranks)))

    @staticmethod
    def balanced(mask: Mask, n: int, ranks: int) -> Shards:
        """Pieces of 128 tokens, distributed so that all ranks have the same number of visible tiles and of tokens.

        The piece whose queries see the most tiles goes first, to the rank with the fewest so far that has room. A short
        sequence has smaller ones, 8 a rank. ShapeError for a mask of other tokens.
        """
        size = min(TILE, -(-n // (LEAST * ranks)) or 1)
        cover = mask.on(n, heads=mask.extent().sizes()[0]).cover(size, size) != Cover.NONE
        pieces = [range(s.start, s.stop) for s in blocks(n, size)]
        cost = cover.float().sum(-1).reshape(-1, len(pieces)).mean(0).tolist() if pieces else []
        room, load = [-(-len(pieces) // ranks)] * ranks, [0.0] * ranks
        mine: list[list[int]] = [[] for _ in range(ranks)]
        for piece in sorted(range(len(pieces)), key=lambda piece: -cost[piece]):
            rank = min((r for r in range(ranks) if room[r]), key=lambda r: load[r])
            mine[rank].append(piece)
            room[rank], load[rank] = room[rank] - 1, load[rank] + cost[piece]
        tokens = [[t for piece in sorted(of_rank) for t in pieces[piece]] for of_rank in mine]
        return Shards(tuple(torch.tensor(of_rank, dtype=torch.int64, device="cpu") for of_rank in tokens))

    @staticmethod
    def of(indices: Sequence[Any]) -> Shards:
        """These indices for each rank, integers; a rank may have none. ValueError unless each token has one rank."""
        ascending = [isinstance(x, range) and x.step > 0 for x in indices]  # others are no slices
        found = Shards(
            tuple(x if up else of_numbers(x, torch.int64).long() for x, up in zip(indices, ascending, strict=True))
        )
        every = torch.cat(found.indices).sort().values
        if not torch.equal(every, torch.arange(len(every), dtype=torch.int64, device="cpu")):
            raise ValueError(
                f"Shards.of: {count_of(len(every), 'index')} on {count_of(len(indices), 'rank')} are "
                f"not 0 to {len(every) - 1}, each once."
            )
        return found

    @property
    def indices(self) -> tuple[Tensor, ...]:
        """For each rank int64 (n_r,)."""
        return tuple(
            x if isinstance(x, Tensor) else torch.arange(len(x), dtype=torch.int64, device="cpu") * x.step + x.start
            for x in self.of_ranks
        )

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many tokens each rank holds."""
        return tuple(map(len, self.of_ranks))

    @property
    def n(self) -> int:
        """How many tokens there are."""
        return sum(self.lengths)

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.of_ranks)

    def __repr__(self) -> str:
        return (
            f"Shards({count_of(self.n, 'token')}, {', '.join(map(str, self.lengths))} on "
            f"{count_of(self.ranks, 'rank')})"
        )


def shard(x: Tensor, shards: Shards, rank: int, dim: int = -2) -> Tensor:
    """The part of a rank of a tensor of all tokens along `dim`. ShapeError where the shards are of other tokens.

    >>> shard(torch.arange(8), Shards.striped(8, 2), 1, dim=0)
    tensor([1, 3, 5, 7])
    """
    if x.shape[dim] != shards.n:
        raise ShapeError(
            f"x has shape {listed(x.shape)}, {count_of(x.shape[dim], 'token')} along axis {dim}; expected {shards.n}, "
            f"as {shards!r} have: make the shards of these tokens."
        )
    return select(x, shards.of_ranks[rank], dim)


def joined(parts: Sequence[Tensor], shards: Shards, dim: int = -2) -> Tensor:
    """All tokens along `dim` in ascending order of their indices, from those of every rank."""
    whole, indices = torch.cat(list(parts), dim), torch.cat(shards.indices)
    return whole if _ascending(indices) else select(whole, indices.argsort(), dim)


def divided(whole: Tensor, shards: Shards, dim: int = -2) -> tuple[Tensor, ...]:
    """The adjoint: what each rank holds."""
    indices = torch.cat(shards.indices)
    own = whole if _ascending(indices) else select(whole, indices.argsort().argsort(), dim)
    return own.split(shards.lengths, dim)


def _ascending(indices: Tensor) -> bool:
    return bool((indices[1:] > indices[:-1]).all())


@outside_of_graphs
def unshard(x: Tensor, shards: Shards, group: Any = None, dim: int = -2) -> Tensor:
    """The tensor of all tokens, on every rank, from the parts of all ranks. All ranks of the group must call it.

    group: as of `ring_attention`, or a mesh of two dimensions as of `usp_attention`. Differentiable once: the gradient
    of a rank's part is the sum of its gradients on all ranks, as the loss is the sum of their losses. Raises
    ShapeError, on every rank, if parts do not fit the shards, Unsupported for a device for which the group has no
    backend, and PeerError where another rank raises an error, or has other shards, or a part of another dtype or of
    other axes.
    """
    ranks = Ranks.of(group)
    with ranks.telling():
        part = x.movedim(dim, 0)
        ranks.levels[0].check_device("x", x)
        description: CallDescription = {
            "the function": "unshard",
            "x": PartOfTokens(x, dim),
            "shards": described(shards, shards.indices),
            "the device": x.device.type,
        }
        for peers in ranks.levels:
            agree(peers, description)
            peers.connect(x.device)
    lengths = tuple(of_rank[0] for of_rank in ranks.gather([len(part)]))
    if lengths != shards.lengths:
        raise ShapeError(f"x has {list(lengths)} tokens on the ranks of the group; expected {shards!r}.")
    return _Unshard.apply(part, shards, ranks).movedim(0, dim)


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, shards: Shards, ranks: Ranks) -> Tensor:
        width = x.shape[1:].numel()
        ctx.of, ctx.ranks, ctx.sizes = shards, ranks, ranks.sizes([n * width for n in shards.lengths])
        with ranks.together("the tensor of all tokens"):
            found = x.reshape(-1)
            for peers, sizes in ctx.sizes:
                found = torch.cat(peers.exchange([found] * peers.count, sizes))
            return joined(found.view(shards.n, *x.shape[1:]).split(shards.lengths), shards, 0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        def gradients(cotangents: tuple[Tensor, ...]) -> tuple[Tensor]:
            (g,) = cotangents
            found = torch.cat([t.reshape(-1) for t in divided(g, ctx.of, 0)])
            for peers, sizes in reversed(ctx.sizes):
                shares = peers.exchange(found.split(sizes), [sizes[peers.rank]] * peers.count)
                found = torch.stack(shares).sum(0)
            return (found.view(ctx.of.lengths[ctx.ranks.rank], *g.shape[1:]),)

        with ctx.ranks.together("the gradient of a tensor of all tokens"):
            return *linear_in((g,), gradients), None, None
