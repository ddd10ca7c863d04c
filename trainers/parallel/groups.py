"""Who works with whom: groups of devices, and of the hosts they are on, by name, with sizes and ranks.

The gang `data` of a device is the devices that differ from it along the mesh axis `data` alone, and so for each axis; `root` is
all devices of the run. An axis that the mesh has not got makes gangs of one.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

ROOT = "root"
AXES = ("data", "fsdp", "tensor", "expert", "context", "pipeline", "slice")


@dataclass(frozen=True)
class MeshGroup:
    name: str
    devices: tuple[jax.Device, ...]
    """In the order of their ranks."""
    rank: int
    """Of the device that was asked for."""

    @property
    def size(self) -> int:
        return len(self.devices)

    @property
    def hosts(self) -> tuple[int, ...]:
        """Process indices, each once, in the order of their first devices."""
        return tuple(dict.fromkeys(device.process_index for device in self.devices))

    @property
    def num_hosts(self) -> int:
        return len(self.hosts)

    @property
    def host_rank(self) -> int:
        return self.hosts.index(self.devices[self.rank].process_index)


def mesh_group(mesh: Mesh, name: str, device: jax.Device | None = None) -> MeshGroup:
    """The gang of this name that a device of the mesh belongs to; default: the first of this host's.

    Raises ValueError at another name, or a device that is not in the mesh.
    """
    if name != ROOT and name not in AXES:
        raise ValueError(f"there is no gang {name!r}: expected one of {', '.join((ROOT, *AXES))}")
    device = mesh.local_devices[0] if device is None else device
    found = np.argwhere(mesh.devices == device)
    if not len(found):
        raise ValueError(f"{device} is not in the mesh of {mesh.devices.size} devices")
    place = tuple(found[0])
    if name == ROOT:
        return MeshGroup(name, tuple(mesh.devices.flat), int(np.ravel_multi_index(place, mesh.devices.shape)))
    if name not in mesh.axis_names:
        return MeshGroup(name, (device,), 0)
    axis = mesh.axis_names.index(name)
    line = mesh.devices[(*place[:axis], slice(None), *place[axis + 1 :])]
    return MeshGroup(name, tuple(line), int(place[axis]))


def mesh_groups(mesh: Mesh, device: jax.Device | None = None) -> dict[str, MeshGroup]:
    """All of them, by name."""
    return {name: mesh_group(mesh, name, device) for name in (ROOT, *AXES)}
