"""The kinds of faults: what each does to a run, what the run must make of it, what has to be there. And the seeded schedule."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import psutil

from orchestrator.faultlab.chaos import around_command, injectors
from orchestrator.faultlab.chaos.injectors import Details, Fault, Injection, Testbed
from orchestrator.faultlab.testbed.live_run import RunError, step_of


def nothing(testbed: Testbed, injection: Injection) -> None: ...


def at_once(testbed: Testbed, injection: Injection) -> bool:
    return True


@dataclass(frozen=True)
class Kind:
    """`inject` does what `about` says. Then, when `until` holds, it is healed, if it does not end by itself."""

    about: str
    inject: Callable[[Testbed, Fault], Details]
    named: tuple[str, ...] = ()
    """Kinds of incident that name it rightly; none: nothing that is worth an incident has happened."""
    must_show: bool = True
    """Whether there has to be an incident."""
    names_host: bool = False
    """Whether the incident must name the host that was hit."""
    then: tuple[str, ...] = ()
    """Kinds of incident of which at least one must follow, and no other may; none: what follows is not looked at."""
    never: tuple[str, ...] = ()
    """Kinds of incident that must not be among those that follow: what they would name is not broken."""
    until: Callable[[Testbed, Injection], bool] = at_once
    heal: Callable[[Testbed, Injection], None] = nothing
    needs: str = ""
    """cluster, slices (a cluster of TPU slices), network, disk, freezable (a disk too), folder (as storage), mlflow,
    supervisor, programs (a folder of its own for executables), data (texts of its own), terminal, reader (of what the command
    prints), end (of the run, at a known step); and `fresh`: a checkpoint that was completed just now, and one before it."""
    last: int = 0
    """Kinds with a higher number come after all others: nothing of the run can be seen on its console any more, or it is over."""
    overrides: tuple[str, ...] = ()


CRASH = ("process_crash",)
LOST = ("host_lost",)
PREEMPTION = ("preemption",)
STORAGE = ("storage_error",)
HANG_OF_STORAGE = ("hang", "storage_error")
"""Where the limit of a save (`driver.watchdog.save_s`) is shorter than the hang; else nothing happens."""
GANG_GONE = ("host_lost", "driver_lost")
LEASE = (f"driver.agent_lease_s={injectors.LEASE_S:g}",)
IMPATIENT = ("checkpoint.storage_patience_s=2",)
"""Shorter than the limit of a step: training goes on while the storage hangs."""
STEP_LIMIT = ("driver.watchdog.step_floor_s=4", "driver.watchdog.save_s=6")
"""While a save is under way, a step may take as long as a save."""

RUN_AGAIN = partial(Kind, must_show=False, heal=around_command.start_again)
"""The command has ended, as it had to: then it is run again, and the run goes on."""

KINDS: Mapping[str, Kind] = {
    "process": Kind("a training process is killed (SIGKILL)", injectors.kill_process, named=CRASH, names_host=True),
    "freeze": Kind(
        "a training process is stopped (SIGSTOP)",
        injectors.freeze_process,
        named=("hang",),
        names_host=True,
        overrides=STEP_LIMIT,
    ),
    "agent": Kind("a host's agent is killed", injectors.kill_agent, named=LOST, names_host=True),
    "node": Kind("a machine is lost with all that runs on it", injectors.kill_node, named=LOST, names_host=True, needs="cluster"),
    "slice": Kind(
        "a machine of a TPU slice is lost, and with it the slice",
        injectors.kill_node,
        named=LOST,
        names_host=True,
        needs="slices",
    ),
    "driver": Kind("the driver is killed", injectors.kill_driver, named=("driver_lost",), needs="supervisor"),
    "stall": Kind(
        "the driver is paused, for less than its agents' lease",
        injectors.pause_driver(injectors.SHORT_PAUSE_S),
        must_show=False,
        until=injectors.time_is_up,
        heal=injectors.let_driver_go_on,
        overrides=LEASE,
    ),
    "pause": Kind(
        "the driver is paused until its agents have left",
        injectors.pause_driver(injectors.LONG_PAUSE_S),
        named=GANG_GONE,
        until=injectors.time_is_up,
        heal=injectors.let_driver_go_on,
        overrides=LEASE,
    ),
    "slow": Kind(
        "a host takes longer for each step",
        injectors.ordered("slow", step_s=injectors.SLOW_S, steps=injectors.SLOW_STEPS),
        named=("straggler",),
        names_host=True,
        until=injectors.noticed,
        overrides=("driver.stragglers.window_s=1", "driver.stragglers.windows=3"),
    ),
    "hang": Kind("a host hangs in Python", injectors.ordered("hang"), named=("hang",), names_host=True, overrides=STEP_LIMIT),
    "skip": Kind(
        "a host waits in a collective that the others skip",
        injectors.ordered("skip_collective"),
        named=("hang",),
        names_host=True,
        overrides=STEP_LIMIT,
    ),
    "desync": Kind("a host is one batch further than the others", injectors.ordered("desync"), named=("desync",)),
    "stuck_save": Kind(
        "a host's part of a checkpoint is never written to its end",
        injectors.ordered("stuck_save"),
        named=("hang",),
        names_host=True,
        overrides=STEP_LIMIT,
    ),
    "nan": Kind("a batch of one host weighs NaN", injectors.ordered("nan"), named=("non_finite",)),
    "exception": Kind(
        "an error of the program on one host", injectors.ordered("exception"), named=("user_error",), names_host=True
    ),
    "device": Kind(
        "a device error on one host (uncorrectable ECC)",
        injectors.ordered("device_error"),
        named=("device_error",),
        names_host=True,
    ),
    "torn": Kind(
        "the newest checkpoint is truncated, and a process killed",
        injectors.truncate_checkpoint,
        named=CRASH,
        names_host=True,
        needs="fresh",
    ),
    "flip": Kind(
        "a byte of the newest checkpoint is changed, and a process killed",
        injectors.flip_byte,
        named=CRASH,
        names_host=True,
        needs="fresh",
    ),
    "program": Kind(
        "a byte of each kept train step is changed, and a process killed",
        injectors.flip_programs,
        named=CRASH,
        names_host=True,
        until=injectors.a_program_was_refused,
        needs="programs",
    ),
    "vanish": Kind(
        "the checkpoints are gone when a process is killed, and come back later",
        injectors.take_checkpoints_away,
        named=CRASH,
        names_host=True,
        then=STORAGE,
        until=injectors.time_is_up,
        heal=injectors.bring_checkpoints_back,
        needs="fresh folder",
    ),
    "planted_link": Kind(
        "links to a folder elsewhere lie where the run writes, and a process is killed",
        injectors.plant_links,
        named=CRASH,
        names_host=True,
        until=injectors.time_is_up,
        heal=injectors.take_links_away,
        needs="folder",
    ),
    "superseded_pen": Kind(
        "the driver sleeps, the command is run again and takes the run over, and the driver goes on",
        around_command.supersede,
        must_show=False,
        heal=around_command.was_refused,
        overrides=LEASE,
    ),
    "disk_full": Kind(
        "the run's storage is full",
        injectors.fill_disk,
        must_show=False,
        until=injectors.a_save_has_failed,
        heal=injectors.free_disk,
        needs="disk",
    ),
    "storage_hang": Kind(
        "the run's storage hangs (who writes, waits in the kernel)",
        injectors.freeze_storage,
        named=HANG_OF_STORAGE,
        never=LOST,
        must_show=False,
        until=injectors.time_is_up,
        heal=injectors.thaw_storage,
        needs="freezable",
        overrides=IMPATIENT,
    ),
    "storage_hang_kill": Kind(
        "it hangs, and a process is killed meanwhile",
        injectors.freeze_storage_and_kill,
        named=CRASH,
        names_host=True,
        never=LOST,
        until=injectors.time_is_up,
        heal=injectors.thaw_storage,
        needs="freezable",
        overrides=IMPATIENT,
    ),
    "tracking": Kind(
        "the MLflow server is killed",
        injectors.kill_tracking,
        must_show=False,
        until=injectors.time_is_up,
        heal=injectors.start_tracking,
        needs="mlflow",
    ),
    "preempt": Kind("a training process gets SIGTERM", injectors.terminate_process, named=PREEMPTION, names_host=True),
    "drain": Kind(
        "a machine gives notice, and is taken away",
        injectors.drain_node,
        named=PREEMPTION,
        names_host=True,
        until=injectors.noticed,
        heal=injectors.take_node_away,
        needs="cluster",
    ),
    "clock": Kind(
        "a machine's clock jumps by an hour, a process is killed, and the clock jumps back",
        injectors.set_clock,
        named=CRASH,
        names_host=True,
        until=injectors.time_is_up,
        heal=injectors.set_clocks_right,
        needs="cluster",
    ),
    "clock_step": Kind(
        "the clocks of all machines step by an hour, and back",
        injectors.step_clocks,
        must_show=False,
        until=injectors.time_is_up,
        heal=injectors.set_clocks_right,
        needs="cluster",
    ),
    "odd_event": Kind(
        "a training process reports what is no event",
        injectors.order_odd_events,
        must_show=False,
        until=injectors.an_odd_event_was_told,
    ),
    "forking_user": Kind("code of the user's forks a pool of processes on one host", injectors.ordered("fork"), must_show=False),
    "signal_in_start": RUN_AGAIN(
        "the command is stopped, and gets another signal as it is run again; then it is run once more",
        around_command.strike_a_start,
    ),
    "stop_in_wait": RUN_AGAIN(
        "the command is stopped, run again where another driver seems to hold the run, and stopped while it waits for that one",
        around_command.stop_a_wait,
    ),
    "early_jax": RUN_AGAIN(
        "the command is stopped, and run again with a module that uses JAX as it is imported; then without it",
        around_command.use_jax_early,
    ),
    "moved_bucket": RUN_AGAIN(
        "the command is stopped, its run goes on in another place of the storage, and comes back",
        around_command.move_run,
    ),
    "full_output": Kind(
        "what `gangway status` prints arrives nowhere (a full disk)", around_command.print_to_a_full_disk, must_show=False
    ),
    "other_data": RUN_AGAIN(
        "the command is stopped, and run again where its data have changed; then they are as before",
        around_command.change_data,
        needs="data",
    ),
    "terminal": Kind(
        "the terminal of the command is closed (SIGHUP); then it is run again",
        around_command.close_terminal,
        must_show=False,
        until=around_command.never,
        heal=around_command.go_on,
        needs="terminal",
    ),
    "stdout": Kind(
        "nobody reads what the command prints any more", around_command.stop_reading, must_show=False, needs="reader", last=1
    ),
    "disk_full_at_end": Kind(
        "the run's storage is full as it ends, and has room later; the command is run again if it has ended",
        around_command.fill_disk_at_end,
        named=STORAGE,
        must_show=False,
        until=injectors.time_is_up,
        heal=around_command.free_disk_and_go_on,
        needs="disk end",
        last=2,
    ),
    "network": Kind(
        "a machine's cable is cut",
        injectors.cut_network,
        named=("host_lost", "hang"),
        names_host=True,
        until=injectors.noticed,
        heal=injectors.join_network,
        needs="network",
        overrides=STEP_LIMIT,
    ),
}


def inject(testbed: Testbed, fault: Fault) -> Injection:
    """Injects a fault, waits until it shows, and heals it. Raises RunError if it cannot be injected."""
    kind, at_s = KINDS[fault.kind], time.time()
    # A gang that may shrink has fewer hosts by now than were dealt to.
    fault = replace(fault, host=fault.host % max(1, len(testbed.run.members())))
    # Counted before the fault: every newer incident belongs to it.
    before, oldest = len(testbed.run.incidents()), next(iter(testbed.run.checkpoints()), None)
    try:
        details = kind.inject(testbed, fault)
    except (psutil.NoSuchProcess, ProcessLookupError) as error:
        raise RunError(f"{fault.kind}: what was to be injected on host {fault.host} was gone already: {error}") from error
    made = Injection(fault.kind, details.pop("host", fault.host), details.pop("at_s", at_s), at_s, details, before)
    made.oldest_checkpoint = step_of(oldest) if oldest else 0
    testbed.run.wait(lambda: kind.until(testbed, made), f"{fault.kind} to show")
    kind.heal(testbed, made)
    # From here on a new checkpoint shows that the fault is overcome.
    made.healed_at_s = testbed.run.now_s()
    return made


def schedule(kinds: Sequence[str], count: int, hosts: int, seed: int, spread_s: float) -> list[Fault]:
    """The same faults for the same seed: each kind equally often (as far as `count` divides), in a random order. One that ends
    the run can come once."""
    rng = random.Random(seed)
    again = [kind for kind in kinds if not need([kind], "end")]
    rounds = [*kinds, *(again * count)] if count > len(kinds) else kinds
    dealt = [*rounds[:count]]
    rng.shuffle(dealt)
    dealt.sort(key=lambda kind: KINDS[kind].last)
    return [Fault(kind, rng.randrange(hosts), rng.uniform(0, spread_s), rng.randrange(2**32)) for kind in dealt]


def overrides_for(kinds: Collection[str]) -> list[str]:
    """What a run that is to have these faults needs in its configuration."""
    own = [override for kind in KINDS if kind in kinds for override in KINDS[kind].overrides]
    return list(dict.fromkeys(own))


def need(kinds: Collection[str], what: str) -> bool:
    return any(what in KINDS[kind].needs.split() for kind in kinds)
