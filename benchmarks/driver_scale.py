"""What the driver costs for thousands of hosts: its real loop, its classes and its policies, with simulated agents.

    python -m benchmarks.driver_scale [--hosts 4096] [--generations 10000] [--without-ray]

The agents are simulated in one process with a clock of its own, so that an hour takes seconds; the driver's CPU time is kept
apart from the simulation's, and is added to that clock: what the driver does late, it does late there too. What Ray itself
costs is measured at the end, with a real actor: calls of a driver's process to an agent, and their answers.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import ray  # noqa: E402

from cluster.gang.calls import Mailbox, gather  # noqa: E402
from orchestrator.driver.poller import HOSTS_PER_POLL_S, POLL_S, SILENCE_S  # noqa: E402
from orchestrator.run_state.incidents import Incident  # noqa: E402
from tests.unit import fake_gang  # noqa: E402
from tests.unit.driving import Launched  # noqa: E402
from tests.unit.fake_gang import Job, Process  # noqa: E402
from tests.unit.simulated_ray import MeteredWorld, SimulatedRay, launched  # noqa: E402

QUIET_S = 300.0
SMALL_GANG = 8
LIMIT_OF_A_CORE = 0.5
LIMIT_OF_LATENCY_S = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4096)
    parser.add_argument("--generations", type=int, default=10_000)
    parser.add_argument("--without-ray", action="store_true", help="leave out what needs a real Ray")
    arguments = parser.parse_args()
    print(f"{arguments.hosts} hosts, a step, a heartbeat and a metric each second")
    OneRun(arguments.hosts).run()
    print(f"\n{arguments.generations} generations of {SMALL_GANG} hosts, each ended by a killed process")
    if arguments.generations:
        many_generations(arguments.generations)
    if not arguments.without_ray:
        print("\nRay's own part: calls from one process to agents, their answers taken by callback")
        calls_of_ray(arguments.hosts)


# ---------------------------------------------------------------------- one run of very many hosts


class Meter:
    """Driver CPU seconds and the world's seconds since it was last read."""

    def __init__(self, world: MeteredWorld):
        self.world = world
        self._cpu_s, self._at_s = world.driver_cpu_s, world.now_s

    def read(self) -> tuple[float, float]:
        world = self.world
        found = world.driver_cpu_s - self._cpu_s, world.now_s - self._at_s
        self._cpu_s, self._at_s = world.driver_cpu_s, world.now_s
        return found


