"""A Ray cluster of several nodes on this machine, for faults that take a whole node or its network. Nothing is left behind.

Each node has a wall clock of its own (clock.py); where it is permitted, a network namespace of its own too, joined to the
others by a cable that can be cut. Nodes may be hosts of fake TPU slices: Ray recognises a slice by the labels and resources of
its nodes alone, so processes that use no TPU can run on them.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from cluster.hosts.config import (
    POD_TYPE_LABEL,
    SLICE_NAME_LABEL,
    WORKER_ID_LABEL,
    HostsConfig,
    chips_per_host,
    hosts_per_slice,
    pod_type,
)
from gangway.storage import ours
from orchestrator.faultlab.testbed import clock as settable_clock
from orchestrator.faultlab.testbed.resources import ResourceError, can_connect, free_port, run, wait_for

NET = "10.231.{octet}.{host}"
"""Addresses of the nodes in network namespaces of their own; each network has its octet."""
NETWORKS = 200
"""So many have room on a machine."""
NAMES_OF_SPACES = Path("/etc/netns")
NAMES = ours.named("the names of a network namespace", r"gw\d+n\d+")
CLUSTER_ENV = {
    # A node that is cut off is declared dead within some 10 s, not within a minute.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_USAGE_STATS_ENABLED": "0",
}
START = """
from ray.scripts.scripts import main

from orchestrator.driver.ray_cluster import START_LIMIT_S, patient_with_agents

with patient_with_agents(START_LIMIT_S):
    main()
"""
ASK = """
import json, sys, ray
from ray.util import list_named_actors, placement_group_table

ray.init(sys.argv[1], log_to_driver=False, logging_level="error")
actors = [f"actor {a['name']}" for a in list_named_actors(all_namespaces=True) if a["namespace"] == "gangway"]
groups = [f"placement group {g['name']}" for g in placement_group_table().values() if g["state"] != "REMOVED"]
print(json.dumps(actors + groups))
"""


DRAIN = """
import subprocess, sys, ray

