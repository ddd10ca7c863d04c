"""Models with more than parameters: batch statistics, random streams, variables of their own."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gangway.errors import UsageError
from gangway.stop_reason import StopReason
from tests.programs import normed
from tests.programs.normed import Normed, NormedTask, Vectors, real_rows, running_statistics
from tests.unit.training import OneDevice, StopAt, assert_equal, losses, of
from trainers import runtime
from trainers.base import BaseTrainer
from trainers.config.arguments import TrainingArguments, from_dict
from trainers.loop.results import describe
from trainers.step import rest_of_model
from trainers.step.state import abstract_model, initial_model

HERE = "tests.unit.trainers.step.test_model_state:"
STILL = {"optimizer": {"name": "sgd", "learning_rate": 1e-30, "schedule": {"name": "constant"}}}
"""So small a rate that no parameter changes: only the other state does."""


def trainer(tmp_path, *callbacks, cls=BaseTrainer, data=None, **changes):
    arguments = from_dict(TrainingArguments, {**normed.settings(**changes), "storage": str(tmp_path)})
    return cls(arguments, *(data or normed.vectors(arguments)), callbacks=callbacks)


@pytest.mark.slow("trains; the step alone is tested in `make test`")
def test_parameters_are_optimized_and_the_rest_is_carried_along(tmp_path, events):
    made = trainer(tmp_path, cls=OneDevice, max_num_steps=40, evaluation={"every_steps": 20})
    state = made.train()
    assert set(state.params) == {"inner", "norm", "out"}
    assert set(state.params["norm"]) == {"scale", "bias"}
    assert {name: set(below) for name, below in state.model_state.items()} == {"norm": {"mean", "var"}}
    moments = {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state.opt_state)}
    assert not any("mean" in name or "dropout" in name for name in moments)
    # An evaluation: running statistics, nothing dropped out; computed with NNX alone.
    model = made.model.merge(state.params, state.model_state)
    model.eval()
    held_out = [Vectors(21)[index] for index in range(21)]
    expected = NormedTask(None).loss(model, {name: np.stack([row[name] for row in held_out]) for name in ("x", "label")})
    assert made.output.metrics["eval_loss"] == pytest.approx(float(np.mean(expected.losses)), rel=1e-5)
    assert made.evaluate()["accuracy"] == pytest.approx(float(np.mean(expected.metrics["accuracy"])), rel=1e-5)
    assert made.evaluate()["accuracy"] > 0.8
    assert_equal(made.output.state.model_state, state.model_state)  # evaluations changed nothing


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("cls", "accumulation_steps"), [(BaseTrainer, 1), (BaseTrainer, 3), (OneDevice, 3)])
def test_batch_statistics_are_those_of_the_rows_of_all_devices_that_count(tmp_path, cls, accumulation_steps):
    """27 rows on eight devices: some only fill up the batch. Each micro-batch updates them once, in order."""
    made = trainer(tmp_path, cls=cls, max_num_steps=2, accumulation_steps=accumulation_steps, **STILL)
    state = made.train()
    micro_batches = [rows for index in range(2) for rows in np.split(real_rows(index), accumulation_steps)]
    mean, var = running_statistics(state.params["inner"], micro_batches)
    np.testing.assert_allclose(state.model_state["norm"]["mean"], mean, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state.model_state["norm"]["var"], var, rtol=1e-4)


class Five:
    """A stream of five examples: with a global batch of 27 in three micro-batches, the last two have none."""

    def __iter__(self):
        return (Vectors(96)[index] for index in range(5))


def test_a_micro_batch_without_rows_changes_no_statistics(tmp_path):
    made = trainer(tmp_path, cls=OneDevice, data=(Five(), None), accumulation_steps=3, **STILL)
    state = made.train()
    assert int(state.step) == 1
    mean, var = running_statistics(state.params["inner"], [real_rows(0)[:5]])
    np.testing.assert_allclose(state.model_state["norm"]["mean"], mean, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state.model_state["norm"]["var"], var, rtol=1e-4)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.params, state.model_state)))


@pytest.mark.slow("compiles a step and trains")
def test_the_same_noise_on_one_device_as_on_eight(tmp_path, events):
    trainer(tmp_path / "a", cls=OneDevice, accumulation_steps=3).train()
    one = losses(events)
    events.clear()
    trainer(tmp_path / "b", accumulation_steps=3).train()
    np.testing.assert_allclose(list(one.values()), list(losses(events).values()), rtol=1e-4)


@pytest.mark.slow("compiles a step and trains")
@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_a_resumed_run_equals_an_undisturbed_one_bit_for_bit(tmp_path, events, accumulation_steps):
    changes = {"accumulation_steps": accumulation_steps, "max_num_steps": 12}
    changes["cls"] = OneDevice
    whole = trainer(tmp_path / "whole", **changes)
    whole.train()
    stopped = trainer(tmp_path / "cut", StopAt(3, StopReason.TERMINATED), **changes)
    stopped.train()
    assert 3 <= stopped.output.metrics["batches"] < 12
    runtime.install(runtime.Runtime(events.append))  # nobody asks this one to stop
    again = trainer(tmp_path / "cut", **changes)
    again.train()
    assert_equal(again.output.state, whole.output.state)
    assert again.output.metrics["params_digest"] == whole.output.metrics["params_digest"]
    assert stopped.output.metrics["params_digest"] != whole.output.metrics["params_digest"]


def test_the_digest_of_a_run_has_the_statistics_too(tmp_path):
    made = trainer(tmp_path, max_num_steps=1)
    state = made.train()
    other = dataclasses.replace(state, model_state=jax.tree.map(lambda leaf: leaf + 1, state.model_state))
    fingerprint = made.functions.checkpoint_manager.fingerprint
    digests = {describe(one, fingerprint(one))["params_digest"] for one in (state, other)}
    assert len(digests) == 2


def drawn(purpose="training", seed=0, batch_index=3, micro_batch=1):
    """What each stream of the model gives first."""
    _, _, template, _ = nnx.split(nnx.eval_shape(lambda: Normed(nnx.Rngs(0))), nnx.Param, rest_of_model.STREAMS, ...)
    streams = rest_of_model.streams(template, seed, purpose, batch_index, micro_batch)
    assert {int(count[...]) for _, count in nnx.to_flat_state(streams) if isinstance(count, nnx.RngCount)} == {0}
    keys = [key for _, key in nnx.to_flat_state(streams) if isinstance(key, nnx.RngKey)]
    return [tuple(jax.random.key_data(key[...]).tolist()) for key in keys]


def test_a_streams_key_is_a_function_of_what_it_is_for():
    assert drawn() == drawn()
    others = [drawn(seed=1), drawn(batch_index=4), drawn(micro_batch=2), drawn(purpose="evaluation"), drawn()]
    keys = [key for keys in others for key in keys]
    assert len(keys) == len(set(keys)) == 10  # two layers each


class Layers(nnx.Module):
    """Three layers of dropout, made by `nnx.vmap`: their streams are one, with a key for each layer."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def make(rngs):
            return nnx.Dropout(0.5, rngs=rngs)

        self.layers, self.scale = make(rngs), nnx.Param(jnp.ones(()))

    def __call__(self, x):
        return self.scale * nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(self.layers, x)


