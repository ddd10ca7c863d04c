"""All that Orbax needs beside itself to write and read arrays in a bucket.

Orbax knows gs:// and no s3://, and has no arguments for limits. So three private names of it are replaced, and two of its tables
changed. `tests/unit/trainers/checkpoint/test_orbax_bucket.py` fails if a new version has others, or needs this no more.
"""

from __future__ import annotations

import importlib
import os
import posixpath
import re
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils

from gangway.storage import usage
from gangway.storage.usage import Usage

REQUESTS = ("get", "put", "list", "delete", "again")
OF_TENSORSTORE = dict(zip(("read", "write", "list", "delete_range", "retries"), REQUESTS, strict=True))
OF_TENSORSTORE |= {"bytes_read": "bytes_in", "bytes_written": "bytes_out"}


def count(usage: Usage, settings: dict[str, Any]) -> None:
    """Counts in `usage` all that Orbax asks from now on in this process: arrays by tensorstore, and the small files beside them
    by gcsfs and s3fs. All three tell it by what they document: the metrics of tensorstore, traces of aiohttp, events of botocore.
    `settings` are those that fsspec gives new file systems, by their scheme."""
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


SCHEMES = ("gs://", "s3://")
RETRIES = {"max_retries": 10, "initial_delay": "200ms", "max_delay": "8s"}
"""How often tensorstore asks again: about 50 s in all. Without a limit it would ask for longer than anybody waits."""
_of_google = gcs_utils.get_kvstore_for_gcs
_once = threading.Lock()
_enabled: list[bool] = []


def enable() -> None:
    """Lets Orbax write and read in buckets, in this process. A second call changes nothing."""
    with _once:
        if _enabled:
            return
        _enabled.append(True)
        import fsspec

        for scheme in ("s3", "s3a", "gcs", "gs"):
            # Else host 0 could see a folder as it was before the other hosts wrote to it.
            fsspec.config.conf.setdefault(scheme, {})["use_listings_cache"] = False
        count(usage.HERE, fsspec.config.conf)
        for context in (tensorstore_utils._BASE_TS_CONTEXT, tensorstore_utils._DEFAULT_OCDBT_TS_CONTEXT):
            for store in ("s3", "gcs"):
                context[f"{store}_request_retries"] = dict(RETRIES)
        tensorstore_utils._use_gcs_driver = lambda directory: directory.startswith(SCHEMES)
        tensorstore_utils._normalize_path = _normalized
        gcs_utils.get_kvstore_for_gcs = lambda url: kvstore(url, os.environ)


def import_ahead(url: str) -> None:
    """Imports, and enables, all that the checkpoints of a run at this URL need: hundreds of modules. Speaks to no bucket."""
    import fsspec

    enable()
    importlib.import_module("obstore.store")
    fsspec.get_filesystem_class(url.partition("://")[0])


def kvstore(url: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Returns the specification of tensorstore's key-value store for the folder at a URL."""
    if not url.startswith("s3://"):
        return _of_google(url)
    bucket, _, path = url.removeprefix("s3://").partition("/")
    found: dict[str, Any] = {"driver": "s3", "bucket": bucket, "path": path}
    # tensorstore does not read these variables, as other clients do.
    if where := environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL"):
        region = environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION") or "us-east-1"
        found |= {"endpoint": where, "aws_region": region}
    return found


def _normalized(path: str) -> str:
    # `normpath` alone makes one slash of two.
    return re.sub(r"^(gs|s3):/+", r"\1://", posixpath.normpath(path))
