"""The process of one candidate: answers questions, a line of JSON each, and computes nothing in between."""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any

import torch

from benchmarks.candidates import CANDIDATES, Module, Unable, Way
from benchmarks.cases import Case
from benchmarks.inputs import draw
from benchmarks.memory import Memory


class Server:
    """Holds one candidate and the ways of the case at hand."""

    def __init__(self, name: str, threads: int) -> None:
        # torch draws the inputs for everybody; only a candidate that is torch gives it threads
        torch.set_num_threads(1)
        self.module: Module = CANDIDATES[name].module()
        self.version = self.module.start(threads)
        self.threads = torch.get_num_threads()
        self.ways: dict[str, Way] = {}

    def start(self) -> str:
        return self.version

    def prepare(self, case: Case, folder: str) -> dict[str, str]:
        """Makes a case ready, runs each way once, writes what came out: way -> file."""
        self.ways.clear()
        found: dict[str, str] = {}
        for number, way in enumerate(self.module.ways(case, draw(case))):
            with torch.no_grad():
                way.before()
                results = [t.detach().clone() for t in way.results(way.run())]
            found[way.name] = f"{folder}/{number}.pt"
            torch.save(results, found[way.name])
            self.ways[way.name] = way
        return found

    def time(self, way: str, calls: int) -> float:
        """Seconds of a call; before many, one untimed run brings caches and threads back."""
        asked, seconds = self.ways[way], 0.0
        runs = max(1, round(calls / asked.calls))
        with torch.no_grad():
            if runs > 1:
                asked.before()
                asked.run()
            for _ in range(runs):
                asked.before()
                start = time.perf_counter()
                asked.run()
                seconds += time.perf_counter() - start
        return seconds / (runs * asked.calls)

    def parts(self, way: str) -> dict[str, float]:
        """Seconds of what a call is made of, by name."""
        with torch.no_grad():
            return self.ways[way].parts()

    def memory(self, way: str) -> int | None:
        """Bytes by which one call grows the process at most; None where the system does not say."""
        self.ways[way].before()
        memory = Memory()
        self.ways[way].run()
        return memory.grown()


def answer(server: Server, question: dict[str, Any]) -> dict[str, Any]:
    """{"answer": ...}, {"unable": why} or {"failed": why}."""
    action = question.pop("do")
    if "case" in question:
        question["case"] = Case.parse(question["case"])
    try:
        return {"answer": getattr(server, action)(**question)}
    except Unable as why:
        return {"unable": str(why)}
    except Exception as error:
        traceback.print_exc()
        return {"failed": f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:200]}


def main(name: str, threads: str) -> None:
    # what libraries print must not come between the answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    server = Server(name, int(threads))
    for line in sys.stdin:
        answers.write(json.dumps(answer(server, json.loads(line))) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
