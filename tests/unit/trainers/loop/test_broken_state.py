"""Updates that make parameters or moments infinite or NaN, with a finite loss: the state is never saved, never trained on."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gangway.errors import NonFiniteLossError
from gangway.storage.opening import place_of
from tests.saved import saved
from tests.unit.training import of, trainer
from trainers.base import BaseTrainer
from trainers.checkpoint import layout

MODULE = "tests.unit.trainers.loop.test_broken_state"
BAD = 6
"""The update (counted from 0) that breaks the state."""


def nan_parameters(config, schedule):
    def update(updates, count, params=None):
        bad = jnp.where(count == BAD, jnp.nan, 0.0)
        # One value of one array: most batches do not see it.
        return {**updates, "embed": updates["embed"].at[255, 0].add(bad)}, count + 1

    return optax.chain(optax.sgd(0.01), optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update))


def infinite_moments(config, schedule):
    def init(params):
        return {"count": jnp.zeros((), jnp.int32), "moment": jnp.zeros(7), "best": jnp.array(jnp.inf)}

    def update(updates, state, params=None):
        moment = state["moment"].at[3].set(jnp.where(state["count"] == BAD, jnp.inf, state["moment"][3] + 1))
        best = jnp.minimum(state["best"], optax.tree.norm(updates))
        return updates, {"count": state["count"] + 1, "moment": moment, "best": best}

    return optax.chain(optax.sgd(0.01), optax.GradientTransformation(init, update))


def settings(optimizer, policy="skip", **changes):
    return {"optimizer": {"name": f"{MODULE}:{optimizer}"}, "anomalies": {"non_finite": policy}, **changes}


def saved_and_finite(folder):
    steps = layout.steps(place_of(folder))
    for step in steps:
        assert json.loads((saved(folder.parent, step) / "meta.json").read_text())["not_finite"] == {}
    return steps


@pytest.mark.sampled(1)
@pytest.mark.parametrize("optimizer", ["nan_parameters", "infinite_moments"])
@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_training_goes_back_to_the_checkpoint_before_the_update_and_leaves_it_out(tmp_path, events, optimizer, policy):
    # At the eighth batch it breaks again, for the update is counted, and not the batch: two batches are left out.
    made = trainer(tmp_path, **settings(optimizer, policy, max_num_steps=8, checkpoint={"save_steps": 1, "save_total_limit": 2}))
    state = made.train()
    told = of(events, "anomaly")
    assert {(a["kind"], a["action"]) for a in told} == {("broken_state", "rollback")}
    found = [(a["batch_index"], a["restored_step"], a["skipped_batches"]) for a in told if a["skipped_batches"]]
    assert found == [(6, 6, [6]), (7, 7, [7])]
    # Moments are looked at before a save: only then, and from the checkpoint before, after each step.
    assert len(told) - len(found) == (2 if optimizer == "infinite_moments" else 0)
    assert all(bool(np.isfinite(leaf).all()) for leaf in jax.tree.leaves((state.params, state.opt_state)))
    assert saved_and_finite(tmp_path / "run" / "checkpoints") == [7, 8]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("save_at", [8, None])
def test_what_the_step_does_not_tell_is_found_before_the_save_and_looked_for(tmp_path, events, save_at):
    """Moments, which the step does not look at."""
    changes = {"max_num_steps": 10, "checkpoint": {"save_steps": 4 if save_at else 5}}
    state = trainer(tmp_path, **settings("infinite_moments", **changes)).train()
    told = [(a["batch_index"], a["restored_step"], a["skipped_batches"]) for a in of(events, "anomaly")]
    back_to = 4 if save_at else 5
    assert told[:2] == [((save_at or 10) - 1, back_to, []), (6, back_to, [6])]
    assert np.isfinite(np.asarray(state.opt_state[-1]["moment"])).all()
    assert saved_and_finite(tmp_path / "run" / "checkpoints")[-1] == 10


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("nan_parameters", r"after the update of batch 6 .*lower the learning rate.*\.params\['embed'\]"),
        ("infinite_moments", r"the state at step 7 are infinite or NaN \(.*'moment'\].*lower the learning rate"),
    ],
)
def test_with_raise_the_run_ends_and_names_the_array(tmp_path, events, optimizer, message):
    made = trainer(tmp_path, **settings(optimizer, "raise", checkpoint={"save_steps": 1}))
    with pytest.raises(NonFiniteLossError, match=message):
        made.train()
    made.training.saver.manager.close()
    assert saved_and_finite(tmp_path / "run" / "checkpoints")[-1] == 6


class Breaks(BaseTrainer):
    """A hook that spoils a parameter which no batch may look at."""

    at = 5

    def on_step_end(self, state, metrics, step):
        if step == self.at:
            state.params["embed"] = state.params["embed"].at[255, 0].set(jnp.inf)
        return state, metrics


@pytest.mark.sampled(1)
@pytest.mark.parametrize("save_steps", [1, 4])
def test_what_a_hook_has_broken_is_not_saved_and_not_repeated_for_ever(tmp_path, events, save_steps):
    made = trainer(tmp_path, cls=Breaks, checkpoint={"save_steps": save_steps})
    with pytest.raises(NonFiniteLossError, match="though the batch was left out"):
        made.train()
    made.training.saver.manager.close()
    assert saved_and_finite(tmp_path / "run" / "checkpoints")[-1] == 4
    # Each `saving` is answered, or the watchdog would wait for ever.
    assert len(of(events, "saving")) == len(of(events, "saved")) + len(of(events, "save_failed"))


@pytest.mark.slow("trains")
def test_infinities_from_the_beginning_stay(tmp_path, events):
    first = trainer(tmp_path / "first", max_num_steps=1).train()
    params = {name: np.array(leaf) for name, leaf in first.params.items()}
    params["embed"][255] = -np.inf  # a row that no batch has; its update is 0
    changes = {"optimizer": {"name": f"{MODULE}:plain"}, "max_num_steps": 6, "checkpoint": {"save_steps": 2}}
    trainer(tmp_path, **changes).train(model_parameters=params)
    assert of(events, "anomaly") == []
    assert [event["step"] for event in of(events, "saved")][-1] == 6
    again = trainer(tmp_path, **{**changes, "max_num_steps": 8})
    again.train()
    assert (of(events, "restored")[-1]["step"], of(events, "anomaly")) == (6, [])


def plain(config, schedule):
    return optax.sgd(0.01)


def test_parameters_that_were_given_cannot_be_had_again(tmp_path, events):
    params = trainer(tmp_path / "first", max_num_steps=1).train().params
    made = trainer(tmp_path, **settings("nan_parameters", checkpoint={}))
    with pytest.raises(Exception, match="model_parameters cannot be had again: save more often"):
        made.train(model_parameters=params)
