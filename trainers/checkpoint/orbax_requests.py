"""Counts what Orbax asks of buckets: arrays by tensorstore, and the small files beside them by gcsfs and s3fs.

All three tell it by what they document: the metrics of tensorstore, trace configurations of aiohttp, and events of botocore.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from gangway.storage.usage import Usage

REQUESTS = ("get", "put", "list", "delete", "again")
OF_TENSORSTORE = dict(zip(("read", "write", "list", "delete_range", "retries"), REQUESTS, strict=True))
OF_TENSORSTORE |= {"bytes_read": "bytes_in", "bytes_written": "bytes_out"}


def count(usage: Usage, settings: dict[str, Any]) -> None:
    """Counts in `usage` all that is asked from now on in this process. `settings` are those that fsspec gives new file systems,
    by their scheme."""
    usage.add_source(_of_tensorstore)
    for scheme in ("gcs", "gs"):
        settings.setdefault(scheme, {})["session_kwargs"] = {"trace_configs": [_trace(usage)]}
    for scheme in ("s3", "s3a"):
        settings.setdefault(scheme, {})["session"] = _session(usage)


def _of_tensorstore() -> Mapping[str, int]:
    found: Counter[str] = Counter()
    for store in ("gcs", "s3"):
        for name, number in _metrics(f"/tensorstore/kvstore/{store}/").items():
            if kind := OF_TENSORSTORE.get(name):
                found[kind] += number
    # Before it writes to S3 it asks for the head of the object. Its metrics have that among all requests alone.
    asked = _metrics("/tensorstore/http/request_started").get("", 0)
    found["head"] += max(0, asked - sum(found[kind] for kind in REQUESTS))
    return found


def _metrics(prefix: str) -> dict[str, int]:
    """Returns the counters of tensorstore by the rest of their names."""
    import tensorstore

    found = tensorstore.experimental_collect_matching_metrics(prefix)
    return {
        metric["name"].removeprefix(prefix): sum(int(value["value"]) for value in metric["values"])
        for metric in found
        if all("value" in value for value in metric["values"])
    }


def _trace(usage: Usage) -> Any:
    import aiohttp

    async def on_request_start(session: object, context: object, request: aiohttp.TraceRequestStartParams) -> None:
        usage.add(**{kind_of(request.method, str(request.url)): 1})

    config = aiohttp.TraceConfig()
    config.on_request_start.append(on_request_start)
    return config


def _session(usage: Usage) -> Any:
    from aiobotocore.session import AioSession

    def before_send(request: Any, **_: object) -> None:
        usage.add(**{kind_of(request.method, request.url): 1})

    session = AioSession()
    session.register("before-send.s3", before_send)
    return session


def kind_of(method: str, url: str) -> str:
    """Returns the kind of a request, as `Usage` has it."""
    parts = urlsplit(url)
    query = parse_qs(parts.query, keep_blank_values=True)
    if method.upper() == "GET":
        return "list" if parts.path.endswith("/o") or "list-type" in query else "get"
    if method.upper() == "DELETE" or "delete" in query:
        return "delete"
    return "head" if method.upper() == "HEAD" else "put"
