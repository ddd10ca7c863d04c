"""What a program is traced for, without making JAX look for devices: a standby traces before it has joined a gang."""

from __future__ import annotations

import jax
import numpy as np

from trainers.jax_internals import xla_bridge
from trainers.parallel import mesh as meshes


def platform() -> str | None:
    """Returns the platform of the computation, such as `cpu` or `cuda`; None if it is not known yet."""
    if (device := meshes.traced_device()) is not None:
        return device.platform
    if xla_bridge.backends_are_initialized():
        return jax.default_backend()
    # Set by the orchestrator for each kind of host, such as `cuda,cpu`.
    named = jax.config.jax_platforms  # type: ignore[attr-defined]  # made at run time
    return named.split(",")[0] if named else None


def is_known() -> bool:
    """Returns whether the devices are known: the process has started them. To ask JAX itself would start them."""
    return meshes.traced_device() is not None or xla_bridge.backends_are_initialized()


def kind_of_host() -> str | None:
    """Returns `cpu`, `gpu` or `tpu`: what `hosts.kind` says. None if it is not known yet."""
    found = platform()
    return "gpu" if found in ("cuda", "rocm") else found


def num_devices() -> int:
    """Returns the number of devices of the run; 1 if they are not known yet."""
    if (mesh := meshes.traced_for()) is not None:
        return mesh.size
    return jax.device_count() if xla_bridge.backends_are_initialized() else 1


def wait_for_device(array: jax.Array) -> np.ndarray:
    """Returns `array` on the host, once the device has computed it. Behind a collective that is a wait for all hosts."""
    # NumPy's conversion waits. An error of the computation, or of another host in it, is raised here.
    return np.asarray(array)
