"""What the search of the site finds first: a table of what people type, and the page that answers it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore")]

FIRST = {
    "vit": "how-to/vit.html",
    "photograph": "how-to/vit.html",
    "speed up": "how-to/embeddings.html",
    "sentence transformers": "how-to/embeddings.html",
    "bfloat16": "how-to/train.html",
    "sliding window": "how-to/sinks.html",
    "sink": "how-to/sinks.html",
    "padding": "how-to/padding.html",
    "alibi": "how-to/alibi.html",
    "flexattention": "how-to/flex.html",
    "paged cache": "how-to/pages.html",
    "kv cache": "how-to/decode.html",
    "induction": "how-to/induction.html",
    "entropy": "how-to/entropy.html",
    "memory-mapped": "how-to/mapped.html",
    "pack": "how-to/pack.html",
    "bahdanau": "how-to/alignment.html",
    "compare": "compare.html",
}
AMONG = {  # the first five
    "npz": "report.html",
    "gqa": "glossary.html",
    "rope": "glossary.html",
    "bertviz": "report.html",
    "circuits": "heads.html",
    "nn.MultiheadAttention": "how-to/replace.html",
}

FOUND = ".md-search-result__item > a"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the tests print what matters."""


@pytest.fixture(scope="module")
def home(site: Path) -> Iterator[Any]:
    """The first page of the site in a browser."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright, which drives a browser")
    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    chromium = next((path for path in found if path), None)
    if chromium is None:
        pytest.skip("needs Chromium on the path")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site)))
    Thread(target=server.serve_forever, daemon=True).start()
    with sync_api.sync_playwright() as play:
        opened = play.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = opened.new_page()
        page.goto(f"http://127.0.0.1:{server.server_port}/index.html")
        yield page
        opened.close()
    server.shutdown()
    server.server_close()


def results(page: Any, query: str) -> list[str]:
    """The pages that are found, the best first.

    The search runs in a worker, in its own time, and until it answers the page lists what it found before. So the list
    is emptied first, and the query is sent at once, not by the letter: what is listed then was found for it.
    """
    box, any_listed = page.locator("[data-md-component='search-query']"), f"document.querySelector('{FOUND}') != null"
    for text, wanted in (("", f"!({any_listed})"), (query, any_listed)):
        box.fill(text)
        box.dispatch_event("keyup")  # the page listens for it
        page.wait_for_function(wanted)
    links = page.locator(FOUND).evaluate_all("found => found.map(a => new URL(a.href).pathname)")
    return list(dict.fromkeys(link.removeprefix("/") for link in links))


@pytest.mark.parametrize("query", FIRST)
def test_a_search_finds_the_right_page_first(home: Any, query: str) -> None:
    assert results(home, query)[0] == FIRST[query]


@pytest.mark.parametrize("query", AMONG)
def test_a_search_finds_the_right_page_among_the_first(home: Any, query: str) -> None:
    assert AMONG[query] in results(home, query)[:5]
