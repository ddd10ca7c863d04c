"""How each fault is injected: from outside, or by an order to `trainers.diagnostics.fault_injection` in a training process."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from gangway.storage.opening import place_of
from gangway.storage.store import Place
from orchestrator.faultlab.testbed.live_run import Run, RunError, step_of
from orchestrator.faultlab.testbed.local_cluster import Cluster
from orchestrator.faultlab.testbed.resources import MlflowServer, SmallDisk

T = TypeVar("T")
SLOW_S, SLOW_STEPS = 0.3, 25
TRACKING_DOWN_S = 3.0
VANISHED_S = 8.0
CLOCK_JUMP_S, CLOCK_BEFORE_KILL_S, CLOCK_IS_WRONG_S = 3600.0, 2.0, 6.0
LEASE_S = 30.0
"""Of agents without a driver (`driver.agent_lease_s`), where the driver is to be paused: chaos waits that long."""
SHORT_PAUSE_S, LONG_PAUSE_S = 23.0, LEASE_S + 8.0
"""Longer than the driver waits for a silent agent; longer than the lease."""
STORAGE_HANGS_S = 25.0
"""Longer than the driver waits for a silent agent, or for an answer of one."""
NOTICE_S = 60
PLANTED = ("previews", "incidents", "figures", "requests")
THEIRS = ("stop-000000000000.json", "0001/host-0000.txt", "loss.png", "thesis.tex")
PLANTED_S = 8.0
CHECKPOINTS, CHECKPOINTS_AWAY = "checkpoints", "checkpoints-away"
ORDER_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Fault:
    kind: str
    host: int
    delay_s: float
    """After the run is ready for it: where in its steps the fault comes."""
    salt: int
    """For what else is left to chance, such as which byte of which file."""


@dataclass
class Testbed:
    """The run and the resources under it; None for a resource that this schedule does not need."""

    run: Run
    cluster: Cluster | None = None
    disk: SmallDisk | None = None
    mlflow: MlflowServer | None = None
    programs: Path | None = None
    """Where its hosts keep executables."""
    data: Path | None = None
    """The texts that it learns from."""
    max_steps: int | None = None
    """Where the run ends."""
    save_steps: int | None = None


def needed(resource: T | None) -> T:
    """Returns a resource of the testbed, which is there if the kind of the fault says that it needs it (`Kind.needs`)."""
    assert resource is not None
    return resource


Details = dict[str, Any]
"""What is recorded of an injection: whose process, which file, which batch. `host` and `at_s`, if there, are better known."""


@dataclass
class Injection:
    """A fault that was injected."""

    kind: str
    host: int
    at_s: float
    healed_at_s: float
    """When it was over, as far as it lies with us."""
    details: Details
    incidents_before: int = 0
    """So many were known when the fault was injected. Not by times: a clock may be what is set."""
    oldest_checkpoint: int = 0
    """The step of the oldest one that was there: nothing may go on from before it."""
    problem: str | None = None
    """What was seen to be wrong while the fault lasted."""


def noticed(testbed: Testbed, injection: Injection) -> bool:
    return len(testbed.run.incidents()) > injection.incidents_before


# ---------------------------------------------------------------------- injected from outside


def kill_process(testbed: Testbed, fault: Fault) -> Details:
    return send(testbed.run.member(fault.host), signal.SIGKILL)


def freeze_process(testbed: Testbed, fault: Fault) -> Details:
    return send(testbed.run.member(fault.host), signal.SIGSTOP)


def terminate_process(testbed: Testbed, fault: Fault) -> Details:
    return send(testbed.run.member(fault.host), signal.SIGTERM)


def kill_agent(testbed: Testbed, fault: Fault) -> Details:
    return send(testbed.run.agent(fault.host), signal.SIGKILL)


def kill_driver(testbed: Testbed, fault: Fault) -> Details:
    driver = testbed.run.driver()
    if driver.pid == testbed.run.process.pid:
        raise RunError("the driver runs in the command itself: nothing would start it again; set driver.supervise=true")
    return send(driver, signal.SIGKILL)


def pause_driver(pause_s: float) -> Callable[[Testbed, Fault], Details]:
    def inject(testbed: Testbed, fault: Fault) -> Details:
        return {**send(testbed.run.driver(), signal.SIGSTOP), "until_s": time.time() + pause_s}

    return inject


def let_driver_go_on(testbed: Testbed, injection: Injection) -> None:
    os.kill(injection.details["pid"], signal.SIGCONT)


def kill_node(testbed: Testbed, fault: Fault) -> Details:
    """A node that holds a host of the gang and not the driver; another one (of TPU hosts: another whole slice) is started, as a
    cluster that heals itself would."""
    host, node = _host_on_a_node(testbed, fault.host)
    node.kill()
    needed(testbed.cluster).add_machines()
    return {"host": host, "node": node.number}


def drain_node(testbed: Testbed, fault: Fault) -> Details:
    """Its machine gives notice; another one is there already."""
    host, node = _host_on_a_node(testbed, fault.host)
    needed(testbed.cluster).add_machines()
    needed(testbed.cluster).drain(node, NOTICE_S)
    return {"host": host, "node": node.number}


def take_node_away(testbed: Testbed, injection: Injection) -> None:
    next(node for node in needed(testbed.cluster).nodes if node.number == injection.details["node"]).kill()


def cut_network(testbed: Testbed, fault: Fault) -> Details:
    host, node = _host_on_a_node(testbed, fault.host)
    needed(needed(testbed.cluster).network).cut(node)
    return {"host": host, "node": node.number}


def join_network(testbed: Testbed, injection: Injection) -> None:
    """The node was declared dead and leaves: another one comes in its place."""
    node = next(node for node in needed(testbed.cluster).nodes if node.number == injection.details["node"])
    needed(needed(testbed.cluster).network).join(node)
    needed(testbed.cluster).add_machines()


def _host_on_a_node(testbed: Testbed, first: int) -> tuple[int, Any]:
    """Returns the first host from `first` on whose node may be lost: not the head, and not the node of the driver."""
    of_driver = needed(testbed.cluster).node_of(testbed.run.driver())
    members = testbed.run.members()
    for host in sorted(members, key=lambda host: (host < first, host)):
        node = needed(testbed.cluster).node_of(members[host])
        if node is not None and node is not of_driver:
            return host, node
    raise RunError("no host of the gang is on a node that may be lost")


def set_clock(testbed: Testbed, fault: Fault) -> Details:
    """Of a host's machine, or of the driver's, an hour forward or back; then a process is killed: both have to tell when."""
    rng = random.Random(fault.salt)
    host, node = _host_on_a_node(testbed, fault.host)
    injected, ahead_s = rng.choice([node, needed(testbed.cluster).head()]), rng.choice([-CLOCK_JUMP_S, CLOCK_JUMP_S])
    injected.set_clock(ahead_s)
    time.sleep(CLOCK_BEFORE_KILL_S)
    about = {"host": host, "node": injected.number, "ahead_s": ahead_s, "until_s": time.time() + CLOCK_IS_WRONG_S}
    return {**send(testbed.run.member(host), signal.SIGKILL), **about}


def truncate_checkpoint(testbed: Testbed, fault: Fault) -> Details:
    return _damage(testbed, fault, lambda data, rng: data[: rng.randrange(len(data))])


def flip_byte(testbed: Testbed, fault: Fault) -> Details:
    return _damage(testbed, fault, flipped)


def _damage(testbed: Testbed, fault: Fault, change: Callable[[bytes, random.Random], bytes]) -> Details:
    """Damages a file of the newest checkpoint, and kills a process so that it has to be read."""
    rng = random.Random(fault.salt)
    newest = testbed.run.checkpoints()[-1]
    name = pick_file(newest, rng)
    path = newest / name
    path.put(change(path.content(), rng))
    return {**kill_process(testbed, fault), "checkpoint": step_of(newest), "file": name}


def pick_file(folder: Place, rng: random.Random) -> str:
    """Returns the name in the folder of one that holds something."""
    # Sorted: the same seed has to choose the same file again.
    return rng.choice(sorted(entry.name for entry in place_of(folder).list() if entry.size))


def flipped(data: bytes, rng: random.Random) -> bytes:
    """Returns the data with one byte changed."""
    index = rng.randrange(len(data))
    return data[:index] + bytes([data[index] ^ rng.randrange(1, 256)]) + data[index + 1 :]


REFUSED = re.compile(r"\S+\.xla could not be loaded")
"""Part of what the console says of a kept executable that is compiled again."""


def flip_programs(testbed: Testbed, fault: Fault) -> Details:
    """In place, as a disk would. Whoever takes the process's place must not run what is left."""
    rng, before = random.Random(fault.salt), len(REFUSED.findall(testbed.run.console()))
    paths = sorted(needed(testbed.programs).glob("train_step-*.xla"))
    if not paths:
        raise RunError(f"no host has kept its train step in {testbed.programs}")
    for path in paths:
        path.write_bytes(flipped(path.read_bytes(), rng))
    return {**kill_process(testbed, fault), "files": [path.name for path in paths], "said_before": before}


