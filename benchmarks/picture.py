"""What was measured, as a picture: a panel for each group of cases, bars in ratio to torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from benchmarks.candidates import CANDIDATES
from benchmarks.measure import Row
from benchmarks.report import Report, factor, shape, share

COLORS = {
    "regard": "#c2410c",
    "torch": "#64748b",
    "flex": "#94a3b8",
    "onnx": "#0f766e",
    "openvino": "#5eaaa8",
    "jax": "#b3a369",
    "eager": "#475569",
    "compiled": "#94a3b8",
    "contiguous": "#7c9a5e",
    "tiled": "#a8a29e",
    "other": "#fdba74",
}
BAR = 0.15  # inches of a bar
GAP = 0.16  # inches between two cases
BASES = ("torch", "eager", "contiguous", "tiled")  # who is 1: SDPA, or where it takes no part the plainest other
TICKS = (0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)


def draw(report: Report, file: Path) -> bool:
    """Writes the picture, its format by suffix; nothing where no case has two to compare. Whether it did."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = [row for row in report.rows if any(not math.isnan(_ahead(row, name)) for name in report.versions)]
    if not rows:
        return False
    groups = list(dict.fromkeys(row.case.group for row in rows))
    panels = {group: [row for row in rows if row.case.group == group] for group in groups}
    names = list(report.versions)
    columns = _columns(panels, names)
    heights = [sum(_height(panels[group], names) for group in column) for column in columns]
    figure = Figure(figsize=(7.4 * len(columns), max(heights) + 1.5), layout="constrained")
    FigureCanvasAgg(figure)  # no display and no global state: pyplot would bring both
    ratios = [ratio for row in rows for name in names if not math.isnan(ratio := _ahead(row, name))]
    limits = min(*ratios, 0.5), max(*ratios, 2.0)
    for part, column in zip(figure.subfigures(1, len(columns), squeeze=False)[0], columns, strict=True):
        sizes = [_height(panels[group], names) for group in column]
        parts = part.subplots(len(column), 1, squeeze=False, height_ratios=sizes)[:, 0]
        for axes, group in zip(parts, column, strict=True):
            _panel(axes, group, panels[group], report, limits)
    _title(figure, report)
    figure.savefig(file, dpi=130)
    return True


def _columns(panels: dict[str, list[Row]], names: list[str]) -> list[list[str]]:
    """The groups in order, in two columns of about the same height where there are several."""
    groups = list(panels)
    if len(groups) < 2:
        return [groups]
    heights = [_height(panels[group], names) for group in groups]
    cut = min(range(1, len(groups)), key=lambda n: max(sum(heights[:n]), sum(heights[n:])))
    return [groups[:cut], groups[cut:]]


def _taking(row: Row, names: list[str]) -> list[str]:
    """Who has a bar: everybody with a time but the one that is 1."""
    return [name for name in names if name != _base(row) and not math.isnan(_ahead(row, name))]


def _height(rows: list[Row], names: list[str]) -> float:
    return 0.75 + sum(GAP + BAR * len(_taking(row, names)) for row in rows)


def _base(row: Row) -> str | None:
    return next((name for name in BASES if name in row.entries and row.entries[name].ways), None)


def _ahead(row: Row, name: str) -> float:
    """How many times as fast as the one that is 1; NaN without a time."""
    base, entry = _base(row), row.entries.get(name)
    return float("nan") if base is None or entry is None else row.entries[base].seconds / entry.seconds


def _panel(axes: Any, group: str, rows: list[Row], report: Report, limits: tuple[float, float]) -> None:
    names, at = list(report.versions), 0.0
    ticks: list[float] = []
    for number, row in enumerate(rows):
        taking = _taking(row, names)
        ticks.append(at + BAR * (len(taking) - 1) / 2)
        if number % 2:
            axes.axhspan(at - (BAR + GAP) / 2, at + BAR * len(taking) - (BAR - GAP) / 2, color="0.965", zorder=-2)
        for name in taking:
            _bar(axes, at, row, name, report)
            at += BAR
        at += GAP
    axes.axvline(1, color=COLORS["torch"], linewidth=2, zorder=0)
    axes.set_xscale("log")
    axes.set_xlim(limits[0] / 1.6, limits[1] * 5)
    axes.set_ylim(at - GAP + BAR / 2, -BAR)
    axes.set_yticks(ticks, [_label(row) for row in rows], fontsize=8)
    axes.tick_params(axis="y", length=0)
    shown = [x for x in TICKS if limits[0] / 1.5 <= x <= limits[1] * 1.5]
    axes.set_xticks(shown, [f"{x:g}x" for x in shown], fontsize=8)
    axes.set_xticks([], minor=True)
    axes.grid(axis="x", color="0.92", zorder=-1)
    axes.set_axisbelow(True)
    axes.set_title(group, loc="left", fontsize=11, fontweight="bold")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _bar(axes: Any, at: float, row: Row, name: str, report: Report) -> None:
    """From 1 outwards: to the right what is faster than torch, to the left what is slower."""
    ratio, told = _ahead(row, name), share(row, report)
    axes.barh(at, ratio - 1, left=1, height=BAR * 0.88, color=COLORS[name], linewidth=0)
    text, style = factor(ratio), {"fontsize": 6.5, "color": "0.45"}
    if name == "regard":
        text = text if told == "–" else f"{text}  ·  {told}"
        style = {"fontsize": 7.5, "color": COLORS[name], "fontweight": "bold"}
    if ratio < 1 and name != "regard":
        axes.text(ratio / 1.04, at, text, va="center", ha="right", **style)
    else:
        axes.text(max(ratio, 1) * 1.04, at, text, va="center", **style)


def _label(row: Row) -> str:
    return f"{row.case.name}\n{shape(row.case)}"


def _title(figure: Any, report: Report) -> None:
    from matplotlib.patches import Patch

    figure.suptitle(
        f"{report.table.capitalize()}: how many times as fast as torch (the grey line)\n"
        f"{report.processor}, {report.threads} threads, kernels {report.isa}; measured peak "
        f"{report.peak / 1e9:.0f} Gflop/s (float32), read {report.read / 1e9:.1f} GB/s",
        fontsize=12,
    )
    labels = {name: f"{CANDIDATES[name].title} {version}" for name, version in report.versions.items()}
    handles = [Patch(color=COLORS[name], label=label) for name, label in labels.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
