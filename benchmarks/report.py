"""What was measured, as a Markdown page; the numbers behind it as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.candidates import CANDIDATES
from benchmarks.cases import MODELS, STEPPED, STEPS, Case
from benchmarks.functions import FUNCTIONS
from benchmarks.measure import Entry, Row, Timed

REFUSED = "**regard wrong**"


@dataclass
class Report:
    """A table of tables.py. peak in operations a second, read in bytes a second."""

    table: str
    processor: str
    isa: str | None
    threads: int
    peak: float
    read: float
    versions: dict[str, str]
    missing: dict[str, str]
    rows: list[Row] = field(default_factory=list)

    @property
    def peers(self) -> list[str]:
        return [name for name in self.versions if name != "regard"]

    def save(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, file: Path) -> Report:
        data: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        data["rows"] = [_row(row) for row in data["rows"]]
        return cls(**data)


def _row(row: dict[str, Any]) -> Row:
    entries = {
        name: Entry(e["why"], e["wrong"], {way: Timed(**timed) for way, timed in e["ways"].items()})
        for name, e in row["entries"].items()
    }
    return Row(Case.parse(row["case"]), row["limit"], entries)


def markdown(report: Report) -> str:
    blocks = [_head(report), _times(report), _laws(report), _ways(report), _errors(report), _whys(report)]
    return "\n\n".join(block for block in blocks if block) + "\n"


def _head(report: Report) -> str:
    versions = ", ".join(f"{CANDIDATES[name].title} {version}" for name, version in report.versions.items())
    missing = "".join(f" {CANDIDATES[name].title}: {why}." for name, why in report.missing.items())
    return (
        f"# {report.table.capitalize()}: regard against its peers\n\n"
        f"{report.processor}, {report.threads} threads each, regard's kernels {report.isa}. {versions}.{missing}\n\n"
        f"Measured in the same run: {report.peak / 1e9:.0f} Gflop/s of float32 multiply-adds, {report.read / 1e9:.1f} "
        "GB/s read from memory. Shares of the peak are of the float32 one for every dtype, visible pairs counted.\n\n"
        "Each candidate has a process of its own, stopped (SIGSTOP) while others have their turn, with its library's "
        "own settings but for the number of threads. Results are checked against float64 first; medians of up to seven "
        "turns. A peer's column says how many times as long as regard it takes. Where a candidate has several ways to "
        "make the call, the fastest counts; in parentheses, for regard and torch: the plain call. All ways stand below."
        + _MORE.get(report.table, "")
    )


_MORE = {
    "generation": f"\n\nA step is one call of attention with one query a sequence. A run makes {STEPS}, each with one "
    "key more than the last; the time is that of one. Before each run regard forgets the lengths that it has seen. "
    "Overhead: a step on tensors so small that the kernel takes next to nothing. Attention's share of a model is what "
    "its layers spend in the function of attention; masks are made elsewhere. Tokens are checked by the logits of the "
    "eager model in float64: each must be its greedy choice, to rounding.",
    "functions": "\n\nA function of a pair is given to regard and FlexAttention unchanged, and to regard also as a "
    "Modifier or a Where, of a rectangle of pairs; FlexAttention is compiled, for the lengths of the case. Beside "
    "them, regard without its kernels: the same Modifier or Where, tile by tile in PyTorch. Of sums over features "
    "FlexAttention has none: beside them the formula in plain torch, compiled and not.",
    "models": "\n\nArchitectures of transformers of 4 layers and 384 to 1,024 features, of random weights: torch's "
    "column is the model with its sdpa, regard's the same with its own. A forward reads, without gradients; a "
    f"training step also finds the gradients of all parameters. A step is one of {STEPS} of `generate` "
    "behind a text, with each cache; what stands before is read untimed. Tokens are checked by the logits of torch's "
    "model in float64: each must be its greedy choice, to rounding. Medians are over the turns of three processes of "
    "each candidate, one after another: of seven turns each where the times are within 5 % of each other.",
    "patching": "\n\nWhole models, of random weights: torch's column is the model as it is, on its own fast paths; "
    "regard's is the same model under `regard.patch(model)`. Eval: a forward pass without gradients. Training: forward "
    "and the gradients of all parameters. How much faster a model can become is bounded by what it does besides "
    "attention. Results under dropout are compared with dropout off.",
}


def _times(report: Report) -> str:
    titles = " | ".join(f"vs {CANDIDATES[name].title}" for name in report.peers)
    more = {"inference": [], "generation": ["extra memory", "of which"]}.get(report.table, ["extra memory"])
    lines = [
        f"| {' | '.join(['case', 'q', 'regard', 'share of the machine', *more])} | {titles} |",
        "| --- | --- | ---: | ---:" + " | ---:" * (len(more) + len(report.peers)) + " |",
    ]
    for row in report.rows:
        ours = row.entries.get("regard", Entry(why="left out"))
        cells = [row.case.name, shape(row.case), _with_plain(time(ours.seconds), time(ours.plain))]
        if not ours.ways:
            cells[-1] = _unseen(ours, REFUSED)
        cells.append(share(row, report))
        if more:
            cells.append(_memory(ours))
        if "of which" in more:
            cells.append(of_which(row))
        cells += [against(row, name) for name in report.peers]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def against(row: Row, name: str) -> str:
    """How many times as long as regard a peer takes, in parentheses the plain call; – where it has none."""
    ours, theirs = row.entries.get("regard"), row.entries.get(name)
    if theirs is None or not theirs.ways:
        return _unseen(theirs, "wrong")
    if ours is None or not ours.ways:
        return time(theirs.seconds) if ours is None else "–"
    shown = factor(theirs.seconds / ours.seconds)
    return _with_plain(shown, factor(theirs.plain / ours.seconds)) if name == "torch" else shown


def _with_plain(best: str, plain: str) -> str:
    return best if plain == best else f"{best} ({plain})"


def _unseen(entry: Entry | None, wrong: str) -> str:
    if entry is None or entry.wrong is None:
        return "–"
    return f"{wrong}: {entry.wrong:.0e}"


def _memory(entry: Entry) -> str:
    timed = entry.ways[entry.best] if entry.best is not None else None
    return "–" if timed is None or timed.memory is None else f"{timed.memory / 1e6:.1f} MB"


def of_which(row: Row) -> str:
    """regard's time by its parts: the way to the kernel and back; attention in a model, and how long torch's takes."""
    ours, theirs = (_parts(row.entries.get(name)) for name in ("regard", "torch"))
    if "overhead" in ours:
        return f"{time(ours['overhead'])} overhead"
    if "attention" not in ours:
        return "–"
    shown = f"{ours['attention'] / row.entries['regard'].seconds:.0%} attention"
    return shown + (f", torch's {factor(theirs['attention'] / ours['attention'])}" if "attention" in theirs else "")


def _parts(entry: Entry | None) -> dict[str, float]:
    return entry.ways[entry.best].parts if entry is not None and entry.best is not None else {}


def factor(ratio: float) -> str:
    return f"{ratio:.0f}x" if ratio >= 99.5 else f"{ratio:.1f}x" if ratio >= 9.95 else f"{ratio:.2f}x"


def time(seconds: float) -> str:
    """Three figures with a unit.

    >>> time(0.01234), time(0.0000123)
    ('12.3 ms', '12.3 µs')
    """
    if math.isnan(seconds):
        return "–"
    size, unit = (seconds * 1e3, "ms") if seconds >= 1e-3 else (seconds * 1e6, "µs")
    return f"{size:.3g} {unit}" if size < 1000 else f"{size:.0f} {unit}"


def shape(case: Case) -> str:
    return "(" + ", ".join(map(str, case.shape)) + ")"


def share(row: Row, report: Report) -> str:
    """Of the multiply-add peak; in decoding of the bandwidth; – where neither binds."""
    ours = row.entries.get("regard")
    if ours is None or not ours.ways or row.case.what in ("additive", *MODELS) or row.case.operations < 1e7:
        return "–"
    if row.case.shape[-2] < 16 or row.case.what in STEPPED:
        rate = row.case.bytes_read / ours.seconds
        return f"{rate / 1e9:.1f} GB/s, {rate / report.read:.0%} of read"
    return f"{row.case.operations / ours.seconds / report.peak:.0%} of peak"


def _laws(report: Report) -> str:
    """What must grow with the work alone."""
    ours = [(row.case, row.entries["regard"].seconds) for row in report.rows if row.entries.get("regard", Entry()).ways]
    lines: list[str] = []
    ragged = [(case, seconds / case.pairs) for case, seconds in ours if case.what == "ragged"]
    for case, cost in ragged:
        lines.append(
            f"- {case.name}: {cost * 1e12:.3g} ps for each of the Σ n² pairs of a head, "
            f"{cost / ragged[0][1]:.2f} times as much as the first batch."
        )
    wide = next((c for c in ours if c[0].name.startswith("full, beside")), None)
    for case, seconds in ours:
        if case.what == "window" and wide is not None:
            part, cost = case.pairs / wide[0].pairs, seconds / wide[1]
            lines.append(f"- {case.name}: {part:.2%} of the pairs of the full call, {cost:.2%} of its time.")
            lines[-1] += f" That is {cost / part:.2f} times its share."
    lines += _functions(report)
    return "\n".join(["What follows the work:", "", *lines]) if lines else ""


def _functions(report: Report) -> list[str]:
    """What functions of a pair cost beside the plain call, and their first call beside the next one."""
    plain = {(row.case.passes, row.case.shape): row.entries["regard"] for row in report.rows if row.case.what == "full"}
    lines: list[str] = []
    for row in report.rows:
        ours, beside = row.entries.get("regard", Entry()), plain.get((row.case.passes, row.case.shape), Entry())
        if row.case.what not in FUNCTIONS or not ours.ways or not beside.ways:
            continue
        line = f"- {row.case.name}: {ours.seconds / beside.seconds:.2f} times the plain call"
        if FUNCTIONS[row.case.what].mask is not None:
            line += f", with {row.case.pairs / (row.case.batch * row.case.heads * row.case.keys**2):.1%} of its pairs"
        parts = _parts(ours)
        if "first" in parts:
            line += f"; a first call {time(parts['first'])}, the next one {time(parts['second'])}"
        lines.append(f"{line}.")
    return lines


def _ways(report: Report) -> str:
    lines = [
        f"- {row.case.name} {shape(row.case)}: {CANDIDATES[name].title}, "
        + "; ".join(f"{way} {time(timed.seconds)}" for way, timed in entry.ways.items())
        for row in report.rows
        for name, entry in row.entries.items()
        if len(entry.ways) > 1
    ]
    return "\n".join(["## Ways", "", "The plain call first.", "", *lines]) if lines else ""


def _errors(report: Report) -> str:
    names = list(report.versions)
    lines = [
        "## Errors",
        "",
        "Against float64, relatively: the root mean square of the differences over that of the result, all heads and, "
        "where there are many, evenly chosen queries; in training the worst of the output and all gradients, of the "
        "first heads. Dropout: how far the spread of the differences is from what it must be. What passes the limit "
        "(eight times the error of a plain evaluation in the same dtype) is wrong, and not timed.",
        "",
        "| case | q | " + " | ".join(CANDIDATES[name].title for name in names) + " | limit |",
        "| --- | --- " + "| ---: " * (len(names) + 1) + "|",
    ]
    for row in report.rows:
        cells = [_error(row.entries.get(name)) for name in names]
        lines.append(f"| {row.case.name} | {shape(row.case)} | {' | '.join(cells)} | {row.limit:.1e} |")
    return "\n".join(lines)


def _error(entry: Entry | None) -> str:
    if entry is None or not entry.ways:
        return _unseen(entry, "wrong")
    return f"{entry.error:.1e}"


def _whys(report: Report) -> str:
    """Why a candidate is missing where it is, each reason once with the cases."""
    found: dict[tuple[str, str], list[str]] = {}
    for row in report.rows:
        for name, entry in row.entries.items():
            if entry.why is not None:
                found.setdefault((name, entry.why), []).append(row.case.name)
            elif not entry.ways:
                found.setdefault((name, "a wrong result"), []).append(row.case.name)
    lines = [
        f"- {CANDIDATES[name].title}: {why} ({', '.join(dict.fromkeys(cases))})" for (name, why), cases in found.items()
    ]
    return "\n".join(["## Not timed", "", *lines]) if lines else ""
