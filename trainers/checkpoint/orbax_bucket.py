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
from collections.abc import Mapping
from typing import Any

from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils

from gangway.storage import usage
from trainers.checkpoint import orbax_requests

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
        orbax_requests.count(usage.HERE, fsspec.config.conf)
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
