"""What the ranks of a group compare of a call, since all of them must have the same."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from zlib import crc32

import torch
from torch import Tensor

from regard.core.shapes import listed
from regard.parallel.peers import PeerError, Peers

HASHED = 1 << 20  # numbers of a tensor whose content is compared


@dataclass(frozen=True, eq=False)
class PartOfTokens:
    """A tensor split by tokens along `axis`; except for the number of tokens, it must be alike on all ranks."""

    t: Tensor
    axis: int = -2

    def shown(self) -> str:
        return f"{self.t.dtype} {listed(self.t.shape)}"

    def compared(self) -> str:
        """The same without the number of tokens."""
        sizes = list(map(str, self.t.shape))
        sizes[self.axis] = "tokens"
        return f"{self.t.dtype} {sizes}"


CallDescription = dict[str, str | PartOfTokens]


def agree(peers: Peers, description: CallDescription, *numbers: int) -> list[list[int]]:
    """These numbers of every rank, by rank. Raises PeerError on every rank where the descriptions differ.

    A description begins with the function that was called, which decides the rest of it.
    """
    compared = {name: x if isinstance(x, str) else x.compared() for name, x in description.items()}
    digest = int.from_bytes(hashlib.blake2b(repr(sorted(compared.items())).encode(), digest_size=7).digest(), "little")
    found = peers.tell("the beginning of a call", digest, *numbers)
    if any(other[0] != digest for other in found):
        shown = {name: x if isinstance(x, str) else x.shown() for name, x in description.items()}
        every = [json.loads(text) for text in _texts(peers, json.dumps([compared, shown]))]
        first, shown_first = every[0]
        unlike = (
            (rank, name) for rank, (other, _) in enumerate(every) for name in first if other.get(name) != first[name]
        )
        rank, name = next(unlike)
        there, here = every[rank][1][name], shown_first[name]
        is_tensor = not isinstance(description.get(name), str)
        expected = "; expected what differs in the number of tokens alone" if is_tensor else ""
        message = f"the ranks make unlike calls: {name} is {there} on rank {rank}, {here} on rank 0{expected}."
        raise PeerError(message, known_to=peers.name)
    return [other[1 : 1 + len(numbers)] for other in found]


def _texts(peers: Peers, own: str) -> list[str]:
    """A text of every rank, by rank."""
    written = torch.frombuffer(bytearray(own.encode()), dtype=torch.uint8)
    sizes = [size for (size,) in peers.gather([len(written)])]
    return [bytes(t.tolist()).decode() for t in peers.exchange([written] * peers.count, sizes)]


def described(value: object, tensors: Sequence[Tensor] = ()) -> str:
    """A value as ranks compare it: its text without addresses and devices, and the content of its tensors."""
    return " ".join([re.sub(r" at 0x[0-9a-f]+|,\s*device='[^']*'", "", repr(value)), *map(_checksum, tensors)])


def _checksum(t: Tensor) -> str:
    """dtype, shape and, unless it is large, content."""
    if t.numel() > HASHED or t.is_meta:
        return f"{t.dtype}{listed(t.shape)}"
    content = t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{t.dtype}{listed(t.shape)}#{crc32(content.numpy().tobytes()):08x}"
