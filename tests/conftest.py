"""Before JAX is imported: the tests see eight CPU devices, and compile into a cache of this test run."""

import os

import pytest

from cluster.topology import CPU_THREADS_PER_DEVICE

NUM_DEVICES = 8

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", f"--xla_force_host_platform_device_count={NUM_DEVICES}")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_AUTH_MODE", "disabled")


@pytest.fixture(scope="session", autouse=True)
def _threads_for_all_devices():
    """Of this process alone: XLA reads the number once, and what the tests start is to have its own."""
    import jax

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NPROC", str(CPU_THREADS_PER_DEVICE * NUM_DEVICES))
        jax.devices()
