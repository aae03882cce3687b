"""Blocks that are sent around the ranks of a group, and their gradients, which are sent back to the block's rank."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.parallel.peers import Message, Peers, Stopped


def circulate(
    peers: Peers,
    own: Sequence[Tensor],
    sizes: Sequence[int],
    needed: Sequence[Sequence[bool]],
    gradients: ReturnedGradients | None = None,
) -> Generator[tuple[int, Tensor | None], None, None]:
    """The blocks of all ranks, one after the other around the ring: (rank whose block it is, the block), own first.

    own, tensors of one dtype with sizes[rank] numbers in all, are this rank's block, a vector. needed[r][s] says
    whether rank r needs the block of s: one that neither this rank nor one behind it needs does not come here, and None
    stands for it. The next block is on its way while this one is in use, so that three are held at most. With each
    block travels a number, on the CPU wherever the block is, which is 1 where a rank on its way has given up.

    A rank that gives up (`close()`, within `Peers.together`) still passes on blocks and gradients, and informs all whom
    its blocks reach, which then raise Stopped.
    """
    count, rank = peers.count, peers.rank
    block: Tensor | None = torch.cat([t.reshape(-1) for t in own])
    peers.tell("the first block of a ring")
    given_up = closed = False

    def goes_on(source: int, step: int) -> bool:
        """Whether a block leaves the rank that is `step` places behind its own."""
        return any(needed[(source + d) % count][source] for d in range(step + 1, count))

    for step in range(count):
        source, coming = (rank - step) % count, (rank - step - 1) % count
        sends: list[Message] = []
        receives: list[Message] = []
        arriving: Tensor | None = None
        stop = torch.zeros(1, dtype=torch.uint8, device="cpu")
        if step + 1 < count and goes_on(coming, step):
            arriving = own[0].new_empty(sizes[coming])
            receives = [(t, peers.after(-1)) for t in (arriving, stop)]
        if block is not None and goes_on(source, step):
            sends = [(t, peers.after(1)) for t in (block, torch.full_like(stop, given_up))]
        if gradients is not None:
            passed, taken = gradients.messages(step)
            sends, receives = sends + passed, receives + taken
        messages = peers.post(sends, receives)
        if not given_up:
            try:
                yield source, block
            except GeneratorExit:
                given_up = closed = True
        messages.wait()
        if gradients is not None:
            gradients.pass_on(step)
        block = arriving
        given_up = given_up or bool(stop)
    if gradients is not None:
        peers.post(*gradients.messages(count)).wait()
    if given_up and not closed:
        raise Stopped


@dataclass(eq=False)
class ReturnedGradients:
    """The gradient of each block: passed on by the ranks that compute the block, then returned to its owner.

    needed as of `circulate`, sizes: how many numbers the gradient of each rank's block has, of like's dtype. Where
    nothing is added, by a rank that has given up, zeros are. A gradient arrives during the step in which the block is
    in use, and at its owner during the step after the last use: both ranks then post it together with their blocks.

    found: what other ranks have added to the gradient of this rank's block; None without such ranks.
    """

    peers: Peers
    needed: Sequence[Sequence[bool]]
    sizes: Sequence[int]
    like: Tensor
    found: Tensor | None = None
    _share: Tensor | None = None
    _before: Tensor | None = None
    _due: dict[int, list[Message]] = field(default_factory=dict[int, list[Message]])

    def add(self, share: Tensor) -> None:
        """What this rank adds to the gradient of the block in use, another's. It is written to."""
        self._share = share

    def messages(self, step: int) -> tuple[list[Message], list[Message]]:
        """What this rank sends during a step, the last one of which has no block, and what it receives."""
        rank, receives = self.peers.rank, list[Message]()
        source = (rank - step) % self.peers.count
        visitors, of_own = self._visitors(source), self._visitors(rank)
        if rank in visitors[1:]:
            self._before = self.like.new_empty(self.sizes[source])
            receives.append((self._before, visitors[visitors.index(rank) - 1]))
        if of_own and step == self._behind(rank, of_own[-1]) + 1:
            self.found = self.like.new_empty(self.sizes[rank])
            receives.append((self.found, of_own[-1]))
        return self._due.pop(step, []), receives

    def pass_on(self, step: int) -> None:
        """Keeps the sum for the step in which the next rank computes the block, or for the next one to send it home."""
        rank = self.peers.rank
        source = (rank - step) % self.peers.count
        visitors = self._visitors(source)
        if rank not in visitors:
            return
        total = self.like.new_zeros(self.sizes[source]) if self._share is None else self._share
        if self._before is not None:
            total += self._before
        self._share = self._before = None
        later = visitors[visitors.index(rank) + 1 :]
        at, to = (self._behind(source, later[0]), later[0]) if later else (step + 1, source)
        self._due.setdefault(at, []).append((total, to))

    def _behind(self, source: int, rank: int) -> int:
        """The step in which a rank has the block of another in use."""
        return (rank - source) % self.peers.count

    def _visitors(self, source: int) -> list[int]:
        """The other ranks that compute the block of `source`, in the order in which it comes to them."""
        count = self.peers.count
        return [rank for d in range(1, count) if self.needed[rank := (source + d) % count][source]]
