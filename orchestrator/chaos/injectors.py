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
from typing import Any

import psutil

from orchestrator.testbed.live_run import Run, RunError
from orchestrator.testbed.local_cluster import Cluster
from orchestrator.testbed.resources import MlflowServer, SmallDisk

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
CHECKPOINTS, CHECKPOINTS_AWAY = "checkpoints", "checkpoints-away"
ORDER_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Fault:
    kind: str
    host: int
    delay_s: float
    """After the run is ready for it: where in its steps it strikes."""
    salt: int
    """For what else is left to chance, such as which byte of which file."""


@dataclass
class Scene:
    """The run, and what it stands on; None for what this schedule has no use for."""

    run: Run
    cluster: Cluster | None = None
    disk: SmallDisk | None = None
    mlflow: MlflowServer | None = None
    programs: Path | None = None
    """Where its hosts keep executables."""


Details = dict[str, Any]
"""What is to be told of a strike: whose process, which file, which batch. `host` and `at_s` are better known there, if there."""


@dataclass
class Strike:
    """A fault that struck."""

    kind: str
    host: int
    at_s: float
    healed_at_s: float
    """When it was over, as far as it lies with us."""
    details: Details
    incidents_before: int = 0
    """So many were known when it struck. Not told by times: a clock may be what is struck."""
    oldest_checkpoint: int = 0
    """The step of the oldest one that was there: nothing may go on from before it."""
    problem: str | None = None
    """What was seen to be wrong while it struck."""


def noticed(scene: Scene, strike: Strike) -> bool:
    return len(scene.run.incidents()) > strike.incidents_before


# ---------------------------------------------------------------------- struck from outside


def kill_process(scene: Scene, fault: Fault) -> Details:
    return send(scene.run.member(fault.host), signal.SIGKILL)


def freeze_process(scene: Scene, fault: Fault) -> Details:
    return send(scene.run.member(fault.host), signal.SIGSTOP)


def terminate_process(scene: Scene, fault: Fault) -> Details:
    return send(scene.run.member(fault.host), signal.SIGTERM)


def kill_agent(scene: Scene, fault: Fault) -> Details:
    return send(scene.run.agent(fault.host), signal.SIGKILL)


def kill_driver(scene: Scene, fault: Fault) -> Details:
    driver = scene.run.driver()
    if driver.pid == scene.run.process.pid:
        raise RunError("the driver runs in the command itself: nothing would start it again; set driver.supervise=true")
    return send(driver, signal.SIGKILL)


def pause_driver(pause_s: float) -> Callable[[Scene, Fault], Details]:
    def strike(scene: Scene, fault: Fault) -> Details:
        return {**send(scene.run.driver(), signal.SIGSTOP), "until_s": time.time() + pause_s}

    return strike


def let_driver_go_on(scene: Scene, strike: Strike) -> None:
    os.kill(strike.details["pid"], signal.SIGCONT)


def kill_node(scene: Scene, fault: Fault) -> Details:
    """A node that holds a host of the gang and not the driver; another one (of TPU hosts: another whole slice) is started, as a
    cluster that heals itself would."""
    assert scene.cluster is not None
    host, node = _host_on_a_node(scene, fault.host)
    node.kill()
    scene.cluster.add_machines()
    return {"host": host, "node": node.number}


def drain_node(scene: Scene, fault: Fault) -> Details:
    """Its machine gives notice; another one is there already."""
    assert scene.cluster is not None
    host, node = _host_on_a_node(scene, fault.host)
    scene.cluster.add_machines()
    scene.cluster.drain(node, NOTICE_S)
    return {"host": host, "node": node.number}


def take_node_away(scene: Scene, strike: Strike) -> None:
    assert scene.cluster is not None
    next(node for node in scene.cluster.nodes if node.number == strike.details["node"]).kill()


def cut_network(scene: Scene, fault: Fault) -> Details:
    assert scene.cluster is not None
    assert scene.cluster.network is not None
    host, node = _host_on_a_node(scene, fault.host)
    scene.cluster.network.cut(node)
    return {"host": host, "node": node.number}


