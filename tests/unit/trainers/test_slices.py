"""Training on several slices (`mesh.slice`): the numbers of one device, restarts, which devices are a slice, what is refused."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from tests.unit.trainers.test_context import EXPERTS, SIZES, assert_as_on_one_device, assert_goes_on, texts
from tests.unit.training import arguments
from trainers.config import MeshConfig
from trainers.parallel import mesh as meshes

__all__ = ["texts"]


@pytest.mark.slow("trains on several meshes")
def test_ten_steps_have_the_numbers_of_one_device(tmp_path, events, texts):
    assert_as_on_one_device(tmp_path, events, {"slice": 2, "data": 1, "fsdp": 2, "tensor": 2})


@pytest.mark.slow("trains on one device and on a mesh, in many forms")
@pytest.mark.parametrize(
    ("mesh", "changes"),
    [
        ({"slice": 8, "data": 1}, {}),
        ({"slice": 2, "data": 4}, {}),
        ({"slice": 2, "data": 1, "fsdp": 4}, {}),
        ({"slice": 4, "data": 1, "tensor": 2}, {}),
        ({"slice": 2, "data": 1, "expert": 4}, {"model": EXPERTS, "loss": {"load_balancing_weight": 0.02}}),
        ({"slice": 2, "data": 1, "context": 4}, {"model": {**SIZES, "context_attention": "ring"}}),
        ({"slice": 2, "data": 1, "fsdp": 2, "context": 2}, {"model": {**SIZES, "remat": "full"}}),
    ],
    ids=["alone", "data", "fsdp", "tensor", "expert", "context", "remat"],
)
def test_with_each_other_axis(tmp_path, events, texts, mesh, changes):
    assert_as_on_one_device(tmp_path, events, mesh, **{"accumulation_steps": 1, **changes})


@pytest.mark.slow("trains several times")
def test_a_run_that_was_cut_goes_on_bit_for_bit_and_on_other_meshes(tmp_path, events, texts):
    about = {"mesh": {"slice": 2, "data": 1, "fsdp": 4}, "checkpoint": {"save_steps": 4}, "accumulation_steps": 1}
    assert_goes_on(tmp_path, events, about, {"slice": 4, "data": 2})


def test_without_slices_of_the_platform_devices_that_follow_each_other_are_a_slice():
    mesh = meshes.make_mesh(MeshConfig(slice=2, data=1, fsdp=-1), jax.devices())
    assert dict(mesh.shape) == {"slice": 2, "data": 1, "fsdp": 4, "expert": 1, "tensor": 1}
    assert [device.id for device in mesh.devices[1].flat] == [device.id for device in jax.devices()[4:]]
    assert "slice" not in meshes.make_mesh(MeshConfig(), jax.devices()).shape


class Chip(SimpleNamespace):
    """Stands for a TPU of JAX: where it is, and in which slice."""

    def __hash__(self):
        return self.id


def chips(slices):
    """Chips of v5e, 2 x 2 in each slice, of which one slice comes after the other in no order."""
    about = {"platform": "tpu", "device_kind": "TPU v5 lite", "core_on_chip": 0, "process_index": 0}
    return [
        Chip(id=10 * number + place, slice_index=number, coords=(place % 2, place // 2, 0), **about)
        for place in range(4)
        for number in range(slices)
    ]


def test_each_slice_of_the_platform_is_a_slice_of_the_mesh():
    devices = meshes._by_slices({"slice": 2, "data": 1, "fsdp": 4}, chips(2))
    assert devices.shape == (2, 1, 4)
    assert [{device.slice_index for device in row.flat} for row in devices] == [{0}, {1}]


def test_a_mesh_of_other_slices_than_the_platforms_is_refused():
    with pytest.raises(ValueError, match=r"mesh\.slice = 4: the devices are of 2 slices; set mesh\.slice=2"):
        meshes._by_slices({"slice": 4, "data": 2}, chips(2))


def test_a_batch_is_divided_over_the_slices_first(tmp_path):
    made = arguments(tmp_path, mesh={"slice": 2, "data": 4}, global_batch_size=4, accumulation_steps=1)
    with pytest.raises(ValueError, match=r"4 sequences for 8 replicas \(slice 2 x data 4 x fsdp 1 x expert 1\)"):
        made.check_devices(8)
    mesh = meshes.make_mesh(MeshConfig(slice=2, data=-1), jax.devices())
    rows = meshes.micro_batches(mesh).devices_indices_map((1, 8))
    assert [rows[device][1].start for device in mesh.devices.flat] == list(range(8))


def test_a_mesh_that_does_not_divide_the_devices_is_refused_with_both_numbers(tmp_path):
    made = arguments(tmp_path, mesh={"slice": 3, "data": -1})
    with pytest.raises(ValueError, match=r"mesh slice 3 .*does not fit 8 devices.*; what would fit: mesh\.slice = 2 or 4"):
        made.check_devices(8)
