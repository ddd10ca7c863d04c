"""Gangs: names, sizes and ranks of groups of devices and hosts."""

from __future__ import annotations

import jax
import pytest

from trainers.config import MeshConfig
from trainers.parallel.groups import AXES, ROOT, mesh_group, mesh_groups
from trainers.parallel.mesh import make_mesh


@pytest.fixture
def mesh():
    return make_mesh(MeshConfig(data=2, fsdp=2, tensor=2), jax.devices()[:8])


def test_each_device_has_its_place_in_each_gang(mesh):
    for number, device in enumerate(mesh.devices.flat):
        found = mesh_groups(mesh, device)
        ranks = {name: (one.rank, one.size) for name, one in found.items()}
        assert ranks[ROOT] == (number, 8)
        assert [ranks[name] for name in ("data", "fsdp", "tensor")] == [(number // 4, 2), (number // 2 % 2, 2), (number % 2, 2)]
        assert [ranks[name] for name in ("expert", "context", "pipeline", "slice")] == [(0, 1)] * 4
        assert all(one.devices[one.rank] == device for one in found.values())


def test_those_of_a_gang_agree_on_it(mesh):
    for name in (ROOT, *AXES):
        groups = {mesh_group(mesh, name, device).devices for device in mesh.devices.flat}
        members = [device for group in groups for device in group]
        assert sorted(members, key=lambda device: device.id) == sorted(mesh.devices.flat, key=lambda device: device.id), name


def test_hosts_of_a_gang_are_counted_once(mesh):
    found = mesh_group(mesh, "data")
    assert (found.hosts, found.num_hosts, found.host_rank) == ((0,), 1, 0)


def test_what_is_no_gang_is_an_error(mesh):
    with pytest.raises(ValueError, match="there is no gang 'model': expected one of root, data, fsdp, tensor"):
        mesh_group(mesh, "model")
    small = make_mesh(MeshConfig(), jax.devices()[:2])
    with pytest.raises(ValueError, match="is not in the mesh of 2 devices"):
        mesh_group(small, "data", jax.devices()[5])