def a_program_was_refused(testbed: Testbed, injection: Injection) -> bool:
    return len(REFUSED.findall(testbed.run.console())) > injection.details["said_before"]


def take_checkpoints_away(testbed: Testbed, fault: Fault) -> Details:
    """As when a share is not mounted any more: the folder is gone, or an empty one lies in its place. Then a process is killed,
    and the run looks for its checkpoints."""
    folder = testbed.run.run_dir.path / CHECKPOINTS
    empty = bool(fault.salt % 2)
    folder.rename(folder.with_name(CHECKPOINTS_AWAY))
    if empty:
        folder.mkdir()
    return {**kill_process(testbed, fault), "empty": empty, "until_s": time.time() + VANISHED_S}


def bring_checkpoints_back(testbed: Testbed, injection: Injection) -> None:
    """Over what was written in their place meanwhile, if anything was: that is kept beside them."""
    folder = testbed.run.run_dir.path / CHECKPOINTS
    with suppress(FileNotFoundError):
        injection.details["written_meanwhile"] = sorted(path.name for path in folder.iterdir())
        folder.rename(folder.with_name(f"{CHECKPOINTS}-meanwhile-{injection.incidents_before}"))
    folder.with_name(CHECKPOINTS_AWAY).rename(folder)


def plant_links(testbed: Testbed, fault: Fault) -> Details:
    """Under names that the run writes to, to a folder of somebody's, in which such names are too. Then a process is killed, and
    there is something to write."""
    folder, theirs = testbed.run.run_dir.path, testbed.run.orders / "theirs"
    for name in THEIRS:
        (theirs / name).parent.mkdir(parents=True, exist_ok=True)
        (theirs / name).write_text("precious")
    planted = [name for name in PLANTED if not os.path.lexists(folder / name)]
    for name in planted:
        (folder / name).symlink_to(theirs.absolute())
    return {**kill_process(testbed, fault), "planted": planted, "until_s": time.time() + PLANTED_S}


