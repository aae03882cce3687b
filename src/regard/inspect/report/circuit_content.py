"""What the page's script is given of circuits by token: each text once, and numbers of texts."""

from __future__ import annotations

from typing import Any

from regard.inspect.report.circuit_layer import TokenRows
from regard.inspect.report.content import Content
from regard.inspect.report.findings import shown


def circuit_content(report: Content) -> dict[str, Any] | None:
    """For each layer, head and token: the numbers of the names of other tokens, and the rank; None without circuits."""
    layers = next((one.circuits_by_layer for one in report.head_results if one.circuits_by_layer), None)
    if layers is None:
        return None
    names: dict[str, int] = {}

    def numbers(heads: tuple[TokenRows, ...]) -> list[list[Any]]:
        return [
            [
                [[names.setdefault(shown(text, 40), len(names)) for text in others], rank]
                for others, rank in zip(rows.texts, rows.rank.tolist(), strict=True)
            ]
            for rows in heads
        ]

    found = [{"raised": numbers(layer.raised), "sought": numbers(layer.sought)} for layer in layers]
    return {"tokens": [shown(text, 40) for text in layers[0].tokens], "names": list(names), "layers": found}
