"""nccl's rules, over gloo: messages of a pretended device as nccl would carry them, and an error where it could not.

What is checked, by torch's documentation of batch_isend_irecv and Work.wait and by ProcessGroupNCCL: a send or receive
is part of a batch, has no tag and some numbers; all ranks of a group have met in a collective before the first batch; a
rank's batches run one after the other, each until all its messages have arrived, so that an order in which two ranks
wait for each other ends in a time-out; messages of a pair come in order, in equal sizes and dtypes; a tensor stays
alive and unchanged until its work is waited for, once, with a time-out; what is received is there only then, NaN before
it; and the host reads no number of the device meanwhile, but in a backend of attention.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from pretended_device import DEVICE, LISTENERS, Pretended, begin, within

TAG = 7_000_000  # of the data; of the headers one more
BROKEN: list[str] = []  # rules broken in this process, also where no error could be raised
IN_FLIGHT: set[int] = set()  # works that nobody has waited for
REAL = {name: getattr(c10d, name) for name in ("isend", "irecv", "batch_isend_irecv", "all_reduce")}


class BrokenRule(AssertionError):
    """What nccl could not do."""


def broken(rule: str) -> BrokenRule:
    BROKEN.append(rule)
    return BrokenRule(rule)


class Progress(threading.Event):
    """Set when a job has ended, with the error in which it did."""

    error: Exception | None = None


class Communicator:
    """The stream of one group on one rank, which runs one job after the other."""

    def __init__(self) -> None:
        self.jobs: queue.Queue[tuple[Callable[[], None], Progress]] = queue.Queue()
        self.connected = False
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            job, progress = self.jobs.get()
            try:
                job()
            except Exception as error:
                progress.error = error
            progress.set()

    def launch(self, job: Callable[[], None], operations: list[Operation]) -> Work:
        work = Work(operations)
        self.jobs.put((job, work.progress))
        return work


class Operation:
    """One send or receive of a batch."""

    def __init__(self, op: Any) -> None:
        if not isinstance(op.tensor, Pretended):
            raise broken(f"a batch has a tensor on {op.tensor.device} beside one on {DEVICE}")
        if op.tag:
            raise broken(f"a message has the tag {op.tag}")
        if not op.tensor.numel():
            raise broken("a message has no numbers")
        if not op.tensor.is_contiguous():
            raise broken("a message is not contiguous")
        self.sends, self.peer, self.group = op.op is dist.isend, op.group_peer, op.group
        self.tensor, self.raw = weakref.ref(op.tensor), op.tensor.raw.detach()
        if not self.sends:
            self.raw.view(torch.uint8).fill_(255)  # NaN
        self.before, self.staged = self.raw.clone(), torch.empty_like(self.raw)

    def header(self) -> Tensor:
        return torch.tensor([self.raw.numel(), self.raw.element_size(), self.raw.dtype.is_floating_point])

    def exchange(self, t: Tensor, tag: int) -> Any:
        given = {"group": self.group, "tag": tag}
        if self.sends:
            return REAL["isend"](t, group_dst=self.peer, **given)
        return REAL["irecv"](t, group_src=self.peer, **given)

    def finish(self) -> None:
        """What there is to see once the work is waited for."""
        way = "sent" if self.sends else "received"
        if self.tensor() is None:
            raise broken(f"a tensor that is {way} was freed before its work was waited for")
        if not torch.equal(self.raw.view(torch.uint8), self.before.view(torch.uint8)):
            raise broken(f"a tensor that is {way} was written to before its work was waited for")
        if not self.sends:
            self.raw.copy_(self.staged)


class Work:
    """What a batch becomes: one for all of its messages."""

    def __init__(self, operations: list[Operation]) -> None:
        self.operations, self.progress = operations, Progress()
        IN_FLIGHT.add(id(self))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if not timeout:
            raise broken("a work is waited for without a time-out, and would not be waited for")
        if id(self) not in IN_FLIGHT:
            raise broken("a work is waited for twice")
        IN_FLIGHT.remove(id(self))
        if not self.progress.wait(timeout.total_seconds()):
            raise RuntimeError("nccl: timed out")
        if self.progress.error is not None:
            raise self.progress.error
        for operation in self.operations:
            operation.finish()
        return True

    def __del__(self) -> None:
        if id(self) in IN_FLIGHT:
            IN_FLIGHT.remove(id(self))
            broken("a work was never waited for")


COMMUNICATORS: dict[str, Communicator] = {}


def communicator(group: Any) -> Communicator:
    name = (dist.group.WORLD if group is None else group).group_name
    if name not in COMMUNICATORS:
        COMMUNICATORS[name] = Communicator()
    return COMMUNICATORS[name]


def batch(ops: list[Any]) -> list[Any]:
    if not any(isinstance(op.tensor, Pretended) for op in ops):
        return REAL["batch_isend_irecv"](ops)
    operations = [Operation(op) for op in ops]
    of_group = communicator(ops[0].group)
    if not of_group.connected:
        raise broken("the first messages of a group are some ranks' alone")

    def job() -> None:
        headers = [each.header() if each.sends else torch.empty_like(each.header()) for each in operations]
        for work in [each.exchange(t, TAG + 1) for each, t in zip(operations, headers, strict=True)]:
            work.wait()
        for each, header in zip(operations, headers, strict=True):
            if not torch.equal(header, each.header()):
                raise broken(f"a message of {header.tolist()} arrives where one of {each.header().tolist()} is due")
        works = [each.exchange(each.raw if each.sends else each.staged, TAG) for each in operations]
        for work in works:
            work.wait()

    return [of_group.launch(job, operations)]


def alone(name: str) -> Callable[..., Any]:
    """isend and irecv, which a device has in batches alone."""

    def post(t: Tensor, *args: Any, **kwargs: Any) -> Any:
        if isinstance(t, Pretended):
            raise broken(f"{name} outside of a batch")
        return REAL[name](t, *args, **kwargs)

    return post


def all_reduce(t: Tensor, group: Any = None) -> None:
    """A collective of the device, behind the batches that were launched before it."""
    if not isinstance(t, Pretended):
        return REAL["all_reduce"](t, group=group)
    of_group = communicator(group)
    of_group.launch(lambda: REAL["all_reduce"](t.raw, group=group), []).wait(timedelta(seconds=60))
    of_group.connected = True


def heard(name: str) -> None:
    if IN_FLIGHT and not within("backends", "runtime", "api.py"):
        raise broken(f"{name} reads a number of the device while messages are on their way")


@contextmanager
def nccl() -> Iterator[list[str]]:
    """Inside, the pretended device has nccl; yields the rules that were broken."""
    begin()
    BROKEN.clear()
    COMMUNICATORS.clear()
    isend, irecv = alone("isend"), alone("irecv")
    fakes: dict[str, Any] = {
        "isend": isend,
        "irecv": irecv,
        "batch_isend_irecv": batch,
        "all_reduce": all_reduce,
        "get_backend_config": lambda group=None: f"cpu:gloo,{DEVICE}:nccl",
    }
    places = [(module, name) for module in (dist, c10d) for name in fakes]
    before = [getattr(*place) for place in places]
    LISTENERS.append(heard)
    for module, name in places:
        setattr(module, name, fakes[name])
    try:
        yield BROKEN
    finally:
        for (module, name), real in zip(places, before, strict=True):
            setattr(module, name, real)
        LISTENERS.remove(heard)
        IN_FLIGHT.clear()
