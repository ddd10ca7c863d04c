"""Train mode and evaluation mode: a model drops values out while it trains, and not while it is evaluated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.programs.tiny import Table, TableTask
from tests.unit.training import FIXED, assert_equal, losses, of, trainer
from trainers.protocol import Last
from trainers.step import loss as loss_module

HERE = "tests.unit.trainers.step.test_modes:"


class Dropout(nnx.Module):
    """Like `nnx.Dropout`, with a key of its own: a model may hold parameters alone."""

    def __init__(self):
        self.deterministic = False

    def __call__(self, x):
        return x if self.deterministic else 2 * x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)


class DroppingTable(Table):
    def __init__(self, width, rngs):
        super().__init__(width, rngs)
        self.dropout = Dropout()

    def __call__(self, tokens):
        return self.dropout(jnp.tanh(self.embed[...][tokens])) @ self.out[...]


class DroppingTask(TableTask):
    def build_model(self, rngs):
        return DroppingTable(16, rngs)


class AlwaysDropping(DroppingTask):
    """Its model has no say in it."""

    def loss(self, model, batch):
        model.train()
        return super().loss(model, batch)


@pytest.mark.slow("trains")
def test_training_drops_out_and_no_evaluation_does(tmp_path, events):
    units = {"eval": {}, "own": {"task": HERE + "DroppingTask"}, "dropped": {"task": HERE + "AlwaysDropping"}}
    still = {"name": "adamw", "learning_rate": 1e-30, "schedule": {"name": "constant"}}
    made = trainer(tmp_path / "a", task=HERE + "DroppingTask", max_num_steps=1, optimizer=still, evaluation={"units": units})
    state, (dropped_loss,) = made.train(), losses(events).values()
    events.clear()
    plain = trainer(tmp_path / "b", max_num_steps=1, optimizer=still)
    assert_equal(plain.train().params, state.params)
    (plain_loss,) = losses(events).values()
    assert dropped_loss != pytest.approx(plain_loss, rel=1e-6)
    expected = plain.output.metrics["eval_loss"]
    assert made.output.metrics["eval_loss"] == made.output.metrics["own_loss"] == expected
    assert made.output.metrics["dropped_loss"] != pytest.approx(expected, rel=1e-6)
    assert made.evaluate()["loss"] == expected


class Flagged(TableTask):
    def loss(self, model, batch, training):
        assert isinstance(training, bool)
        loss = super().loss(model, batch)
        parts = {"trained": Last(1.0)} if training else {"evaluated": Last(1.0), "spent": loss.parts["accuracy"]}
        return loss._replace(parts=parts)


@pytest.mark.parametrize("units", [{}, {"eval": {"task": HERE + "Flagged"}}])
def test_a_loss_that_asks_is_reported_whether_it_trains(tmp_path, events, units):
    made = trainer(tmp_path, task=HERE + "Flagged", max_num_steps=2, accumulation_steps=2, evaluation={"units": units})
    made.train()
    trained, evaluated = (
        {name for event in of(events, "metrics") if (event.get("kind") == kind) for name in event["metrics"]}
        for kind in (None, "eval")
    )
    assert "trained" in trained
    assert "evaluated" not in trained
    assert {"eval_evaluated", "eval_spent"} <= evaluated
    assert "eval_trained" not in evaluated


def test_the_step_of_a_model_without_modes_is_as_it_was(tmp_path, monkeypatch):
    def gradients():
        made = trainer(tmp_path, optimizer=FIXED)
        made.prepare()
        objective = jax.grad(lambda *given: made.design.loss(*given).loss_sum)
        step = jax.ShapeDtypeStruct((), jnp.int32)
        design = made.design
        return jax.jit(objective).trace(design.state.params, design.rows(design.output), step).jaxpr

    with_modes = str(gradients())
    monkeypatch.setattr(loss_module, "in_mode", lambda model, *, training: model)
    assert str(gradients()) == with_modes
