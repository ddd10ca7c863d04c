"""The steward of a driver: a Ray actor that gives back the placement groups of a run when neither driver nor agents are left.

Placement groups are detached: they outlive their driver, so that the next one can adopt the gang. Agents without a driver remove
them. But a driver may die while it waits for machines, before any agent runs. Then its groups would reserve machines for nobody.
So the steward is started before the first group. It takes no resources and has a lease like an agent. If its machine is lost, Ray
starts it on another one, with a new lease.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import ray

from cluster.agent.driver_lease import Lease
from cluster.placement.cleanup import NAMESPACE, name_of, remove_orphaned

LOOK_S = 1.0
LEASE_GROUP = "lease"
"""The concurrency group of `keep`, with a thread to itself: all other threads of an agent may be waiting for something."""

_log = logging.getLogger(__name__)


class Steward:
    """The Ray actor that `hire` makes. `numbers` are part of its name: the driver's term, and the time when it was hired. An
    older steward leaves the groups to a newer one."""

    def __init__(self, run_name: str, numbers: tuple[int, int], lease_s: float):
        self._run_name, self._numbers, self._lease = run_name, numbers, Lease(lease_s, time.monotonic())
        self._lock = threading.Lock()
        threading.Thread(target=self._wait, name="lease", daemon=True).start()

    def keep(self, *, driver_term: int = 0) -> None:
        """Renews the lease."""
        with self._lock:
            self._lease.renew(driver_term, time.monotonic())

    def _left_s(self) -> float:
        with self._lock:
            return self._lease.left_s(time.monotonic())

    def _wait(self) -> None:
        name = name_of(self._run_name, "steward", *self._numbers)
        while True:
            while (left_s := self._left_s()) > 0:
                time.sleep(min(left_s, LOOK_S))
            try:
                if remove_orphaned(self._run_name, self._numbers):
                    # Not `os._exit`: with `max_restarts` = -1 Ray would start it again.
                    ray.kill(ray.get_actor(name, namespace=NAMESPACE))
            except Exception:  # the only one who would clean up must go on
                _log.exception("could not give back what the run %s holds; trying again", self._run_name)
            time.sleep(LOOK_S)


def hire(run_name: str, driver_term: int, lease_s: float) -> tuple[str, Any]:
    """Asks Ray for a steward; returns its name and its handle. Ray starts it even if the caller ends meanwhile."""
    numbers = (driver_term, time.time_ns())
    name = name_of(run_name, "steward", *numbers)
    options = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        # It must start even where no CPU is free.
        "num_cpus": 0,
        "max_restarts": -1,
        # The calls that keep its lease would fill Ray's record of tasks.
        "enable_task_events": False,
    }
    remote: Any = ray.remote
    actor = remote(concurrency_groups={LEASE_GROUP: 1})(Steward).options(**options)
    return name, actor.remote(run_name, numbers, lease_s)
