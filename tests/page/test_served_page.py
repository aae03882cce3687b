"""The page as `regard look --serve` shows it: every row in full, whatever the length; and what the server refuses."""

from __future__ import annotations

import http.client
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import regard as rg
from regard.demo.model import load
from regard.demo.reading import read
from regard.inspect.report.server import PageServer

TEXT = (b"She sells sea shells by the sea shore, the shells that she sells. " * 10)[:600]


@pytest.fixture(scope="module")
def report() -> rg.Report:
    return read(load(), TEXT, facts=(*rg.Report.FACTS, rg.facts.Inputs()))


@pytest.fixture(scope="module")
def server(report: rg.Report) -> Iterator[PageServer]:
    server = report.serve()
    yield server
    server.close()


def test_from_python_it_is_served_until_it_is_closed(report: rg.Report) -> None:
    server = report.serve("L3H1")
    row = Answer(server, f"/{server.token}/row?layer=3&head=1&query=300")
    assert np.array_equal(np.nan_to_num(np.frombuffer(row.body, "<f4")), report.row("L3H1", 300).numpy())
    assert f'href="{server.url}"' in server._repr_html_() and server.url in repr(server)
    server.close()
    with pytest.raises(ConnectionError):
        Answer(server, f"/{server.token}/")


class Answer:
    """What the server answers to one request, made by hand."""

    def __init__(
        self, server: PageServer, path: str, method: str = "GET", host: str | None = None, body: str = ""
    ) -> None:
        port = server.server_address[1]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.putrequest(method, path, skip_host=True)
        connection.putheader("Host", host or f"127.0.0.1:{port}")
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body.encode())
        answer = connection.getresponse()
        self.status, self.body, self.headers = answer.status, answer.read(), answer.headers
        connection.close()


@pytest.fixture
def opened(browser: Any, server: PageServer) -> Iterator[Any]:
    contexts: list[Any] = []

    def opening(address: str = "", **form: Any) -> Any:
        contexts.append(browser.new_context(viewport={"width": 1200, "height": 900}, **form))
        page = contexts[-1].new_page()
        page.said, page.asked = [], []
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.on("request", lambda request: page.asked.append(request.url))
        page.goto(server.url + address)
        page.wait_for_selector("body[data-ready]", timeout=10_000)
        return page

    yield opening
    for context in contexts:
        context.close()


def exact(page: Any) -> None:
    page.locator("#mass", has_text=re.compile("^exact")).wait_for(timeout=10_000)


def listed(page: Any) -> dict[int, float]:
    lines = page.locator("#tops .bar-line")
    numbers, shares = (lines.locator(where).all_inner_texts() for where in ("small", ".share"))
    return {int(n): float(re.sub(r"[^\d.]", "", share)) for n, share in zip(numbers, shares, strict=True)}


def test_a_token_of_a_long_text_shows_all_its_keys(report: rg.Report, server: PageServer, opened: Any) -> None:
    page = opened("#L2H1&query=400&key=399&scale=log")
    exact(page)
    row = report.row("L2H1", 400)
    order = row.argsort(descending=True)[:8].tolist()
    assert set(listed(page)) == set(order)
    for key, share in listed(page).items():
        assert share == float(f"{100 * row[key]:.0f}" if row[key] >= 0.0995 else f"{100 * row[key]:.2g}")
    entropy = -torch.special.xlogy(row, row).sum()
    mass = page.inner_text("#mass")
    assert mass.startswith("exact, all 600 keys: 8 heaviest, ") and mass.endswith(f"entropy {entropy:.2f} nats")
    grounds = page.locator("#words > bdi").evaluate_all("words => words.map(w => w.style.background)")
    assert all(bool(ground) == (p > 1e-4) for ground, p in zip(grounds, row, strict=True) if not 9e-5 < p < 1.1e-4)
    assert sum(map(bool, grounds)) > 20
    assert page.inner_text("#text-scale .off") == "cannot attend"
    assert page.locator("#words [data-n='401']").get_attribute("class") == "token off"
    assert page.asked[1:] == [f"{server.url}row?layer=2&head=1&query=400"] and page.said == []


@pytest.mark.full
def test_what_is_chosen_is_asked_for_once(server: PageServer, opened: Any) -> None:
    page = opened("#L1H0&query=300&key=299")
    exact(page)
    page.locator("#words [data-n='310']").click()
    page.mouse.move(2, 2)
    page.locator("#about", has_text="(310)").wait_for()
    exact(page)
    page.locator("#words [data-n='300']").click()
    page.mouse.move(2, 2)
    exact(page)
    page.locator("[value='keys']").click()
    assert page.inner_text("#mass").startswith("queries that have this key among their 4 heaviest")
    page.locator("[value='queries']").click()
    page.locator("[value='lines']").click()
    with page.expect_response(re.compile("layer=1&head=2&query=300")):
        page.locator("#heads [data-head='2']").click()
    exact(page)
    rows = [url.rpartition("?")[2] for url in page.asked[1:]]
    assert sorted(set(rows)) == sorted(rows)
    assert {"layer=1&head=0&query=310", "layer=1&head=0&query=300", "layer=1&head=2&query=300"} <= set(rows)
    assert page.said == []


