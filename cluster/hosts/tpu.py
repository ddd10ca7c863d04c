"""Facts about TPU generations: chips per host, devices per chip, names and topologies."""

from __future__ import annotations

import itertools
import math

from gangway.config.section import did_you_mean

CHIPS_PER_HOST = {"v2": 4, "v3": 4, "v4": 4, "v5p": 4, "v5litepod": 4, "v6e": 4, "v7x": 4}
"""TPU chips of one VM, by generation: https://cloud.google.com/tpu/docs/system-architecture-tpu-vm."""
EIGHT_CHIP_GENERATIONS = ("v5litepod", "v6e")
"""A slice of at most 8 chips of these is one VM with all of them."""
DEVICES_PER_CHIP = {"v2": 2, "v3": 2, "v7x": 2}
"""JAX devices of one chip where that is not 1: generations whose cores are programmed one by one."""
CORES_PER_CHIP = {"v5litepod": 1, "v6e": 1}
"""Cores of one chip where that is not 2: cloud names count cores (`v4-16` has 8 chips)."""
TOPOLOGY_NAMES = {"v5litepod": "v5e", "v7x": "tpu7x"}
"""Where JAX names a topology otherwise than Ray does. Of v7x each chip is two devices."""
FLAT_TOPOLOGIES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
"""Shapes in which v5e and v6e are offered: https://cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus."""
SMALL_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
"""Shapes of fewer than 64 chips in which v4, v5p and v7x are offered, on the same page. Larger ones have sides that are
multiples of 4 and do not fall from left to right, up to LARGEST_CUBE."""
LARGEST_CUBE = {"v4": (12, 12, 16), "v5p": (16, 16, 24), "v7x": (8, 16, 16)}
ALIASES = {"v5e": "v5litepod", "v5lite": "v5litepod", "tpu7x": "v7x", "v7": "v7x"}


def generation(accelerator: str) -> str:
    """Returns the TPU generation as Ray spells it: `TPU-V6E` is `v6e`, `v5e` is `v5litepod`. Raises ValueError for an unknown
    one."""
    name = accelerator.lower().removeprefix("tpu-")
    name = ALIASES.get(name, name)
    if name not in CHIPS_PER_HOST:
        generations = sorted({*CHIPS_PER_HOST, "v5e"})
        hint = did_you_mean(name, generations)
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


def offered(name: str) -> tuple[str, ...]:
    """Returns the topologies in which slices of a generation (`v5litepod`, `v5p`, ...) can be had, by their chips; none of v2 and
    v3, whose machines are called by their size alone."""
    if name in EIGHT_CHIP_GENERATIONS:
        return FLAT_TOPOLOGIES
    if name not in LARGEST_CUBE:
        return ()
    sides = (range(4, most + 1, 4) for most in LARGEST_CUBE[name])
    cubes = sorted(
        (dims for dims in itertools.product(*sides) if list(dims) == sorted(dims)), key=lambda dims: (math.prod(dims), dims)
    )
    if name == "v7x":  # powers of two, of which none is more than twice another
        cubes = [dims for dims in cubes if dims[-1] <= 2 * dims[0] and all(side & (side - 1) == 0 for side in dims)]
    return (*SMALL_CUBES, *("x".join(map(str, dims)) for dims in cubes))


def topology_problem(accelerator: str, topology: str) -> str | None:
    """Returns why no slice of this topology can be had, with those of about as many chips; None if it can. Raises ValueError
    where `generation` and `topology_dims` do."""
    shapes, chips = offered(generation(accelerator)), math.prod(topology_dims(topology))
    if "x".join(map(str, topology_dims(topology))) in shapes:
        return None
    if not shapes:
        return f"{accelerator} has no slices that are ordered by a topology; expected v4, v5e, v5p, v6e or v7x"
    near = sorted(shapes, key=lambda shape: abs(math.log(math.prod(topology_dims(shape)) / chips)))[:3]
    return f"{chips} chips of {accelerator} are not offered in this shape; the nearest: {', '.join(near)}"
