"""The machine of an agent: free ports for coordinators, the Ray node, and a home folder."""

from __future__ import annotations

import os
import random
import socket
import tempfile
from collections.abc import MutableMapping
from typing import Any

import ray

from gangway.wire.answers import RayNode

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
    with held_port(rng) as held:
        return held.getsockname()[1]


def held_port(rng: random.Random | None = None) -> socket.socket:
    """Returns a socket that holds a free port until it is closed: nobody finds it free, and one server that sets SO_REUSEADDR, as
    most do, can listen on it. Raises OSError if a hundred tries find none."""
    rng = rng or random.Random()
    for _ in range(100):
        held = socket.socket()
        try:
            # At random: several processes of a machine must not choose the same one.
            held.bind(("", rng.randint(FIRST_PORT, LAST_PORT)))
            # After `bind`, or two processes could hold it.
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            return held
        except OSError:
            held.close()
    raise OSError(f"no free port found between {FIRST_PORT} and {LAST_PORT} in 100 tries")


def with_port(address: str, port: int) -> str:
    """Joins address and port: `10.0.0.1:80`, `[fd00::1]:80`."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def ray_node() -> RayNode:
    """Returns the Ray node of this process: address, id and labels. Without Ray it is the loopback address."""
    if not ray.is_initialized():
        return {"host_ip": "127.0.0.1", "node_id": None, "labels": {}}
    context = ray.get_runtime_context()
    labels: Any = context.get_node_labels()
    return {"host_ip": ray.util.get_node_ip_address(), "node_id": context.get_node_id(), "labels": labels}
