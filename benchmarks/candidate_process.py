"""The process of a candidate: started, asked questions, and stopped between its answers."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.candidates import CANDIDATES

ROOT = Path(__file__).resolve().parents[1]
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
