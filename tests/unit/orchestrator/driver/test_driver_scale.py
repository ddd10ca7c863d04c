"""What the driver does for each host must not grow with their number: counted in lines of Python that it runs, not in seconds.

The real loop, classes and policies, with simulated agents (`simulated_ray`). Not counted are loops inside of Python's own
functions: benchmarks/driver_scale.py tells the seconds.
"""

import math
import sys
from pathlib import Path

import pytest

import cluster
from orchestrator.driver import poller
from tests.unit.simulated_ray import MeteredWorld, launched

SIZES = (128, 256, 512)
"""With fewer hosts the next probe of a new agent falls before it can answer, so one more is waited for."""
OWN = str(Path(cluster.__file__).parents[1])
TESTS = str(Path(OWN, "tests"))
ALLOWANCE = 0.7
"""Lines for each host and host: 0.44 without such a loop, for at so few hosts it counts too what is done at a time. A loop over
all hosts for each of them, once in the whole run, adds one or more."""


class Lines:
    """Counts the lines of this project's code that run while the driver has the word."""

    def __init__(self, world):
        self.num = 0
        world.switched.append(lambda to_driver: sys.settrace(self._enter if to_driver else None))

    def _enter(self, frame, event, argument):
        name = frame.f_code.co_filename
        return self._count if name.startswith(OWN) and not name.startswith(TESTS) else None

    def _count(self, frame, event, argument):
        self.num += event == "line"
        return self._count


def lines_of_a_run(hosts):
    """A start, a save by all, a killed process, a lost machine, a lost driver, the end."""
    world = MeteredWorld(max_steps=12, step_s=1.0, save_steps=4)
    made, simulated = launched(world, hosts)
    lines = Lines(world)

    def process(host):
        """Of the newest generation."""
        return max(world.jobs.values(), key=lambda job: job.generation).processes[host]

    world.at(4.37, lambda: process(hosts // 2).agent.end_process(told=True))
    world.at(8.41, lambda: process(hosts // 3).agent.die())  # noqa: PLW0108 - at that time
    world.at(14.23, lambda: world.die_at.add(world.num_effects + 1))
    tracing = sys.gettrace()
    with simulated.patched():
        try:
            with world.driver():
                made.run()
        finally:
            sys.settrace(tracing)
    assert world.commits[-1][1] == 12
    assert made.kinds() == ["process_crash", "host_lost", "driver_lost"]
    return lines.num


@pytest.mark.slow("drives hundreds of hosts")
def test_the_driver_does_no_more_for_each_host_of_many_than_of_few(monkeypatch):
    monkeypatch.setattr(poller, "HOSTS_PER_POLL_S", math.inf)  # as many polls of each host, however many there are
    few, more, most = (lines_of_a_run(hosts) for hosts in SIZES)
    # Of a + b*n + c*n**2 through three points at n, 2n and 4n.
    quadratic = (most - 3 * more + 2 * few) / (6 * SIZES[0] ** 2)
    assert abs(quadratic) < ALLOWANCE
    assert few / SIZES[0] > 1000  # it has counted
