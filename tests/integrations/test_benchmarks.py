"""The harness of the benchmarks and `regard bench`, on tiny calls: what is checked and shown, never how fast it is."""

from __future__ import annotations

import dataclasses
import itertools
import math
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
import torch

import regard as rg
from benchmark_checks import GENERATED, LLAMA, made, right, row
from regard.cli import bench as short
from regard.cli.bench import TimedCall
from regard_command import main

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import benchmarks.__main__ as command
from benchmarks import candidates, cases, errors, looking, measure, report, tables, truth
from benchmarks.candidate_process import Lost, Worker, begin
from benchmarks.cases import Case
from benchmarks.inputs import Inputs, draw
from benchmarks.measure import Entry, Timed
from benchmarks.report import Report

from needed import needs_kernels

pytestmark = pytest.mark.full

SHAPE = (2, 3, 13, 8)
TINY = {
    what: Case("tiny", what, SHAPE, what=what, lengths=(5, 13) if what == "padding" else ())
    for what in ("full", "causal", "bool", "bias", "padding", "dropout")
}
TINY["window"] = Case("tiny", "window", (1, 2, 512, 8), what="window")
TINY["ragged"] = Case("tiny", "ragged", (1, 3, 18, 8), what="ragged", lengths=(5, 13))
TINY["grouped"] = Case("tiny", "grouped", (1, 6, 3, 8), key_heads=2, nk=29)
TINY["wide"] = Case("tiny", "wide", SHAPE, dv=16)
TINY["three axes"] = Case("tiny", "three axes", (3, 13, 8))
TINY["five axes"] = Case("tiny", "five axes", (2, 2, 3, 13, 8))
TRAINED = {
    f"{what} {passes}": Case("tiny", what, (1, 3, 13, 8), what=what, passes=passes)
    for what in ("full", "causal", "bias", "t5")
    for passes in ("backward", "both")
}
TRAINED["additive both"] = Case("tiny", "additive", (1, 1, 13, 8), what="additive", dv=4, passes="both")


@pytest.mark.parametrize("name", ["regard", "torch"])
@pytest.mark.parametrize("what", [what for what in TINY if what != "dropout"])
def test_every_way_is_right(name: str, what: str) -> None:
    assert all(error <= 1 for error in right(TINY[what], name).values())


@pytest.mark.parametrize("name", ["regard", "torch"])
def test_dropout_spreads_as_it_must(name: str) -> None:
    case = dataclasses.replace(TINY["dropout"], shape=(8, 6, 101, 64))
    assert all(error <= 1 for error in right(case, name).values())


@pytest.mark.parametrize("case", TRAINED.values(), ids=list(TRAINED))
def test_gradients_are_right(case: Case) -> None:
    names = ("regard", "eager") if case.what == "additive" else ("regard", "torch")
    assert all(error <= 1 for name in names for error in right(case, name).values())


@pytest.fixture(scope="module")
def process_of() -> Iterator[Callable[[str], Executor]]:
    """A process for each peer: OpenVINO forks as it loads, and JAX's threads do not outlive that."""
    with ExitStack() as stack:

        @cache
        def of(name: str) -> Executor:
            return stack.enter_context(ProcessPoolExecutor(1, multiprocessing.get_context("spawn")))

        yield of


@pytest.mark.parametrize("name", ["onnx", "openvino", "jax"])
@pytest.mark.parametrize("what", [what for what in TINY if what != "dropout"])
def test_peers_are_right_where_they_are_installed(name: str, what: str, process_of: Callable[[str], Executor]) -> None:
    if candidates.CANDIDATES[name].missing:
        pytest.skip("not installed")
    assert all(error <= 1 for error in process_of(name).submit(right, TINY[what], name).result().values())


@pytest.mark.parametrize("what", ["full", "dropout"])
@pytest.mark.parametrize(
    "spoil", [lambda t: t * 1.1, lambda t: t.flip(2), lambda t: t.index_fill(1, torch.tensor(2), torch.nan)]
)
def test_a_wrong_result_is_seen(what: str, spoil: Callable[[torch.Tensor], torch.Tensor]) -> None:
    case = dataclasses.replace(TINY[what], shape=(8, 6, 101, 64))
    x = draw(case)
    way = candidates.CANDIDATES["torch"].module().ways(case, x)[0]
    exact, out = truth.exact(case, x), way.results(way.run())[0]
    assert exact.error([out]) <= exact.limit < exact.error([spoil(out)])


