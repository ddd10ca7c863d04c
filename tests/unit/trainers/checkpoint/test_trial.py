"""States that the serializer refuses, arrays of size zero, and records that are no JSON."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from gangway.storage.opening import place_of
from tests.programs import checkpointing
from trainers.checkpoint import array_io, layout, trial, weights
from trainers.checkpoint.array_io import ArrayFiles


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


def with_parameter(step, name, value):
    """The state of `step` with one more parameter, and its moment."""
    state, placed = checkpointing.state(step), jax.device_put(value, checkpointing.everywhere())
    params = {**state.params, "layer": {**state.params["layer"], name: placed}}
    moments, count = state.opt_state
    moments = {**moments, "layer": {**moments["layer"], name: placed}}
    return dataclasses.replace(state, params=params, opt_state=(moments, count))


def test_a_parameter_of_size_zero_is_saved_and_comes_back(folder):
    state = with_parameter(3, "none", np.zeros((0, 4), np.float32))
    manager = checkpointing.manager(folder)
    assert manager.try_save(state, {}) == ""
    arguments = {"optimizer": {"name": "adamw"}}
    manager.save(3, state, {"batch_index": 3, "arguments": arguments})
    manager.wait()
    assert (manager.failed, manager.saved) == ([], [3])
    restored = checkpointing.manager(folder).restore(checkpointing.abstract(state)).state
    assert checkpointing.same(restored, state)
    assert restored.params["layer"]["none"].sharding == state.params["layer"]["none"].sharding
    found = weights.open_whole(layout.at(place_of(folder), 3))
    assert found.here("layer.none").shape == found.parameters["layer.none"].shape == (0, 4)


def refuse_halves(monkeypatch):
    """A serializer that does not know a type, as one does not know each new type of JAX."""
    write = ArrayFiles.write

    def refuses(self, folder, take, copied):
        tree = take()
        if any(leaf.dtype == jax.numpy.bfloat16 for leaf in jax.tree.leaves(tree)):
            raise ValueError("cannot write a half")
        write(self, folder, lambda: tree, copied)

    monkeypatch.setattr(array_io.ArrayFiles, "write", refuses)


def test_what_the_serializer_refuses_is_named_before_the_first_step(monkeypatch):
    refuse_halves(monkeypatch)
    found = trial.problem(checkpointing.abstract(checkpointing.state(1)))
    assert found.count("cannot write a half") == 2
    assert ".params['half'] (bfloat16[8, 8])" in found
    assert ".opt_state[0]['half']" in found
    assert "embed" not in found


def test_a_save_that_cannot_work_is_reported_from_a_storage_that_comes_back(folder, monkeypatch):
    manager = checkpointing.manager(folder)
    with monkeypatch.context() as patch:
        refuse_halves(patch)
        manager.save_now(1)
    assert ".params['half']" in manager.unsavable
    assert manager.problem == manager.unsavable
    manager = checkpointing.manager(folder)

    def full(*arguments):
        raise ValueError("RESOURCE_EXHAUSTED: no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(array_io.ArrayFiles, "write", full)
        patch.setattr(trial, "problem", lambda like: "")  # this machine's own disk has room
        manager.save_now(2)
    assert "RESOURCE_EXHAUSTED" in manager.problem
    assert manager.unsavable == ""
    manager.save_now(2)
    assert manager.saved == [2]


def test_a_record_that_is_no_json_is_named(folder):
    manager = checkpointing.manager(folder)
    bad = {"batch_index": 1, "mine": {"object"}}
    assert "mine of its record cannot be written as JSON" in manager.try_save(checkpointing.state(1), bad)
    manager.save(1, checkpointing.state(1), bad)
    manager.wait()
    assert "mine" in manager.unsavable
