"""The page of a comparison: a table of changes, and the maps of heads before and after; no script."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from regard.inspect.report.content import Content
from regard.inspect.report.findings import Head, percent
from regard.inspect.report.grids import Grid
from regard.inspect.report.page_parts import asset, picture, table
from regard.inspect.report.text import facts, name

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def html(before: Content, after: Content, change: Grid, shown: Sequence[tuple[Head, Sequence[str]]]) -> str:
    """The page as one text; `shown` are the heads whose maps stand side by side, each with its numbers."""
    title = f"{before.title} → {after.title}"
    most = (shown[0][0].layer, shown[0][0].head)
    read = "".join(
        f'<p class="facts"><span>{label}</span> {escape(name(report))}  {escape(facts(report))}</p>'
        for label, report in (("before", before), ("after", after))
    )
    heads = "".join(_head(before, after, head, numbers) for head, numbers in shown)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f'<title>{escape(title)} – regard</title><link rel="icon" href="data:,">'
        f'<style>{asset("page.css")}{asset("page_compare.css")}</style></head><body class="regard">'
        f"<header><h1>{escape(title)}</h1>{read}</header><main>"
        f'<h2>The share of its mass that each head has moved to other keys</h2><section class="grids">'
        f"{table(change, 'violet', most)}</section>"
        f'<h2>The heads that changed most</h2><div class="changes">{heads}</div></main></body></html>\n'
    )


def _head(before: Content, after: Content, head: Head, numbers: Sequence[str]) -> str:
    sides = "".join(
        f"<figure>{picture(report.layers[head.layer], head.head, f'{head.name} {label}')}"
        f"<figcaption>{label}</figcaption></figure>"
        for label, report in (("before", before), ("after", after))
    )
    said = "".join(f"<li>{escape(one)}</li>" for one in numbers)
    layer = escape(after.layers[head.layer].name)
    return (
        f'<section class="change"><h3><b>{head.name}</b> {layer}: {percent(head.value)} of its mass</h3>'
        f'<div class="sides">{sides}</div><ul class="quiet">{said}</ul></section>'
    )
