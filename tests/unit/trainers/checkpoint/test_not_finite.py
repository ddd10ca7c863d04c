"""States that are not finite: they are not saved, do not count, and are passed over."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gangway.errors import CheckpointUnavailableError, NonFiniteStateError
from gangway.storage.opening import place_of
from tests.programs import checkpointing
from trainers.checkpoint import layout
from trainers.checkpoint.fingerprints import Measurement


def broken(step, part="params", value=np.nan):
    """The state of `step` with one value of one array set, of the parameters or of their moments."""
    state = checkpointing.state(step)
    tree = state.params if part == "params" else state.opt_state[0]
    tree["half"] = tree["half"].at[3, 4].set(value)
    return state


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("part", "name"), [("params", r"\.params\['half'\]"), ("moments", r"\.opt_state\[0\]\['half'\]")])
def test_a_state_that_is_not_finite_is_not_saved(folder, part, name, value):
    manager = checkpointing.manager(folder, keep=1)
    manager.save_now(1)
    with pytest.raises(NonFiniteStateError, match=name):
        manager.save(2, broken(2, part, value), {})
    manager.wait()
    assert checkpointing.names(folder) == ["1"]
    assert [step for step, _ in manager.failed] == [2]
    assert not manager.failing  # the storage is fine: nothing is to be tried again
    manager.save_now(3)
    assert checkpointing.names(folder) == ["3"]


def test_a_model_that_is_not_finite_is_not_saved_and_reported(folder):
    manager = checkpointing.manager(folder)
    manager.save_model(2, broken(2), {})
    manager.wait()
    assert layout.steps(layout.models_of(place_of(folder))) == []
    assert "half" in manager.notes[-1]


def test_what_was_infinite_at_the_beginning_may_stay_so_and_not_grow(folder):
    manager, state = checkpointing.manager(folder), broken(1, value=-np.inf)
    manager.prepare(state)
    manager.save(1, state, {"batch_index": 1})
    manager.wait()
    assert manager.infinite_parameters
    again = checkpointing.manager(folder)
    restored = again.restore(checkpointing.abstract(state)).state
    assert again.broken(restored) == []
    restored.params["half"] = restored.params["half"].at[0, 0].set(jnp.inf)
    assert again.broken(restored) == [".params['half']"]


def saved_without_a_look(folder, step, monkeypatch):
    """As a version did that did not look."""
    described = Measurement.described.func
    with monkeypatch.context() as patch:
        patch.setattr(Measurement, "described", property(lambda *given: {**described(*given), "not_finite": {}}))
        manager = checkpointing.manager(folder)
        manager.save(step, broken(step), {"batch_index": step})
        manager.wait()


def test_a_checkpoint_that_is_not_finite_is_passed_over(folder, monkeypatch):
    checkpointing.manager(folder).save_now(1)
    saved_without_a_look(folder, 2, monkeypatch)
    abstract = checkpointing.abstract(checkpointing.state(0))
    manager = checkpointing.manager(folder, keep=2)
    restored = manager.restore(abstract)
    assert (restored.meta["step"], [bad["step"] for bad in restored.skipped]) == (1, [2])
    assert ".params['half'] are infinite or NaN" in restored.skipped[0]["why"]
    # It does not count: of two that are to stay, 1 is one.
    manager.save_now(3)
    assert "1" in checkpointing.names(folder)


def test_if_none_is_finite_training_does_not_begin_again(folder, monkeypatch):
    saved_without_a_look(folder, 2, monkeypatch)
    with pytest.raises(CheckpointUnavailableError, match="infinite or NaN"):
        checkpointing.manager(folder).restore(checkpointing.abstract(checkpointing.state(0)))


def test_only_what_is_trained_must_be_finite(folder):
    metric = jax.device_put(jnp.array([jnp.nan, 1.0]), checkpointing.everywhere())
    state = dataclasses.replace(checkpointing.state(1), sums={"metric": metric})
    manager = checkpointing.manager(folder)
    manager.save(1, state, {"batch_index": 1})
    manager.wait()
    assert checkpointing.same(checkpointing.manager(folder).restore(checkpointing.abstract(state)).state, state)
