"""The steward of a driver: gives back what its run holds, or waits for, when nobody is left who would.

Placement groups are detached: they outlive their driver, so that another one can take the gang over, and agents without a driver
remove them. A driver that dies before any agent lives, while it waits for machines, would leave groups that take machines for
nobody. Its steward is there before the first of them: a Ray actor that takes no resources, with the lease of an agent. If the
steward's machine is lost, Ray starts it on another one, with a lease that begins anew.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import ray

from cluster.agent.driver_lease import Lease
from cluster.placement.cleanup import NAMESPACE, remove_unled, steward_name

LOOK_S = 1.0
LEASE_GROUP = "lease"
"""Ray's name for the thread of an agent, or a steward, that answers `keep` alone: the others may all wait for something."""

_log = logging.getLogger(__name__)


class Steward:
    """The Ray actor that `hire` makes. `numbers` name it: the driver's term, and when it was hired; the newest has the say."""

    def __init__(self, run_name: str, numbers: tuple[int, int], lease_s: float):
        self._run_name, self._numbers, self._lease = run_name, numbers, Lease(lease_s)
        threading.Thread(target=self._wait, name="lease", daemon=True).start()

    def keep(self, *, driver_term: int = 0) -> None:
        """Renews the lease."""
        self._lease.renew(driver_term)

    def _wait(self) -> None:
        name = steward_name(self._run_name, *self._numbers)
        while True:
            while (left_s := self._lease.left_s()) > 0:
                time.sleep(min(left_s, LOOK_S))
            try:
                if remove_unled(self._run_name, self._numbers):
                    ray.kill(ray.get_actor(name, namespace=NAMESPACE))  # to exit would have Ray start it again
            except Exception:
                _log.exception("could not give back what the run %s holds; trying again", self._run_name)
            time.sleep(LOOK_S)


def hire(run_name: str, driver_term: int, lease_s: float) -> tuple[str, Any]:
    """Asks Ray for a steward; returns its name and its handle. Ray starts it, whatever becomes of the caller."""
    numbers = (driver_term, time.time_ns())
    name = steward_name(run_name, *numbers)
    options = {
        "name": name,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "num_cpus": 0,
        "max_restarts": -1,
        "enable_task_events": False,
    }
    remote: Any = ray.remote
    actor = remote(concurrency_groups={LEASE_GROUP: 1})(Steward).options(**options)
    return name, actor.remote(run_name, numbers, lease_s)