def test_stacked_layers_draw_each_for_itself():
    class Task(NormedTask):
        def build_model(self, rngs):
            return Layers(rngs)

    parts, _, _ = abstract_model(Task(None), 0)
    params, state = initial_model(Task(None), 0)
    model = parts.merge(params, state, parts.streams("training", 5, 0))
    model.train()
    dropped = np.asarray(model(jnp.ones(64)))
    assert len({row.tobytes() for row in dropped}) == 3
    assert 0.3 < (dropped == 0).mean() < 0.7


class Noisy(nnx.Module):
    """Draws in evaluations, too."""

    def __init__(self, rngs: nnx.Rngs):
        self.scale, self.noise = nnx.Param(jnp.ones(())), rngs["noise"].fork()

    def __call__(self, x):
        return self.scale * jnp.sum(x, -1) + self.noise.normal(x.shape[:1])


class NoisyTask(NormedTask):
    def build_model(self, rngs):
        return Noisy(rngs)

    def loss(self, model, batch):
        return model(batch["x"]) ** 2


def test_an_evaluation_that_draws_gives_the_same_numbers_each_time(tmp_path):
    made = trainer(tmp_path, task=HERE + "NoisyTask", max_num_steps=1, evaluation={"batch_size": 8})
    state = made.train()
    first = made.evaluate()
    assert made.evaluate() == first
    assert made.evaluate(dataclasses.replace(state, batch_index=state.batch_index + 5)) == first
    batches = [metrics["loss"] for metrics in made.eval()]
    assert len(set(batches)) == len(batches) > 1


