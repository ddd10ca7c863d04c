"""Where a run begins: what is given to `train` is taken once, found again by a rollback, and never instead of a checkpoint."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from gangway.errors import UsageError
from tests.unit.trainers.loop.test_skipped_batches import Poison
from tests.unit.training import FIXED, assert_equal, of, trainer
from trainers import runtime
from trainers.base import BaseTrainer

NO_SAVES = {"optimizer": FIXED, "checkpoint": {"save_at_end": False}}
ROLLBACK = {**NO_SAVES, "anomalies": {"non_finite": "rollback"}}


def parameters(seed):
    random = np.random.default_rng(seed)
    return {"embed": random.normal(size=(256, 16)).astype(np.float32), "out": random.normal(size=(16, 256)).astype(np.float32)}


def state_of(tmp_path, step):
    """A state at `step`, of another run."""
    return trainer(tmp_path / "source", **NO_SAVES | {"max_num_steps": step, "seed": 3}).train()


def copied(state):
    """Training donates what it is given."""
    return jax.tree.map(lambda leaf: leaf.copy(), state)


def ordered(events, **orders):
    runtime.install(runtime.Runtime(events.append, **orders))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["state", "parameters"])
def test_what_is_given_is_the_beginning_and_the_checkpoint_wins_afterwards(tmp_path, events, kind):
    source = state_of(tmp_path, 2)

    def given():
        return {"state": copied(source)} if kind == "state" else {"model_parameters": parameters(1)}

    whole = trainer(tmp_path / "whole", optimizer=FIXED).train(**given())
    trainer(tmp_path / "cut", optimizer=FIXED, max_num_steps=6).train(**given())
    events.clear()
    resumed = trainer(tmp_path / "cut", optimizer=FIXED)
    assert_equal(whole, resumed.train(**given()))
    assert of(events, "save_failed") == []
    name = {"state": "the given state", "parameters": "model_parameters"}[kind]
    notes = [event["message"] for event in of(events, "note")]
    assert [note for note in notes if note.startswith(name)] == [
        f"{name} was not used: the run goes on from its checkpoint of step 6; to begin with it, give the run another name"
    ]


@pytest.mark.slow("trains twice")
@pytest.mark.parametrize("kind", ["state", "parameters"])
def test_a_rollback_to_the_beginning_finds_what_was_given(tmp_path, events, kind):
    source = state_of(tmp_path, 2)

    def given():
        return {"state": copied(source)} if kind == "state" else {"model_parameters": parameters(1)}

    made = trainer(tmp_path / "rolled", Poison(5), **ROLLBACK)
    rolled = made.train(**given())
    assert [event["restored_step"] for event in of(events, "anomaly")] == [2 if kind == "state" else 0]
    ordered(events, skip_batches=[5])
    assert_equal(rolled, trainer(tmp_path / "ordered", **NO_SAVES).train(**given()))
    assert made.lineage.segments[0]["batch_index"] == (2 if kind == "state" else 0)


class Warm(BaseTrainer):
    """Puts its own parameters into the state that training begins with."""

    def on_training_start(self, state):
        if int(state.step) > 0:
            return state
        return dataclasses.replace(state, params=jax.tree.map(lambda leaf: 0.5 * leaf, state.params))


def test_a_rollback_to_the_beginning_finds_what_the_hook_made_of_it(tmp_path, events):
    rolled = trainer(tmp_path / "rolled", Poison(3), cls=Warm, **ROLLBACK).train()
    assert [event["restored_step"] for event in of(events, "anomaly")] == [0]
    ordered(events, skip_batches=[3])
    assert_equal(rolled, trainer(tmp_path / "ordered", cls=Warm, **NO_SAVES).train())


class Counting(BaseTrainer):
    calls = 0

    def on_training_start(self, state):
        self.calls += 1
        return state


def test_after_a_rollback_to_a_checkpoint_the_hook_is_not_called_again(tmp_path, events):
    made = trainer(tmp_path, Poison(6), cls=Counting, **ROLLBACK | {"checkpoint": {"save_steps": 4}})
    made.train()
    assert [event["restored_step"] for event in of(events, "anomaly")] == [4]
    assert made.calls == 1


def test_given_parameters_have_the_types_and_names_of_the_model(tmp_path, events):
    given = {name: value.astype(np.float64) for name, value in parameters(1).items()}
    a = trainer(tmp_path / "a", **NO_SAVES).train(model_parameters=given)
    b = trainer(tmp_path / "b", **NO_SAVES).train(model_parameters=parameters(1))
    assert_equal(a, b)
    wrong = {"embed": np.zeros((256, 8), np.float32), "head": {"bias": np.zeros(3)}}
    with pytest.raises(UsageError) as raised:
        trainer(tmp_path / "c", **NO_SAVES).train(model_parameters=wrong)
    assert str(raised.value) == (
        "the given parameters are not those of the model: out is missing; head.bias is not in the model; "
        "embed is [256, 8], expected [256, 16]"
    )


class OwnState(BaseTrainer):
    """Its state has the parameters of `parameters(1)`, and shapes of all else."""

    changes: dict = {}  # noqa: RUF012 - what a test replaces

    def configure_model(self):
        made = super().configure_model()
        return made._replace(state=dataclasses.replace(made.state, **{"params": parameters(1), **self.changes}))


class WholeState(BaseTrainer):
    """Its state is all arrays: the first one, with other parameters."""

    def configure_model(self):
        made = super().configure_model()
        return made._replace(state=dataclasses.replace(self.initial_state(), params=parameters(1)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cls", [OwnState, WholeState])
def test_the_arrays_of_configure_model_are_the_beginning_also_of_a_second_training(tmp_path, events, cls):
    expected = trainer(tmp_path / "given", **NO_SAVES | {"max_num_steps": 2}).train(model_parameters=parameters(1))
    made = trainer(tmp_path / "own", cls=cls, **NO_SAVES | {"max_num_steps": 2})
    assert_equal(made.train(), expected)
    assert_equal(made.train(), expected)
    assert [event["message"] for event in of(events, "note") if "configure_model" in event["message"]] == []


def test_a_call_by_hand_drops_no_array_and_types_are_those_of_the_model(tmp_path, events):
    wide = jax.tree.map(lambda leaf: leaf.astype(np.float64), parameters(1))
    cls = type("Wide", (OwnState,), {"changes": {"params": wide}})
    made = trainer(tmp_path, cls=cls, **NO_SAVES)
    made.configure_model()
    made.prepare()
    state = made.design.state
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state.params)} == {"float32"}
    assert_equal(state.params, parameters(1))


def test_arrays_of_configure_model_that_do_not_go_with_the_rest_are_an_error(tmp_path, events):
    with pytest.raises(UsageError, match=r"init_from: configure_model has returned a state with arrays \(.params"):
        trainer(tmp_path, cls=OwnState, init_from="x", **NO_SAVES).train()
    shapes = {"more": jax.ShapeDtypeStruct((3,), np.float32)}
    other = type("Other", (OwnState,), {"changes": {"sums": shapes}})
    with pytest.raises(UsageError, match=r"with .sums\['more'\] \[3\], of which only the shape .* has none: give an array"):
        trainer(tmp_path, cls=other, **NO_SAVES).train()


def test_the_first_state_is_that_of_a_training_without_steps(tmp_path, events):
    made = trainer(tmp_path, **NO_SAVES)
    made.configure_model()
    state = made.initial_state()
    assert (int(state.step), int(state.batch_index)) == (0, 0)
    assert_equal(state, jax.jit(made.design.initial_state)())