@pytest.mark.full
def test_an_end_of_the_server_is_said(report: rg.Report, browser: Any) -> None:
    with PageServer(report) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        page = browser.new_page()
        page.goto(f"{server.url}#L1H0&query=300&key=299")
        exact(page)
        server.shutdown()
        thread.join()
        page.route("**/row?*", lambda route: route.abort())
    page.locator("#words [data-n='310']").click()
    page.mouse.move(2, 2)
    page.locator("#served", has_text="The server has stopped").wait_for()
    assert "4 heaviest" in page.inner_text("#mass")
    page.close()


def test_the_row_is_float32_and_nan_where_nothing_is_seen(report: rg.Report, server: PageServer) -> None:
    answer = Answer(server, f"/{server.token}/row?layer=3&head=1&query=400")
    assert answer.status == 200 and answer.headers["Content-Type"] == "application/octet-stream"
    row = torch.frombuffer(bytearray(answer.body), dtype=torch.float32)
    assert row.isnan().tolist() == [not 400 - 255 <= n <= 400 for n in range(600)]
    assert torch.equal(row.nan_to_num(0), report.row("L3H1", 400))


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("layer=3&head=1&query=600", "there is no query 600"),
        ("layer=3&head=4&query=0", "there is no layer 3 with a head 4"),
        ("layer=-1&head=0&query=0", "there is no layer -1"),
        ("layer=3&head=1", "'query' is missing"),
        ("layer=x&head=1&query=0", "invalid literal"),
        ("layer=3&head=1&query=0&a=b", "Max number of fields exceeded"),
    ],
)
def test_a_row_that_is_not_there(server: PageServer, query: str, said: str) -> None:
    answer = Answer(server, f"/{server.token}/row?{query}")
    assert answer.status == 400 and said in answer.body.decode()


def test_another_path_gets_status_404(server: PageServer) -> None:
    token = server.token
    assert len(token) >= 43
    near = (f"/{token}", f"/{token[:-1]}/", f"/{token}x/", f"/{token}/../", f"/{token}/page.js", f"/{token}/row/")
    for path in ("/", "//", "*", "/%00/", "/row?layer=0&head=0&query=0", *near):
        answer = Answer(server, path)
        assert (answer.status, answer.body) == (404, b"there is nothing here.\n"), path
        assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'")


def test_it_only_reads(server: PageServer) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD", "PATCH", "BREW"):
        answer = Answer(server, f"/{server.token}/", method, body="x" * 10)
        assert answer.status == 405 and answer.headers["Allow"] == "GET", method


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1", "127.0.0.1:1", "localhost.evil.example", "0.0.0.0", ""])
def test_another_host_is_refused(server: PageServer, host: str) -> None:
    answer = Answer(server, f"/{server.token}/", host=host or "-")
    assert answer.status == 403 and server.token not in answer.body.decode()


def test_its_own_names_are_answered(server: PageServer) -> None:
    for host in server.hosts:
        answer = Answer(server, f"/{server.token}/", host=host)
        assert answer.status == 200
        policy = answer.headers["Content-Security-Policy"]
        assert "connect-src 'self'" in policy and "frame-ancestors 'none'" in policy
        assert (answer.headers["Cache-Control"], answer.headers["Referrer-Policy"]) == ("no-store", "no-referrer")


def test_nobody_else_can_reach_it(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    others = {entry[4][0] for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} - {"127.0.0.1"}
    port = server.server_address[1]
    for address in others or {"127.0.0.2"}:
        with pytest.raises(ConnectionRefusedError), socket.create_connection((address, port), timeout=1):
            pass


def test_without_queries_and_keys_nothing_is_served() -> None:
    with pytest.raises(ValueError, match=r"blocks.0.attention were not kept, from which rows are computed"):
        PageServer(read(load(), b"to be or not to be", facts=rg.Report.FACTS))


def test_each_server_has_a_secret_of_its_own(report: rg.Report) -> None:
    with PageServer(report) as one, PageServer(report) as other:
        assert one.token != other.token and one.server_address != other.server_address


def test_a_block_ends_the_thread_that_serves(report: rg.Report) -> None:
    with report.serve() as server:
        thread = server.thread
        assert thread is not None and thread.is_alive()
    assert not thread.is_alive() and server.thread is None
    PageServer(report).close()  # which nobody serves