class Poisoned(OneDevice):
    """The values of batch 2 are too large for their squares: the variance is infinite, and the loss is not."""

    size = 1e30

    def on_training_start(self, state):
        # It takes half a minute, and is tested elsewhere.
        self.training.loop.guard.diagnose = lambda *args: "not looked for"
        return state

    def preforward(self, batch):
        third = (batch["sample_id"] >= 54) & (batch["sample_id"] < 81)
        return {**batch, "x": jnp.where(third[:, None], self.size * batch["x"], batch["x"])}


class NotANumber(Poisoned):
    size = jnp.nan


@pytest.mark.slow("compiles a step and trains")
@pytest.mark.parametrize("cls", [Poisoned, NotANumber])
@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_a_batch_that_spoils_the_statistics_is_skipped_and_leaves_nothing(tmp_path, events, cls, accumulation_steps):
    about = {"accumulation_steps": accumulation_steps, "max_num_steps": 5}
    made = trainer(tmp_path / "spoilt", cls=cls, **about)
    state = made.train()
    assert [event["batch_index"] for event in of(events, "anomaly")] == [2]
    assert (int(state.step), int(state.batch_index)) == (4, 5)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.params, state.model_state)))
    # As if it had been skipped on order.
    runtime.install(runtime.Runtime(events.append, skip_batches=[2]))
    ordered = trainer(tmp_path / "ordered", cls=OneDevice, **about)
    assert_equal(ordered.train(), state)


class Keeping(nnx.Module):
    """Its loss does not depend on what it keeps."""

    def __init__(self, rngs: nnx.Rngs):
        self.out, self.energy = nnx.Linear(normed.WIDTH, normed.LABELS, rngs=rngs), nnx.BatchStat(jnp.zeros(()))

    def __call__(self, x):
        self.energy[...] = 0.9 * self.energy[...] + 0.1 * jnp.mean(x**2)
        return self.out(jnp.sign(x))


class KeepingTask(NormedTask):
    def build_model(self, rngs):
        return Keeping(rngs)


def test_state_that_becomes_infinite_is_not_kept_though_the_loss_is_finite(tmp_path, events):
    state = trainer(tmp_path, cls=Poisoned, task=HERE + "KeepingTask", max_num_steps=5).train()
    assert [event["batch_index"] for event in of(events, "anomaly")] == [2]
    assert (int(state.step), int(state.batch_index)) == (4, 5)
    assert np.isfinite(state.model_state["energy"])


class Half(NormedTask):
    """In float16, where a loss of this scale overflows."""

    def loss(self, model, batch):
        losses = super().loss(model, batch).losses
        return losses.astype(jnp.float16).astype(jnp.float32)


def test_an_update_that_overflows_leaves_the_statistics_as_they_were(tmp_path, events):
    made = trainer(tmp_path, cls=OneDevice, task=HERE + "Half", dtype="float16", loss_scale={"initial": 2.0**30}, max_num_steps=2)
    state = made.train()
    assert sum(event["metrics"].get("skipped_batches", 0) for event in of(events, "metrics")) == 2
    assert int(state.step) == 0
    _, first = initial_model(made.task, made.arguments.seed)
    assert_equal(state.model_state, first)


class Count(nnx.Variable):
    pass


class Counting(nnx.Module):
    """Counts its calls, has an array that is no variable, and sows."""

    def __init__(self, rngs: nnx.Rngs):
        self.out = nnx.Linear(normed.WIDTH, normed.LABELS, rngs=rngs)
        self.calls, self.smallest = Count(jnp.zeros((), jnp.int32)), Count(jnp.full((), jnp.inf))
        self.signs = nnx.data(jnp.ones(normed.WIDTH))

    def __call__(self, x):
        self.calls[...] += 1
        self.smallest[...] = jnp.minimum(self.smallest[...], jnp.min(x))
        self.sow(nnx.Intermediate, "seen", x)
        return self.out(self.signs * x)


class CountingTask(NormedTask):
    def build_model(self, rngs):
        return Counting(rngs)

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return loss._replace(metrics={**loss.metrics, "calls": jnp.broadcast_to(model.calls[...], loss.losses.shape)})