def take_links_away(testbed: Testbed, injection: Injection) -> None:
    folder, theirs = testbed.run.run_dir.path, testbed.run.orders / "theirs"
    for name in injection.details["planted"]:
        (folder / name).rename(testbed.run.orders / f"{name}-{injection.incidents_before}")
    found = {str(path.relative_to(theirs)): path.read_text() for path in theirs.rglob("*") if path.is_file()}
    if found != dict.fromkeys(THEIRS, "precious"):
        injection.problem = f"written through a link: there is {', '.join(sorted(found))}"


def time_is_up(testbed: Testbed, injection: Injection) -> bool:
    return time.time() > injection.details["until_s"]


def fill_disk(testbed: Testbed, fault: Fault) -> Details:
    # Counted before: saves that failed earlier do not show this fault.
    before = testbed.run.console().count(SAVE_FAILED)
    needed(testbed.disk).fill()
    return {"said_before": before}


SAVE_FAILED = "failed, training goes on"
"""Part of what the console says of a save that failed."""


def a_save_has_failed(testbed: Testbed, injection: Injection) -> bool:
    return testbed.run.console().count(SAVE_FAILED) > injection.details["said_before"]


def free_disk(testbed: Testbed, injection: Injection) -> None:
    needed(testbed.disk).free()


