"""Starts the shipper process, starts it again when it dies, and tells it to finish."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import chain, repeat

from cluster.agent.child_process import child_env, import_path
from gangway.storage import documents, durable
from gangway.waits import CHECK_STOP_INTERVAL_S
from orchestrator.tracking.spool import FOLDER

URI_VARIABLE = "MLFLOW_TRACKING_URI"
"""MLflow's own. In the shipper's environment, where it may hold a user and a password; in files they are masked."""
DRAIN = b"drain\n"
"""The line on the shipper's standard input that tells it to ship the rest and exit."""
LEFT_OVER = 3
"""The exit status of a shipper that could not ship all lines."""
RESTART_DELAYS_S = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class ShipperProcess:
    """Keeps one shipper running, whatever happens to it."""

    def __init__(self, run_dir: str, uri: str):
        self._run_dir, self._uri = run_dir, uri
        self._process: subprocess.Popen[bytes] | None = None
        self._closing = threading.Event()
        self._out_of_time = threading.Event()
        self._lock = threading.Lock()
        self.problem: str | None = None
        # The kernel ends a shipper when the *thread* that started it ends: this one lives as long as the driver does.
        self._thread = threading.Thread(target=self._keep_running, name="shipper", daemon=True)
        self._thread.start()

    def close(self, limit_s: Callable[[], float]) -> None:
        """Lets it ship the rest, for as long as `limit_s` says from now on, and leaves no process behind."""
        began_s = time.monotonic()
        with self._lock:
            # Under one lock with `_run_one`: each shipper gets the line, even one that is being started now.
            self._closing.set()
            _send(self._process, DRAIN)
        while self._thread.is_alive() and (left_s := began_s + limit_s() - time.monotonic()) > 0:
            self._thread.join(min(left_s, CHECK_STOP_INTERVAL_S))
        with self._lock:
            self._out_of_time.set()
            if self._process is not None:
                self._process.kill()  # Safe at any moment: what it sent twice is one entry in MLflow.
        self._thread.join()

    def _keep_running(self) -> None:
        for delay_s in chain(RESTART_DELAYS_S, repeat(RESTART_DELAYS_S[-1])):
            status = self._run_one()
            if self._closing.is_set() and (status in (0, LEFT_OVER) or self._out_of_time.is_set()):
                return
            (self._out_of_time if self._closing.is_set() else self._closing).wait(delay_s)

    def _run_one(self) -> int | None:
        """Starts a shipper and waits for its end; its exit status, or None if it could not be started."""
        with self._lock:
            if self._out_of_time.is_set():
                return None
            try:
                self._process = _start_shipper(self._run_dir, self._uri)
                self.problem = None
            except OSError as error:
                self.problem = f"cannot start the process that ships metrics to MLflow: {error.strerror}"
                return None
            if self._closing.is_set():
                _send(self._process, DRAIN)
        # Outside the lock: `close` has to be able to write to the process, and to kill it.
        return self._process.wait()


def _start_shipper(run_dir: str, uri: str) -> subprocess.Popen[bytes]:
    defaults = {
        # A server that does not answer is tried again by the shipper, which does so for ever but can be interrupted.
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    paths = import_path(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    with open(documents.join(run_dir, FOLDER, "shipper.log"), "ab", opener=durable.no_link) as log:
        return subprocess.Popen(
            [sys.executable, "-m", "orchestrator.tracking", run_dir, "--follow", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=child_env(defaults | os.environ, {"PYTHONPATH": os.pathsep.join(paths), URI_VARIABLE: uri}),
            start_new_session=True,  # A Ctrl-C at the terminal is for the driver, which then lets the shipper finish.
        )


def _send(process: subprocess.Popen[bytes] | None, line: bytes) -> None:
    if process is None or process.stdin is None:
        return
    try:
        process.stdin.write(line)
        process.stdin.flush()
    except BrokenPipeError:
        return  # It has died: the next one gets the line when it is started.