@pytest.mark.slow("trains twice")
def test_variables_of_a_models_own_are_kept_over_micro_batches_steps_and_restarts(tmp_path, events):
    about = {"cls": OneDevice, "task": HERE + "CountingTask", "accumulation_steps": 3}
    trainer(tmp_path, StopAt(2, StopReason.TERMINATED), **about).train()
    runtime.install(runtime.Runtime(events.append))
    state = trainer(tmp_path, **about, max_num_steps=8).train()
    assert int(state.model_state["calls"]) == 3 * 8
    assert float(state.model_state["smallest"]) == min(real_rows(index).min() for index in range(8))
    assert set(state.model_state) == {"calls", "smallest", "signs"}


class Forgetful(Counting):
    def __call__(self, x):
        self.newest = Count(x)
        return super().__call__(x)


class ForgetfulTask(NormedTask):
    def build_model(self, rngs):
        return Forgetful(rngs)


def test_a_variable_that_is_made_in_the_call_is_refused_by_name(tmp_path):
    with pytest.raises(UsageError, match=r"newest: absent before, float32\[27, 6\] after\): make all of them in __init__"):
        trainer(tmp_path, task=HERE + "ForgetfulTask").prepare()


class Plain(Counting):
    def __init__(self, rngs: nnx.Rngs):
        super().__init__(rngs)
        self.scales = jnp.ones(normed.WIDTH)


class PlainTask(NormedTask):
    def build_model(self, rngs):
        return Plain(rngs)


def test_a_plain_array_as_an_attribute_is_refused_by_name(tmp_path):
    with pytest.raises(UsageError, match=r"plain arrays as attributes \(Plain.scales\): wrap each in nnx.Variable"):
        trainer(tmp_path, task=HERE + "PlainTask").prepare()


def test_a_model_with_state_is_not_merged_without_it(tmp_path):
    made = trainer(tmp_path)
    made.prepare()
    params, _ = initial_model(made.task, 0)
    with pytest.raises(UsageError, match=r"state beside its parameters \(norm.mean, norm.var\)"):
        made.model.merge(params)


class OwnStep(OneDevice):
    def configure_functions(self):
        def train_step(state, batch):
            def mean_loss(params):
                model = self.model.merge(params, state.model_state, self.model.streams("training", state.batch_index, 0))
                model.train()
                loss = jnp.mean(self.task.loss(model, batch).losses)
                return loss, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

            (loss, model_state), gradients = jax.value_and_grad(mean_loss, has_aux=True)(state.params)
            updates, opt_state = self.optimizer.update(gradients, state.opt_state, state.params)
            params = jax.tree.map(jnp.add, state.params, updates)
            return dataclasses.replace(state, params=params, opt_state=opt_state, model_state=model_state), {"loss": loss}

        return super().configure_functions()._replace(train_step_fn=train_step)


@pytest.mark.slow("compiles a step and trains")
def test_a_step_of_ones_own_may_change_the_state_too(tmp_path, events):
    about = {"global_batch_size": 16, "optimizer": {**STILL["optimizer"], "learning_rate": 0.1, "max_grad_norm": None}}
    own = trainer(tmp_path / "own", cls=OwnStep, **about).train()
    built_in = trainer(tmp_path / "built-in", cls=OneDevice, **about).train()
    for a, b in zip(
        jax.tree.leaves((own.params, own.model_state)), jax.tree.leaves((built_in.params, built_in.model_state)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


class Uphill(OneDevice):
    """Loses what the objective returned."""

    def forward_backward(self, objective, params, micro_batch):
        (value, loss), gradients = jax.value_and_grad(objective, has_aux=True)(params, micro_batch)
        return (value, type(loss)(loss.loss_sum, loss.num_targets, loss.parts)), gradients


def test_gradients_of_ones_own_must_hand_the_state_on(tmp_path):
    with pytest.raises(UsageError, match="forward_backward returned a Loss without the model's state"):
        trainer(tmp_path, cls=Uphill).train()


class Dict(NormedTask):
    def loss(self, model, batch):
        return {"fit": super().loss(model, batch), "size": (jnp.sum(model.out.kernel[...] ** 2), None)}


def test_a_loss_of_several_terms_updates_the_state_once(tmp_path, events):
    made = trainer(tmp_path, cls=OneDevice, task=HERE + "Dict", max_num_steps=1, accumulation_steps=3, **STILL)
    state = made.train()
    mean, _ = running_statistics(state.params["inner"], np.split(real_rows(0), 3))
    np.testing.assert_allclose(state.model_state["norm"]["mean"], mean, rtol=1e-5, atol=1e-5)
