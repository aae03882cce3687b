"""Processes of one group, started once, that run functions of the tests: `Group(4).run(function, argument)`."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

WAIT = 120  # seconds for an answer of a process


class Group:
    """`count` processes, each a rank of one group, and subgroups of the first 1, 2, ... of them.

    They take seconds to load torch and regard, for which the first call waits, not this one. With nccl for tensors on
    CUDA, all ranks share the first GPU: nccl refuses that on one host, so each names another host (NCCL_HOSTID), and
    they exchange messages over sockets.
    """

    def __init__(self, count: int, backends: str = "gloo") -> None:
        context = mp.get_context("spawn")
        self.folder = tempfile.TemporaryDirectory()
        store = Path(self.folder.name) / "store"
        self.pipes: list[Connection] = []
        self.processes: list[SpawnProcess] = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, count, backends, str(store), theirs), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)
        self.ready = False

    def run(self, function: Callable[..., Any], *given: Any, ranks: int | None = None) -> list[Any]:
        """What function(group, *given) returns on each of the first `ranks` ranks; its error, where one raises."""
        self.start(function, *given, ranks=ranks)
        answers = [self.answer(rank) for rank in range(len(self.pipes) if ranks is None else ranks)]
        for rank, (ok, answer) in enumerate(answers):
            if not ok:
                raise AssertionError(f"rank {rank}: {answer}")
        return [answer for _, answer in answers]

    def start(self, function: Callable[..., Any], *given: Any, ranks: int | None = None) -> None:
        if not self.ready:
            self.ready = all(self.answer(rank)[0] for rank in range(len(self.pipes)))
        count = len(self.pipes) if ranks is None else ranks
        for pipe in self.pipes[:count]:
            pipe.send((function, given, count))

    def answer(self, rank: int, seconds: float = WAIT) -> tuple[bool, Any]:
        """Whether the function returned on a rank, and what it returned or how it failed."""
        assert self.pipes[rank].poll(seconds), f"rank {rank} does not answer"
        return self.pipes[rank].recv()

    def signal(self, rank: int, what: signal.Signals) -> None:
        pid = self.processes[rank].pid
        assert pid is not None
        os.kill(pid, what)

    def close(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()
        self.folder.cleanup()


def _serve(rank: int, count: int, backends: str, store: str, pipe: Connection) -> None:
    import pytest  # noqa: F401
    import torch
    import torch.distributed as dist

    import regard.parallel  # noqa: F401
    from seeding import seed_torch

    torch.set_num_threads(1)
    if "nccl" in backends:
        os.environ |= {"NCCL_HOSTID": f"host of rank {rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}
    dist.init_process_group(
        backends, store=dist.FileStore(store, count), rank=rank, world_size=count, timeout=timedelta(seconds=WAIT)
    )
    groups = [dist.new_group(list(range(n + 1))) for n in range(count)]
    pipe.send((True, "ready"))
    while True:
        try:
            function, given, ranks = pipe.recv()
        except EOFError:
            return
        seed_torch(0)
        try:
            pipe.send((True, function(groups[ranks - 1], *given)))
        except Exception:
            pipe.send((False, traceback.format_exc()))
