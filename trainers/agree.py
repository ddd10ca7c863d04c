"""What one host alone knows, agreed on by all: every such decision goes through here, or through the flags of the train step.

All hosts must call each function in the same order with the same `topic`. They talk through the coordination service, on the
host: no device, no compilation. A host that never comes makes the others raise after `timeout_s`, naming the topic.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import jax
from jax._src import distributed

from trainers.errors import CoordinatorError

_counter = itertools.count()
"""Makes each exchange's keys unique: the same on all hosts because all call in the same order."""

DEFAULT_TIMEOUT_S = 1800.0
"""Longer than any limit of a watchdog, which sees more and says more; without one it ends a run that would wait for ever."""


def all_hosts(topic: str, value: Any, timeout_s: float = DEFAULT_TIMEOUT_S) -> list[Any]:
    """Every host's (JSON-able) value, in host order."""
    if jax.process_count() == 1:
        return [value]
    prefix = f"agree/{next(_counter)}/{topic}"
    client = _client()
    client.key_value_set(f"{prefix}/{jax.process_index()}", json.dumps(value))
    return [_get(client, f"{prefix}/{host}", topic, host, timeout_s) for host in range(jax.process_count())]


def from_host0(topic: str, value: Any = None, timeout_s: float = DEFAULT_TIMEOUT_S) -> Any:
    """Host 0's (JSON-able) value; what the others pass is ignored."""
    if jax.process_count() == 1:
        return value
    key = f"agree/{next(_counter)}/{topic}"
    client = _client()
    if jax.process_index() == 0:
        client.key_value_set(key, json.dumps(value))
        return value
    return _get(client, key, topic, 0, timeout_s)


def every_host(topic: str, condition: bool, timeout_s: float = DEFAULT_TIMEOUT_S) -> bool:
    """True if `condition` holds on all hosts."""
    return all(all_hosts(topic, bool(condition), timeout_s))


def barrier(topic: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
    all_hosts(topic, True, timeout_s)


def _client() -> Any:
    client = distributed.global_state.client
    if client is None:
        raise CoordinatorError("several hosts, but this process has not joined: call trainers.distributed.join first")
    return client


def _get(client: Any, key: str, topic: str, host: int, timeout_s: float) -> Any:
    try:
        return json.loads(client.blocking_key_value_get(key, int(timeout_s * 1000)))
    except jax.errors.JaxRuntimeError as error:
        raise CoordinatorError(f"no answer from host {host} on {topic!r} within {timeout_s:.0f} s: {error}") from error
