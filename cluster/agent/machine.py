"""The machine of an agent: free ports for coordinators, the Ray node, and a home folder."""

from __future__ import annotations

import os
import random
import socket
import tempfile
from collections.abc import MutableMapping
from typing import Any

import ray

from cluster.agent.answers import RayNode

FIRST_PORT, LAST_PORT = 20_100, 32_700
"""Above the ports of Ray's workers, below those that Linux gives to outgoing connections. A port is chosen now and used minutes
or days later, by the next generation: no outgoing connection may have taken it by then."""


def ensure_home(environ: MutableMapping[str, str]) -> None:
    """Sets HOME where `~` stands for nothing: a user without an entry in the list of users, as in a container that was started
    with a number. A folder of that name would be made in the working folder."""
    if os.path.expanduser("~") == "~" or environ.get("HOME") == "":
        environ["HOME"] = tempfile.mkdtemp(prefix="gangway-home-")


def free_port(rng: random.Random | None = None) -> int:
    """Returns a port on which nothing listens now. Raises OSError if a hundred tries find none."""
    rng = rng or random.Random()
    for _ in range(100):
        # At random: nothing holds the port until it is used, and several agents of a machine must not choose
        # the same one.
        port = rng.randint(FIRST_PORT, LAST_PORT)
        if _is_free(port):
            return port
    raise OSError(f"no free port found between {FIRST_PORT} and {LAST_PORT} in 100 tries")


def with_port(address: str, port: int) -> str:
    """Joins address and port: `10.0.0.1:80`, `[fd00::1]:80`."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def ray_node() -> RayNode:
    """Returns the Ray node of this process: address, id and labels. Without Ray it is the loopback address."""
    if not ray.is_initialized():
        return {"host_ip": "127.0.0.1", "node_id": None, "labels": {}}
    context = ray.get_runtime_context()
    labels: Any = context.get_node_labels()
    return {"host_ip": ray.util.get_node_ip_address(), "node_id": context.get_node_id(), "labels": labels}
