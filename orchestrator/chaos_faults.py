"""The kinds of faults: what each does to a run, what the run must make of it, what has to be there. And the seeded schedule."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import psutil

from orchestrator import chaos_strikes as by
from orchestrator.chaos_run import RunError
from orchestrator.chaos_strikes import Details, Fault, Scene, Strike


def nothing(scene: Scene, strike: Strike) -> None: ...


def at_once(scene: Scene, strike: Strike) -> bool:
    return True


@dataclass(frozen=True)
class Kind:
    """`strike` does it. Then, when `until` holds, it is healed, if it does not end by itself."""

    strike: Callable[[Scene, Fault], Details]
    named: tuple[str, ...] = ()
    """Kinds of incident that name it rightly; none: nothing that is worth an incident has happened."""
    must_show: bool = True
    """Whether there has to be an incident."""
    names_host: bool = False
    """Whether the incident must name the host that was struck."""
    until: Callable[[Scene, Strike], bool] = at_once
    heal: Callable[[Scene, Strike], None] = nothing
    needs: str = ""
    """cluster, network, disk, mlflow, supervisor; and `fresh`: a checkpoint that was completed just now, and one before it."""
    overrides: tuple[str, ...] = ()


CRASH = ("process_crash",)
LOST = ("host_lost",)
PREEMPTION = ("preemption",)
STEP_LIMIT = ("driver.watchdog.step_floor_s=4", "driver.watchdog.save_s=6")
"""While a save is under way, a step may take as long as a save."""

KINDS: Mapping[str, Kind] = {
    "process": Kind(by.kill_process, named=CRASH, names_host=True),
    "freeze": Kind(by.freeze_process, named=("hang",), names_host=True, overrides=STEP_LIMIT),
    "agent": Kind(by.kill_agent, named=LOST, names_host=True),
    "node": Kind(by.kill_node, named=LOST, names_host=True, needs="cluster"),
    "driver": Kind(by.kill_driver, named=("driver_lost",), needs="supervisor"),
    "slow": Kind(
        by.ordered("slow", step_s=by.SLOW_S, steps=by.SLOW_STEPS),
        named=("straggler",),
        names_host=True,
        until=by.noticed,
        overrides=("driver.stragglers.window_s=1", "driver.stragglers.windows=3"),
    ),
    "hang": Kind(by.ordered("hang"), named=("hang",), names_host=True, overrides=STEP_LIMIT),
    "skip": Kind(by.ordered("skip_collective"), named=("hang",), names_host=True, overrides=STEP_LIMIT),
    "desync": Kind(by.ordered("desync"), named=("desync",)),
    "stuck_save": Kind(by.ordered("stuck_save"), named=("hang",), names_host=True, overrides=STEP_LIMIT),
    "nan": Kind(by.ordered("nan"), named=("non_finite",)),
    "exception": Kind(by.ordered("exception"), named=("user_error",), names_host=True),
    "torn": Kind(by.truncate_checkpoint, named=CRASH, names_host=True, needs="fresh"),
    "flip": Kind(by.flip_byte, named=CRASH, names_host=True, needs="fresh"),
    "disk_full": Kind(by.fill_disk, must_show=False, until=by.a_save_has_failed, heal=by.free_disk, needs="disk"),
    "tracking": Kind(
        by.kill_tracking,
        must_show=False,
        until=lambda scene, strike: time.time() > strike.details["until_s"],
        heal=by.start_tracking,
        needs="mlflow",
    ),
    "preempt": Kind(by.terminate_process, named=PREEMPTION, names_host=True),
    "drain": Kind(by.drain_node, named=PREEMPTION, names_host=True, until=by.noticed, heal=by.take_node_away, needs="cluster"),
    "network": Kind(
        by.cut_network,
        named=("host_lost", "hang"),
        names_host=True,
        until=by.noticed,
        heal=by.join_network,
        needs="network",
        overrides=STEP_LIMIT,
    ),
}


def strike(scene: Scene, fault: Fault) -> Strike:
    """Strikes, waits until it shows, and heals. Raises RunError if it cannot strike."""
    kind, at_s = KINDS[fault.kind], time.time()
    # A gang that may shrink has fewer hosts by now than were dealt to.
    fault = replace(fault, host=fault.host % max(1, len(scene.run.members())))
    try:
        details = kind.strike(scene, fault)
    except (psutil.NoSuchProcess, ProcessLookupError) as error:
        raise RunError(f"{fault.kind}: what was to be struck on host {fault.host} was gone already: {error}") from error
    made = Strike(fault.kind, details.pop("host", fault.host), details.pop("at_s", at_s), at_s, details)
    scene.run.wait(lambda: kind.until(scene, made), f"{fault.kind} to show")
    kind.heal(scene, made)
    made.healed_at_s = time.time()
    return made


def schedule(kinds: Sequence[str], count: int, hosts: int, seed: int, spread_s: float) -> list[Fault]:
    """The same faults for the same seed: each kind equally often (as far as `count` divides), in a random order."""
    rng = random.Random(seed)
    dealt = [kinds[i % len(kinds)] for i in range(count)]
    rng.shuffle(dealt)
    return [Fault(kind, rng.randrange(hosts), rng.uniform(0, spread_s), rng.randrange(2**32)) for kind in dealt]


def overrides_for(kinds: Collection[str]) -> list[str]:
    """What a run that these shall strike needs in its configuration."""
    own = [override for kind in KINDS if kind in kinds for override in KINDS[kind].overrides]
    return list(dict.fromkeys(own))


def need(kinds: Collection[str], what: str) -> bool:
    return any(what in KINDS[kind].needs.split() for kind in kinds)
