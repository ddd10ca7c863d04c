"""Groups of devices along the axes of the mesh, and of the hosts they are on, by name, with sizes and ranks.

The group `data` of a device contains the devices that differ from it along the mesh axis `data` alone, and likewise for each
axis; `root` contains all devices of the run. An axis that the mesh does not have makes groups of one.
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
    """The devices in the order of their ranks."""
    rank: int
    """The rank of the device that the group was asked for."""

    @property
    def size(self) -> int:
        return len(self.devices)

    @property
    def hosts(self) -> tuple[int, ...]:
        """The process indices, each once, in the order of their first devices."""
        # A dict and not a set: it keeps the order of the ranks.
        return tuple(dict.fromkeys(device.process_index for device in self.devices))

    @property
    def num_hosts(self) -> int:
        return len(self.hosts)

    @property
    def host_rank(self) -> int:
        return self.hosts.index(self.devices[self.rank].process_index)


def mesh_group(mesh: Mesh, name: str, device: jax.Device | None = None) -> MeshGroup:
    """Returns the group of this name that a device of the mesh belongs to; default: the first device of this host.

    Raises ValueError for an unknown name, or a device that is not in the mesh.
    """
    if name != ROOT and name not in AXES:
        raise ValueError(f"there is no gang {name!r}: expected one of {', '.join((ROOT, *AXES))}")
    # The first device stands for its host.
    device = mesh.local_devices[0] if device is None else device
    coordinates = np.argwhere(mesh.devices == device)
    if not len(coordinates):
        raise ValueError(f"{device} is not in the mesh of {mesh.devices.size} devices")
    position = tuple(coordinates[0])
    if name == ROOT:
        return MeshGroup(name, tuple(mesh.devices.flat), int(np.ravel_multi_index(position, mesh.devices.shape)))
    if name not in mesh.axis_names:
        return MeshGroup(name, (device,), 0)
    axis = mesh.axis_names.index(name)
    # All devices with the same coordinates on the other axes, in the order along this one.
    line = mesh.devices[(*position[:axis], slice(None), *position[axis + 1 :])]
    return MeshGroup(name, tuple(line), int(position[axis]))


def mesh_groups(mesh: Mesh, device: jax.Device | None = None) -> dict[str, MeshGroup]:
    """Returns all groups of a device, by name."""
    return {name: mesh_group(mesh, name, device) for name in (ROOT, *AXES)}
