"""The label of a head, as reports write it."""

from __future__ import annotations

import re


def parse_head(label: str) -> tuple[str | int, int]:
    """The layer and the head of a label: the layer's name, as in decoder cross L3H1, or its number, as in 3,1.

    ValueError for anything else.

    >>> parse_head("L3H1"), parse_head("decoder cross L3H1"), parse_head("3,1")
    (('L3', 1), ('decoder cross L3', 1), (3, 1))
    """
    named = re.fullmatch(r"\s*((?:encoder |decoder )?(?:cross )?)L(\d+)H(\d+)\s*", label, re.IGNORECASE)
    if named is not None:
        stack, layer, head = named.groups()
        return f"{stack.lower()}L{int(layer)}", int(head)
    numbers = re.fullmatch(r"\s*(\d+)\s*,\s*(\d+)\s*", label)
    if numbers is None:
        raise ValueError(
            f"{label!r} is no head; expected a label such as L3H1 (layer 3, head 1), decoder L3H1, or 3,1."
        )
    return int(numbers[1]), int(numbers[2])
