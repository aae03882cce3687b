"""How a report looks on paper: grids of layers × heads, the pooled map of one head, and who receives the mass."""

from __future__ import annotations

import math
import textwrap
from functools import lru_cache
from itertools import accumulate, groupby
from typing import Any, BinaryIO

import torch

from regard.inspect.report.colours import LEAST, palette
from regard.inspect.report.content import Content
from regard.inspect.report.findings import received, shown
from regard.inspect.report.grids import Grid, overview
from regard.inspect.report.layer import Axis, Layer
from regard.inspect.report.text import facts

WIDTH = 12.0  # inches
INK, QUIET, GROUND, NOWHERE = "#1b1f27", "#646b78", "#ffffff", "#d5d9e0"
HUES = ("#0f766e", "#b45309", "#6d28d9")
NAMED_TICKS = 36  # tokens up to which an axis names each of them
BARS = 8
GRID, LETTER = 2.5, 0.062  # inches: the height of a grid, and of a letter beside it
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
    """The matplotlib figure: a title, three grids, the map of a head beside the mass per key, the findings."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    at, title = report.shown(head)
    layer = report.layers[at.layer]
    said = [line for found in report.findings for line in textwrap.wrap(found.said, 150)]
    foot = 10.45 + _room(layer.keys)
    figure = Figure(figsize=(WIDTH, foot + 0.22 * len(said) + 0.15), facecolor=GROUND)
    FigureCanvasAgg(figure)  # no display and no global state: pyplot would bring both
    _write(figure, 0.45, report.title, size=17, weight="bold", color=INK)
    _write(figure, 0.85, f"{report.model}   {facts(report)}", size=9.5, color=QUIET)
    for number, (grid, hue) in enumerate(zip(overview(report.layers, report.unit), HUES, strict=True)):
        _draw_grid(_axes(figure, 0.65 + 3.88 * number, 1.4, 2.85, GRID), grid, hue, (at.layer, at.head))
    left = max(0.65 + _room(layer.queries), 1.15)
    _draw_map(_axes(figure, left, 4.9, 5.85 - left, 4.7), layer, at.head, title)
    if not bool(layer.cells.all()):
        _draw_key(figure, 5.95, 9.78, "cannot attend")
    profile, bars = _axes(figure, 7.6, 4.9, 4.1, 1.75), _axes(figure, 9.2, 7.55, 2.5, 2.05)
    _draw_received(profile, bars, report)
    for number, line in enumerate(said):
        _write(figure, foot + 0.22 * number, line, size=9.5, color=INK)
    return figure


def _axes(figure: Any, left: float, top: float, width: float, height: float) -> Any:
    """Axes at a place in inches from the upper left corner. Every label has its room: nothing is laid out twice."""
    across, down = figure.get_size_inches()
    return figure.add_axes((left / across, 1 - (top + height) / down, width / across, height / down))


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


def _title(axes: Any, text: str, x: float = 0.0) -> None:
    axes.set_title(drawable(text), loc="left", x=x, size=10.5, weight="bold", color=INK, pad=7, parse_math=False)


def _quiet(axes: Any, *hidden: str) -> None:
    axes.tick_params(colors=QUIET, labelsize=8, length=2.5, width=0.6)
    for name, spine in axes.spines.items():
        spine.set_visible(name not in hidden)
        spine.set_color("#b8bec9")
        spine.set_linewidth(0.6)


def _draw_grid(axes: Any, grid: Grid, hue: str, marked: tuple[int, int]) -> None:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import MaxNLocator

    rows, heads = len(grid.values), max(map(len, grid.values))
    cells = [[*row, *[math.nan] * (heads - len(row))] for row in grid.values]
    colours = LinearSegmentedColormap.from_list(grid.title, ["#f3f4f6", hue])
    x, y = ([n - 0.5 for n in range(count + 1)] for count in (heads, rows))
    finite = [[v if math.isfinite(v) else math.nan for v in row] for row in cells]
    image = axes.pcolormesh(
        x, y, finite, cmap=colours, vmin=grid.low, vmax=grid.high or 1, edgecolors=GROUND, linewidth=min(0.8, 10 / rows)
    )
    axes.add_patch(Rectangle((marked[1] - 0.5, marked[0] - 0.5), 1, 1, fill=False, edgecolor=INK, linewidth=1.3))
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_xlabel("head", color=QUIET)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True, steps=[1, 2, 4, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(12, integer=True, steps=[1, 2, 4, 5, 10]))
    _name_layers(axes, grid)
    _quiet(axes, "top", "right", "left", "bottom")
    _title(axes, grid.label)
    _bar(axes, image)


def _name_layers(axes: Any, grid: Grid) -> None:
    """At the left: "layer"; or the name of each stack beside its rows, which are counted from 0 in each."""
    places = [row.rpartition("L") for row in grid.rows]
    stacks, numbers = [stack.strip() for stack, _, _ in places], [number for _, _, number in places]
    if len(set(stacks)) == 1:
        axes.set_ylabel("layer", color=QUIET)
        return
    axes.yaxis.set_major_formatter(lambda row, _: numbers[int(row)] if 0 <= row < len(numbers) else "")
    runs = [(stack, len(list(rows))) for stack, rows in groupby(stacks)]
    ends = list(accumulate(length for _, length in runs))
    for end in ends[:-1]:
        axes.axhline(end - 0.5, color=INK, linewidth=0.8)
    form = {"rotation": 90, "ha": "center", "va": "center", "size": 8, "color": QUIET}
    half = [LETTER / 2 * (len(stack) + 1) * len(stacks) / GRID for stack, _ in runs]  # of each name, in rows
    middles = [end - length / 2 for (_, length), end in zip(runs, ends, strict=True)]
    for (stack, _), middle in zip(runs, apart(middles, half, len(stacks)), strict=True):
        axes.annotate(stack, (0, middle - 0.5), (-24, 0), ("axes fraction", "data"), "offset points", **form)


def apart(middles: list[float], half: list[float], end: float) -> list[float]:
    """The middles of names beside an axis from 0 to `end`, moved as little as keeps each from the next.

    >>> apart([20.0, 41.0, 43.0], [3.0, 3.0, 5.0], 44.0)
    [20.0, 31.0, 39.0]
    """
    found, limit = list[float](), end
    for middle, size in zip(reversed(middles), reversed(half), strict=True):
        found.insert(0, min(middle, limit - size))
        limit = found[0] - size
    limit = 0.0
    for number, size in enumerate(half):
        found[number] = max(found[number], limit + size)
        limit = found[number] + size
    return found


def _bar(axes: Any, image: Any, label: str = "", **form: Any) -> None:
    box, across = axes.get_position(), 1 / axes.figure.get_size_inches()[0]
    place = axes.figure.add_axes((box.x1 + 0.1 * across, box.y0, 0.13 * across, box.height))
    bar = axes.figure.colorbar(image, cax=place, **form)
    bar.outline.set_visible(False)
    bar.ax.tick_params(which="both", colors=QUIET, labelsize=8, length=2.5, width=0.6)
    bar.set_label(label, color=QUIET)


def _draw_map(axes: Any, layer: Layer, head: int, title: str) -> None:
    from matplotlib.colors import ListedColormap, LogNorm

    shown_weights = layer.maps[head].clamp(min=LEAST).masked_fill(~layer.cells, math.nan)
    colours = ListedColormap([(r / 255, g / 255, b / 255) for r, g, b in palette()])
    axes.set_facecolor(NOWHERE)
    image = axes.pcolormesh(
        layer.col_edges.tolist(), layer.row_edges.tolist(), shown_weights.tolist(),
        norm=LogNorm(LEAST, 1), cmap=colours, rasterized=True,
    )  # fmt: skip
    axes.set_ylim(len(layer.queries), 0)
    _name_ticks(axes.xaxis, layer.keys, 90)
    _name_ticks(axes.yaxis, layer.queries, 0)
    axes.set_xlabel("key", color=INK)
    axes.set_ylabel("query", color=INK)
    _quiet(axes, "top", "right")
    _title(axes, textwrap.shorten(title, 64, placeholder="…"))
    _bar(axes, image, "weight on the cell's keys, mean of its queries", extend="min", format="%g")


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
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    if not _named(tokens):
        return 0.0
    font = FontProperties(size=8)
    # A path of nothing but spaces has no end.
    widths = [TextPath((0, 0), f"{name}.", prop=font).get_extents().x1 for name in _tick_names(tokens)]
    return max(widths) / 72


def _draw_received(profile: Any, bars: Any, report: Content) -> None:
    from matplotlib.ticker import MaxNLocator

    mass = 100 * received(report.layers)
    _title(profile, "mass that each key receives, % of all")
    _title(
        bars,
        "keys that receive the most",
        (profile.get_position().x0 - bars.get_position().x0) / bars.get_position().width,
    )
    for axes in (profile, bars):
        _quiet(axes, "top", "right")
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


def drawable(text: str) -> str:
    """The text as the font can draw it: each character that it lacks as ‹code point›, spaces and line ends shown."""
    known = _characters()
    return "".join(c if ord(c) in known or not c.isprintable() else f"‹{ord(c):X}›" for c in text)


@lru_cache(maxsize=1)
def _characters() -> frozenset[int]:
    from matplotlib.font_manager import FontProperties, findfont
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(findfont(FontProperties())).get_charmap())
