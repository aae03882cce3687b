"""The page: a report as one HTML file that needs no network; and the part of it that needs no script."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from html import escape
from itertools import cycle
from string import Template
from typing import BinaryIO

from regard.core.shapes import count_of
from regard.inspect.report.content import Content
from regard.inspect.report.findings import Finding
from regard.inspect.report.page_parts import asset, data_uri, picture, table
from regard.inspect.report.payload import payload
from regard.inspect.report.png import png_of_pixels
from regard.inspect.report.text import facts

SCRIPTS = (
    *("page_data", "page_address", "page_state", "page_colour", "page_frame", "page_map", "page_picture"),
    *("page_tokens", "page_text", "page_lines", "page_sheet", "page_grids", "page_files", "page_save"),
    *("page_save_map", "page_measure", "page_circuits"),
)


def write(report: Content, file: BinaryIO, head: tuple[int, int] | None) -> None:
    """Writes the page into a file, UTF-8."""
    file.write(html(report, head).encode("utf-8", "replace"))  # a lone surrogate is no text


def html(report: Content, head: tuple[int, int] | None) -> str:
    """The page as one text. It makes no requests."""
    script = script_of((*SCRIPTS, "page"))
    return _filled(report, head, script, policy_of(script, "'none'"))


def served(report: Content, head: tuple[int, int] | None) -> tuple[bytes, str]:
    """The page as a server answers it, and its policy: its script may request rows from that server only."""
    script = script_of((*SCRIPTS, "page_serve", "page"))
    policy = policy_of(script, "'self'")
    return _filled(report, head, script, policy).encode("utf-8", "replace"), policy


def _filled(report: Content, head: tuple[int, int] | None, script: str, policy: str) -> str:
    return Template(asset("page.html")).substitute(
        head=head_of(report.title, policy, _css()),
        unit=escape(report.unit),
        find=f"a {escape(report.unit)}" if report.picture is None else "row,column",
        first=escape(report.first_name),
        view="text" if report.picture is None else "image",
        words=asset("page_words.html"),
        header=_header(report),
        figure=_still(report, head),
        picture=_patches(report),
        grids=_grids(report, head),
        data=payload(report, head),
        script=script,
    )


def head_of(title: str, policy: str, css: str) -> str:
    """The head of the document."""
    return Template(asset("page_head.html")).substitute(title=escape(title), policy=policy, css=css)


def policy_of(script: str, connect: str) -> str:
    """A Content-Security-Policy: this script may run, and no other; what it may connect to."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; connect-src {connect}; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )


def script_of(names: Sequence[str]) -> str:
    """The parts of a script, in a scope of their own."""
    parts = "\n".join(asset(f"{name}.js") for name in names)
    return f'"use strict";\n(() => {{\n{parts}}})();\n'


def _css() -> str:
    return asset("page.css") + asset("page_live.css")


def _header(report: Content) -> str:
    return (
        f"<header><h1>{escape(report.title)}</h1>"
        f'<p class="facts"><span>{escape(report.model)}</span> {escape(facts(report))}</p></header>'
        f"{findings_list(report.findings)}"
    )


def findings_list(findings: Sequence[Finding]) -> str:
    """Findings with their rules; the heads that they name are links."""
    said = "".join(f'<li>{_said(found)}<span class="rule">{escape(found.rule)}</span></li>' for found in findings)
    return f'<section aria-label="findings"><ul class="findings">{said}</ul></section>'


def _said(found: Finding) -> str:
    """A finding's sentence: its heads as links, and what it quotes kept from turning the direction of the rest."""
    named = "|".join(sorted((re.escape(head.name) for head in found.heads), key=len, reverse=True))
    parts: list[str] = []
    for text in re.split("(‘.*’)", found.said):
        if text.startswith("‘"):
            parts.append(f'‘<bdi dir="ltr">{escape(text[1:-1])}</bdi>’')
        else:
            parts.append(re.sub(rf"\b({named})\b", r'<a href="#\1">\1</a>', escape(text)) if named else escape(text))
    return "".join(parts)


def _grids(report: Content, head: tuple[int, int] | None) -> str:
    at, _ = report.shown(head)
    hues = cycle(("teal", "amber", "violet"))
    tables = "".join(
        table(grid, "signed" if grid.signs is not None else next(hues), (at.layer, at.head)) for grid in report.overview
    )
    return f'<section class="grids" aria-label="layers and heads">{tables}</section>'


def _patches(report: Content) -> str:
    """The image that was read, below its patches; nothing for a text."""
    if report.picture is None:
        return ""
    image = data_uri(png_of_pixels(report.picture.pixels))
    return (
        '<div class="patches" id="patches" hidden><img src="' + image + '" alt="the image that was read">'
        '<canvas id="overlay" tabindex="0" role="img" aria-label="weights of patches; the arrow keys choose a patch">'
        '</canvas></div><p class="opacity" id="opacity-line" hidden><label>colours over the image '
        '<input id="opacity" type="range" min="0" max="100" step="5"></label></p>'
    )


def _still(report: Content, head: tuple[int, int] | None) -> str:
    """The map of one head as a picture."""
    at, title = report.shown(head)
    layer = report.layers[at.layer]
    alt = (
        f"{title}: weights of {count_of(len(layer.queries), 'query', ',')} (down) on "
        f"{count_of(len(layer.keys), 'key', ',')} (across)"
    )
    return (
        f'<figure class="still" id="still"><figcaption>{escape(title)}</figcaption>{picture(layer, at.head, alt)}'
        "<p>queries downwards, keys to the right; logarithmic colours from 0.0001 to 1; grey: cannot attend</p>"
        "</figure>"
    )
