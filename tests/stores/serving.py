"""A server of HTTP in a thread, on a free port of this machine."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote, urlsplit


class Answer(NamedTuple):
    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = {}
    declared: int | None = None
    """The length that is said, if it is not that of the body."""
    then_close: bool = False


class Request(NamedTuple):
    method: str
    target: str
    """The path and the query, as they came."""
    headers: Mapping[str, str]
    body: bytes

    @property
    def path(self) -> str:
        return unquote(urlsplit(self.target).path)

    @property
    def query(self) -> dict[str, str]:
        return dict(parse_qsl(urlsplit(self.target).query, keep_blank_values=True))


class Handler(BaseHTTPRequestHandler):
    """Reads a request whole, and sends what `answer` returns."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def answer(self, request: Request) -> Answer:
        raise NotImplementedError

    def log_message(self, *_) -> None:
        pass

    def _serve(self) -> None:
        answer = self.answer(Request(self.command, self.path, self.headers, self._body()))
        self.send_response(answer.status)
        headers = {name: value for name, value in answer.headers.items() if name.lower() != "content-length"}
        for name, value in headers.items():
            self.send_header(name, value)
        if answer.status not in (204, 304):
            self.send_header("Content-Length", str(len(answer.body) if answer.declared is None else answer.declared))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)
        if answer.then_close:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = b""
        while size := int(self.rfile.readline().split(b";")[0], 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = do_PATCH = _serve


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_) -> None:
        pass  # a client that has gone


@contextmanager
def served(handler: type[Handler]) -> Iterator[str]:
    """Yields the address of a server."""
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=lambda: server.serve_forever(0.05), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