address, folder, seconds = sys.argv[1:]
ray.init(address, log_to_driver=False, logging_level="error")
(node_id,) = (n["NodeID"] for n in ray.nodes() if n["Alive"] and n["RayletSocketName"].startswith(folder))
about = ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=on order", f"--deadline-remaining-seconds={seconds}"]
command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", f"--address={address}", f"--node-id={node_id}"]
subprocess.run([*command, *about], check=True)
"""


@dataclass
class Node:
    """A Ray node in a session of its own. `space` is its network namespace, if it has one."""

    number: int
    process: subprocess.Popen
    space: str | None
    clock: Path

    def set_clock(self, ahead_s: float) -> None:
        """Sets the wall clock of all that runs on it."""
        settable_clock.set_ahead(self.clock, ahead_s)

    def processes(self) -> list[psutil.Process]:
        """Everything that runs on it: its session, and what was started from there in sessions of its own."""
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(process.pid) == self.process.pid:
                    found.update({below.pid: below for below in [process, *process.children(recursive=True)]})
        return list(found.values())

    def kill(self) -> None:
        """As when the machine loses its power: everything at once."""
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


class Cluster:
    """A head, whose one CPU is for the driver, and nodes of one host each."""

    def __init__(self, folder: Path, network: Network | None, slices_of: HostsConfig | None = None):
        self.folder, self.network, self.slices_of = folder, network, slices_of
        """With `slices_of` the nodes are TPU hosts by what they say of themselves, and come in slices."""
        self.nodes: list[Node] = []
        self._num_started = self._num_slices = 0
        self.ip = network.head_ip if network else "127.0.0.1"
        self.address = f"{self.ip}:{free_port(self.ip)}"
        self.authentication = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        """What whoever is to use it must have in its environment."""
        self._clocks = folder / "clocks"
        self._clocks.mkdir()
        shutil.copy(settable_clock.__file__, self._clocks / "sitecustomize.py")

    def start_head(self) -> None:
        port = self.address.rpartition(":")[2]
        self._start(["--head", f"--port={port}", f"--node-ip-address={self.ip}", "--include-dashboard=false"], None, FakeNode())
        wait_for(lambda: can_connect(self.address), "the head of a Ray cluster")

    def add_machines(self) -> None:
        """Asks for what may take the place of a lost machine: one more, or a whole slice; it is there some seconds later."""
        nodes = [FakeNode()]
        if self.slices_of is not None:
            nodes = slice_nodes(self.slices_of, f"slice-{self._num_slices}")
            self._num_slices += 1
        for node in nodes:
            space = self.network.add(self._num_started) if self.network else None
            ip = self.network.ip_of(self._num_started) if self.network else self.ip
            self._start([f"--address={self.address}", f"--node-ip-address={ip}"], space, node)

    def node_of(self, process: psutil.Process) -> Node | None:
        """The node that runs it: that of the nearest process above it in a node's session. None: the head, or none of ours."""
        sessions = {node.process.pid: node for node in self.nodes[1:]}
        for above in [process, *process.parents()]:
            with suppress(ProcessLookupError):
                if node := sessions.get(os.getsid(above.pid)):
                    return node
        return None

    def head(self) -> Node:
        return self.nodes[0]

    def drain(self, node: Node, seconds: int) -> None:
        """Tells that the node will be taken away in so many seconds."""
        done = self._ask(DRAIN, f"{self._folder_of(node.number)}/", str(seconds))
        if done.returncode != 0:
            raise ResourceError(f"node {node.number} cannot be drained: {done.stderr.strip()[-500:]}")

    def left_behind(self) -> list[str]:
        """Named actors and placement groups that the run has not given back."""
        done = self._ask(ASK)
        if done.returncode != 0:
            return [f"the cluster could not be asked: {done.stderr.strip()[-500:]}"]
        return json.loads(done.stdout.splitlines()[-1])

    def keep_logs(self, folder: Path) -> None:
        """What Ray's own processes have printed, by node: gone otherwise, with the cluster."""
        for logs in self.folder.glob("*/session_*/logs"):
            if not logs.parent.is_symlink():
                shutil.copytree(logs, folder / logs.parts[-3] / logs.parts[-2], dirs_exist_ok=True)

    def close(self) -> None:
        for node in reversed(self.nodes):
            node.kill()

    def _ask(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A driver of its own: this process stays free of Ray."""
        command = [sys.executable, "-c", program, self.address, *arguments]
        env = os.environ | CLUSTER_ENV | self.authentication
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=env)

    def _folder_of(self, number: int) -> str:
        """One for each: nodes of one machine that share one take each other's sockets."""
        return f"{self.folder}/{number}"

    def _start(self, arguments: Sequence[str], space: str | None, about: FakeNode) -> None:
        number = self._num_started
        self._num_started += 1
        command = [sys.executable, "-c", START, "start", "--block", "--num-cpus=1", *arguments]
        command.append(f"--temp-dir={self._folder_of(number)}")
        command.append("--include-log-monitor=false")  # it looks ten times a second on each node for what no driver here prints
        if about.resources:
            labels = ",".join(f"{name}={value}" for name, value in about.labels.items())
            command += [f"--resources={json.dumps(about.resources)}", f"--labels={labels}"]
        clock = self._clocks / str(number)
        settable_clock.set_ahead(clock, 0.0)
        path = os.pathsep.join(filter(None, [str(self._clocks), os.environ.get("PYTHONPATH")]))
        own = {**about.env, settable_clock.VARIABLE: str(clock), "PYTHONPATH": path}
        env = {**os.environ, **CLUSTER_ENV, **self.authentication, **own}
        prefix = ["ip", "netns", "exec", space] if space else []
        with (self.folder / f"node-{number}.log").open("wb") as log:
            process = subprocess.Popen(
                [*prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
            )
        self.nodes.append(Node(number, process, space, clock))


class Network:
    """A bridge, and for each node a network namespace that hangs on it by a cable that can be cut."""

    def __init__(self) -> None:
        self._spaces: dict[int, str] = {}
        self._has_bridge = False
        self._number(0)

    def open(self) -> None:
        """Takes numbers that are free: another network may be there, or what a killed process has left of one."""
        for attempt in range(NETWORKS):
            self._number(attempt)
            try:
                ip("link", "add", self.bridge, "type", "bridge")
                self._has_bridge = True
                break
            except ResourceError as error:
                if "File exists" not in str(error) or attempt == NETWORKS - 1:
                    raise
        ip("addr", "add", f"{self.head_ip}/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")

    def _number(self, attempt: int) -> None:
        # From the process id: two networks on one machine rarely begin with the same.
        self.octet = (os.getpid() + attempt) % NETWORKS + 20
        self.head_ip = NET.format(octet=self.octet, host=1)
        self.bridge = f"gwb{self.octet}"

    def ip_of(self, number: int) -> str:
        return NET.format(octet=self.octet, host=number + 10)

    def add(self, number: int) -> str:
        space, cable = f"gw{self.octet}n{number}", self._cable(number)
        ip("netns", "add", space)
        self._spaces[number] = space
        ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
        ip("link", "set", cable, "master", self.bridge, "up")
        ip("-n", space, "addr", "add", f"{self.ip_of(number)}/24", "dev", "eth0")
        ip("-n", space, "link", "set", "lo", "up")
        ip("-n", space, "link", "set", "eth0", "up")
        # Ray finds its own address by the way out; XLA's collectives by what the host's name means.
        ip("-n", space, "route", "add", "default", "via", self.head_ip)
        names = NAMES_OF_SPACES / space / "hosts"  # `ip netns exec` shows it there as /etc/hosts
        names.parent.mkdir(parents=True, exist_ok=True)
        names.write_text(f"127.0.0.1 localhost\n{self.ip_of(number)} {socket.gethostname()}\n")
        return space

    def cut(self, node: Node) -> None:
        ip("link", "set", self._cable(node.number), "down")

    def join(self, node: Node) -> None:
        ip("link", "set", self._cable(node.number), "up")

    def close(self) -> None:
        for number, space in self._spaces.items():
            # A process that still runs in the namespace would keep it alive.
            pids = subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True, check=False).stdout.split()
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            for thing in (["link", "del", self._cable(number)], ["netns", "del", space]):
                subprocess.run(["ip", *thing], capture_output=True, check=False)
            with suppress(OSError):
                ours.delete(NAMES_OF_SPACES / space, NAMES)
        if self._has_bridge:  # else it is another's
            subprocess.run(["ip", "link", "del", self.bridge], capture_output=True, check=False)

    def _cable(self, number: int) -> str:
        return f"gwc{self.octet}n{number}"


@contextmanager
def local_cluster(network: Network | None, slices_of: HostsConfig | None = None) -> Iterator[Cluster]:
    """Only its head: the driver is to find its place there, so that any other node may be lost."""
    folder = Path(tempfile.mkdtemp(prefix="gw-", dir="/tmp"))  # short: socket paths have a limit
    cluster = Cluster(folder, network, slices_of)
    try:
        cluster.start_head()
        yield cluster
    finally:
        cluster.close()
        with suppress(OSError):
            ours.delete(folder, ours.TEMPORARY_FOLDER)


@contextmanager
def network() -> Iterator[Network]:
    made = Network()
    try:
        made.open()
        yield made
    finally:
        made.close()


def why_no_network() -> str | None:
    """Why network namespaces cannot be had here; None if they can."""
    probe = f"gwprobe{os.getpid()}"
    try:
        ip("netns", "add", probe)
    except ResourceError as error:
        return f"no network namespaces here: {error}"
    try:
        ip("link", "add", probe, "type", "veth", "peer", "name", "eth0", "netns", probe)
    except ResourceError as error:
        return f"no virtual cables here: {error}"
    finally:
        ip("netns", "del", probe)
    return None


def ip(*arguments: str) -> None:
    run(["ip", *arguments])


TOPOLOGY_LABEL = "ray.io/tpu-topology"


@dataclass(frozen=True, kw_only=True)
class FakeNode:
    num_cpus: float = 1
    resources: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)


def slice_nodes(config: HostsConfig, name: str, num_cpus: float = 1) -> list[FakeNode]:
    """Returns the nodes of one fake TPU slice, in the order of their worker ids."""
    return [_slice_node(config, name, worker, num_cpus) for worker in range(hosts_per_slice(config))]


def _slice_node(config: HostsConfig, name: str, worker: int, num_cpus: float) -> FakeNode:
    head = {f"TPU-{pod_type(config)}-head": 1.0} if worker == 0 else {}
    return FakeNode(
        num_cpus=num_cpus,
        resources={"TPU": chips_per_host(config), name: 1.0, **head},
        labels={
            SLICE_NAME_LABEL: name,
            WORKER_ID_LABEL: str(worker),
            POD_TYPE_LABEL: pod_type(config),
            TOPOLOGY_LABEL: config.topology or "",
        },
        # Without these Ray would ask the cloud's metadata server, which is not there, and wait for it.
        env={
            "TPU_NAME": name,
            "TPU_WORKER_ID": str(worker),
            "TPU_ACCELERATOR_TYPE": pod_type(config),
            "TPU_TOPOLOGY": config.topology or "",
        },
    )