def join_network(scene: Scene, strike: Strike) -> None:
    """The node was declared dead and leaves: another one comes in its place."""
    assert scene.cluster is not None
    assert scene.cluster.network is not None
    node = next(node for node in scene.cluster.nodes if node.number == strike.details["node"])
    scene.cluster.network.join(node)
    scene.cluster.add_machines()


def _host_on_a_node(scene: Scene, wish: int) -> tuple[int, Any]:
    """The wished host, or the next one, whose node may be lost: not the head, and without the driver."""
    assert scene.cluster is not None
    of_driver = scene.cluster.node_of(scene.run.driver())
    members = scene.run.members()
    for host in sorted(members, key=lambda host: (host < wish, host)):
        node = scene.cluster.node_of(members[host])
        if node is not None and node is not of_driver:
            return host, node
    raise RunError("no host of the gang is on a node that may be lost")


def set_clock(scene: Scene, fault: Fault) -> Details:
    """Of a host's machine, or of the driver's, an hour forward or back; then a process is killed: both have to tell when."""
    assert scene.cluster is not None
    rng = random.Random(fault.salt)
    host, node = _host_on_a_node(scene, fault.host)
    struck, ahead_s = rng.choice([node, scene.cluster.head()]), rng.choice([-CLOCK_JUMP_S, CLOCK_JUMP_S])
    struck.set_clock(ahead_s)
    time.sleep(CLOCK_BEFORE_KILL_S)
    about = {"host": host, "node": struck.number, "ahead_s": ahead_s, "until_s": time.time() + CLOCK_IS_WRONG_S}
    return {**send(scene.run.member(host), signal.SIGKILL), **about}


def set_clock_right(scene: Scene, strike: Strike) -> None:
    assert scene.cluster is not None
    next(node for node in scene.cluster.nodes if node.number == strike.details["node"]).set_clock(0.0)


def truncate_checkpoint(scene: Scene, fault: Fault) -> Details:
    return _damage(scene, fault, lambda data, rng: data[: rng.randrange(len(data))])


def flip_byte(scene: Scene, fault: Fault) -> Details:
    return _damage(scene, fault, flipped)


def _damage(scene: Scene, fault: Fault, change: Callable[[bytes, random.Random], bytes]) -> Details:
    """Damages a file of the newest checkpoint, and kills a process so that it has to be read."""
    rng = random.Random(fault.salt)
    newest = scene.run.checkpoints()[-1]
    path = pick_file(newest, rng)
    data = path.read_bytes()
    path.write_bytes(change(data, rng))
    return {**kill_process(scene, fault), "checkpoint": int(newest.name), "file": str(path.relative_to(newest))}


def pick_file(folder: Path, rng: random.Random) -> Path:
    """One that holds something."""
    return rng.choice(sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size))


def flipped(data: bytes, rng: random.Random) -> bytes:
    """With one byte changed."""
    place = rng.randrange(len(data))
    return data[:place] + bytes([data[place] ^ rng.randrange(1, 256)]) + data[place + 1 :]


REFUSED = re.compile(r"\S+\.xla could not be loaded")
"""Part of what the console says of a kept executable that is compiled again."""


def flip_programs(scene: Scene, fault: Fault) -> Details:
    """In place, as a disk would. Whoever takes the process's place must not run what is left."""
    assert scene.programs is not None
    rng, told = random.Random(fault.salt), len(REFUSED.findall(scene.run.console()))
    paths = sorted(scene.programs.glob("train_step-*.xla"))
    if not paths:
        raise RunError(f"no host has kept its train step in {scene.programs}")
    for path in paths:
        path.write_bytes(flipped(path.read_bytes(), rng))
    return {**kill_process(scene, fault), "files": [path.name for path in paths], "told_before": told}


