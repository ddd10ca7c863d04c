"""Facts about TPU generations: chips per host, devices per chip, names and topologies."""

from __future__ import annotations

import difflib

CHIPS_PER_HOST = {"v2": 4, "v3": 4, "v4": 4, "v5p": 4, "v5litepod": 4, "v6e": 4, "v7x": 4}
"""TPU chips of one VM, by generation: https://cloud.google.com/tpu/docs/system-architecture-tpu-vm."""
EIGHT_CHIP_GENERATIONS = ("v5litepod", "v6e")
"""A slice of at most 8 chips of these is one VM with all of them."""
DEVICES_PER_CHIP = {"v2": 2, "v3": 2, "v7x": 2}
"""JAX devices of one chip where that is not 1: generations whose cores are programmed one by one."""
CORES_PER_CHIP = {"v5litepod": 1, "v6e": 1}
"""Cores of one chip where that is not 2: cloud names count cores (`v4-16` has 8 chips)."""
TOPOLOGY_NAMES = {"v5litepod": "v5e"}
"""Where JAX names a topology otherwise than Ray does."""
ALIASES = {"v5e": "v5litepod", "v5lite": "v5litepod", "tpu7x": "v7x", "v7": "v7x"}


def generation(accelerator: str) -> str:
    """Returns the TPU generation as Ray spells it: `TPU-V6E` is `v6e`, `v5e` is `v5litepod`. Raises ValueError for an unknown
    one."""
    name = accelerator.lower().removeprefix("tpu-")
    name = ALIASES.get(name, name)
    if name not in CHIPS_PER_HOST:
        generations = sorted({*CHIPS_PER_HOST, "v5e"})
        close = difflib.get_close_matches(name, generations, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"accelerator = {accelerator!r}: not a TPU generation; known: {', '.join(generations)}{hint}")
    return name


def topology_dims(topology: str) -> tuple[int, ...]:
    """Parses `2x2x4` as (2, 2, 4). Raises ValueError when it is not of that form."""
    parts = topology.strip().lower().split("x")
    is_shape = len(parts) in (2, 3) and all(part.isdigit() and int(part) > 0 for part in parts)
    if not is_shape:
        raise ValueError(f"topology = {topology!r}: expected two or three sizes such as 4x4 or 2x2x2")
    return tuple(int(part) for part in parts)


def topology_name(accelerator: str, topology: str) -> str:
    """Returns how JAX names the topology of a slice: `v5e:4x4`."""
    name = generation(accelerator)
    return f"{TOPOLOGY_NAMES.get(name, name)}:{'x'.join(map(str, topology_dims(topology)))}"
