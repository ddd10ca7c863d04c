"""The head of a Ray cluster, asked by plain TCP: before Ray connects, and while a run needs it.

Ray itself tries a dead address for minutes, in warnings only, and notices a dead head late.
"""

from __future__ import annotations

import errno
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

from gangway.wire.console import Note

CHECK_TIMEOUT_S = 5.0
"""How long a head may take to answer before Ray is asked to connect."""
LOOK_S = 1.0
"""How often the head of a running run is asked."""
SILENT_S = 3.0
"""For how long a head may be silent before the command says so."""
GIVE_UP_S = 55.0
"""When the command ends. Ray's own processes give up after 60 s (`gcs_rpc_server_reconnect_timeout_s`), without a word."""
NEWEST_CLUSTER = Path(tempfile.gettempdir()) / "ray" / "ray_current_cluster"
"""Where `ray start` writes its address, which `auto` means."""

# The first bytes of HTTP/2 (RFC 9113, 3.4): its preface and an empty frame of settings. Ray's head answers with its own settings.
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
HTTP2_SETTINGS = 4
REFUSED = os.strerror(errno.ECONNREFUSED).lower()
"""Nobody listens there: on this machine its process is dead."""


class ClusterError(Exception):
    """The Ray cluster that was named cannot be used, or was lost; the message says which it is and what to do."""


def named(environ: Mapping[str, str], configured: str | None) -> tuple[str, str] | None:
    """Returns the address of the cluster that the run is to use and who names it; None: a Ray of its own on this machine."""
    if address := environ.get("RAY_ADDRESS"):
        return address, "RAY_ADDRESS"
    return (configured, "driver.address of the configuration") if configured else None


def check(address: str, source: str, timeout_s: float = CHECK_TIMEOUT_S) -> None:
    """Raises ClusterError unless the head of a Ray cluster answers there."""
    if address == "local":
        return
    if address == "auto":
        if not NEWEST_CLUSTER.exists():
            return  # Ray looks for its processes, and tells at once if there are none
        address, source = NEWEST_CLUSTER.read_text().strip(), f"{source}, auto: the last `ray start` on this machine"
    if address.startswith(("http://", "https://")):
        raise ClusterError(
            f"{address} (from {source}) is the address of a dashboard, for `ray job submit --address`: expected the head's, "
            "HOST:PORT, such as 127.0.0.1:6379"
        )
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        expected = "expected HOST:PORT, such as 127.0.0.1:6379"
        raise ClusterError(f"{address!r} (from {source}) is no address of a Ray cluster: {expected}")
    if problem := why_silent(host.strip("[]"), int(port), timeout_s):
        raise ClusterError(
            f"no Ray cluster answers at {address} (from {source}): {problem}. Start one there (`ray start --head --port={port}`) "
            "or name one that runs; without RAY_ADDRESS and driver.address the run starts Ray on this machine"
        )


def why_silent(host: str, port: int, timeout_s: float) -> str | None:
    """Returns why no head of a Ray cluster answers there within `timeout_s`; None if one does."""
    answers: list[str | None] = []
    # In a thread: to look a name up may take longer than any timeout of a socket.
    asking = threading.Thread(target=lambda: answers.append(_ask(host, port, timeout_s)), name="ask the head", daemon=True)
    asking.start()
    asking.join(timeout_s)
    return answers[0] if answers else f"no answer within {timeout_s:g} s"


def _ask(host: str, port: int, timeout_s: float) -> str | None:
    try:
        with socket.create_connection((host, port), timeout=timeout_s) as connection:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return None  # more would take its certificates
            connection.sendall(HTTP2_HELLO)
            answer = connection.recv(9)
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except OSError as error:
        return str(error.strerror or error).lower()
    if len(answer) < 4 or answer[3] != HTTP2_SETTINGS:
        return "something else listens there, which does not speak Ray's protocol (the port of the dashboard?)"
    return None


class HeadWatch:
    """Asks the head once a second, in a thread. Says when it has become silent, and when it answers again.

    `lost` tells why it is gone while it is silent. `over` is true when it has been silent for so long that Ray gives up, too.
    `own_died` is called if the head is of a Ray that this command has started, and is dead: it never comes back, and the hosts
    have until Ray gives up to save.
    """

    def __init__(
        self,
        address: str,
        run_dir: str,
        tell: Callable[[Note], None],
        own_died: Callable[[], None] | None = None,
        *,
        silent_s: float = SILENT_S,
        give_up_s: float = GIVE_UP_S,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.address, self.run_dir = address, run_dir
        self.lost: str | None = None
        self.over = self._is_dead = False
        self._tell, self._own_died = tell, own_died
        self._silent_s, self._give_up_s, self._clock = silent_s, give_up_s, clock
        self._which = "Ray that this command has started (gcs_server)" if own_died else f"Ray cluster at {address}"
        self._heard_s = clock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="head of the cluster", daemon=True)

    def __enter__(self) -> HeadWatch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()

    def look(self) -> None:
        """Asks once. Tells what has changed since the last time."""
        problem = self._ask()
        if problem is None:
            self._heard_s = self._clock()
            if self.lost:
                self.lost = None
                self._tell(Note(ev="note", message=f"the head of the {self._which} answers again"))
            return
        silent_s = self._clock() - self._heard_s
        self.over = silent_s >= self._give_up_s
        if silent_s < self._silent_s or self._is_dead:
            return
        self._is_dead = self._own_died is not None and problem == REFUSED
        if self.lost and not self._is_dead:
            return
        self.lost = self._describe(problem)
        ends = f"unless it comes back within {self._give_up_s:g} s, this command ends"
        if self._is_dead:
            ends = "it does not come back: the hosts save and stop"
        self._tell(Note(ev="note", message=f"{self.lost}; {ends}. {self.way_on()}", level="error"))
        if self._is_dead and self._own_died is not None:
            self._own_died()

    def why_lost(self) -> str | None:
        """Returns why the head is gone, and how to go on; None if it is there. Asks it: a driver may end before the watch has
        seen why."""
        if self.lost is None and (problem := self._ask()):
            self.lost = self._describe(problem)
        return f"{self.lost}. {self.way_on()}" if self.lost else None

    def way_on(self) -> str:
        again = "The same command" if self._own_died else "When there is a cluster again, the same command, with its address,"
        return f"{again} goes on from the newest checkpoint in {self.run_dir}/checkpoints"

    def _ask(self) -> str | None:
        host, _, port = self.address.rpartition(":")
        return why_silent(host.strip("[]"), int(port), self._silent_s)

    def _describe(self, problem: str) -> str:
        return f"the head of the {self._which} does not answer: {problem}"

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S) and not self.over:
            self.look()
