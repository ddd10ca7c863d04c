"""Before JAX starts: the tests see eight CPU devices, and threads enough for all of them."""

import os
import secrets

import pytest

from cluster.hosts.process_env import CPU_THREADS_PER_DEVICE, IN_ORDER

NUM_DEVICES = 8

os.environ.setdefault("JAX_PLATFORMS", "cpu")
FLAGS = (
    # As every training process has it. Without it a step that accumulates gradients hung here too, once in some runs.
    IN_ORDER,
    f"--xla_force_host_platform_device_count={NUM_DEVICES}",
    # Default 40 s: on a machine that does much else, XLA would abort the process while some devices wait for the others.
    "--xla_cpu_collective_call_terminate_timeout_seconds=300",
)
os.environ.setdefault("XLA_FLAGS", " ".join(FLAGS))
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "token")
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # of all Rays that the tests start

with pytest.MonkeyPatch.context() as patch:
    # XLA reads it once, when JAX starts: here, before a test module's import starts it. What the tests start has its own.
    patch.setenv("NPROC", str(CPU_THREADS_PER_DEVICE * NUM_DEVICES))
    import jax

    jax.devices()
