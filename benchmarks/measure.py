"""Processes, turns, medians: every candidate alone in a process that is stopped while the others have their turns."""

from __future__ import annotations

import contextlib
import math
import statistics
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.architectures import Exact
from benchmarks.candidate_process import Lost, Worker
from benchmarks.cases import Case
from benchmarks.inputs import draw
from benchmarks.models import Greedy, Vectors
from benchmarks.patched import Outputs
from benchmarks.truth import Truth, exact

TURNS = 7  # at most, of each way; of several processes each has its share, but for candidates that are CLOSE
CLOSE = 1.05  # times as long as the other: candidates of which chance could say which one is faster
TRIALS = 3  # before the turns, of each of several ways
NEAR = 1.25  # ways that take at most so many times as long as the fastest, in a first trial, take turns with it


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
    """Checks all results, finds the fastest ways of each candidate, then lets them take turns.

    In processes that are started anew for each share of the turns where the case asks for several.
    """
    taking = {name: worker for name, worker in workers.items() if case.is_for(name)}
    if case.lacking:
        why = f"not installed ({', '.join(case.lacking)})"
        return Row(case, math.nan, {name: Entry(why=why) for name in taking})
    entries: dict[str, Entry] = {}
    with tempfile.TemporaryDirectory() as folder:
        _prepare(case, taking, folder)
        truth = exact(case, draw(case))
        for name, worker in taking.items():
            entries[name] = _checked(_heard(worker), truth)
        row = Row(case, truth.limit, entries)
        if not row.refused:
            contenders = _first_times(row, taking, seconds)
            _take_turns(row, taking, contenders, seconds)
            for _ in range(case.processes - 1):
                _begin_anew(row, taking, folder)
                _take_turns(row, taking, contenders, seconds)
            _ask_for_parts(row, taking)
    return row


def _prepare(case: Case, workers: dict[str, Worker], folder: str) -> None:
    """Asks all candidates to make a case ready, and to write their results into a folder of their own."""
    for name, worker in workers.items():
        own = Path(folder) / name
        own.mkdir(exist_ok=True)
        _tell(worker, "prepare", case=asdict(case), folder=str(own))


def _begin_anew(row: Row, workers: dict[str, Worker], folder: str) -> None:
    """Another process in the place of each, made ready; what one computes was checked in the first."""
    for worker in workers.values():
        worker.end()
    _prepare(row.case, workers, folder)
    for name, worker in workers.items():
        answer, entry = _heard(worker), row.entries[name]
        if "answer" not in answer and entry.why is None:
            entry.why = answer.get("unable") or answer["failed"]
            entry.ways.clear()


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


def _first_times(row: Row, workers: dict[str, Worker], seconds: float) -> list[tuple[str, str]]:
    """Tries each way of each candidate; the candidates and ways that shall take turns."""
    contenders: list[tuple[str, str]] = []
    for name, worker in workers.items():
        entry = row.entries[name]
        for way, timed in list(entry.ways.items()):
            timed.first = _turn(entry, worker, way, 1)
            if timed.first < seconds / 10:
                calls = max(3, int(seconds / 20 / timed.first))
                trials = TRIALS if len(entry.ways) > 1 else 1
                timed.first = statistics.median(_turn(entry, worker, way, calls) for _ in range(trials))
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
    return contenders


def _take_turns(row: Row, workers: dict[str, Worker], contenders: list[tuple[str, str]], seconds: float) -> None:
    for turn in range(TURNS):
        close = _close(row)
        if turn >= math.ceil(TURNS / row.case.processes) and not close:
            return
        for name, way in contenders:
            entry = row.entries[name]
            # what takes long has fewer turns
            if way in entry.ways and turn < max(TRIALS if close else 1, round(2 * seconds / entry.ways[way].first)):
                calls = max(1, round(seconds / TURNS / entry.ways[way].first))
                entry.ways[way].turns.append(_turn(entry, workers[name], way, calls))


def _close(row: Row) -> bool:
    """Whether the fastest peer takes as long as regard, to a few hundredths, by the turns so far."""
    ours = row.entries["regard"].seconds if "regard" in row.entries else math.nan
    peer = min((e.seconds for name, e in row.entries.items() if name != "regard" and e.ways), default=math.nan)
    return peer < CLOSE * ours and ours < CLOSE * peer


def _ask_for_parts(row: Row, workers: dict[str, Worker]) -> None:
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
