"""python -m benchmarks [WORD ...]: every case (or those whose names hold a word) for every candidate.

Each candidate runs in a process of its own, so that one's idle threads do not disturb the other. Results are checked
against float64 first; then the candidates take turns, and medians are compared. Writes benchmarks/results/inference.md.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

import regard as rg
from benchmarks.cases import CANDIDATES, CASES, Case, meaning
from regard.backends.library import chosen, load

RESULTS = Path(__file__).parent / "results"
SECONDS = 1.5  # for each candidate and case, about


class Worker:
    """A process that runs one candidate on command."""

    def __init__(self, name: str) -> None:
        command = [sys.executable, "-m", "benchmarks", "--worker", name]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **question: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def serve(name: str) -> None:
    """Answers on standard output: {"prepare": n} with the error of case n, {"time": calls} with the seconds of one."""
    run = None
    for line in sys.stdin:
        question = json.loads(line)
        if "prepare" in question:
            case = CASES[question["prepare"]]
            run = CANDIDATES[name](case)
            with torch.no_grad():
                print(json.dumps(error(case, run())), flush=True)
        else:
            assert run is not None
            with torch.no_grad():
                start = time.perf_counter()
                for _ in range(question["time"]):
                    run()
                print(json.dumps((time.perf_counter() - start) / question["time"]), flush=True)


def error(case: Case, out: torch.Tensor) -> float:
    """The largest error of a result against float64, on the first head."""
    q, k, v = (t[:1, :1].double() for t in case.inputs())
    right = rg.attention(q, k, v, **meaning(case), backend=rg.Tiled())
    return float((out[:1, :1].double() - right).abs().max())


def peak() -> float:
    """The float32 multiply-add peak of as many cores as torch has threads, in operations a second: best of five."""
    isa = chosen()
    if isa is None:
        return float("nan")
    run = load(isa).handle.regard_peak
    import ctypes

    run.restype, run.argtypes = ctypes.c_double, (ctypes.c_int64,)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        best = max(best, run(4_000_000) / (time.perf_counter() - start))
    return best * torch.get_num_threads()


def measure(case: Case, number: int, workers: dict[str, Worker], fastest: float) -> str:
    errors = {name: worker.ask(prepare=number) for name, worker in workers.items()}
    limit = 1e-5 if case.dtype == "float32" else 3e-2
    wrong = {name: e for name, e in errors.items() if not e < limit}
    if wrong:
        raise SystemExit(f"{case.name} {case.shape}: wrong results {wrong}; nothing is timed.")
    once = {name: worker.ask(time=1) for name, worker in workers.items()}
    calls = {name: max(1, round(SECONDS / 9 / t)) for name, t in once.items()}
    times: dict[str, list[float]] = {name: [] for name in workers}
    for _ in range(9):
        for name, worker in workers.items():
            times[name].append(worker.ask(time=calls[name]))
    median = {name: statistics.median(t) for name, t in times.items()}
    share = case.operations / median["regard"] / fastest if "decode" not in case.name else float("nan")
    unit = "of peak" if case.dtype == "float32" else "of float32 peak"
    shown = "–" if share != share else f"{share:.0%} {unit}"
    ahead = median["torch"] / median["regard"]
    row = f"| {case.name} | {case.shape} | {median['regard'] * 1e3:.3g} | {ahead:.2f}x | {shown} "
    row += f"| {errors['regard']:.1e} | {errors['torch']:.1e} |"
    print(row, flush=True)
    return row


def main(words: list[str]) -> None:
    fastest = peak()
    workers = {name: Worker(name) for name in CANDIDATES}
    head = [
        "# Inference: forward, regard against torch's scaled_dot_product_attention",
        "",
        f"{platform.machine()}, kernels {chosen()}, {torch.get_num_threads()} threads, torch {torch.__version__}; "
        f"measured float32 multiply-add peak {fastest / 1e9:.0f} Gflop/s. Medians of nine turns.",
        "",
        "| case | q | regard, ms | ahead of torch | share | error | torch's error |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    print("\n".join(head))
    chosen_cases = [(n, c) for n, c in enumerate(CASES) if not words or any(w in c.name for w in words)]
    rows = [measure(case, n, workers, fastest) for n, case in chosen_cases]
    if not words:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "inference.md").write_text("\n".join([*head, *rows]) + "\n")


if __name__ == "__main__":
    serve(sys.argv[2]) if sys.argv[1:2] == ["--worker"] else main(sys.argv[1:])
