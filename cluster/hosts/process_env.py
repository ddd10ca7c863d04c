"""The environment variables of the training processes. Pure functions of the configuration."""

from __future__ import annotations

from cluster.hosts import compiler_flags
from cluster.hosts.config import HostsConfig, devices_per_host
from cluster.hosts.environment import NO_PROXY_BETWEEN_HOSTS
from gangway.surroundings import CPU_THREADS_PER_DEVICE, IN_ORDER

MEGASCALE_PORT = 8081
PRIVATE_UMASK = 0o077
"""With this umask, only the user of a process can read the files that it creates."""


def process_env(config: HostsConfig, host: int, cache_dir: str) -> dict[str, str]:
    """Returns the environment variables of the training process of `host`; those of `config.env` override ours."""
    variables = {
        "JAX_PLATFORMS": {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}[config.kind],
        "JAX_COMPILATION_CACHE_DIR": compile_cache_dir(config, host, cache_dir),
        "GANGWAY_PROGRAMS": f"{cache_dir}/programs",
        # Without these two JAX keeps only what is large or slow to compile, and a restart would compile the rest again.
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        **NO_PROXY_BETWEEN_HOSTS,
    }
    flags = config.env.get("XLA_FLAGS", "")
    if config.kind == "cpu":
        devices = devices_per_host(config)
        # Ours before the user's, which decide: of two settings of a flag, the last one counts.
        flags = " ".join(part for part in (IN_ORDER, flags, f"--xla_force_host_platform_device_count={devices}") if part)
        if devices > 1:
            variables["NPROC"] = str(CPU_THREADS_PER_DEVICE * devices)
    # XLA_FLAGS comes last: it holds the user's flags and ours.
    return {
        **variables,
        **compiler_flags.defaults_env(config),
        **config.env,
        **({"XLA_FLAGS": flags} if flags else {}),
    }


def compile_cache_dir(config: HostsConfig, host: int, cache_dir: str) -> str:
    """Returns the folder of JAX's compilation cache for the training process of `host`.

    On CPU each host has a folder to itself: the cache keys depend on the rank of the process, so a shared folder gives no hits.
    On TPU and GPU all hosts should read the same folder.
    """
    return f"{cache_dir}/host-{host:04d}" if config.kind == "cpu" else cache_dir


def megascale_env(slice_id: int, num_slices: int, coordinator_ip: str, port: int = MEGASCALE_PORT) -> dict[str, str]:
    """Returns the variables with which processes of several TPU slices find each other; empty for one slice."""
    if num_slices == 1:
        return {}
    return {
        "MEGASCALE_COORDINATOR_ADDRESS": coordinator_ip,
        "MEGASCALE_PORT": str(port),
        "MEGASCALE_NUM_SLICES": str(num_slices),
        "MEGASCALE_SLICE_ID": str(slice_id),
    }