def a_program_was_refused(scene: Scene, strike: Strike) -> bool:
    return len(REFUSED.findall(scene.run.console())) > strike.details["told_before"]


def take_checkpoints_away(scene: Scene, fault: Fault) -> Details:
    """As when a share is not mounted any more: the folder is gone, or an empty one lies in its place. Then a process is killed,
    and the run looks for its checkpoints."""
    folder = scene.run.run_dir / CHECKPOINTS
    empty = bool(fault.salt % 2)
    folder.rename(folder.with_name(CHECKPOINTS_AWAY))
    if empty:
        folder.mkdir()
    return {**kill_process(scene, fault), "empty": empty, "until_s": time.time() + VANISHED_S}


def bring_checkpoints_back(scene: Scene, strike: Strike) -> None:
    """Over what was written in their place meanwhile, if anything was: that is kept beside them."""
    folder = scene.run.run_dir / CHECKPOINTS
    with suppress(FileNotFoundError):
        strike.details["written_meanwhile"] = sorted(path.name for path in folder.iterdir())
        folder.rename(folder.with_name(f"{CHECKPOINTS}-meanwhile-{strike.incidents_before}"))
    folder.with_name(CHECKPOINTS_AWAY).rename(folder)


def time_is_up(scene: Scene, strike: Strike) -> bool:
    return time.time() > strike.details["until_s"]


def fill_disk(scene: Scene, fault: Fault) -> Details:
    assert scene.disk is not None
    told = scene.run.console().count(SAVE_FAILED)
    scene.disk.fill()
    return {"told_before": told}


SAVE_FAILED = "failed, training goes on"
"""Part of what the console says of a save that failed."""


def a_save_has_failed(scene: Scene, strike: Strike) -> bool:
    return scene.run.console().count(SAVE_FAILED) > strike.details["told_before"]


def free_disk(scene: Scene, strike: Strike) -> None:
    assert scene.disk is not None
    scene.disk.free()


def freeze_storage(scene: Scene, fault: Fault) -> Details:
    """Whoever writes to the run's storage waits, in the kernel, as on a server that does not answer. Reading goes on."""
    assert scene.disk is not None
    scene.disk.freeze()
    return {"until_s": time.time() + STORAGE_HANGS_S, "order": scene.run.order(fault.host, "slow", step_s=0.0, steps=0)}


def freeze_storage_and_kill(scene: Scene, fault: Fault) -> Details:
    """The same, and a failure has to be handled meanwhile."""
    assert scene.disk is not None
    scene.disk.freeze()
    return {**kill_process(scene, fault), "until_s": time.time() + STORAGE_HANGS_S}


def thaw_storage(scene: Scene, strike: Strike) -> None:
    assert scene.disk is not None
    if (order := strike.details.get("order")) and scene.run.taken(order) is None:
        strike.problem = "no step was taken while the storage hung"
    scene.disk.thaw()


def kill_tracking(scene: Scene, fault: Fault) -> Details:
    assert scene.mlflow is not None
    return {"pid": scene.mlflow.kill(), "until_s": time.time() + TRACKING_DOWN_S}


def start_tracking(scene: Scene, strike: Strike) -> None:
    assert scene.mlflow is not None
    scene.mlflow.start()
    scene.mlflow.wait_ready()


def send(process: psutil.Process, number: signal.Signals) -> Details:
    os.kill(process.pid, number)
    return {"pid": process.pid}


# ---------------------------------------------------------------------- on order


def ordered(kind: str, **settings: Any) -> Callable[[Scene, Fault], Details]:
    def strike(scene: Scene, fault: Fault) -> Details:
        order = scene.run.order(fault.host, kind, **settings)
        if not scene.run.wait(lambda: scene.run.taken(order) is not None, f"the order {order} to be taken", ORDER_TIMEOUT_S):
            raise RunError(f"the run ended before it took the order {order}")
        taken = scene.run.taken(order) or {}
        return {name: taken[name] for name in ("pid", "batch_index", "at_s")}

    return strike
