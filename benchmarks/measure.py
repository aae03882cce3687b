"""Processes, turns, medians: every candidate alone in a process that is stopped while the others have their turns."""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.architectures import Exact
from benchmarks.candidates import CANDIDATES
from benchmarks.cases import Case
from benchmarks.inputs import draw
from benchmarks.models import Greedy, Vectors
from benchmarks.patched import Outputs
from benchmarks.truth import Truth, exact

ROOT = Path(__file__).resolve().parents[1]
TURNS = 7
NEAR = 1.25  # ways that take at most so many times as long as the fastest, in a first trial, take turns with it
PATIENCE = 180.0  # seconds that an answer may take


# The finder of an editable install comes before the path, and would import its own checkout whatever the path says.
WITHOUT_EDITABLE = """
import runpy, sys
names = [getattr(finder, "__module__", type(finder).__module__) for finder in sys.meta_path]
sys.meta_path[:] = [finder for finder, name in zip(sys.meta_path, names) if "editable" not in name]
runpy.run_module("benchmarks.worker", run_name="__main__", alter_sys=True)
"""


class Lost(Exception):
    """A process that ended, or did not answer in time."""


class Worker:
    """A process that runs one candidate on command. Between its answers it is stopped: not even idle threads spin."""

    def __init__(self, name: str, threads: int, isa: str | None = None, source: Path | None = None) -> None:
        """source: the folder where it looks for packages first. Raises Lost if it does not start."""
        self.name, self.threads, self.isa, self.source = name, threads, isa, source
        self.process: subprocess.Popen[bytes] | None = None
        self.version = self.ask("start")["answer"]

    def _started(self) -> subprocess.Popen[bytes]:
        if self.process is None:
            counts = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NPROC"), str(self.threads))
            path = os.pathsep.join(str(p) for p in (ROOT, self.source, os.environ.get("PYTHONPATH")) if p)
            environment = {**os.environ, **counts, "PYTHONPATH": path, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
            if self.isa is not None:
                environment["REGARD_ISA"] = self.isa
            begin = ["-m", "benchmarks.worker"] if self.source is None else ["-c", WITHOUT_EDITABLE]
            command = [sys.executable, *begin, self.name, str(self.threads)]
            self.log = tempfile.TemporaryFile()  # noqa: SIM115 - what it says besides its answers
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log}
            self.process = subprocess.Popen(command, env=environment, bufsize=0, **pipes)
            atexit.register(self.end)
        return self.process

    def say(self, action: str, **question: Any) -> None:
        process = self._started()
        assert process.stdin is not None
        process.send_signal(signal.SIGCONT)
        process.stdin.write(json.dumps({"do": action, **question}).encode() + b"\n")

    def hear(self) -> dict[str, Any]:
        """The answer; the process rests until it is asked again. Raises Lost, and begins anew at the next question."""
        process, line = self._started(), b""
        assert process.stdout is not None
        deadline = time.monotonic() + PATIENCE
        while not line.endswith(b"\n"):
            ready = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]
            part = os.read(process.stdout.fileno(), 1 << 16) if ready else b""
            if not part:
                why = f"its process ended: {self._last_words()}" if ready else f"no answer in {PATIENCE:.0f} s"
                self.end()
                raise Lost(why)
            line += part
        process.send_signal(signal.SIGSTOP)
        return json.loads(line)

    def ask(self, action: str, **question: Any) -> dict[str, Any]:
        self.say(action, **question)
        return self.hear()

    def _last_words(self) -> str:
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else "it said nothing"

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for file in (self.process.stdin, self.process.stdout, self.log):
                assert file is not None
                file.close()
            self.process = None


@dataclass
class Timed:
    """One way of a candidate: its error, seconds of a call at first and in each turn, bytes, seconds of its parts."""

    error: float
    first: float = 0.0
    turns: list[float] = field(default_factory=list)
    memory: int | None = None
    parts: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """The median of its turns; where it lost before them, what it took at first."""
        return statistics.median(self.turns) if self.turns else self.first


@dataclass
class Entry:
    """What became of a candidate in a case: why it has no times, or its ways, the plain one first."""

    why: str | None = None
    wrong: float | None = None
    ways: dict[str, Timed] = field(default_factory=dict)

    @property
    def best(self) -> str | None:
        turned = [way for way, timed in self.ways.items() if timed.turns]
        return min(turned or self.ways, key=lambda way: self.ways[way].seconds, default=None)

    @property
    def seconds(self) -> float:
        """NaN if it was not timed."""
        return self.ways[self.best].seconds if self.best is not None else float("nan")

    @property
    def plain(self) -> float:
        """Seconds of the way that comes first."""
        return next(iter(self.ways.values())).seconds if self.ways else float("nan")

    @property
    def error(self) -> float:
        return self.ways[self.best].error if self.best is not None else float("nan")


