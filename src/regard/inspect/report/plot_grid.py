"""A grid of layers × heads on paper."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from itertools import accumulate, groupby
from typing import Any

from regard.inspect.report.grids import Grid
from regard.inspect.report.plot_parts import GROUND, INK, QUIET, axes_at, bar, quiet, title

HUES = ("#0f766e", "#b45309", "#6d28d9")
PALE, BELOW, ABOVE = "#f3f4f6", "#1d4ed8", "#c2410c"  # 0, and numbers below and above it where signs matter
HEIGHT, LETTER = 2.5, 0.062  # inches: the height of a grid, and of a letter beside it
ACROSS, ROW = 3, 3.7  # grids beside each other, and the height of such a row with titles and labels
TITLE = 38  # letters of a title that have room over a grid


def rows_of_grids(grids: Sequence[Grid]) -> float:
    """The height in inches that they take, ACROSS of them in a row."""
    return ROW * math.ceil(len(grids) / ACROSS)


def draw_grids(figure: Any, grids: Sequence[Grid], top: float, marked: tuple[int, int]) -> None:
    """Draws grids in rows from `top` on, in inches, one head marked."""
    for number, grid in enumerate(grids):
        row, column = divmod(number, ACROSS)
        width = 2.85 if grid.signs is None else 2.7  # beside the colours stands what signs mean
        place = axes_at(figure, 0.65 + 3.88 * column, top + ROW * row, width, HEIGHT)
        _draw_grid(place, grid, HUES[column], marked)


def _draw_grid(axes: Any, grid: Grid, hue: str, marked: tuple[int, int]) -> None:
    from matplotlib.colors import LinearSegmentedColormap
    from matplotlib.patches import Rectangle
    from matplotlib.ticker import MaxNLocator

    rows, heads = len(grid.values), max(map(len, grid.values))
    cells = [[*row, *[math.nan] * (heads - len(row))] for row in grid.values]
    ends = [PALE, hue] if grid.signs is None else [BELOW, PALE, ABOVE]
    colours = LinearSegmentedColormap.from_list(grid.title, ends)
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
    quiet(axes, "top", "right", "left", "bottom")
    title(axes, "\n".join(textwrap.wrap(grid.label, TITLE)))
    bar(axes, image, "" if grid.signs is None else f"− {grid.signs[0]}        + {grid.signs[1]}")


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
    half = [LETTER / 2 * (len(stack) + 1) * len(stacks) / HEIGHT for stack, _ in runs]  # of each name, in rows
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
