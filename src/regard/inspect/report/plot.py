"""The picture of a report: grids of layers × heads, the pooled map of one head, and the mass that each key receives."""

from __future__ import annotations

import math
import textwrap
from typing import Any, BinaryIO

import torch

from regard.inspect.report.axis import Axis
from regard.inspect.report.colours import LEAST, palette
from regard.inspect.report.content import Content
from regard.inspect.report.findings import received, shown
from regard.inspect.report.layer import Layer
from regard.inspect.report.plot_grid import draw_grids, rows_of_grids
from regard.inspect.report.plot_parts import GROUND, INK, QUIET, axes_at, bar, drawable, quiet, title
from regard.inspect.report.scales import largest_finite
from regard.inspect.report.text import facts

WIDTH = 12.0  # inches
NOWHERE = "#d5d9e0"
NAMED_TICKS = 36  # tokens up to which an axis names each of them
BARS = 8
DEPTH = 1e4  # of the largest mass to the least that is drawn


def write(report: Content, file: BinaryIO, suffix: str, head: tuple[int, int] | None) -> None:
    """Draws the overview into a file: suffix "png", "svg" or "pdf"."""
    from matplotlib import rc_context

    # Text stays text in a vector format, so that it can be searched; and the same report gives the same bytes.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "regard", "pdf.fonttype": 42, "font.size": 9}):
        figure = overview_figure(report, head)
        metadata = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[suffix]
        figure.savefig(file, format=suffix, dpi=140, metadata=metadata)


def overview_figure(report: Content, head: tuple[int, int] | None) -> Any:
    """The matplotlib figure: a title, three grids, the map of a head beside the mass per key, more grids, findings."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    at, name = report.shown(head)
    layer = report.layers[at.layer]
    said = [line for found in report.findings for line in textwrap.wrap(found.said, 150)]
    below = 10.45 + _room(layer.keys)
    grids = report.overview
    foot = below + rows_of_grids(grids[3:])
    figure = Figure(figsize=(WIDTH, foot + 0.22 * len(said) + 0.15), facecolor=GROUND)
    FigureCanvasAgg(figure)  # no display and no global state: pyplot would bring both
    _write(figure, 0.45, report.title, size=17, weight="bold", color=INK)
    _write(figure, 0.85, f"{report.model}   {facts(report)}", size=9.5, color=QUIET)
    draw_grids(figure, grids[:3], 1.4, (at.layer, at.head))
    draw_grids(figure, grids[3:], below + 0.25, (at.layer, at.head))
    left = max(0.65 + _room(layer.queries), 1.15)
    _draw_map(axes_at(figure, left, 4.9, 5.85 - left, 4.7), layer, at.head, name, LogNorm(LEAST, 1))
    if not bool(layer.cells.all()):
        _draw_key(figure, 5.95, 9.78, "cannot attend")
    profile, bars = axes_at(figure, 7.6, 4.9, 4.1, 1.75), axes_at(figure, 9.2, 7.55, 2.5, 2.05)
    _draw_received(profile, bars, report)
    for number, line in enumerate(said):
        _write(figure, foot + 0.22 * number, line, size=9.5, color=INK)
    return figure


def head_figure(report: Content, head: tuple[int, int] | None) -> Any:
    """The matplotlib figure of the map of one head: rows are queries, columns keys, their tokens at the axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    at, name = report.shown(head)
    layer = report.layers[at.layer]
    rows, cols = layer.maps.shape[-2:]
    side = min(max(0.24, 2.4 / max(rows, cols)), 4.8 / max(rows, cols))  # inches of a cell
    width, height = max(side * cols, 1.6), max(side * rows, 1.6)
    left, below = max(0.65 + _room(layer.queries), 1.15), 0.75 + _room(layer.keys)
    figure = Figure(figsize=(left + width + 1.2, 0.55 + height + below), facecolor=GROUND)
    FigureCanvasAgg(figure)
    name = textwrap.shorten(name, int(10 * (width + 1)), placeholder="…")
    _draw_map(axes_at(figure, left, 0.55, width, height), layer, at.head, name, _scale_of(layer.maps[at.head]))
    return figure


def _scale_of(weights: torch.Tensor) -> Any:
    """Linear where at least 80 % of the mass is in weights of a tenth of the largest or more; else logarithmic."""
    from matplotlib.colors import LogNorm, Normalize

    most = largest_finite(weights)
    heavy = float(weights[weights >= most / 10].sum()) >= 0.8 * float(weights.nansum())
    return Normalize(0, most or 1) if heavy else LogNorm(LEAST, 1)


def _write(figure: Any, top: float, text: str, **form: Any) -> None:
    across, down = figure.get_size_inches()
    figure.text(0.3 / across, 1 - top / down, drawable(text), va="center", parse_math=False, **form)


def _draw_key(figure: Any, left: float, top: float, text: str) -> None:
    """What the colour of cells without a number means: a square of it, and a word."""
    from matplotlib.patches import Rectangle

    (across, down), side = figure.get_size_inches(), 0.13
    corner = (left / across, 1 - (top + side / 2) / down)
    place = Rectangle(corner, side / across, side / down, facecolor=NOWHERE, transform=figure.transFigure)
    figure.add_artist(place)
    figure.text((left + 0.2) / across, 1 - top / down, text, va="center_baseline", size=8, color=QUIET)


