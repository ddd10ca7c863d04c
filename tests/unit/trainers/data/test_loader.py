"""Global batches by their index: the same rows at any number of devices, padding that does not count."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from tests.programs.tiny import Numbers
from trainers.config import MeshConfig
from trainers.config.arguments import TrainingArguments, from_dict
from trainers.data.loader import StepAddressedLoader
from trainers.parallel.mesh import make_mesh
from trainers.step.sample_digest import count_samples


def loader(num_devices, global_batch_size=8, **changes):
    mesh = make_mesh(MeshConfig(), jax.devices()[:num_devices])
    return StepAddressedLoader(Numbers(96, 4), global_batch_size, mesh, **changes)


def real_rows(batch):
    """{(micro-batch, row): sample id} of what counts."""
    weight, ids = np.asarray(batch["weight"]), np.asarray(batch["sample_id"])
    return {place: int(ids[place]) for place in np.ndindex(*weight.shape) if weight[place] > 0}


@pytest.mark.parametrize(("num_devices", "accumulation_steps"), [(1, 1), (2, 1), (3, 1), (5, 1), (8, 1), (1, 2), (2, 2), (3, 2)])
def test_a_batch_has_the_same_rows_at_any_number_of_devices(num_devices, accumulation_steps):
    batch = loader(num_devices, accumulation_steps=accumulation_steps).batch(3)
    size = 8 // accumulation_steps
    assert real_rows(batch) == {(row // size, row % size): 24 + row for row in range(8)}
    assert batch["weight"].shape[1] % num_devices == 0
    assert np.isin(np.asarray(batch["sample_id"]), range(24, 32)).all()  # padding is made of ordinary examples


def test_what_is_read_before_training_begins_is_what_training_gets():
    read = []
    ahead = loader(1, read=lambda index: read.append(index) or Numbers(96, 4)[index])
    ahead.begin(3)
    ahead._threads.submit(lambda: None).result()
    assert {24, 25, 26} <= set(read)
    assert set(real_rows(ahead.batch(3)).values()) == {*range(24, 32)}
    assert set(real_rows(ahead.batch(4)).values()) == {*range(32, 40)}
    assert len(read) == len(set(read))
    assert set(real_rows(ahead.batch(0)).values()) == {*range(8)}  # a seek: what was read ahead is dropped


@pytest.mark.parametrize("num_devices", [1, 3])
def test_a_held_out_set_is_read_once_with_padding_of_both_kinds(num_devices):
    batches = list(loader(num_devices, num_examples=21).epoch())
    assert [len(real_rows(batch)) for batch in batches] == [8, 8, 5]
    assert [sample for batch in batches for sample in real_rows(batch).values()] == list(range(21))


@pytest.mark.slow("trains more than once")
def test_the_digest_of_samples_does_not_know_the_padding():
    totals = {name: np.zeros(2, np.uint32) for name in ("tokens", "samples", "samples_digest")}
    found = [
        jax.device_get(count_samples(totals, np.int32(3), loader(n, accumulation_steps=2).batch(3), np.float32(32), 4))
        for n in (1, 2, 3, 4)
    ]
    for other in found[1:]:
        jax.tree.map(np.testing.assert_array_equal, found[0], other)
    assert found[0]["samples"][1] == 8


def arguments(**changes):
    return from_dict(TrainingArguments, {"name": "x", "max_num_steps": 1, "global_batch_size": 8, **changes})


@pytest.mark.parametrize(("num_devices", "accumulation_steps", "padded"), [(1, 1, 0), (3, 1, 1), (8, 1, 0), (3, 2, 4), (4, 2, 0)])
def test_the_rows_that_are_computed_and_do_not_count(num_devices, accumulation_steps, padded):
    made = arguments(accumulation_steps=accumulation_steps)
    assert made.padded_rows_per_step(num_devices) == padded
    shape = loader(num_devices, accumulation_steps=accumulation_steps).shape
    assert shape[0] * shape[1] == 8 + padded


def test_more_replicas_than_rows_are_refused():
    assert arguments(mesh={"data": 2, "tensor": 4}).check_devices(8)
    with pytest.raises(ValueError, match=r"= 4 sequences for 8 replicas .* set global_batch_size to 16 or more"):
        arguments(accumulation_steps=2).check_devices(8)