def test_truth_agrees_with_reference() -> None:
    case = TINY["padding"]
    x = draw(case)
    exact = truth.exact(case, x).right[0]
    double = (t.double() for t in (x.q, x.k, x.v))
    assert x.mask is not None
    torch.testing.assert_close(exact, rg.attention(*double, mask=rg.Dense(x.mask), backend=rg.Reference()))


def test_pairs_are_those_that_the_mask_shows() -> None:
    for case in (*TINY.values(), *GENERATED.values()):
        seen = None if case.what == "bool" else draw(case).dense()
        n = case.shape[-2]
        full = case.batch * case.heads * n * case.keys
        assert case.pairs == (full if seen is None else int(seen.expand(case.batch, case.heads, n, case.keys).sum()))


def test_padded_and_packed_are_inverse() -> None:
    x: Inputs = draw(TINY["ragged"])
    q, _, _, real = x.padded()
    assert torch.equal(x.packed(q), x.q) and real.sum(-1).flatten().tolist() == [5, 13]


def test_cases_have_names_of_their_own_and_survive_json() -> None:
    for table in tables.TABLES.values():
        assert len({case.title for case in table}) == len(table)
        assert all(Case.parse(dataclasses.asdict(case)) == case for case in table)


def test_another_checkout_takes_part_where_regard_does() -> None:
    case = TINY["full"]
    for only, expected in (((), "regard other torch"), (("regard",), "regard other"), (("torch",), "torch")):
        taking = [name for name in ("regard", "other", "torch") if dataclasses.replace(case, only=only).is_for(name)]
        assert taking == expected.split()


@pytest.fixture(scope="module")
def process() -> Iterator[Worker]:
    found = Worker("torch", 1)
    yield found
    found.end()


@pytest.fixture
def worker(process: Worker) -> Worker:
    """Asked once, so that it runs: a test may have ended it."""
    process.ask("start")
    return process


def test_a_case_is_checked_and_timed_in_a_process_of_its_own(worker: Worker) -> None:
    row = measure.measure(TINY["grouped"], {"torch": worker}, 0.001)
    entry = row.entries["torch"]
    assert entry.why is None and len(entry.ways) == 4
    assert entry.best is not None and entry.ways[entry.best].turns and entry.seconds > 0


def test_ways_that_come_near_the_fastest_take_turns() -> None:
    """One trial does not tell them apart; the plain call has turns too, unless it is slow."""
    took = {"plain": 0.9, "fast": 0.1, "near": 0.12, "far": 0.13}

    class Steady:
        """A candidate whose calls always take the same time."""

        def ask(self, action: str, way: str, **_: object) -> dict[str, object]:
            return {"answer": took[way] if action == "time" else None}

    found = row(tables.INFERENCE[2], regard=0.1)
    entry = found.entries["regard"] = Entry(ways={way: Timed(0.0) for way in took})
    contenders = measure._first_times(found, {"regard": Steady()}, 1.0)
    measure._take_turns(found, {"regard": Steady()}, contenders, 1.0)
    assert [way for way, timed in entry.ways.items() if timed.turns] == ["plain", "fast", "near"]
    assert entry.best == "fast"
    found.entries["regard"] = Entry(ways={way: Timed(0.0) for way in took})
    assert measure._first_times(found, {"regard": Steady()}, 0.8) == [("regard", "fast"), ("regard", "near")]


