"""Stores that tests speak to: each yields the environment that clients of it need."""

from __future__ import annotations

import logging
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from tests.stores.fake_gcs import FakeGCS

BUCKET = "gangway-tests"
OF_S3 = {
    **{"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "testtest", "AWS_REGION": "us-east-1"},
    **{"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"},
}
OF_GCS = {"GOOGLE_CLOUD_PROJECT": "tests", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false", "NO_GCE_CHECK": "true"}


def environment(scheme: str, url: str) -> dict[str, str]:
    """Returns what a client needs to speak to the store of that scheme at `url`."""
    if scheme == "s3":
        return OF_S3 | {"AWS_ENDPOINT_URL": url, "AWS_ALLOW_HTTP": "true"}
    return OF_GCS | {"STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url}


@contextmanager
def moto() -> Iterator[str]:
    """Yields the address of an S3 with the bucket BUCKET."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        make_bucket(f"http://{host}:{port}", BUCKET)
        yield f"http://{host}:{port}"
    finally:
        server.stop()


def make_bucket(url: str, name: str) -> None:
    """Makes a bucket of a store that looks at no signature."""
    who = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=none"
    request = urllib.request.Request(f"{url}/{name}", method="PUT", headers={"Authorization": who})
    urllib.request.urlopen(request, timeout=30).read()


@contextmanager
def fake_gcs() -> Iterator[str]:
    """Yields the address of a GCS that has every bucket."""
    with FakeGCS().serving() as url:
        yield url
