"""Keeps the leases of a gang's agents from a thread that does nothing else, whatever the driver's own thread waits for."""

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

CALLS_PER_LEASE = 4
"""How often an agent is called in the time of its lease: three calls may be lost."""
TURN_S = 0.5
"""How often the thread looks which agents are due, at most; short leases have it look more often."""
DRIVER_SILENCE_S = 1800.0
"""A driver whose own thread has given no sign for so long is stuck for good, and its agents are left to their leases. Storage
that hangs is known to come back after many minutes; machines that train nothing for half an hour are cheaper than a lost run."""

_log = logging.getLogger(__name__)


class LeaseKeeper:
    """Calls each agent a few times per lease, spread over it. Its thread begins with the first agent and ends with `stop`.

    `call(agent)` sends the call that renews the lease, and returns Ray's reference to its answer. Any thread may call these.
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
        """When to call whom next (a heap), each slot once. One that was dropped leaves it when it is due."""
        self._scheduled: set[int] = set()
        self._asked: dict[int, tuple[Any, float]] = {}
        """By slot: the call that has no answer yet, and since when. Only the thread uses it."""
        self._heard_s = clock()
        self._stale: StaleDriver | None = None
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def keep(self, slot: int, agent: Any) -> None:
        """From now on also the lease of this agent; in place of another one in the same slot."""
        with self._lock:
            self._agents[slot] = agent
            if slot not in self._scheduled:
                self._scheduled.add(slot)
                heapq.heappush(self._due, (self._clock() + random.random() * self._interval_s, slot))
            if self._thread is None and self._start and not self._stopped.is_set():
                self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)
                self._thread.start()

    def drop(self, slot: int) -> None:
        """Leaves the agent in this slot alone, if it had any."""
        with self._lock:
            self._agents.pop(slot, None)

    def heard(self) -> None:
        """The driver's thread is alive. Raises StaleDriver if an agent has answered that a newer driver leads it."""
        with self._lock:
            self._heard_s = self._clock()
            if self._stale is not None:
                raise self._stale

    def stop(self) -> None:
        self._stopped.set()

    def turn(self) -> None:
        """Calls those who are due, and looks at the answers that have come. Never waits."""
        self._take_answers()
        with self._lock:
            agents = self._take_due()
        for slot, agent in agents:
            self._asked[slot] = (self._call(agent), self._clock())

    def _take_due(self) -> list[tuple[int, Any]]:
        now_s = self._clock()
        if self._stale is not None or now_s - self._heard_s > DRIVER_SILENCE_S:
            return []
        found = []
        while self._due and self._due[0][0] <= now_s:
            _, slot = heapq.heappop(self._due)
            if slot not in self._agents:
                self._scheduled.remove(slot)
                continue
            heapq.heappush(self._due, (now_s + self._interval_s, slot))
            if slot not in self._asked:  # calls to one that is frozen must not pile up
                found.append((slot, self._agents[slot]))
        return found

    def _take_answers(self) -> None:
        refs = [ref for ref, _ in self._asked.values()]
        ready = set(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) if refs else set()
        old_s = self._clock() - 2 * self._interval_s  # an answer that is so late may have been lost: the agent is asked again
        for slot, (ref, asked_s) in list(self._asked.items()):
            if ref in ready:
                self._take_answer(ref)
            if ref in ready or asked_s < old_s:
                del self._asked[slot]

    def _take_answer(self, ref: Any) -> None:
        try:
            ray.get(ref)
        except StaleDriver as error:
            with self._lock:
                self._stale = error
        except ray.exceptions.RayError:  # an agent that is gone, or cut off: the driver finds that out by itself
            pass

    def _run(self) -> None:
        cluster = ray.get_runtime_context().gcs_address
        while not self._stopped.wait(min(TURN_S, self._interval_s / 4)):
            if not ray.is_initialized() or ray.get_runtime_context().gcs_address != cluster:
                return  # nothing here may connect to a cluster by itself
            try:
                self.turn()
            except Exception:
                _log.exception("a call that keeps the lease of an agent failed; the next ones follow")
