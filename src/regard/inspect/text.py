"""How facts look in a terminal: grids of layers × heads in block characters."""

from __future__ import annotations

from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"


def block(value: float, low: float, high: float) -> str:
    """One character for a value between low and high, the ends included; ends are kept beyond them.

    >>> "".join(block(x / 4, 0, 1) for x in range(5))
    '▁▃▅▇█'
    """
    share = 0.0 if high <= low else (value - low) / (high - low)
    return BLOCKS[min(max(int(share * len(BLOCKS)), 0), len(BLOCKS) - 1)]


def grid(title: str, values: Sequence[Sequence[float]], low: float, high: float, unit: str) -> list[str]:
    """Lines of a picture: one row a layer, one block a head, and the scale in the title.

    >>> print("\\n".join(grid("entropy", [[0.0, 1.0], [2.0, 1.0]], 0, 2, "nats")))
    entropy  ▁ 0  █ 2 nats
         0 1
    L0   ▁ ▅
    L1   █ ▅
    """
    heads = " ".join(f"{n % 10}" for n in range(max(map(len, values), default=0)))
    lines = [f"{title}  {BLOCKS[0]} {low:g}  {BLOCKS[-1]} {high:g} {unit}".rstrip(), f"     {heads}"]
    return lines + [f"L{n:<3} " + " ".join(block(v, low, high) for v in row) for n, row in enumerate(values)]


def side_by_side(*pictures: list[str], gap: int = 4) -> list[str]:
    """Pictures of equal height next to each other.

    >>> print("\\n".join(side_by_side(["a", "bc"], ["d", "e"])))
    a     d
    bc    e
    """
    widths = [max(map(len, picture)) for picture in pictures]
    rows = zip(*pictures, strict=True)
    return [(" " * gap).join(part.ljust(w) for part, w in zip(row, widths, strict=True)).rstrip() for row in rows]