def _draw_map(axes: Any, layer: Layer, head: int, name: str, scale: Any) -> None:
    from matplotlib.colors import ListedColormap

    shown_weights = layer.maps[head].clamp(min=LEAST).masked_fill(~layer.cells, math.nan)
    colours = ListedColormap([(r / 255, g / 255, b / 255) for r, g, b in palette()])
    axes.set_facecolor(NOWHERE)
    image = axes.pcolormesh(
        layer.col_edges.tolist(), layer.row_edges.tolist(), shown_weights.tolist(),
        norm=scale, cmap=colours, rasterized=True,
    )  # fmt: skip
    axes.set_ylim(len(layer.queries), 0)
    _name_ticks(axes.xaxis, layer.keys, 90)
    _name_ticks(axes.yaxis, layer.queries, 0)
    axes.set_xlabel("key", color=INK)
    axes.set_ylabel("query", color=INK)
    quiet(axes, "top", "right")
    title(axes, textwrap.shorten(name, 64, placeholder="…"))
    single = layer.maps.shape[-2:] == (len(layer.queries), len(layer.keys))
    said = "weight" if single else "weight on the cell's keys, mean of its queries"
    bar(axes, image, said, extend="min" if scale.vmin else "neither", format="%g")


def _named(tokens: Axis) -> bool:
    """Whether each token gets a tick of its own."""
    return bool(tokens.tokens) and len(tokens) <= NAMED_TICKS


def _name_ticks(axis: Any, tokens: Axis, rotation: int) -> None:
    if _named(tokens):
        names = _tick_names(tokens)
        axis.set_ticks([n + 0.5 for n in range(len(tokens))], names, rotation=rotation, parse_math=False)


def _tick_names(tokens: Axis) -> list[str]:
    return [_fitted(token, 12) for token in tokens.tokens]


def _room(tokens: Axis) -> float:
    """Inches that the longest name at an axis takes; 0 for numbers, which always have their room."""
    from matplotlib import rc_context
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    if not _named(tokens):
        return 0.0
    font = FontProperties(size=8)
    with rc_context({"text.parse_math": False}):  # a token of two dollars is no formula
        # A path of nothing but spaces has no end.
        widths = [TextPath((0, 0), f"{name}.", prop=font).get_extents().x1 for name in _tick_names(tokens)]
    return max(widths) / 72


def _draw_received(profile: Any, bars: Any, report: Content) -> None:
    from matplotlib.ticker import MaxNLocator

    mass = 100 * received(report.layers).nan_to_num(0)
    title(profile, "mass that each key receives, % of all")
    title(
        bars,
        "keys that receive the most",
        (profile.get_position().x0 - bars.get_position().x0) / bars.get_position().width,
    )
    for axes in (profile, bars):
        quiet(axes, "top", "right")
    if not len(mass):
        for axes in (profile, bars):
            axes.text(
                0.5, 0.5, "no self-attention was seen", color=QUIET, ha="center", va="center", transform=axes.transAxes
            )
            axes.set_axis_off()
        return
    keys = max((one for one in report.layers if one.looks_at_itself), key=lambda one: len(one.keys)).keys
    low = max(float(mass.min()) / 1.5, float(mass.max()) / DEPTH, 1e-30)
    profile.fill_between(range(len(mass)), mass.tolist(), low, step="mid", color="#9d1f74", linewidth=0.4)
    profile.set_yscale("log")
    profile.yaxis.set_major_formatter("{x:g}")
    profile.yaxis.set_minor_formatter("")
    profile.xaxis.set_major_locator(MaxNLocator(7, integer=True))
    profile.set_ylim(low, float(mass.max()) * 1.4 or 1)
    profile.set_xlim(-0.5, len(mass) - 0.5)
    profile.set_xlabel("key", color=INK)
    _draw_bars(bars, mass, keys)


def _draw_bars(axes: Any, mass: torch.Tensor, keys: Axis) -> None:
    from matplotlib.ticker import MaxNLocator

    best = mass.topk(min(BARS, len(mass)))
    found = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    axes.barh(range(len(found)), [share for _, share in found], color="#d03765", height=0.62)
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set_xlim(0, (max(share for _, share in found) or 1) * 1.25)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    names = [f"{_fitted(keys.name(key), 18)}  {key:,}" for key, _ in found]
    axes.set_yticks(range(len(found)), names, parse_math=False)
    for row, (_, share) in enumerate(found):
        axes.annotate(f"{share:.2g} %", (share, row), xytext=(4, 0), textcoords="offset points", va="center",
                      size=8, color=QUIET)  # fmt: skip
    axes.set_xlabel("% of all mass (token, key)", color=QUIET)
    axes.tick_params(axis="y", labelcolor=INK, length=0)


def _fitted(token: str, longest: int) -> str:
    # What the font lacks gets longer, and what stands for spaces may be among it.
    return shown(drawable(shown(token, 2 * longest)), longest)
