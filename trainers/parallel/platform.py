"""What a program is traced for, without making JAX look for devices: a standby traces before it has joined a gang."""

from __future__ import annotations

import jax
from jax._src import xla_bridge


def platform() -> str | None:
    """Returns the platform of the computation, such as `cpu` or `cuda`; None if it is not known yet."""
    if xla_bridge.backends_are_initialized():
        return jax.default_backend()
    # Set by the orchestrator for each kind of host, such as `cuda,cpu`.
    named = jax.config.jax_platforms  # type: ignore[attr-defined]  # made at run time
    return named.split(",")[0] if named else None


def is_known() -> bool:
    """Returns whether this process has started its devices. To ask JAX itself would start them."""
    return xla_bridge.backends_are_initialized()


def kind_of_host() -> str | None:
    """Returns `cpu`, `gpu` or `tpu`: what `hosts.kind` says. None if it is not known yet."""
    found = platform()
    return "gpu" if found in ("cuda", "rocm") else found


def num_devices() -> int:
    """Returns the number of devices of the run; 1 if they are not known yet."""
    return jax.device_count() if xla_bridge.backends_are_initialized() else 1
