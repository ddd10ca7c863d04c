"""The environment of the training processes: pure functions of the configuration."""

from __future__ import annotations

from cluster.hosts.config import HostsConfig, devices_per_host

CPU_THREADS_PER_DEVICE = 4
"""XLA's own number is that of the machine's cores. Devices of one process wait for each other in its threads, in several
collectives at a time: where there are fewer cores than that, all threads may come to wait for one that never gets its turn."""
MEGASCALE_PORT = 8081
PRIVATE_UMASK = 0o077
"""What a process makes with it is for its user alone."""


def process_env(config: HostsConfig, host: int, cache_dir: str) -> dict[str, str]:
    """Environment of the training process of `host`."""
    own = {
        "JAX_PLATFORMS": {"cpu": "cpu", "gpu": "cuda,cpu", "tpu": "tpu,cpu"}[config.kind],
        "JAX_COMPILATION_CACHE_DIR": compile_cache_dir(config, host, cache_dir),
        "GANGWAY_PROGRAMS": f"{cache_dir}/programs",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    flags = config.env.get("XLA_FLAGS", "")
    if config.kind == "cpu":
        devices = devices_per_host(config)
        flags = f"{flags} --xla_force_host_platform_device_count={devices}".strip()
        if devices > 1:
            own["NPROC"] = str(CPU_THREADS_PER_DEVICE * devices)
    return {**own, **config.env, **({"XLA_FLAGS": flags} if flags else {})}


def compile_cache_dir(config: HostsConfig, host: int, cache_dir: str) -> str:
    """Where JAX, in the training process of `host`, caches what it compiles.

    On CPU each host has a folder of its own: the keys hold a fingerprint of the process's place, so a shared one is never hit.
    On TPU and GPU all hosts should read the same folder.
    """
    return f"{cache_dir}/host-{host:04d}" if config.kind == "cpu" else cache_dir


def megascale_env(slice_id: int, num_slices: int, coordinator_ip: str, port: int = MEGASCALE_PORT) -> dict[str, str]:
    """Tells a process of a run on several TPU slices where the others are; empty for one slice."""
    if num_slices == 1:
        return {}
    return {
        "MEGASCALE_COORDINATOR_ADDRESS": coordinator_ip,
        "MEGASCALE_PORT": str(port),
        "MEGASCALE_NUM_SLICES": str(num_slices),
        "MEGASCALE_SLICE_ID": str(slice_id),
    }
