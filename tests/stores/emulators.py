"""Stores that tests speak to: each yields the environment that clients of it need."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests import ROOT
from tests.stores.fake_gcs import FakeGCS

SEAWEED = ROOT / "build" / "weed" / "bin" / "weed"
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
    from moto.s3.responses import S3Response
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    put, one_at_a_time = S3Response.put_object, threading.Lock()

    def put_alone(self: S3Response) -> object:
        with one_at_a_time:  # it looks whether there is such an object, then writes: two could be told that they were first
            return put(self)

    S3Response.put_object = put_alone
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
def seaweed() -> Iterator[str]:
    """Yields the address of SeaweedFS, a real store, with the bucket BUCKET. Skips the test where it is not installed."""
    if not SEAWEED.exists():
        pytest.skip("SeaweedFS is not installed: `make build/weed`")
    with tempfile.TemporaryDirectory(prefix="weed-") as folder, open(Path(folder, "log"), "wb") as log:
        (Path(folder) / "data").mkdir()
        names = ("s3", "master", "volume", "filer")
        ports = dict(zip((*names, *(f"{name}.grpc" for name in names)), free_ports(2 * len(names)), strict=True))
        options = [f"-{name.partition('.')[0]}.port{name[len(name.partition('.')[0]) :]}={port}" for name, port in ports.items()]
        # Else it tells its makers of this test, listens on all addresses, and takes ports that another one on this machine has.
        options += ["-master.telemetry=false", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        options += ["-master.volumeSizeLimitMB=64", "-volume.max=20", f"-dir={folder}/data", "-filer", "-s3"]
        # With keys in its environment it would let in those alone.
        env = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        process = subprocess.Popen([str(SEAWEED), "server", *options], stdout=log, stderr=log, env=env)
        url = f"http://127.0.0.1:{ports['s3']}"
        try:
            _wait_for_bucket(url, process, Path(folder, "log"))
            yield url
        finally:
            process.kill()  # at SIGTERM it waits for open connections
            process.wait()


def _wait_for_bucket(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline_s = time.monotonic() + 120
    while True:
        try:
            return make_bucket(url, BUCKET)
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"SeaweedFS did not start: {log.read_text(errors='replace')[-2000:]}") from error
            time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    """Returns ports of this machine that nobody has."""
    with ExitStack() as sockets:
        taken = [sockets.enter_context(socket.socket()) for _ in range(count)]
        for one in taken:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in taken]


@contextmanager
def fake_gcs() -> Iterator[str]:
    """Yields the address of a GCS that has every bucket."""
    with FakeGCS().serving() as url:
        yield url
