"""The benchmarks of generation and embeddings, on tiny calls: what is checked and shown, never how fast it is."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmark_checks import GENERATED, LLAMA, made, right, row

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks import candidates, report, tables, truth
from benchmarks.candidates import Way
from benchmarks.cases import Case
from benchmarks.inputs import Inputs, draw
from benchmarks.models import Greedy, model_way
from benchmarks.stepping import steps
from benchmarks.worker import Server

pytestmark = pytest.mark.full


@pytest.mark.parametrize("name", candidates.TAKING_PART["generation"])
@pytest.mark.parametrize("what", GENERATED)
def test_every_way_to_generate_is_right(name: str, what: str) -> None:
    if name == "contiguous" and what not in ("pages", "prefix", "mixed"):
        with pytest.raises(candidates.Unable):
            right(GENERATED[what], name)
    else:
        assert all(error <= 1 for error in right(GENERATED[what], name).values())


@pytest.mark.parametrize("what", [what for what in GENERATED if what not in ("unsorted", "mixed")])
def test_a_step_that_sees_other_keys_is_seen(what: str) -> None:
    x = draw(GENERATED[what])
    exact, way = truth.exact(x.case, x), candidates.CANDIDATES["regard"].module().ways(x.case, x)[0]
    with torch.no_grad():
        way.before()
        outs = way.run()
        outs[3] = outs[2]
    assert exact.error(way.results(outs)) > exact.limit


def test_each_run_begins_anew_and_forgets_the_lengths_before() -> None:
    x, done = draw(GENERATED["growing"]), list[str]()

    def make(x: Inputs) -> tuple[Callable[[], object], Callable[[int], torch.Tensor]]:
        def step(s: int) -> torch.Tensor:
            done.append(f"step {s}")
            return x.q[:, :, s : s + 1]

        return lambda: done.append("begin"), step

    server = Server.__new__(Server)
    server.ways = {"way": steps("way", x, make, lambda: done.append("forget"))}
    assert server.time("way", 1) > 0
    ready, run = ["begin", "forget", "step 0", "begin"], [f"step {s}" for s in range(5)]
    assert done == ready + run
    done.clear()
    server.time("way", 10)  # calls: two runs, and one before them
    assert done == 3 * (ready + run)
    assert server.parts("way")["overhead"] > 0


def test_a_time_is_that_of_a_call_and_without_what_comes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def passing(seconds: float) -> Callable[[], None]:
        return lambda: now.__setitem__(0, now[0] + seconds)

    monkeypatch.setattr("benchmarks.worker.time.perf_counter", lambda: now[0])
    server = Server.__new__(Server)
    server.ways = {"way": Way("way", passing(8.0), list, calls=4, before=passing(100.0))}
    assert server.time("way", 12) == 2.0


@pytest.mark.parametrize("what", [what for what in GENERATED if what not in ("unsorted", "mixed")])
def test_tiny_steps_are_of_the_same_kind(what: str) -> None:
    tiny = GENERATED[what].tiny
    assert (tiny.what, tiny.steps, tiny.batch) == (what.split(",")[0], 5, GENERATED[what].batch)
    assert tiny.heads // (tiny.key_heads or 1) == (3 if "grouped" in what else 1)
    assert all(error <= 1 for error in right(tiny, "regard").values())


@pytest.mark.parametrize("implementation", ["regard", "sdpa"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_model_generates_the_right_tokens(cache: str, implementation: str) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")
    x = draw(dataclasses.replace(LLAMA, what=cache))
    way, exact = model_way(x, implementation), truth.exact(x.case, x)
    assert isinstance(exact, Greedy)
    tokens = way.results(way.run())
    assert exact.error(tokens) <= exact.limit < 1e-3
    assert exact.error([tokens[0].roll(1, -1)]) > exact.limit
    assert exact.error([tokens[0][:, 1:]]) == math.inf
    assert way.parts()["attention"] > 0


def test_generation_shows_what_time_is_made_of() -> None:
    step, llama = row(tables.GENERATION[2], regard=1e-3, torch=2e-3), row(LLAMA, regard=0.5, torch=1.0)
    step.entries["regard"].ways["way"].parts = {"overhead": 1.5e-5}
    llama.entries["regard"].ways["way"].parts = {"attention": 0.1}
    llama.entries["torch"].ways["way"].parts = {"attention": 0.3}
    page = report.markdown(dataclasses.replace(made(step, llama), table="generation"))
    assert "| 33.6 GB/s, 168% of read | – | 15 µs overhead | 2.00x |" in page
    assert "| – | – | 20% attention, torch's 3.00x | 2.00x |" in page


def test_keys_that_sequences_share_are_read_once() -> None:
    growing, prefix = tables.GENERATION[0], GENERATED["prefix"]
    assert growing.bytes_read == 8 * (128 + 16) * 128 * 4  # 16: half of the steps, rounded down
    assert prefix.bytes_read == 2 * (3 * 27 - 2 * 11) * 16 * 4


@pytest.mark.parametrize("size", [0, 5])
@pytest.mark.parametrize("name", ["regard", "torch"])
def test_embeddings_are_right(name: str, size: int) -> None:
    case = Case("tiny", "minilm", (13, 9), what="sentences", size=size)
    if case.lacking:
        pytest.skip(f"not installed: {case.lacking}")
    assert all(error <= 1 for error in right(case, name).values())
