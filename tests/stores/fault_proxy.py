"""A proxy before a store, which counts requests and bytes, and does what a network and a cloud do on bad days."""

from __future__ import annotations

import http.client
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from tests.stores.serving import Answer, Handler, Request, served

HOP = {"connection", "transfer-encoding", "content-length", "keep-alive"}
CODES = {403: "AccessDenied", 409: "ConditionalRequestConflict", 429: "TooManyRequests", 500: "InternalError", 503: "SlowDown"}


@dataclass
class Fault:
    match: str
    """Of "KIND /path?query"; KIND is GET, PUT, POST, HEAD, DELETE or LIST."""
    do: str
    """`403` and other statuses: so it answers. `lost`: the work is done, and its answer is a 503. `hang`, `delay`: for `seconds`
    before the work, and then no answer, or the answer. `cut`: half of the answer. `hide`: a listing without the names that
    match `names`."""
    times: int = 1 << 30
    seconds: float = 2.0
    names: str = ""


class FaultProxy:
    """`faults` may be changed while it serves; the first that matches is done."""

    def __init__(self, upstream: str):
        self._upstream = urlsplit(upstream)
        self.faults: list[Fault] = []
        self.counts: Counter[str] = Counter()
        self.log: list[str] = []
        self._lock = threading.Lock()
        self._connections = threading.local()

    @contextmanager
    def serving(self) -> Iterator[str]:
        proxy = self

        class One(Handler):
            def answer(self, request: Request) -> Answer:
                return proxy._answer(request)

        with served(One) as url:
            yield url

    def counted(self) -> dict[str, int]:
        """Returns the requests by kind and the bytes by direction since the last call."""
        with self._lock:
            found, self.counts = dict(sorted(self.counts.items())), Counter()
        return found

    def _answer(self, request: Request) -> Answer:
        kind = kind_of(request)
        fault = self._note(request, kind)
        do = fault.do if fault else ""
        if do.isdecimal():
            text = f"<?xml version='1.0'?><Error><Code>{CODES.get(int(do), 'Injected')}</Code><Message>injected</Message></Error>"
            return Answer(int(do), text.encode(), {"Content-Type": "application/xml"})
        if fault and do in ("hang", "delay"):
            time.sleep(fault.seconds)
        if do == "hang":
            return Answer(then_close=True)
        answer = self._forward(request)
        with self._lock:
            self.counts[f"{kind} bytes in"] += len(answer.body)
        if do == "lost":
            return Answer(503)
        if fault and do == "hide" and kind == "LIST":
            return answer._replace(body=_without(answer.body, fault.names))
        if do == "cut":
            return answer._replace(body=answer.body[: len(answer.body) // 2], declared=len(answer.body), then_close=True)
        return answer

    def _note(self, request: Request, kind: str) -> Fault | None:
        text = f"{kind} {unquote(request.target)}"
        with self._lock:
            self.counts[kind] += 1
            self.counts[f"{kind} bytes out"] += len(request.body)
            found = next((one for one in self.faults if one.times > 0 and re.search(one.match, text)), None)
            if found:
                found.times -= 1
            self.log.append(f"{text} {found.do if found else ''}")
        return found

    def _forward(self, request: Request) -> Answer:
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP}
        for is_last in (False, True):
            connection = getattr(self._connections, "one", None)
            if connection is None:
                connection = self._connections.one = http.client.HTTPConnection(self._upstream.netloc, timeout=60)
            try:
                connection.request(request.method, request.target, request.body or None, headers)
                response = connection.getresponse()
                body = response.read()
                break
            except (OSError, http.client.HTTPException):
                self._connections.one = None
                if is_last:
                    raise
        found = {name: value for name, value in response.getheaders() if name.lower() not in HOP}
        length = response.getheader("Content-Length")
        return Answer(response.status, body, found, declared=int(length) if request.method == "HEAD" and length else None)


def kind_of(request: Request) -> str:
    query, path = request.query, request.path.rstrip("/")
    if request.method == "GET" and ("list-type" in query or "prefix" in query or path.endswith("/o")):
        return "LIST"
    if path.startswith("/upload/") and query.get("uploadType") in ("media", "multipart"):
        return "PUT"
    return request.method


def _without(listing: bytes, names: str) -> bytes:
    """Returns a listing in XML without the objects whose names match."""
    rows = rb"<(Contents|CommonPrefixes)>(?:(?!</\1>).)*?</\1>"
    return re.sub(rows, lambda row: b"" if re.search(names.encode(), row[0]) else row[0], listing, flags=re.S)
