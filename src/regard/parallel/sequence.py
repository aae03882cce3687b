"""SequenceParallel: how a layer attends where each rank has some tokens of the sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.backends.base import Backend
from regard.call.hooks import AttentionCall
from regard.call.of_part import mask_of_part, score_of_part
from regard.call.part import QueriesAndKeys
from regard.core.dropout import Dropout
from regard.core.positions import Positions
from regard.masks.algebra import Mask
from regard.parallel.ranks import Ranks
from regard.parallel.ring import ring_attention
from regard.parallel.shards import Shards, unshard
from regard.scores.algebra import Score


@dataclass(frozen=True, eq=False)
class SequenceParallel:
    """The tokens of each rank, for layers of regard.nn: MultiHeadAttention(..., parallel=SequenceParallel(shards)).

    A layer then takes x (*batch, n_r, d_model), the tokens of its rank in the order of shards.indices[rank], rotates
    them by their positions in the whole sequence, and attends to all of it; its mask and score are those of the whole.
    A layer's sequence has shards.n tokens; for another one, set `layer.parallel` anew. The gradient of a parameter is
    what this rank's tokens add to it: sum it over the group, as for the layers around it.

    shards  which tokens each rank has
    group   a process group, one dimension of a DeviceMesh, or None: all processes; of usp_attention the whole mesh
    attend  ring_attention, ulysses_attention, usp_attention, or a function with their arguments
    """

    shards: Shards
    group: Any = None
    attend: Callable[..., Tensor] = ring_attention

    @property
    def rank(self) -> int:
        """The number of this process among the processes of the sequence."""
        return Ranks.of(self.group).rank

    def positions(self) -> Positions:
        """The positions of this rank's tokens, as queries and as keys."""
        own = self.shards.indices[self.rank]
        return Positions(own, own)

    def unshard(self, x: Tensor, dim: int = -2) -> Tensor:
        """The tensor of all tokens, on every rank, from the parts of all ranks."""
        return unshard(x, self.shards, self.group, dim)

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
        """The output for this rank's tokens, from the keys and values of all."""
        with torch._C.DisableTorchFunction():  # the layer has reported the call, whole  # pyright: ignore
            return self.attend(
                q,
                k,
                v,
                group=self.group,
                shards=self.shards,
                score=score,
                mask=mask,
                sink=sink,
                dropout=dropout,
                backend=backend,
            )

    def with_all_keys(self, call: AttentionCall) -> AttentionCall:
        """The call of this rank's queries on the keys of all ranks. All ranks must call it."""
        shards, rank = self.shards, self.rank
        own = QueriesAndKeys(shards.of_ranks[rank], range(shards.n), shards.n, shards.n)
        k = self.unshard(call.k.detach())
        at = Positions(shards.indices[rank], torch.arange(shards.n, dtype=torch.int64, device="cpu"))
        return replace(call, k=k, score=score_of_part(call.score, own), mask=mask_of_part(call.mask, own), positions=at)
