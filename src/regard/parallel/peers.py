"""Peers: the ranks of a group, what they must agree on, and messages: an error names the rank that is late."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from struct import Struct
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from regard.core.errors import Unsupported

TIMEOUT = 300.0  # seconds without a message from a peer
TAG = 0x52470000  # of messages, which no other messages of the group may have; they arrive in the order of sending
NUMBERS = 6  # how many integers ranks tell each other at a step
RECORD = Struct(f"<q160s{NUMBERS}q")  # what they tell: 1 + the process that raised an error or 0, the error or the step
Message = tuple[Tensor, int]  # a tensor, and the rank of the group that it goes to or comes from
Launch = tuple[Sequence[Message], Any]  # messages that were launched together, and the work or works that they became
Raised = tuple[int, str]  # the number of a process among all, and the error that it raised


class PeerError(RuntimeError):
    """A rank of the group raised an error, died, stopped, was too late, or makes another call; the message names it.

    raised    the rank and its error; None: a rank is gone, or calls differ
    known_to  the name of the group whose ranks all know of the error, or are gone
    """

    def __init__(self, message: str, raised: Raised | None = None, known_to: str = "") -> None:
        super().__init__(message)
        self.raised, self.known_to = raised, known_to


class Stopped(Exception):
    """Another rank has given up; it says why where this one comes to the end of its step."""


@dataclass(frozen=True, eq=False)
class Peers:
    """The ranks of a group, as this one sees them. timeout: seconds that it waits for a message.

    group: a process group, one dimension of a DeviceMesh, or None for all processes.
    """

    group: Any
    timeout: float = TIMEOUT

    @staticmethod
    def of(group: Any, timeout: float | None) -> Peers:
        if not (dist.is_available() and dist.is_initialized()):
            raise ValueError(
                "there is no process group: call torch.distributed.init_process_group('gloo') first, in processes that "
                "torchrun starts, say."
            )
        if hasattr(group, "get_group"):
            group = group.get_group()
        if dist.get_rank(group) < 0:
            raise ValueError(f"group has no process {dist.get_rank()}; expected a call by its ranks alone.")
        backends = dist.get_backend_config(group)
        if "cpu" not in _by_device(backends):
            raise ValueError(
                f"group has the backends {backends}, none for tensors on the CPU; expected gloo for these, by which "
                "ranks agree on a call: init_process_group('gloo'), or 'cpu:gloo,cuda:nccl' for tensors on GPUs."
            )
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout is {timeout}; expected seconds, more than 0.")
        return Peers(group, TIMEOUT if timeout is None else timeout)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

    @property
    def count(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def name(self) -> str:
        """That of the group, which no other one of this process has."""
        group = dist.group.WORLD if self.group is None else self.group
        assert group is not None
        return group.group_name

    def after(self, steps: int) -> int:
        """The rank that many places to the right, around the ring."""
        return (self.rank + steps) % self.count

    def check_device(self, name: str, t: Tensor) -> None:
        """Raises Unsupported for a tensor on a device whose tensors the ranks cannot exchange."""
        backends, device = dist.get_backend_config(self.group), t.device
        if device.type == "cpu" or _by_device(backends).get(device.type, "gloo") != "gloo":
            return
        raise Unsupported(
            f"{name} is on {device}: ranks exchange tensors over the group's backend for it, and of {backends} none "
            "can; gloo sends tensors on the CPU alone. For GPUs call init_process_group('cpu:gloo,cuda:nccl'), or pass "
            f"{name}.cpu()."
        )

    def connect(self, device: torch.device) -> None:
        """Connects all ranks for tensors of a device, which nccl does at the first messages and with all ranks at once.

        Every rank of the group must call it before the first `post` of tensors there.
        """
        if device.type != "cpu":
            dist.all_reduce(torch.zeros(1, device=device, dtype=torch.float32), group=self.group)

    def post(self, sends: Sequence[Message], receives: Sequence[Message]) -> Messages:
        """Sends tensors, and fills others, contiguous ones, when it is waited for. Those without numbers are left out.

        Tensors that a rank posts for another one must be posted by that one in the same order, and in calls of `post`
        that correspond: a device launches those of one call together, and the next ones when these have arrived. On the
        CPU a byte follows the last tensor for each rank, see `Messages`.
        """
        sends = [(t.contiguous(), rank) for t, rank in sends]
        launched: list[Launch] = []
        batch: list[Message] = []
        operations: list[dist.P2POp] = []
        for post, way, messages in ((dist.isend, "group_dst", sends), (dist.irecv, "group_src", receives)):
            full = [(t, rank) for t, rank in messages if t.numel()]
            here = [(t, rank) for t, rank in full if t.device.type == "cpu"]
            here += [(torch.zeros(1, dtype=torch.uint8, device="cpu"), rank) for rank in {rank: 0 for _, rank in here}]
            for t, rank in here:  # one by one, so that whoever is late has a name
                given: dict[str, Any] = {way: rank, "group": self.group, "tag": TAG}
                launched.append(self._launched([(t, rank)], partial(post, t, **given)))
            for t, rank in full:
                if t.device.type != "cpu":
                    batch.append((t, rank))
                    operations.append(dist.P2POp(post, t, group=self.group, group_peer=rank))
        if batch:
            launched.insert(0, self._launched(batch, partial(dist.batch_isend_irecv, operations)))
        return Messages(self, launched)

    def _launched(self, messages: Sequence[Message], launch: Callable[[], Any]) -> Launch:
        try:
            return messages, launch()
        except RuntimeError as error:
            raise self.lost(messages, 0.0) from error

    def lost(self, messages: Sequence[Message], waited: float) -> PeerError:
        ranks = " or ".join(map(str, sorted({rank for _, rank in messages})))
        return PeerError(
            f"rank {self.rank} of {self.count} lost rank {ranks} after {waited:.1f} s (timeout {self.timeout:g} s): "
            "that rank has ended, has stopped, makes another call, or has lost another one. The group cannot be used "
            "any more; end this process, and see what that rank has said.",
            known_to=self.name,
        )

    @contextmanager
    def telling(self) -> Generator[None]:
        """Reports an error that is raised inside the block to the other ranks: their next `tell` raises PeerError.

        Even with an error, the block must first send and receive all that the other ranks wait for before that `tell`.
        """
        try:
            with suppress(Stopped):
                yield
                return
            self.tell("another rank's error")  # which raises PeerError
        except BaseException as error:
            if getattr(error, "known_to", "") != self.name:
                with suppress(PeerError):  # its own error is what this rank has to say
                    self.tell("", raised=_blamed(error))
            raise

    @contextmanager
    def together(self, step: str) -> Generator[None]:
        """What succeeds on all ranks or raises on all: where one raises an error, the others raise PeerError."""
        with self.telling():
            yield
            self.tell(step)

    def tell(self, step: str, *numbers: int, raised: Raised | None = None) -> list[list[int]]:
        """Tells every rank of the step that this one has come to, or of an error, with numbers; those of all, by rank.

        Raises PeerError, on every rank, where one reports an error or has come to another step.
        """
        process, text = (-1, step) if raised is None else raised
        record = RECORD.pack(process + 1, text.encode(errors="replace"), *numbers, *[0] * (NUMBERS - len(numbers)))
        found = self.exchange([torch.frombuffer(bytearray(record), dtype=torch.uint8)] * self.count)
        records = [RECORD.unpack(t.numpy().tobytes()) for t in found]
        texts = [text.rstrip(b"\0").decode(errors="ignore") for _, text, *_ in records]
        for (process, *_), text in zip(records, texts, strict=True):
            if process:
                raise PeerError(
                    f"rank {process - 1} of {dist.get_world_size()} processes raised {text}. Every rank of this call "
                    "has ended it, and the group can be used again.",
                    (process - 1, text),
                    self.name,
                )
        for rank, text in enumerate(texts):
            if text != texts[0]:
                message = f"the ranks make unlike calls: rank {rank} has come to {text}, rank 0 to {texts[0]}."
                raise PeerError(message, known_to=self.name)
        return [numbers for _, _, *numbers in records]

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """These integers of every rank, by rank."""
        own = torch.tensor(numbers, dtype=torch.int64, device="cpu")
        return [t.tolist() for t in self.exchange([own] * self.count)]

    def exchange(self, own: Sequence[Tensor], sizes: Sequence[int] | None = None) -> list[Tensor]:
        """own[r] to rank r for a vector of sizes[r] numbers of its, by rank; sizes None: as many as it gets.

        There is one message to and from each rank, except empty ones, so that an error can name the rank that is late.
        """
        sizes = [t.numel() for t in own] if sizes is None else sizes
        found = [t.new_empty(size) for t, size in zip(own, sizes, strict=True)]
        found[self.rank] = own[self.rank]
        others = [self.after(steps) for steps in range(1, self.count)]
        self.post([(own[rank], rank) for rank in others], [(found[rank], rank) for rank in others]).wait()
        return found


@dataclass(frozen=True, eq=False)
class Messages:
    """Tensors on their way to and from peers, kept until they are waited for: once, as gloo would block for ever.

    The last that was launched is waited for first: on the CPU, the byte behind all that a rank sends. Where that rank
    dies in the middle of a tensor, gloo ends the wait for the byte at once. The wait for the tensor would last until
    its time-out, since its receive is no longer among those that are pending when the connection breaks.

    Given a time-out, nccl's wait returns when the messages have arrived, like gloo's; without one it would at once, and
    no error could name the rank that is late.
    """

    peers: Peers
    launched: Sequence[Launch]

    def wait(self) -> None:
        for messages, works in reversed(self.launched):
            start = time.monotonic()
            try:
                for work in works if isinstance(works, list) else [works]:
                    work.wait(timedelta(seconds=self.peers.timeout))
            except RuntimeError as error:
                raise self.peers.lost(messages, time.monotonic() - start) from error


def _by_device(backends: str) -> dict[str, str]:
    """The backend for each type of device: of 'cpu:gloo,cuda:nccl', say."""
    return {device: backend for device, _, backend in (each.partition(":") for each in backends.split(","))}


def _blamed(error: BaseException) -> Raised:
    """Who raised the error from which this one came, if it is known, else this process."""
    if isinstance(error, PeerError) and error.raised is not None:
        return error.raised
    return dist.get_rank(), f"{type(error).__name__}: {error}".partition("\n")[0]
