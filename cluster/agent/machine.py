"""Ports for coordinators."""

from __future__ import annotations

import random
import socket
from typing import Any

import ray

FIRST_PORT, LAST_PORT = 20_100, 32_700
"""Above the ports of Ray's workers, below those that Linux gives to outgoing connections: a port chosen for the next
generation is used minutes or days later, and must not be some connection's own end by then."""


def free_port(rng: random.Random | None = None) -> int:
    """A port that nothing listens on now. Raises OSError if a hundred tries find none."""
    rng = rng or random.Random()
    for _ in range(100):
        port = rng.randint(FIRST_PORT, LAST_PORT)
        if _is_free(port):
            return port
    raise OSError(f"no free port found between {FIRST_PORT} and {LAST_PORT} in 100 tries")


def with_port(address: str, port: int) -> str:
    """`10.0.0.1:80`, `[fd00::1]:80`"""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def place() -> dict[str, Any]:
    """Where Ray has put this process; a process without Ray is on the machine's own."""
    if not ray.is_initialized():
        return {"host_ip": "127.0.0.1", "node_id": None, "labels": {}}
    context = ray.get_runtime_context()
    return {"host_ip": ray.util.get_node_ip_address(), "node_id": context.get_node_id(), "labels": context.get_node_labels()}
