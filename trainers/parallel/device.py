"""The wait for a device, in one place: the analysis of a hang knows this function, and that a host waits there for the others."""

from __future__ import annotations

import jax
import numpy as np


def wait_for_device(array: jax.Array) -> np.ndarray:
    """Returns `array` on the host, once the device has computed it. Behind a collective that is a wait for all hosts."""
    # NumPy's conversion waits. An error of the computation, or of another host in it, is raised here.
    return np.asarray(array)
