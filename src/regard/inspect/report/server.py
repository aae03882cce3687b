"""A report's page, served to this machine alone: the rows of its weights are computed on request."""

from __future__ import annotations

import secrets
import sys
import threading
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import parse_qs

import torch

import regard.inspect.report.page as page
from regard.inspect.report.content import Content

IDLE = 60  # seconds after which a connection that sends no request is closed


class PageServer(ThreadingTCPServer):
    """Serves the page of a report at `url`, on 127.0.0.1 under a random path that is a secret; read only.

    Only GET requests are served. A request for another path gets status 404. A request whose Host header is not
    127.0.0.1 or localhost, with the server's port, gets 403: a page on the internet could otherwise read the report
    through a host name of its own that resolves to 127.0.0.1. The report must keep its queries and keys: see
    Report.row. Raises ValueError if it does not, and for a head that does not exist.

        with PageServer(report) as server:
            print(server.url)
            server.serve_forever()

    or start(), after which a thread answers until close() or the end of the process.
    """

    daemon_threads = True

    def __init__(self, report: Content, head: tuple[int, int] | None = None) -> None:
        for layer in report.layers:
            layer.check_kept()
        self.report, self.token, self.computing = report, secrets.token_urlsafe(32), threading.Lock()
        self.page, self.policy = page.served(report, head)
        self.thread: threading.Thread | None = None
        self.serving = False
        super().__init__(("127.0.0.1", 0), _Request)

    def start(self) -> PageServer:
        self.thread = threading.Thread(target=self.serve_forever, name="regard's page", daemon=True)
        self.thread.start()
        return self

    def close(self) -> None:
        """Ends what start(), or serve_forever() in another thread, began, and closes the port."""
        if self.thread is not None or self.serving:  # else nobody would answer `shutdown`
            self.shutdown()
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        self.server_close()

    def serve_forever(self, poll_interval: float = 0.5) -> None:
        self.serving = True
        try:
            super().serve_forever(poll_interval)
        finally:
            self.serving = False

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"PageServer({self.url})"

    def _repr_html_(self) -> str:
        described = f"{escape(self.report.title)}: {self.url}"
        return f'<a href="{self.url}" target="_blank" rel="noopener noreferrer">{described}</a>'

    @property
    def hosts(self) -> tuple[str, str]:
        """The values of the Host header that are accepted."""
        port = self.server_address[1]
        return f"127.0.0.1:{port}", f"localhost:{port}"

    @property
    def url(self) -> str:
        return f"http://{self.hosts[0]}/{self.token}/"

    def row(self, layer: int, head: int, query: int) -> bytes:
        """The weights of a query as float32, NaN where it may not look. Raises IndexError for what is not there."""
        if not (0 <= layer < len(self.report.layers) and 0 <= head < self.report.layers[layer].heads):
            raise IndexError(f"there is no layer {layer} with a head {head}.")
        with self.computing:
            weights, seen = self.report.layers[layer].row(query)
        return weights[head].float().masked_fill(~seen[head], torch.nan).numpy().astype("<f4").tobytes()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that leaves before it has its answer is no error."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Request(BaseHTTPRequestHandler):
    server: PageServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "regard", ""
    timeout = IDLE

    def parse_request(self) -> bool:
        if not super().parse_request():
            return False
        if self.command != "GET":
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "this server is read only: GET is all that it answers.")
            return False
        return True

    def do_GET(self) -> None:
        if self.headers.get_all("Host") not in [[host] for host in self.server.hosts]:
            self._refuse(HTTPStatus.FORBIDDEN, "this server answers to 127.0.0.1 and localhost alone.")
            return
        path, _, query = self.path.partition("?")
        token, slash, name = path.removeprefix("/").partition("/")
        known = secrets.compare_digest(token.encode("latin-1", "replace"), self.server.token.encode()) and slash
        if known and name == "row":
            self._answer_row(query)
        elif known and name == "":
            self._answer(HTTPStatus.OK, "text/html; charset=utf-8", self.server.page, self.server.policy)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is nothing here.")

    def _answer_row(self, query: str) -> None:
        try:
            given = parse_qs(query, max_num_fields=3)
            layer, head, number = (int(given[name][0]) for name in ("layer", "head", "query"))
            body = self.server.row(layer, head, number)
        except KeyError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, f"row is asked with layer, head and query; {error} is missing.")
        except (ValueError, IndexError) as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        else:
            self._answer(HTTPStatus.OK, "application/octet-stream", body)

    def _refuse(self, status: HTTPStatus, sentence: str) -> None:
        self.close_connection = True  # whatever else the request holds is not read
        self._answer(status, "text/plain; charset=utf-8", f"{sentence}\n".encode())

    def _answer(self, status: HTTPStatus, kind: str, body: bytes, policy: str = "default-src 'none'") -> None:
        self.send_response(status)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Content-Security-Policy": f"{policy}; frame-ancestors 'none'",
            "Cross-Origin-Resource-Policy": "same-origin",
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
        }
        if status == HTTPStatus.METHOD_NOT_ALLOWED:
            headers["Allow"] = "GET"
        if self.close_connection:
            headers["Connection"] = "close"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: their paths hold the secret."""