class OneRun:
    """Its start, a quiet time, a save, one fault after the other, and its end: each step asks for the next one."""

    def __init__(self, hosts: int):
        self.hosts = hosts
        self.world = MeteredWorld(in_time=True, max_steps=10**9, step_s=1.0, save_steps=10**9)
        self.made, self.simulated = launched(self.world, hosts)
        self.meter, self.play = Meter(self.world), Play(self.world)
        self.left = list(FAULTS)

    def run(self) -> None:
        self.play.when_training(self.begun)
        gc.collect()
        gc.disable()  # most objects are the simulation's: to look at them all would be charged to the driver
        try:
            run(self.made, self.simulated, self.world)
        finally:
            gc.enable()
        report("the end: saved, stopped and released", *self.meter.read())
        sizes = {name: len(text) for name, text in self.world.files.items() if isinstance(text, str)}
        print("  files: " + ", ".join(f"{name} {size / 1000:.0f} kB" for name, size in sizes.items()))

    def begun(self) -> None:
        report("start of the gang, to its first step", *self.meter.read())
        self.play.after(QUIET_S, self.trained)

    def trained(self) -> None:
        cpu_s, seconds = self.meter.read()
        print(f"  {seconds:.0f} s of training: {cpu_s / seconds:.4f} of a core (limit {LIMIT_OF_A_CORE:g})")
        self.play.save()
        self.play.after(5.0, self.saved)

    def saved(self) -> None:
        report("a save by all hosts, and 5 s of training", *self.meter.read())
        self.play.after(1.5, self.strike)

    def strike(self) -> None:
        self.meter.read()
        self.world.trouble_told_s.clear()
        self.struck_s = self.world.now_s
        FAULTS[self.left[0]](self.world, self.play.job.processes[self.hosts // 2])
        self.play.after(0.01, lambda: self.play.when_training(self.recovered))

    def recovered(self) -> None:
        name = self.left.pop(0)
        # A host that is cut off is silent: then its answer is due after the longest poll, and is waited for.
        silence_s = max(POLL_S, self.hosts / HOSTS_PER_POLL_S) + SILENCE_S
        silent = FAULTS[name] is cut_off
        knowable_s = self.struck_s + silence_s if silent else min(self.world.trouble_told_s, default=self.struck_s)
        tell_incident(name, self.made.launch.progress.incidents[-1], knowable_s + fake_gang.EPOCH_S, self.meter.read()[0])
        if self.left:
            self.play.save()  # so that the next restart is not delayed for want of progress
            self.play.after(6.5, self.strike)
        else:
            self.play.job.stop_reason = "requested"


def run(made: Launched, simulated: SimulatedRay, world: MeteredWorld) -> None:
    with simulated.patched():
        driver = made.start_driver()
        with world.driver():
            driver.run()


def kill(world: MeteredWorld, process: Process) -> None:
    process.agent.end_process(told=True)


def lose(world: MeteredWorld, process: Process) -> None:
    process.agent.die()


def freeze(world: MeteredWorld, process: Process) -> None:
    process.frozen = True


def cut_off(world: MeteredWorld, process: Process) -> None:
    process.agent.out_of_reach_s = (world.now_s, world.now_s + 10_000.0)


FAULTS: dict[str, Callable[[MeteredWorld, Process], None]] = {
    "process killed": kill,
    "machine lost": lose,
    "process frozen": freeze,
    "host cut off": cut_off,
}


class Play:
    """What happens to a run, and when."""

    def __init__(self, world: MeteredWorld):
        self.world = world

    @property
    def job(self) -> Job:
        """Of the newest generation."""
        return max(self.world.jobs.values(), key=lambda job: job.generation)

    def after(self, seconds: float, work: Callable[[], Any]) -> None:
        self.world.at(seconds, work)

    def save(self) -> None:
        job = self.job
        self.after(0.5, lambda: job._save(job.step, ending=False))

    def when_training(self, work: Callable[[], Any]) -> None:
        """Once all hosts of the newest generation have made their first step."""
        jobs = self.world.jobs
        job = self.job if jobs else None
        if job is not None and job.resumed_step is not None and job.step > job.resumed_step and job.healthy():
            self.world.at(0.01, work)
        else:
            self.world.at(0.01, lambda: self.when_training(work))


def report(what: str, cpu_s: float, seconds: float) -> None:
    print(f"  {what}: {cpu_s:.2f} s of CPU in {seconds:.1f} s")


def tell_incident(name: str, incident: Incident, knowable_s: float, cpu_s: float) -> None:
    """`knowable_s`: when an agent told of it, or its limit had passed."""
    marks = ", ".join(f"{phase} {seconds:.3f}" for phase, seconds in incident.recovery_s.items())
    late_s = incident.failed_at_s + incident.recovery_s["detect"] - knowable_s
    found = f"{incident.kind} of host {incident.host}, known {1000 * late_s:.0f} ms after it could be"
    print(f"  {name}: {found} (limit {1000 * LIMIT_OF_LATENCY_S:.0f} ms), {cpu_s:.2f} s of CPU; recovered: {marks}")


# ---------------------------------------------------------------------- very many generations


def many_generations(count: int) -> None:
    world = MeteredWorld(max_steps=10**9, step_s=0.1, save_steps=10)
    made, simulated = launched(world, SMALL_GANG)
    play, began_s = Play(world), time.monotonic()

    def strike() -> None:
        number = play.job.generation
        if number and number % max(1, count // 10) == 0:
            tell_memory(number, world)
        if number >= count:
            play.job.stop_reason = "requested"
            return
        forget_the_past(world, number)
        world.at(1.3, lambda: (kill(world, play.job.processes[number % SMALL_GANG]), world.at(0.5, again)))

    def again() -> None:
        play.when_training(strike)

    play.when_training(strike)
    run(made, simulated, world)
    each_ms = 1000 * world.driver_cpu_s / count
    print(f"  {each_ms:.1f} ms of CPU a generation; {time.monotonic() - began_s:.0f} s with the simulation")


def forget_the_past(world: MeteredWorld, number: int) -> None:
    """What the simulation keeps in memory, and no driver."""
    world.jobs = {key: job for key, job in world.jobs.items() if job.generation == number}
    world.files["incidents.jsonl"] = ""
    world.files["published"].clear()
    for told in (world.commits, world.trouble_told_s):
        del told[:-1]


def tell_memory(number: int, world: MeteredWorld) -> None:
    gc.collect()
    objects = len(gc.get_objects())
    rss = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    told = {name: len(text) for name, text in world.files.items() if isinstance(text, str) and name.endswith(".json")}
    print(f"  generation {number}: {objects} objects, {rss >> 20} MiB, {json.dumps(told)} bytes")


# ---------------------------------------------------------------------- Ray's own part


def calls_of_ray(hosts: int) -> None:
    """CPU of the driver's process, all threads of Ray included, for each call of a poll and its answer."""
    ray.init("local", num_cpus=1, include_dashboard=False, log_to_driver=False)

    @ray.remote(num_cpus=0, max_concurrency=5000)
    class Agents:
        async def poll(self, cursor: int, wait_s: float, *, driver_term: int) -> dict[str, Any]:
            import asyncio

            await asyncio.sleep(wait_s)
            heartbeat_loop = {"t": 1.0, "ev": "heartbeat", "step": 5, "batch_index": 5, "busy_s": 0.1, "generation": 0}
            return {"events": [], "cursor": cursor, "heartbeat": heartbeat_loop, "host_state": {"alive": True, "pid": 1}}

    agents = [Agents.remote() for _ in range(2)]
    ray.get([agent.poll.remote(0, 0.0, driver_term=0) for agent in agents])

    def ask(wait_s: float) -> None:
        found = gather(
            Mailbox(), lambda i: agents[i % 2].poll.remote(0, wait_s, driver_term=0), dict.fromkeys(range(hosts), 60.0)
        )
        assert all(answer.error is None for answer in found.values())

    for wait_s in (0.0, 1.0):
        began_s, clock_s = time.process_time(), time.monotonic()
        ask(wait_s)
        cpu_s, seconds = time.process_time() - began_s, time.monotonic() - clock_s
        print(f"  {hosts} polls of {wait_s:g} s: {1e6 * cpu_s / hosts:.0f} us of CPU each, {seconds:.1f} s in all")
    polls_per_s = hosts / max(POLL_S, hosts / HOSTS_PER_POLL_S)
    print(f"  while it trains, {polls_per_s:.0f} polls a second: {polls_per_s * cpu_s / hosts:.4f} of a core")
    ray.shutdown()


if __name__ == "__main__":
    main()
