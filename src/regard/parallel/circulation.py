"""Blocks that travel around the ranks of a group, and their gradients, which travel home."""

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
    gradients: GradientsHome | None = None,
) -> Generator[tuple[int, Tensor | None], None, None]:
    """The blocks of all ranks, one after the other around the ring: (rank whose block it is, the block), own first.

    own, tensors of one dtype with sizes[rank] numbers in all, are this rank's block, a vector. needed[r][s] says
    whether rank r needs the block of s: one that neither this rank nor one behind it needs does not come here, and None
    stands for it. The next block is on its way while this one is in use, so that three are held at most. Behind each
    block travels a number, which is 1 where a rank on its way has given up.

    A rank that gives up (`close()`, within `Peers.together`) still passes on blocks and gradients, and tells those whom
    its blocks reach, which then raise Stopped.
    """
    count, rank = peers.count, peers.rank
    block: Tensor | None = torch.cat([*(t.reshape(-1) for t in own), own[0].new_zeros(1)])
    peers.tell("the first block of a ring")
    given_up = closed = False

    def goes_on(source: int, step: int) -> bool:
        """Whether a block leaves the rank that is `step` places behind its own."""
        return any(needed[(source + d) % count][source] for d in range(step + 1, count))

    for step in range(count):
        source, coming = (rank - step) % count, (rank - step - 1) % count
        messages: list[Message] = []
        arriving: Tensor | None = None
        if gradients is not None:
            gradients.expect(source)
        if step + 1 < count and goes_on(coming, step):
            arriving = own[0].new_empty(sizes[coming] + 1)
            messages.append(peers.receive(arriving, peers.after(-1)))
        if block is not None and goes_on(source, step):
            if given_up:
                block[-1] = 1
            messages.append(peers.send(block, peers.after(1)))
        if not given_up:
            try:
                yield source, None if block is None else block[:-1]
            except GeneratorExit:
                given_up = closed = True
        if gradients is not None:
            gradients.pass_on(source)
        for message in messages:
            message.wait()
        block = arriving
        given_up = given_up or (block is not None and bool(block[-1] != 0))
    if gradients is not None:
        gradients.come_home()
    if given_up and not closed:
        raise Stopped


@dataclass(eq=False)
class GradientsHome:
    """Each block's gradient, on its way from each rank that computes the block to the next, and from the last home.

    needed as of `circulate`, sizes: how many numbers the gradient of each rank's block has, of like's dtype. Where
    nothing is added, by a rank that has given up, zeros are. Ranks send to each other in the order in which they
    receive.

    found: what other ranks have added to the gradient of this rank's block; None without such ranks.
    """

    peers: Peers
    needed: Sequence[Sequence[bool]]
    sizes: Sequence[int]
    like: Tensor
    found: Tensor | None = None
    _share: Tensor | None = None
    _before: Message | None = None
    _sent: list[Message] = field(default_factory=list[Message])

    def add(self, share: Tensor) -> None:
        """What this rank adds to the gradient of the block in use, another's. It is written to."""
        self._share = share

    def expect(self, source: int) -> None:
        """Posts the receive of what those before this rank have added, before it computes."""
        visitors = self._visitors(source)
        if self.peers.rank in visitors[1:]:
            before = visitors[visitors.index(self.peers.rank) - 1]
            self._before = self.peers.receive(self.like.new_empty(self.sizes[source]), before)

    def pass_on(self, source: int) -> None:
        """Sends the sum on, to the next rank that computes the block or to its own."""
        visitors = self._visitors(source)
        if self.peers.rank not in visitors:
            return
        total = self.like.new_zeros(self.sizes[source]) if self._share is None else self._share
        if self._before is not None:
            total += self._before.wait()
        self._share = self._before = None
        self._sent = [message for message in self._sent if not message.done()]
        to = [*visitors, source][visitors.index(self.peers.rank) + 1]
        self._sent.append(self.peers.send(total, to))

    def come_home(self) -> None:
        """Waits for the gradient of this rank's own block, and until all that it sent has arrived."""
        rank = self.peers.rank
        visitors, messages = self._visitors(rank), self._sent
        if visitors:
            self.found = self.like.new_empty(self.sizes[rank])
            messages = [self.peers.receive(self.found, visitors[-1]), *messages]
        for message in messages:
            message.wait()

    def _visitors(self, source: int) -> list[int]:
        """The other ranks that compute the block of `source`, in the order in which it comes to them."""
        count = self.peers.count
        return [rank for d in range(1, count) if self.needed[rank := (source + d) % count][source]]
