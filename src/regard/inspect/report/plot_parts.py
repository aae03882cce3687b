"""Parts of the overview picture: axes with room for every label, titles, bars of colours, text that the font has."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

INK, QUIET, GROUND = "#1b1f27", "#646b78", "#ffffff"


def axes_at(figure: Any, left: float, top: float, width: float, height: float) -> Any:
    """Axes at a place in inches from the upper left corner. Every label has its room: nothing is laid out twice."""
    across, down = figure.get_size_inches()
    return figure.add_axes((left / across, 1 - (top + height) / down, width / across, height / down))


def title(axes: Any, text: str, x: float = 0.0) -> None:
    """A title of one line or more, at the left or, as a share of the axes' width, at x."""
    shown = "\n".join(map(drawable, text.splitlines()))
    axes.set_title(shown, loc="left", x=x, size=10.5, weight="bold", color=INK, pad=7, parse_math=False)


def quiet(axes: Any, *hidden: str) -> None:
    """Ticks and lines in grey; without the sides that are named."""
    axes.tick_params(colors=QUIET, labelsize=8, length=2.5, width=0.6)
    for name, spine in axes.spines.items():
        spine.set_visible(name not in hidden)
        spine.set_color("#b8bec9")
        spine.set_linewidth(0.6)


def bar(axes: Any, image: Any, label: str = "", **form: Any) -> None:
    """The colours of an image with their numbers, at the right of its axes."""
    box, across = axes.get_position(), 1 / axes.figure.get_size_inches()[0]
    place = axes.figure.add_axes((box.x1 + 0.1 * across, box.y0, 0.13 * across, box.height))
    bar = axes.figure.colorbar(image, cax=place, **form)
    bar.outline.set_visible(False)
    bar.ax.tick_params(which="both", colors=QUIET, labelsize=8, length=2.5, width=0.6)
    bar.set_label(label, color=QUIET)


def drawable(text: str) -> str:
    """The text as the font can draw it: each character that it lacks as ‹code point›, spaces and line ends shown."""
    known = _characters()
    return "".join(c if ord(c) in known or not c.isprintable() else f"‹{ord(c):X}›" for c in text)


@lru_cache(maxsize=1)
def _characters() -> frozenset[int]:
    from matplotlib.font_manager import FontProperties, findfont
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(findfont(FontProperties())).get_charmap())