def freeze_storage(testbed: Testbed, fault: Fault) -> Details:
    """Whoever writes to the run's storage waits, in the kernel, as on a server that does not answer. Reading goes on."""
    needed(testbed.disk).freeze()
    # An order that changes nothing: that it is taken shows that steps go on while the storage hangs.
    return {"until_s": time.time() + STORAGE_HANGS_S, "order": testbed.run.order(fault.host, "slow", step_s=0.0, steps=0)}


def freeze_storage_and_kill(testbed: Testbed, fault: Fault) -> Details:
    """The same, and a failure has to be handled meanwhile."""
    needed(testbed.disk).freeze()
    return {**kill_process(testbed, fault), "until_s": time.time() + STORAGE_HANGS_S}


def thaw_storage(testbed: Testbed, injection: Injection) -> None:
    # Read before the thaw: after it, a step proves nothing.
    if (order := injection.details.get("order")) and testbed.run.taken(order) is None:
        injection.problem = "no step was taken while the storage hung"
    needed(testbed.disk).thaw()


def kill_tracking(testbed: Testbed, fault: Fault) -> Details:
    return {"pid": needed(testbed.mlflow).kill(), "until_s": time.time() + TRACKING_DOWN_S}


def start_tracking(testbed: Testbed, injection: Injection) -> None:
    needed(testbed.mlflow).start()
    needed(testbed.mlflow).wait_ready()


def step_clocks(testbed: Testbed, fault: Fault) -> Details:
    """Of all machines at once, an hour forward or back, as when a time server is put right. Nothing else happens."""
    ahead_s = random.Random(fault.salt).choice([-CLOCK_JUMP_S, CLOCK_JUMP_S])
    for node in needed(testbed.cluster).nodes:
        node.set_clock(ahead_s)
    return {"ahead_s": ahead_s, "until_s": time.time() + CLOCK_IS_WRONG_S}


def set_clocks_right(testbed: Testbed, injection: Injection) -> None:
    for node in needed(testbed.cluster).nodes:
        node.set_clock(0.0)


def send(process: psutil.Process, number: signal.Signals) -> Details:
    os.kill(process.pid, number)
    return {"pid": process.pid}


# ---------------------------------------------------------------------- on order


def ordered(kind: str, **settings: Any) -> Callable[[Testbed, Fault], Details]:
    def inject(testbed: Testbed, fault: Fault) -> Details:
        order = testbed.run.order(fault.host, kind, **settings)
        if not testbed.run.wait(lambda: testbed.run.taken(order) is not None, f"the order {order} to be taken", ORDER_TIMEOUT_S):
            raise RunError(f"the run ended before it took the order {order}")
        taken = testbed.run.taken(order) or {}
        return {name: taken[name] for name in ("pid", "batch_index", "at_s")}

    return inject


def an_odd_event_was_told(testbed: Testbed, injection: Injection) -> bool:
    """By the process that made one, and by the driver, which another one has reached past it."""
    console, name = testbed.run.console(), injection.details["name"]
    return f"not passed on: '{name}'" in console and f"is left out: {name}_sent" in console


def order_odd_events(testbed: Testbed, fault: Fault) -> Details:
    # One name for each fault: the same mistake is reported once.
    name = f"odd_{fault.salt:x}".translate(str.maketrans("0123456789", "ghijklmnop"))
    return {**ordered("odd_event", name=name)(testbed, fault), "name": name}
