"""How each fault is struck, from outside or by an order to the injector in a training process (trainers/faults.py)."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from orchestrator.chaos_cluster import Cluster
from orchestrator.chaos_ground import MlflowServer, SmallDisk
from orchestrator.chaos_run import Run, RunError

SLOW_S, SLOW_STEPS = 0.3, 25
TRACKING_DOWN_S = 3.0
NOTICE_S = 60
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


def noticed(scene: Scene, strike: Strike) -> bool:
    return any(detected_at_s(incident) >= strike.at_s for incident in scene.run.incidents())


def detected_at_s(incident: Mapping[str, Any]) -> float:
    return incident["failed_at_s"] + incident["recovery_s"].get("detect", 0.0)


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


def kill_node(scene: Scene, fault: Fault) -> Details:
    """A node that holds a host of the gang and not the driver; another one is started, as a cluster that heals itself would."""
    assert scene.cluster is not None
    host, node = _host_on_a_node(scene, fault.host)
    node.kill()
    scene.cluster.add_node()
    return {"host": host, "node": node.number}


def drain_node(scene: Scene, fault: Fault) -> Details:
    """Its machine gives notice; another one is there already."""
    assert scene.cluster is not None
    host, node = _host_on_a_node(scene, fault.host)
    scene.cluster.add_node()
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
    scene.cluster.add_node()


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
