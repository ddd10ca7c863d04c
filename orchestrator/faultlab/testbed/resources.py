"""Resources for disturbed runs: a disk that can be filled or made to hang, an MLflow server that can be killed. Nothing is left
behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from gangway.storage import ours
from gangway.waits import wait_until

START_TIMEOUT_S = 60.0


class ResourceError(Exception):
    """A resource could not be prepared; the message says what failed."""


HOLD_FROZEN = 'fsfreeze --freeze "$0" && echo frozen && cat > /dev/null; fsfreeze --unfreeze "$0"'
"""Holds the file system frozen until its input ends: even if this process is killed, nothing stays frozen."""
FILE_SYSTEM_BYTES = 16 << 20
"""The most that an ext4 of this size needs for itself."""

BALLAST = ours.named("what fills a disk", "ballast")


class SmallDisk:
    """A file system of its own at `folder`, which can be filled to its last byte. If it is not a tmpfs, it can hang, too."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._ballast = folder / "ballast"
        self._freezer: subprocess.Popen | None = None

    def freeze(self) -> None:
        """Whoever writes to it waits, and cannot even be killed, until `thaw`. Reading goes on."""
        command = ["sh", "-c", HOLD_FROZEN, str(self.folder)]
        self._freezer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        assert self._freezer.stdout is not None
        # The line is printed after the freeze: from here on writers wait.
        if not self._freezer.stdout.readline():
            raise ResourceError(f"{self.folder} cannot be frozen: exit status {self._freezer.wait()}")

    def thaw(self) -> None:
        if self._freezer is not None:
            # Closes its input, which ends `cat`, and waits until the file system is thawed.
            self._freezer.communicate()
            self._freezer = None

    def fill(self) -> None:
        with self._ballast.open("ab", buffering=0) as file:
            for size in (1 << 20, 4096, 1):
                with suppress(OSError):
                    while True:
                        file.write(b"\0" * size)

    def free(self) -> None:
        ours.delete(self._ballast, BALLAST)


class MlflowServer:
    """A tracking server in a session of its own, with a store that outlives it. `ip`: one that every node can reach."""

    def __init__(self, folder: Path, ip: str):
        self.folder, self.ip, self.port = folder, ip, free_port(ip)
        self.uri = f"http://{ip}:{self.port}"
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        store = [
            "--backend-store-uri",
            f"sqlite:///{self.folder}/mlflow.db",
            "--artifacts-destination",
            f"{self.folder}/artifacts",
        ]
        place = ["--host", self.ip, "--port", str(self.port)]
        command = [sys.executable, "-m", "mlflow", "server", *store, *place, "--workers", "1"]
        with (self.folder / "mlflow.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def wait_ready(self) -> None:
        wait_for(lambda: answers(f"{self.uri}/health"), "the MLflow server", 120.0)

    def why_it_ended(self) -> str | None:
        """None while it runs."""
        status = self._process.poll() if self._process is not None else None
        return None if status is None else f"the MLflow server of this test had ended by itself (exit status {status})"

    def kill(self) -> int:
        """Returns whose process it was."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        return self._process.pid


@contextmanager
def small_disk(size_bytes: int, *, freezable: bool = False) -> Iterator[SmallDisk]:
    """A tmpfs; if it has to be freezable, an ext4 in a file."""
    folder = Path(tempfile.mkdtemp(prefix="gangway-disk-"))
    image = folder.with_suffix(".image")
    try:
        if freezable:
            with image.open("wb") as file:
                file.truncate(size_bytes + FILE_SYSTEM_BYTES)
            # Without a journal: it outlives no power cut, and costs no more than a tmpfs.
            run(["mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", str(image)])
            run(["mount", "-o", "loop", str(image), str(folder)])
        else:
            run(["mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(folder)])
        disk = SmallDisk(folder)
        try:
            yield disk
        finally:
            # First: on a frozen file system writers would wait for ever.
            disk.thaw()
            # Lazily: a process that still has a file open must not prevent it.
            run(["umount", "--lazy", str(folder)])
    finally:
        ours.delete_empty(folder)
        ours.delete(image, ours.TEMPORARY_FOLDER)


@contextmanager
def mlflow_server(folder: Path, ip: str) -> Iterator[MlflowServer]:
    server = MlflowServer(folder, ip)
    server.start()
    try:
        server.wait_ready()
        yield server
    finally:
        server.kill()


def why_no_small_disk(*, freezable: bool = False) -> str | None:
    """Why such a disk cannot be had here; None if it can."""
    try:
        with small_disk(1 << 20, freezable=freezable) as disk:
            if freezable:
                disk.freeze()
            return None
    except ResourceError as error:
        return f"no {'file system that can be frozen' if freezable else 'mounts'} here: {error}"


def run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ResourceError(f"{' '.join(command)}: {error}") from error
    if done.returncode != 0:
        raise ResourceError(f"{' '.join(command)}: {done.stderr.strip() or f'exit status {done.returncode}'}")


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = START_TIMEOUT_S) -> None:
    if not wait_until(condition, timeout_s):
        raise ResourceError(f"{what} was not there after {timeout_s:.0f} s")


def free_port(ip_address: str) -> int:
    with socket.socket() as listener:
        listener.bind((ip_address, 0))
        return listener.getsockname()[1]


def can_connect(address: str) -> bool:
    host, _, port = address.rpartition(":")
    with suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
        return True
    return False


def answers(url: str) -> bool:
    # Never through a proxy: the server is on this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with suppress(OSError), opener.open(url, timeout=5) as response:
        return response.status == 200
    return False
