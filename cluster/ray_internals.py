"""All that is used of Ray without a public name. No other file imports `ray._private`.

A new version of Ray may rename any of it: `tests/unit/test_internals.py` fails then, and `USED` says what breaks. Importing this
module imports Ray, which reads its environment then.
"""

from __future__ import annotations

from collections.abc import Mapping

from ray._private import services
from ray._private.node import Node
from ray._private.state import available_resources_per_node, state
from ray._raylet import DASHBOARD_AGENT_LISTEN_PORT_NAME, persist_port  # type: ignore[attr-defined]

__all__ = [
    "DASHBOARD_AGENT_LISTEN_PORT_NAME",
    "USED",
    "Node",
    "available_resources_per_node",
    "persist_port",
    "services",
    "state",
]

USED: Mapping[str, str] = {
    "available_resources_per_node": "which machines have room for a host (placement/bundles.py; ray.util.tpu uses it too)",
    "state.get_draining_nodes": "a machine that Ray is draining gives notice (agent/preemption.py; Ray Train uses it too)",
    "Node.start_api_server": "a Ray on one machine starts without the server of the dashboard (driver/ray_cluster.py)",
    "Node.start_monitor": "the same, without the autoscaler",
    "Node.start_log_monitor": "the same, without what copies logs to the driver",
    "Node.start_raylet": "a Ray starts on a busy machine, where Ray's agents need more than 15 s (driver/ray_cluster.py)",
    "services.get_node": "the same, where its node needs more than 30 s to register",
    "persist_port": "the same: a node need not wait for the port of its dashboard's agent",
    "DASHBOARD_AGENT_LISTEN_PORT_NAME": "the same",
    "services.ConsolePopen": "a signal to the command's process group does not end its Ray (orchestrator/driver/ray_cluster.py)",
}
"""What is used, and what stops working without it."""
