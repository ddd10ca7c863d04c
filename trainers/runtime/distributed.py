"""Joining one `jax.distributed` job, and leaving it without hurting the others."""

from __future__ import annotations

import functools
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import jax
from jax._src import compiler, distributed, xla_bridge
from jax._src.lib import _jax

from trainers.errors import CoordinatorError

HEARTBEAT_TIMEOUT_S = 30
"""A backstop only: the process's owner watches exits and progress, both of which it sees much sooner."""
_make_gloo_tcp_collectives = _jax.make_gloo_tcp_collectives

FIRST_WAIT_S = 0.002
QUESTIONS_PER_S = 10_000
"""Of all hosts together to one that does not listen yet."""


@dataclass(frozen=True)
class Membership:
    """One host's place in a generation of the gang. `coordinator` is `ip:port`, a port never used before."""

    host: int = 0
    num_hosts: int = 1
    coordinator: str | None = None
    local_device_ids: tuple[int, ...] | None = None
    join_timeout_s: int = 60


def find_platforms() -> None:
    """Optional, before `join`: imports and registers the plugins for GPUs and TPUs that are installed, as JAX does at the latest
    when a device is first asked for. It touches none."""
    xla_bridge._discover_and_register_pjrt_plugins()


def join(member: Membership) -> None:
    """Joins the gang; all hosts must call this, before anything touches a device. Raises CoordinatorError."""
    # It would take SIGTERM away from the Python handler without a word.
    jax.config.update("jax_enable_preemption_service", False)
    if member.num_hosts == 1 or member.coordinator is None:
        return
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        let_every_process_write_the_compile_cache()
    if member.host > 0:
        wait_for_listener(member.coordinator, member.join_timeout_s, member.num_hosts)
    let_collectives_listen_at(own_address(member.coordinator))
    jax.distributed.initialize(
        member.coordinator,
        member.num_hosts,
        member.host,
        local_device_ids=member.local_device_ids,
        cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
        shutdown_timeout_seconds=10,
        initialization_timeout=member.join_timeout_s,
        coordinator_bind_address=bind_address(member.coordinator) if member.host == 0 else None,
    )


def bind_address(coordinator: str) -> str:
    """Where host 0 listens: at the address that the others were given, which JAX would take for one of many.

    On all addresses only if that one is none of this machine's, as in a container whose addresses are translated.
    """
    address, port = split_port(coordinator)
    try:
        with socket.create_server((address, 0), family=_family(address)):
            return coordinator
    except OSError:
        return f"[::]:{port}"


def own_address(coordinator: str) -> str:
    """This host's address in the network in which it reaches the coordinator."""
    address, port = split_port(coordinator)
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))  # sends nothing: it only chooses the way
        return probe.getsockname()[0]


def split_port(address: str) -> tuple[str, int]:
    """`[fd00::1]:80` as ("fd00::1", 80)."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def wait_for_listener(address: str, timeout_s: float, num_hosts: int = 2) -> None:
    """Returns when `address` listens: dialing before that costs about a second of gRPC back-off. All `num_hosts` hosts together
    ask no more often than it can bear, and not all at once."""
    deadline = time.monotonic() + timeout_s
    waits = asking_waits_s(num_hosts, random.random)
    while True:
        try:
            socket.create_connection(split_port(address), timeout=1).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise CoordinatorError(f"host 0 did not listen on {address} within {timeout_s:.0f} s: {error}") from error
            time.sleep(next(waits))


def asking_waits_s(num_hosts: int, chance: Callable[[], float]) -> Iterator[float]:
    """Between one host's questions: at first some milliseconds, then longer, the more hosts ask. `chance`: from 0 to 1."""
    longest_s = max(FIRST_WAIT_S, num_hosts / QUESTIONS_PER_S)
    wait_s = FIRST_WAIT_S
    while True:
        yield wait_s * (0.5 + chance())
        wait_s = min(longest_s, wait_s * 1.5)


def leave() -> None:
    """At a clean end only; all hosts must call this. Host 0 goes last, or its peers would abort for want of their coordinator.

    After a failure nobody calls this: it would wait for the dead. The process's owner kills the gang instead.
    """
    if distributed.global_state.client is not None:
        jax.distributed.shutdown()


def let_collectives_listen_at(address: str) -> None:
    """CPU only. They would listen at the address that the machine's name stands for: of all networks, or of none that the others
    can reach."""
    _jax.make_gloo_tcp_collectives = functools.partial(_make_gloo_tcp_collectives, hostname=address)


def let_every_process_write_the_compile_cache() -> None:
    """CPU only, each host with a cache folder of its own. There the cache key carries a fingerprint that differs from process to
    process, and only process 0 writes: without this the others compile again at every start (0.3 s against 0.01 s)."""
    write = compiler._cache_write

    def write_as_process_0(*args, **kwargs):
        state = distributed.global_state
        own, state.process_id = state.process_id, 0
        try:
            return write(*args, **kwargs)
        finally:
            state.process_id = own

    compiler._cache_write = write_as_process_0


def use_compile_cache(folder: str) -> None:
    """Has JAX's compile cache in `folder` instead of where its environment says. To be called before anything is compiled: a
    standby learns only with its orders whose place it takes, and on CPU finds that host's programs there alone."""
    path = os.path.expanduser(folder)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = path
    jax.config.update("jax_compilation_cache_dir", path)


def program_folder() -> Path | None:
    """Where this machine keeps executables, if its owner gave it a place for them."""
    folder = os.environ.get("GANGWAY_PROGRAMS")
    return Path(folder) if folder else None