@pytest.mark.parametrize(("theirs", "turns"), [(0.103, 7), (0.2, 3)])
def test_candidates_that_are_close_take_more_turns(theirs: float, turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Steady:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds

        def ask(self, action: str, **_: object) -> dict[str, object]:
            return {"answer": self.seconds if action == "time" else None}

    monkeypatch.setattr(Case, "processes", 3)
    found = row(tables.INFERENCE[2], regard=0.1, torch=theirs)
    found.entries = {name: Entry(ways={"": Timed(0.0)}) for name in ("regard", "torch")}
    workers = {"regard": Steady(0.1), "torch": Steady(theirs)}
    measure._take_turns(found, workers, measure._first_times(found, workers, 1.0), 1.0)
    assert {len(entry.ways[""].turns) for entry in found.entries.values()} == {turns}


def test_processes_that_begin_anew_share_the_turns(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    processes, take_turns = set[int](), measure._take_turns

    def noted(row: measure.Row, workers: dict[str, Worker], *given: object) -> None:
        assert worker.process is not None
        processes.add(worker.process.pid)
        take_turns(row, workers, *given)

    monkeypatch.setattr(Case, "processes", 3)
    monkeypatch.setattr(measure, "_take_turns", noted)
    entry = measure.measure(TINY["grouped"], {"torch": worker}, 0.001).entries["torch"]
    assert len(processes) == 3 and entry.why is None
    turns = [len(timed.turns) for timed in entry.ways.values() if timed.turns]
    assert turns and all(count % 3 == 0 for count in turns), turns


def test_a_process_that_begins_anew_and_fails_has_no_times(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_anew = measure._begin_anew

    def of_integers(row: measure.Row, *given: object) -> None:
        begin_anew(dataclasses.replace(row, case=dataclasses.replace(row.case, dtype="int64")), *given)

    monkeypatch.setattr(Case, "processes", 2)
    monkeypatch.setattr(measure, "_begin_anew", of_integers)
    entry = measure.measure(TINY["grouped"], {"torch": worker}, 0.001).entries["torch"]
    assert entry.why and not entry.ways


def test_between_its_answers_a_process_is_stopped(worker: Worker) -> None:
    assert worker.process is not None
    status = Path(f"/proc/{worker.process.pid}/stat")
    if not status.exists():
        pytest.skip("no /proc")
    for _ in range(1000):  # the signal arrives when it arrives
        if (state := status.read_text().rsplit(")", 1)[1].split()[0]) == "T":
            break
    assert state == "T"


def test_what_cannot_be_said_or_breaks_stops_nothing(worker: Worker) -> None:
    case = dataclasses.replace(TRAINED["additive both"], name="not SDPA's")
    assert measure.measure(case, {"torch": worker}, 0.001).entries["torch"].why == "SDPA has no additive score"
    impossible = dataclasses.replace(TINY["full"], dtype="int64")
    assert worker.ask("prepare", case=dataclasses.asdict(impossible), folder="")["failed"]
    assert worker.process is not None
    worker.process.kill()
    with pytest.raises((Lost, OSError)):
        worker.ask("time", way="SDPA", calls=1)
    worker.end()
    assert measure.measure(TINY["full"], {"torch": worker}, 0.001).entries["torch"].ways


def test_a_wrong_regard_is_refused_and_nothing_is_timed(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truth, "WORSE", 0.0)
    row = measure.measure(TINY["full"], {"regard": worker}, 0.001)
    assert row.refused and row.entries["regard"].wrong is not None
    page = report.markdown(made(row))
    assert "**regard wrong**: " in page and "a wrong result (full)" in page


def test_page_shows_ratios_shares_and_who_is_missing() -> None:
    found = row(tables.INFERENCE[2], regard=0.1, torch=0.25)
    found.entries["torch"].ways = {"plain": Timed(1e-7, 0.5), "clever": Timed(3e-7, 0.25)}
    found.entries["jax"] = Entry(why="too old")
    page = report.markdown(made(found))
    assert "OpenVINO: not installed (openvino)." in page
    assert "| float32 full | (1, 12, 2048, 64) | 100 ms | 129% of peak | 2.50x (5.00x) | – |" in page
    assert "| 2.0e-07 | 3.0e-07 | – | 1.0e-06 |" in page
    assert "torch SDPA, plain 500 ms; clever 250 ms" in page and "JAX: too old (float32 full)" in page


def test_decoding_is_shown_by_bandwidth_and_ragged_batches_by_their_law() -> None:
    decode = next(case for case in tables.INFERENCE if case.name == "decode float32 32:8")
    assert report.share(row(decode, regard=0.01), made()) == "6.7 GB/s, 34% of read"
    ragged = [case for case in tables.INFERENCE if case.what == "ragged"]
    rows = [row(case, regard=case.pairs * 1e-11) for case in ragged]
    assert "1.00 times as much as the first batch" in report.markdown(made(*rows))
    window = [case for case in tables.INFERENCE if case.shape == tables.LONG]
    page = report.markdown(made(*(row(case, regard=case.pairs * 1e-11) for case in window)))
    assert "That is 1.00 times its share." in page


def test_a_wrong_peer_is_marked() -> None:
    found = row(tables.INFERENCE[0], regard=0.1)
    found.entries["torch"] = Entry(wrong=0.25)
    assert report.against(found, "torch") == "wrong: 2e-01"
    assert report.against(found, "jax") == "–"


def test_numbers_survive_the_file(tmp_path: Path) -> None:
    before = made(row(tables.INFERENCE[0], regard=0.1, torch=0.2))
    before.save(tmp_path / "x.json")
    assert Report.load(tmp_path / "x.json") == before


def test_picture_is_drawn_with_gaps(tmp_path: Path) -> None:
    from benchmarks.picture import draw as picture

    rows = [row(case, regard=0.1, torch=0.2) for case in tables.INFERENCE[::5]]
    rows[1].entries["torch"] = Entry(why="too old")
    assert picture(made(*rows), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_every_candidate_has_a_color() -> None:
    """Another checkout of regard, too: what a long run measured is lost where the picture fails."""
    from benchmarks.candidates import CANDIDATES
    from benchmarks.picture import COLORS

    assert set(COLORS) == set(CANDIDATES)


def test_no_picture_is_drawn_of_one_candidate(tmp_path: Path) -> None:
    from benchmarks.picture import draw as picture

    assert not picture(made(row(tables.INFERENCE[0], regard=0.1)), tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


def test_times_and_factors_read_well() -> None:
    assert [report.time(s) for s in (1.5, 0.01234, 1.234e-5, math.nan)] == ["1500 ms", "12.3 ms", "12.3 µs", "–"]
    assert [report.factor(x) for x in (0.5, 9.96, 123.4)] == ["0.50x", "10.0x", "123x"]


@needs_kernels
def test_bench_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = (TimedCall("small", (1, 2, 13, 8)), TimedCall("decode", (1, 4, 1, 8), torch.bfloat16, key_heads=2, nk=29))
    monkeypatch.setattr(short, "CALLS", tiny)
    assert main(["bench", "--seconds", "0"]) == 0
    shown = capsys.readouterr().out
    assert "multiply-add peak" in shown and "decode" in shown and "% read" in shown and "±" in shown


@needs_kernels
def test_bench_ends_in_time_and_says_what_disturbed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for measured in ("peak", "bandwidth"):
        monkeypatch.setattr(short, measured, lambda threads: 1e9)
    clock = itertools.count(0, 1.0)  # a second passes whenever somebody looks
    monkeypatch.setattr(short.time, "perf_counter", lambda: float(next(clock)))
    found = short.bench(200.0, (TimedCall("first", (1, 2, 13, 8)), TimedCall("last", (1, 2, 13, 8), torch.bfloat16)))
    rows = list(found.rows)
    assert next(clock) <= 200 + 10 and rows[0][-1].endswith("% peak") and rows[1][-1] == "-"
    monkeypatch.setattr(short, "_load", lambda: 0.5)
    assert found.notes() == () or found.notes()[0].startswith("each call has to run 3 times: that took")
    found.spreads.append(0.4)
    assert found.notes()[0].startswith("this machine seems busy: times vary by up to ±40%, and 0.5 threads ran on its")


@pytest.mark.parametrize("seconds", ["-1", "nan", "inf"])
def test_bench_needs_a_time(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--seconds", seconds]) == 1
    assert (
        capsys.readouterr().err == f"regard bench: --seconds is {seconds}; expected a number of seconds, 0 or more.\n"
    )


@needs_kernels
def test_bench_times_no_wrong_result(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(short, "CALLS", (TimedCall("small", (1, 2, 13, 8)),))
    for measured in ("peak", "bandwidth"):
        monkeypatch.setattr(short, measured, lambda threads: 1e9)
    monkeypatch.setattr(short, "tolerance", lambda exact, plain: 0.0)
    assert main(["bench", "--seconds", "0"]) == 1
    assert "nothing is timed" in capsys.readouterr().err


def test_bench_without_kernels_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("regard.cli.machine.chosen", lambda: None)
    assert main(["bench"]) == 1
    assert "the native kernels were not built" in capsys.readouterr().err


def test_the_cost_of_looking_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install 'regard[hf]'")
    monkeypatch.setattr(looking, "TURNS", 1)
    monkeypatch.setattr(looking, "PROCESSES", 1)
    asked = ["--shape", "1", "2", "512", "16", "--lengths", "128", "--output", str(tmp_path / "page.md")]
    assert looking.main(asked) == 0
    page = (tmp_path / "page.md").read_text()
    assert all(f"| {name} |" in page for name in (*looking.FACTS, *looking.WAYS.values()))
    assert float(page.split("differ by ")[1].split()[0]) < 1e-4


def test_a_wrong_fact_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 2, 64, 16, generator=random) for _ in range(2))
    looking.check(q, k)
    monkeypatch.setattr(looking.rg, "look", lambda q, k, facts: rg.inspect.look.look(q * 1.001, k, facts=facts))
    with pytest.raises(ValueError, match="from its definition; nothing was measured"):
        looking.check(q, k)


def test_a_case_whose_packages_are_missing_says_so(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cases.MODELS, "dynamic", ("no_such_package",))
    row = measure.measure(LLAMA, {"regard": worker}, 0.001)
    assert not row.refused
    assert "not installed (no_such_package) (llama)" in report.markdown(made(row))


def test_another_checkout_is_found_before_this_one(tmp_path: Path) -> None:
    (tmp_path / "regard").mkdir()
    (tmp_path / "regard" / "__init__.py").write_text("raise ImportError('the other checkout')")
    workers, missing = begin(("other",), 1, None, tmp_path)
    assert not workers and "the other checkout" in missing["other"]


def test_first_word_names_the_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    asked: list[tuple[str, ...]] = []

    def begin(names: tuple[str, ...], *_: object) -> tuple[dict[str, Worker], dict[str, str]]:
        asked.append(names)
        return {}, {}

    monkeypatch.setattr(command, "begin", begin)
    for measured in ("peak", "bandwidth"):
        monkeypatch.setattr(command, measured, lambda threads: 1e9)
    for words in (["generation", "no such case"], ["training", "no such case"], ["no such case"]):
        assert command.main(words) == 0
    assert asked == [candidates.TAKING_PART[table] for table in ("generation", "training", "inference")]
    shown = capsys.readouterr().out
    assert all(f"# {table}: regard" in shown for table in ("Generation", "Training", "Inference"))


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cases that were written are not measured again; numbers of another machine are no part of the table."""
    measured: list[Case] = []

    def taken(case: Case, *_: object) -> measure.Row:
        measured.append(case)
        return row(case, regard=0.1)

    monkeypatch.setattr(command, "begin", lambda *_: ({}, {}))
    monkeypatch.setattr(command, "measure", taken)
    for what in ("peak", "bandwidth"):
        monkeypatch.setattr(command, what, lambda threads: 1e9)
    monkeypatch.setattr(command, "chosen", lambda: "avx2")
    cases = tables.TABLES["training"]
    command.main(["training", cases[0].name, "--output", str(tmp_path)])
    before = len(measured)
    assert 0 < before < len(cases)
    command.main(["training", "--output", str(tmp_path), "--resume"])
    assert len(measured) == len(cases) and all(map(measured.__contains__, cases))
    assert len(Report.load(tmp_path / "training.json").rows) == len(cases)
    monkeypatch.setattr(command, "chosen", lambda: "base")
    with pytest.raises(SystemExit, match="has other isa, avx2; expected base"):
        command.main(["training", "--output", str(tmp_path), "--resume"])


@needs_kernels
def test_errors_of_each_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small integers, whose scores are exact: an error of some last places, and none of 0."""
    monkeypatch.setattr(errors, "DRAWS", 1)
    monkeypatch.setenv("REGARD_ISA", "base")
    found = errors.errors("small integers", ["base"])
    assert set(found) == {"base", "torch SDPA", "the formula"}
    assert all(0 < error < 2e-5 for both in found.values() for error in both)
    assert os.environ["REGARD_ISA"] == "base"
