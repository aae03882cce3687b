"""Visits to a report's page, in a real browser that has no network."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sample_reports as reports
from page_visits import Visit

QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright, which drives a browser")
    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome"))
    chromium = next((path for path in found if path), None)
    if chromium is None:
        pytest.skip("needs Chromium on the path")
    with sync_api.sync_playwright() as play:
        opened = play.chromium.launch(executable_path=chromium, args=list(QUIET))
        yield opened
        opened.close()


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page whose tokens break what is careless."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    reports.nasty().save(path, head=(0, 1))
    return path


@pytest.fixture
def visit(browser: Any, file: Path) -> Iterator[Any]:
    opened: list[Visit] = []

    def visiting(path: Path = file, **form: Any) -> Visit:
        opened.append(Visit(browser, path, **form))
        return opened[-1]

    yield visiting
    for one in opened:
        one.context.close()
