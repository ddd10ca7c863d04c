"""Joins one `jax.distributed` job, and leaves it without disturbing the other hosts."""

from __future__ import annotations

import functools
import importlib.util
import os
import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import jax

from gangway.errors import CoordinatorError, UsageError
from gangway.surroundings import accelerators
from trainers.jax_internals import compiler, distributed, jaxlib, xla_bridge
from trainers.runtime import compile_cache

HEARTBEAT_TIMEOUT_S = 30
"""A backstop only: the agent watches exits and progress, and notices both much sooner."""
# Kept before any patch: `let_collectives_listen_at` may run twice in a process.
_make_gloo_tcp_collectives = jaxlib.make_gloo_tcp_collectives

FIRST_WAIT_S = 0.002
QUESTIONS_PER_S = 10_000
"""The limit for the attempts of all hosts together to connect to a host that does not listen yet."""


@dataclass(frozen=True)
class JoinSpec:
    """One host's membership in a generation of the gang. `coordinator` is `ip:port`, a port that was never used before."""

    host: int = 0
    num_hosts: int = 1
    coordinator: str | None = None
    local_device_ids: tuple[int, ...] | None = None
    join_timeout_s: int = 60


def find_platforms() -> None:
    """Optional, before `join`: imports and registers the installed plugins for GPUs and TPUs, which JAX does at the latest when
    a device is first needed. It touches no device."""
    xla_bridge._discover_and_register_pjrt_plugins()


def devices_touched() -> bool:
    """Whether this process has used its devices. Before `join` it must not."""
    return xla_bridge.backends_are_initialized()


ACCELERATORS = {
    "cuda": ("GPU{} of NVIDIA", ("jax_cuda13_plugin", "jax_cuda12_plugin"), "hosts.kind=gpu"),
    "tpu": ("TPU{}", ("libtpu",), "hosts.kind=tpu"),
}
"""By the platform of JAX: its name, the packages that JAX needs for it (one of them), and the setting that asks for it."""


def check_platform(note: Callable[[str], None], *, of_gang: bool) -> None:
    """After `join`. Raises UsageError if this process was to use accelerators (JAX_PLATFORMS, which `hosts.kind` sets) and JAX
    has none: it would train on the CPU, and JAX says nothing. Tells of those of this machine that stay unused."""
    wanted = os.environ.get("JAX_PLATFORMS", "").partition(",")[0]
    if jax.default_backend() != "cpu":
        return
    here = accelerators()
    if wanted in ACCELERATORS:
        name, packages, setting = ACCELERATORS[wanted]
        asked = f"JAX_PLATFORMS={os.environ['JAX_PLATFORMS']}" + f" (by {setting})" * of_gang
        why = f"JAX's package for them is installed and finds none ({here.get(wanted, 0)} on this machine)"
        why = why if _installed(packages) else _to_install(wanted)
        raise UsageError(f"{asked}, and JAX has no {name.format('s')} here: {why}")
    if wanted and not of_gang:
        return  # somebody has chosen the CPU
    for platform, count in here.items():
        name, packages, setting = ACCELERATORS[platform]
        ways = [setting] * of_gang + [_to_install(platform)] * (not _installed(packages))
        devices = f"{count} {name.format('s' * (count > 1))}"
        note(f"this machine has {devices}, and the run trains on its CPU: {', and '.join(ways) or 'see what JAX prints'}")


def _installed(packages: Sequence[str]) -> bool:
    return any(importlib.util.find_spec(name) is not None for name in packages)


def _to_install(platform: str) -> str:
    return f"pip install 'gangway[{platform}]' (JAX is installed for CPUs alone)"


def join(member: JoinSpec) -> None:
    """Joins the gang; all hosts must call this, before anything touches a device. Raises CoordinatorError."""
    # That service would silently replace the Python handler of SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    # A single host needs no coordinator, and so no port and no wait.
    if member.num_hosts == 1 or member.coordinator is None:
        return
    # Only there does the cache key differ between processes; elsewhere writing from each host would be waste.
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        let_every_process_write_the_compile_cache()
    # Not host 0: it starts the service inside `initialize`, and would wait here for itself.
    if member.host > 0:
        wait_for_listener(member.coordinator, member.join_timeout_s, member.num_hosts)
    # Before `initialize`: the factory is read when the backend is made.
    let_collectives_listen_at(own_address(member.coordinator))
    jax.distributed.initialize(
        member.coordinator,
        member.num_hosts,
        member.host,
        local_device_ids=member.local_device_ids,
        # Everything is given: JAX must not take other values from Slurm or a cloud's environment.
        cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
        shutdown_timeout_seconds=10,
        initialization_timeout=member.join_timeout_s,
        coordinator_bind_address=bind_address(member.coordinator) if member.host == 0 else None,
    )


