"""python -m benchmarks [TABLE] [WORD ...]: regard beside its peers, results checked first.

TABLE: inference (default), training, generation, models, patching or functions.

Every case, or those whose names and shapes hold one of the words, for every peer that is installed. A run of all cases
by all peers writes a Markdown page, a picture and the numbers into benchmarks/results/; a part of them is printed
only, unless --output names a folder. The exit status is 1 where a result of regard's is wrong.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.candidate_process import begin
from benchmarks.candidates import TAKING_PART
from benchmarks.measure import Row, measure
from benchmarks.picture import draw
from benchmarks.report import Report, against, markdown, share
from benchmarks.report import time as shown
from benchmarks.tables import TABLES
from regard.backends.native.ffi import chosen
from regard.cli.machine import bandwidth, peak, processor

RESULTS = Path(__file__).parent / "results"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_intermixed_args(arguments)
    named = options.words[:1] if options.words[:1] and options.words[0] in TABLES else []
    table, words = (*named, "inference")[0], options.words[len(named) :]
    name = table + (f"-{options.isa}" if options.isa else "")
    output = options.output or (None if words or options.only or options.against else RESULTS)
    if options.redraw:
        _write(Report.load((options.output or RESULTS) / f"{name}.json"), options.output or RESULTS, name)
        return 0
    if options.resume and output is None:
        parser.error("--resume: a part of a table is printed, not written; name the --output FOLDER of the other run.")
    if options.resume and not (before := output / f"{name}.json").exists():
        parser.error(f"--resume: there is no {before}; leave out --resume to begin.")
    if options.isa:
        os.environ["REGARD_ISA"] = options.isa
    cases = [case for case in TABLES[table] if not words or any(word in f"{case.group} {case.title}" for word in words)]
    flops, read = peak(options.threads), bandwidth(options.threads)
    names = tuple(n for n in TAKING_PART[table] if n in (options.only or TAKING_PART[table]))
    if options.against is not None:
        names = (*names, "other")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a stopped process must not outlive this one
    workers, missing = begin(names, options.threads, options.isa, options.against)
    versions = {one: worker.version for one, worker in workers.items()}
    report = Report(table, processor(), chosen(), options.threads, flops, read, versions, missing)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        if options.resume:
            report.rows = _rows_of_before(report, output / f"{name}.json")
    try:
        print(markdown(report).split("\n\n| case")[0], flush=True)
        if output is None:
            print("A part of the table: it is printed, not written; --output FOLDER would write it.", flush=True)
        measured = [row.case for row in report.rows]
        for case in [case for case in cases if case not in measured]:
            start = time.perf_counter()
            report.rows.append(measure(case, workers, options.seconds))
            print(_line(report, time.perf_counter() - start), flush=True)
            if output is not None:
                report.save(output / f"{name}.json")
    finally:
        for worker in workers.values():
            worker.end()
    if output is not None:
        _write(report, output, name)
    return int(any(row.refused for row in report.rows))


def _rows_of_before(report: Report, file: Path) -> list[Row]:
    """What an interrupted run of the same candidates on the same processor has written."""
    before = Report.load(file)
    for what in ("processor", "isa", "threads", "versions"):
        if getattr(before, what) != getattr(report, what):
            raise SystemExit(
                f"{file} has other {what}, {getattr(before, what)}; expected {getattr(report, what)}: write into "
                "another folder, or leave out --resume."
            )
    return before.rows


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = sorted({name for table in TAKING_PART.values() for name in table})
    parser.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="inference, training, generation, models, patching or functions, for that table; words that choose cases",
    )
    parser.add_argument("--only", nargs="+", choices=names, metavar="PEER", help=f"of {', '.join(names)}")
    parser.add_argument(
        "--against", type=Path, metavar="SRC", help="the src folder of another, built checkout of regard: a peer too"
    )
    parser.add_argument("--seconds", type=float, default=0.8, help="for each candidate and case (default %(default)g)")
    parser.add_argument("--isa", help="the instruction set that regard must use, for example avx2")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="of each candidate (default %(default)s)"
    )
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="where to write (default benchmarks/results)")
    parser.add_argument("--resume", action="store_true", help="keep the cases that an interrupted run wrote there")
    parser.add_argument("--redraw", action="store_true", help="write page and picture again from the numbers there")
    return parser


def _line(report: Report, took: float) -> str:
    """One case as it is done."""
    row = report.rows[-1]
    ours = row.entries.get("regard")
    cells = [f"{row.case.title:<44}", f"{shown(ours.seconds) if ours else '–':>9}", f"{share(row, report):>24}"]
    cells += [f"{name} {against(row, name)}" for name in report.peers]
    return "  ".join(cells) + f"  [{took:.0f} s]"


def _write(report: Report, folder: Path, name: str) -> None:
    pictured = draw(report, folder / f"{name}.png")
    picture = f"\n![{report.table}]({name}.png)\n" if pictured else ""
    (folder / f"{name}.md").write_text(markdown(report) + picture, encoding="utf-8")
    print(f"wrote {folder / name}.md{' and .png' if pictured else ''}", file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