@dataclass
class Row:
    """A case and what became of each candidate."""

    case: Case
    limit: float
    entries: dict[str, Entry]

    @property
    def refused(self) -> bool:
        """regard was wrong, or could not: nothing was timed."""
        return "regard" in self.entries and not self.entries["regard"].ways and not self.case.lacking


def measure(case: Case, workers: dict[str, Worker], seconds: float) -> Row:
    """Checks all results, finds the fastest ways of each candidate, then lets them take turns."""
    taking = {name: worker for name, worker in workers.items() if case.is_for(name)}
    if case.lacking:
        why = f"not installed ({', '.join(case.lacking)})"
        return Row(case, math.nan, {name: Entry(why=why) for name in taking})
    entries: dict[str, Entry] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, worker in taking.items():
            (Path(folder) / name).mkdir()
            _tell(worker, "prepare", case=asdict(case), folder=f"{folder}/{name}")
        truth = exact(case, draw(case))
        for name, worker in taking.items():
            entries[name] = _checked(_heard(worker), truth)
    row = Row(case, truth.limit, entries)
    if not row.refused:
        _time(row, taking, seconds)
    return row


def _tell(worker: Worker, action: str, **question: Any) -> None:
    with contextlib.suppress(OSError):  # it ended since it was last heard; hearing it says so
        worker.say(action, **question)


def _heard(worker: Worker) -> dict[str, Any]:
    try:
        return worker.hear()
    except Lost as why:
        return {"failed": str(why)}


def _checked(answer: dict[str, Any], truth: Truth | Greedy | Vectors | Outputs | Exact) -> Entry:
    if "answer" not in answer:
        return Entry(why=answer.get("unable") or answer["failed"])
    errors = {way: truth.error(torch.load(file)) for way, file in answer["answer"].items()}
    right = {way: Timed(error) for way, error in errors.items() if error <= truth.limit}
    wrong = [error for way, error in errors.items() if way not in right]
    return Entry(ways=right, wrong=max(wrong, default=None))


def _time(row: Row, workers: dict[str, Worker], seconds: float) -> None:
    contenders: list[tuple[str, str]] = []
    for name, worker in workers.items():
        entry = row.entries[name]
        for way, timed in list(entry.ways.items()):
            timed.first = _turn(entry, worker, way, 1)
            if timed.first < seconds / 10:
                timed.first = _turn(entry, worker, way, max(3, int(seconds / 20 / timed.first)))
            if row.case.passes != "forward" or row.case.what == "unsorted":
                timed.memory = _asked(entry, worker, "memory", way=way)
        if entry.best is not None:
            plain, limit = next(iter(entry.ways)), NEAR * entry.seconds
            # a plain call that is slow, and not what counts, needs no turns
            contenders += [
                (name, way)
                for way, timed in entry.ways.items()
                if timed.first <= limit or (way == plain and timed.first < seconds)
            ]
    for turn in range(TURNS):
        for name, way in contenders:
            entry = row.entries[name]
            # what takes long has fewer turns
            if way in entry.ways and turn < max(1, round(2 * seconds / entry.ways[way].first)):
                calls = max(1, round(seconds / TURNS / entry.ways[way].first))
                entry.ways[way].turns.append(_turn(entry, workers[name], way, calls))

    for name, entry in row.entries.items():
        if entry.best is not None:
            entry.ways[entry.best].parts = _asked(entry, workers[name], "parts", way=entry.best) or {}


def _turn(entry: Entry, worker: Worker, way: str, calls: int) -> float:
    """Seconds of a call; NaN where the candidate was lost."""
    seconds = _asked(entry, worker, "time", way=way, calls=calls)
    return float("nan") if seconds is None else seconds


def _asked(entry: Entry, worker: Worker, action: str, **question: Any) -> Any:
    """An answer about the case at hand; None if there is none, and the entry says why where the candidate was lost."""
    if entry.why is not None:
        return None
    try:
        answer = worker.ask(action, **question)
    except (Lost, OSError) as why:
        answer = {"failed": str(why)}
    if "failed" in answer:
        entry.why = answer["failed"]
        entry.ways.clear()
    return answer.get("answer")


def begin(
    names: tuple[str, ...], threads: int, isa: str | None = None, other: Path | None = None
) -> tuple[dict[str, Worker], dict[str, str]]:
    """A process for each candidate that is installed, and why the others have none.

    other: the source folder of the checkout of regard that "other" measures.
    """
    workers, missing = dict[str, Worker](), dict[str, str]()
    for name in names:
        if CANDIDATES[name].missing:
            missing[name] = f"not installed ({', '.join(CANDIDATES[name].missing)})"
            continue
        try:
            workers[name] = Worker(name, threads, isa, other if name == "other" else None)
        except Lost as why:
            missing[name] = f"does not start ({why})"
    return workers, missing