def bind_address(coordinator: str) -> str:
    """Returns the address that host 0 listens at: the one that the others were given. JAX by itself would listen at all
    addresses.

    All addresses are used only if the given one is none of this machine's, as in a container whose addresses are translated.
    """
    address, port = split_port(coordinator)
    try:
        # Port 0: only whether the address is ours is asked; the real port stays free for the service.
        with socket.create_server((address, 0), family=_family(address)):
            return coordinator
    except OSError:
        return f"[::]:{port}"


def own_address(coordinator: str) -> str:
    """Returns this host's address in the network in which it reaches the coordinator."""
    address, port = split_port(coordinator)
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))  # sends nothing: it only chooses the route
        return probe.getsockname()[0]


def split_port(address: str) -> tuple[str, int]:
    """Splits `[fd00::1]:80` into ("fd00::1", 80)."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def wait_for_listener(address: str, timeout_s: float, num_hosts: int = 2) -> None:
    """Returns when `address` listens. Connecting before that would cost about a second of gRPC back-off. The hosts limit the
    rate of their attempts, all `num_hosts` together, and spread them in time."""
    deadline = time.monotonic() + timeout_s
    waits = asking_waits_s(num_hosts, random.random)
    while True:
        try:
            # A plain TCP connection, closed at once: cheaper than gRPC, and without its back-off.
            socket.create_connection(split_port(address), timeout=1).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise CoordinatorError(f"host 0 did not listen on {address} within {timeout_s:.0f} s: {error}") from error
            time.sleep(next(waits))


def asking_waits_s(num_hosts: int, chance: Callable[[], float]) -> Iterator[float]:
    """Yields the delays between one host's attempts: at first some milliseconds, then longer, the more hosts there are.
    `chance` returns numbers from 0 to 1."""
    # So many hosts together ask QUESTIONS_PER_S times a second at most.
    longest_s = max(FIRST_WAIT_S, num_hosts / QUESTIONS_PER_S)
    wait_s = FIRST_WAIT_S
    while True:
        # Random around the mean: hosts that start together would otherwise ask together every time.
        yield wait_s * (0.5 + chance())
        wait_s = min(longest_s, wait_s * 1.5)


@contextmanager
def no_devices_yet() -> Iterator[None]:
    """Raises UsageError within, at the line that would touch a device: hosts must be joined before. Does nothing in a process
    that has touched its devices."""

    def refuse() -> NoReturn:
        raise UsageError(
            "JAX's devices are used before the hosts have joined: as a module is imported, or data or a trainer is made. Make "
            "arrays, and ask for devices and processes, in what training calls (configure_model, a hook, a method of the task), "
            "or use NumPy"
        )

    asked = xla_bridge.backends
    if not devices_touched():
        xla_bridge.backends = refuse
    try:
        yield
    finally:
        xla_bridge.backends = asked


def let_cpus_run_one_program_at_a_time() -> None:
    """CPU only; before devices are touched. Makes the dispatch of a program wait for its end. Accelerators run programs in the
    order of their dispatch. CPUs run independent ones at once, and over gloo the collectives of two programs would mix."""
    if not devices_touched():
        jax.config.update("jax_cpu_enable_async_dispatch", False)


def leave() -> None:
    """Leaves the job, at a clean end only; all hosts must call this. Host 0 leaves last: the others would abort without their
    coordinator.

    After a failure it must not be called: it would wait for the dead. The agents kill the gang instead.
    """
    if distributed.global_state.client is not None:
        jax.distributed.shutdown()


def let_collectives_listen_at(address: str) -> None:
    """CPU only. Makes the collectives listen at `address`. By default they listen at the address of the machine's name, which
    may be one that the others cannot reach."""
    # A private hook of jaxlib: gloo's factory has no setting in JAX's configuration.
    jaxlib.make_gloo_tcp_collectives = functools.partial(_make_gloo_tcp_collectives, hostname=address)


def let_every_process_write_the_compile_cache() -> None:
    """CPU only, each host with its own cache folder. On CPU the cache key has a fingerprint that differs between processes, and
    only process 0 writes. Without this the others would compile again at every start (0.3 s instead of 0.01 s)."""
    write = compiler._cache_write

    def write_as_process_0(*args, **kwargs):
        # JAX asks this very field whether to write; it is put back even if the write fails.
        state = distributed.global_state
        process_id, state.process_id = state.process_id, 0
        try:
            return write(*args, **kwargs)
        finally:
            state.process_id = process_id

    compiler._cache_write = write_as_process_0


def use_compile_cache(folder: str) -> None:
    """Puts JAX's compile cache in `folder` instead of where its environment says. Must be called before anything is compiled. A
    standby learns only with its orders which host it replaces, and on CPU only that host's folder has its programs."""
    path = os.path.expanduser(folder)
    compile_cache.keep_whole()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = path
    jax.config.update("jax_compilation_cache_dir", path)
