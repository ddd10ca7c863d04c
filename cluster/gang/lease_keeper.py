"""Renews the leases of a gang's agents from a separate thread, so that a driver whose main thread waits does not lose its
gang."""

from __future__ import annotations

import heapq
import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import ray

from cluster.agent.driver_lease import StaleDriver
from gangway.waits import CheckStop

CALLS_PER_LEASE = 4
"""How often an agent is called in the time of its lease: three calls may be lost."""
TURN_S = 0.5
"""How often the thread looks which agents are due; more often if the leases are short."""
DRIVER_SILENCE_S = 1800.0
"""After so long without a sign from the driver's main thread the keeper stops, and the leases run out. The limit is long because
storage that hangs often comes back after many minutes, and idle machines for half an hour cost less than a lost run."""

_log = logging.getLogger(__name__)


class LeaseKeeper:
    """Calls each agent a few times per lease. Its thread begins with the first agent and ends with `stop`.

    `call(agent)` sends the call that renews the lease, and returns Ray's reference to its answer. All methods are thread-safe.
    """

    def __init__(
        self,
        lease_s: float,
        call: Callable[[Any], Any],
        *,
        clock: Callable[[], float] = time.monotonic,
        start: bool = True,
    ):
        self._interval_s, self._call, self._clock, self._start = lease_s / CALLS_PER_LEASE, call, clock, start
        self._lock = threading.Lock()
        self._agents: dict[int, Any] = {}
        """By slot number."""
        self._due: list[tuple[float, int]] = []
        """A heap of (time of the next call, slot), each slot once. A dropped slot is removed when it is due."""
        self._scheduled: set[int] = set()
        self._asked: dict[int, tuple[Any, float]] = {}
        """By slot: the open call, and when it was made. Only the thread uses it."""
        self._driver_alive_at_s = clock()
        self._stale: StaleDriver | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, slot: int, agent: Any) -> None:
        """Renews the lease of this agent from now on, instead of another agent in the same slot."""
        with self._lock:
            self._agents[slot] = agent
            if slot not in self._scheduled:
                self._scheduled.add(slot)
                # A random first time spreads the calls to thousands of agents over the interval.
                heapq.heappush(self._due, (self._clock() + random.random() * self._interval_s, slot))
            if self._thread is None and self._start and not self._stopped.is_set():
                self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)
                self._thread.start()

    def drop(self, slot: int) -> None:
        """Stops renewing the lease of the agent in this slot, if there is one."""
        with self._lock:
            self._agents.pop(slot, None)

    def driver_alive(self) -> None:
        """The driver's main thread calls this as its sign of life. Raises StaleDriver if an agent answered that it has a newer
        driver."""
        with self._lock:
            self._driver_alive_at_s = self._clock()
            if self._stale is not None:
                raise self._stale

    def with_sign_of_life(self, check_stop: CheckStop) -> CheckStop:
        """Returns a `check_stop` for a wait in which nobody else gives the driver's sign of life."""

        def check_stop_and_keep() -> None:
            self.driver_alive()
            check_stop()

        return check_stop_and_keep

    def stop(self) -> None:
        self._stopped.set()

    def turn(self) -> None:
        """Calls the agents that are due, and handles the answers that have come. Never waits."""
        self._handle_answers()
        with self._lock:
            agents = self._take_due()
        # Outside the lock: a call to Ray may be slow, and `driver_alive` must not wait for it.
        for slot, agent in agents:
            self._asked[slot] = (self._call(agent), self._clock())

    def _take_due(self) -> list[tuple[int, Any]]:
        now_s = self._clock()
        if self._stale is not None or now_s - self._driver_alive_at_s > DRIVER_SILENCE_S:
            return []
        due = []
        while self._due and self._due[0][0] <= now_s:
            _, slot = heapq.heappop(self._due)
            if slot not in self._agents:
                self._scheduled.remove(slot)
                continue
            # From now, not from when it was due: after a stall the missed calls must not come all at once.
            heapq.heappush(self._due, (now_s + self._interval_s, slot))
            if slot not in self._asked:  # calls to one that is frozen must not pile up
                due.append((slot, self._agents[slot]))
        return due

    def _handle_answers(self) -> None:
        refs = [ref for ref, _ in self._asked.values()]
        ready = set(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) if refs else set()
        too_old_s = self._clock() - 2 * self._interval_s  # so late an answer may be lost: the agent is asked again
        for slot, (ref, asked_s) in list(self._asked.items()):
            if ref in ready:
                self._handle_answer(ref)
            if ref in ready or asked_s < too_old_s:
                del self._asked[slot]

    def _handle_answer(self, ref: Any) -> None:
        try:
            ray.get(ref)
        except StaleDriver as error:
            with self._lock:
                # Kept for `driver_alive`: an exception in this thread would not end the driver.
                self._stale = error
        except ray.exceptions.RayError:  # the agent is gone or cut off: the driver notices it by its polls
            pass

    def _run(self) -> None:
        cluster = ray.get_runtime_context().gcs_address
        while not self._stopped.wait(min(TURN_S, self._interval_s / 4)):
            if not ray.is_initialized() or ray.get_runtime_context().gcs_address != cluster:
                return  # a call without a connection would make Ray start a cluster
            try:
                self.turn()
            except Exception:
                _log.exception("a call that keeps the lease of an agent failed; the next ones follow")
