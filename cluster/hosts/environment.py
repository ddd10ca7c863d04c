"""What becomes of the environment of a machine in a training process there: one list. Pure.

A variable that is in no list here is *taken* as it is: proxies for the downloads of user code, keys of a cloud, settings of
libraries. `hosts.env` comes over all of it.
"""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Iterator, Mapping

DROPPED = {
    "MEGASCALE_*": "of an earlier gang perhaps, with whose slices a process would hang; the orders have those of this gang",
    "RAY_AUTH_TOKEN": "training code must not have the token of the cluster",
    "JAX_COORDINATOR_*": "of another distributed program: the orders say who the coordinator is",
    "JAX_NUM_PROCESSES": "of another distributed program",
    "JAX_PROCESS_ID": "of another distributed program",
    "JAX_LOCAL_DEVICE_IDS": "of another distributed program: the orders say which devices a process has",
    "JAX_PARTITION_INDEX": "of another distributed program, as JAX_SLICE_INDEX",
    "JAX_SLICE_INDEX": "of another distributed program",
    "JAX_PLATFORM_NAME": "the old name of JAX_PLATFORMS, which hosts.kind decides",
    "GANGWAY_FAULTS": "of a run of `chaos` or `verify`: its faults are for that run",
    "GANGWAY_LAUNCHING": "of the program that called `launch`",
    "EVENT_FD": "of another training process",
}
"""What a training process does not get of the environment of its agent, and why. A name may end in `*`."""

NO_PROXY_BETWEEN_HOSTS = {"grpc_proxy": ""}
"""gRPC takes `https_proxy` and `http_proxy` too, and sends through it what one host says to another. An empty value here ends
that: the other proxies stay, for what user code downloads."""

OVERWRITTEN = (
    *("JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR", "GANGWAY_PROGRAMS", "NPROC", "PYTHONPATH", "MEGASCALE_*", "EVENT_FD"),
    *("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", *NO_PROXY_BETWEEN_HOSTS),
)
"""What a training process gets from us (`process_env`, the orders), whatever its agent has. XLA_FLAGS are joined, ours last."""

NOT_TO_BE_SET = {
    "EVENT_FD": "it is how the process reaches its agent",
    **dict.fromkeys(NO_PROXY_BETWEEN_HOSTS, "what hosts say to each other goes through no proxy; https_proxy is for downloads"),
}
"""What `hosts.env` may not have, and why."""


def taken(inherited: Mapping[str, str]) -> dict[str, str]:
    """Returns what a training process gets of the environment of its agent."""
    return {name: value for name, value in inherited.items() if not is_among(name, DROPPED)}


def problems(env: Mapping[str, str]) -> Iterator[str]:
    """Yields what is wrong with `hosts.env`."""
    for name, value in env.items():
        if name in NOT_TO_BE_SET:
            yield f"env.{name}: leave it out: {NOT_TO_BE_SET[name]}"
        elif why := _impossible(name, value):
            yield f"env: the variable {name!r} cannot be set: {why}"


def _impossible(name: str, value: str) -> str:
    """Returns why no process can have such a variable; empty if one can. The value is not shown."""
    if not name or "=" in name:
        return "expected a name without ="
    try:
        has_nul = b"\0" in os.fsencode(f"{name}{value}")
    except UnicodeEncodeError:
        return "its name or its value has half a character, which has no bytes"
    return "its name or its value has a NUL, which ends a text there" if has_nul else ""


def is_among(name: str, patterns: Mapping[str, str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
