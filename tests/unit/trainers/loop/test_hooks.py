"""Hooks: each is called when it should be; what one returns is what is used, published and checkpointed; an error is an error."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.unit.training import FIXED, assert_equal, losses, of, trainer
from trainers.base import BaseTrainer
from trainers.callbacks import Callback
from trainers.checkpoint.standalone import load_from
from trainers.loop.hooks import overrides
from trainers.worker import exception_event

pytestmark = pytest.mark.usefixtures("events")


class Spy(BaseTrainer):
    """Notes which hook was called, with what."""

    def post_init(self):
        self.called = []

    def on_training_start(self, state):
        self.called.append(("training_start", int(state.batch_index)))
        return state

    def on_training_end(self, state):
        self.called.append(("training_end", int(state.batch_index)))
        return state

    def on_epoch_begin(self, state, epoch):
        self.called.append(("epoch_begin", int(state.batch_index), epoch))
        return state

    def on_epoch_end(self, state, epoch):
        self.called.append(("epoch_end", int(state.batch_index), epoch))
        return state

    def on_step_start(self, state, step):
        self.called.append(("step_start", int(state.batch_index), step))
        return state

    def on_step_end(self, state, metrics, step):
        self.called.append(("step_end", int(state.batch_index), step))
        return state, metrics

    def on_evaluation_start(self, state):
        self.called.append(("evaluation_start", int(state.batch_index)))
        return state

    def on_evaluation_end(self, state, metrics):
        self.called.append(("evaluation_end", int(state.batch_index)))
        return state, metrics

    def of(self, *kinds):
        return [call for call in self.called if call[0] in kinds]


BATCH = 20
"""Of 96 examples an epoch: batches 4 and 9 straddle two."""


def test_each_hook_is_called_when_it_should_be(tmp_path):
    made = trainer(tmp_path, cls=Spy, global_batch_size=BATCH, max_num_steps=6, evaluation={"every_steps": 4})
    made.train()
    steps = [[("step_start", k, k), ("step_end", k + 1, k + 1)] for k in range(6)]
    assert made.called == [
        ("training_start", 0),
        ("epoch_begin", 0, 0),
        *(call for step in steps[:4] for call in step),
        ("evaluation_start", 4),
        ("evaluation_end", 4),
        *steps[4],
        ("epoch_end", 5, 0),
        ("epoch_begin", 5, 1),
        *steps[5],
        ("training_end", 6),
        ("evaluation_start", 6),
        ("evaluation_end", 6),
    ]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("cut", [5, 7])
def test_a_run_that_goes_on_begins_and_ends_each_epoch_once(tmp_path, cut):
    changes = {"cls": Spy, "global_batch_size": BATCH, "optimizer": FIXED, "evaluation": {"max_batches": 1}}
    first = trainer(tmp_path, max_num_steps=cut, **changes)
    first.train()
    second = trainer(tmp_path, max_num_steps=12, **changes)
    second.train()
    assert second.called[0] == ("training_start", cut)
    assert first.of("epoch_begin", "epoch_end") + second.of("epoch_begin", "epoch_end") == [
        ("epoch_begin", 0, 0),
        ("epoch_end", 5, 0),
        ("epoch_begin", 5, 1),
        ("epoch_end", 10, 1),
        ("epoch_begin", 10, 2),
    ]


# ---------------------------------------------------------------------- a state that a hook returns


@jax.jit
def halved(params):
    return jax.tree.map(lambda leaf: leaf / 2, params)


def with_half(state):
    return dataclasses.replace(state, params=halved(state.params))


class Halving(BaseTrainer):
    """Halves the parameters at the hooks whose names it is given."""

    at: tuple[str, ...] = ()

    def _maybe(self, hook, state):
        return with_half(state) if hook in self.at else state

    def on_training_start(self, state):
        return self._maybe("on_training_start", state)

    def on_training_end(self, state):
        return self._maybe("on_training_end", state)

    def on_epoch_begin(self, state, epoch):
        return self._maybe("on_epoch_begin", state)

    def on_epoch_end(self, state, epoch):
        return self._maybe("on_epoch_end", state)

    def on_step_start(self, state, step):
        return self._maybe("on_step_start", state)

    def on_step_end(self, state, metrics, step):
        return self._maybe("on_step_end", state), metrics


SGD = {"name": "sgd", "learning_rate": 1.0, "weight_decay": 0.0, "max_grad_norm": None, "schedule": {"name": "constant"}}
CALLS = {
    "on_training_start": 1,
    "on_training_end": 1,
    "on_epoch_begin": 2,
    "on_epoch_end": 1,
    "on_step_start": 6,
    "on_step_end": 6,
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("hook", CALLS)
def test_a_state_that_a_hook_returns_is_used_and_checkpointed(tmp_path, hook):
    made = trainer(
        tmp_path,
        cls=type("Half", (Halving,), {"at": (hook,)}),
        global_batch_size=BATCH,
        max_num_steps=6,
        # Nothing else moves the parameters, so that the number of halvings can be read from them.
        optimizer={**SGD, "learning_rate": 1e-30},
        evaluation={"max_batches": 1},
    )
    state = made.train()
    start = jax.jit(made.design.initial_state)().params
    expected = jax.tree.map(lambda leaf: leaf / 2 ** CALLS[hook], start)
    assert_equal(state.params, expected)
    saved, _ = load_from(made.save_pretrained(str(tmp_path / "copy")), made.placement.placed_state)
    assert_equal(saved.params, expected)
    newest, _ = load_from(made.output.checkpoint_path, made.placement.placed_state)
    assert_equal(newest.params, expected)


class Swapping(BaseTrainer):
    """Evaluates with other parameters than it trains."""

    def on_evaluation_start(self, state):
        self.kept = state
        return dataclasses.replace(state, params=jax.tree.map(jnp.zeros_like, state.params))

    def on_evaluation_end(self, state, metrics):
        return self.kept, {**metrics, "loss": metrics["loss"] + 1, "mine": 5.0}


@pytest.mark.slow("trains and evaluates")
def test_an_evaluation_may_look_at_another_state_and_its_metrics_are_what_the_hook_returns(tmp_path, events):
    changes = {"optimizer": FIXED, "evaluation": {"every_steps": 4}}
    made = trainer(tmp_path, cls=Swapping, **changes)
    state = made.train()
    assert_equal(state, trainer(tmp_path / "plain", **changes).train())
    assert made.output.metrics["eval_loss"] == pytest.approx(1 + math.log(256))
    assert made.output.metrics["eval_mine"] == 5.0
    told = [event["metrics"] for event in of(events, "metrics") if "eval_mine" in event["metrics"]]
    assert [metrics["eval_loss"] for metrics in told] == pytest.approx([1 + math.log(256)] * 3)


def test_a_state_of_other_shapes_is_an_error_that_is_not_hidden(tmp_path):
    class Wider(BaseTrainer):
        def on_step_start(self, state, step):
            return dataclasses.replace(state, params=jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf]), state.params))

    made = trainer(tmp_path, cls=Wider)
    with pytest.raises((TypeError, ValueError)):
        made.train()
    assert made.output is None


# ---------------------------------------------------------------------- metrics that a hook returns


class Changing(BaseTrainer):
    """Replaces one metric, adds one on the device and one on the host, takes one out."""

    def on_step_end(self, state, metrics, step):
        metrics["loss"] = jnp.asarray(metrics["loss"]) * 0 + step
        metrics["twice"] = jnp.asarray(metrics["grad_norm"]) * 2
        metrics["number"] = 10.0 * step
        del metrics["accuracy"]
        return state, metrics


class Seen(Callback):
    def __init__(self):
        self.steps, self.published = [], []

    def on_step_end(self, state, *, loss, loss_dict, **kwargs):
        self.steps.append((float(loss), {name: float(value) for name, value in loss_dict.items()}))

    def on_publish(self, state, *, step, metrics, **kwargs):
        self.published.append((step, metrics))


def test_metrics_replaced_in_a_hook_are_not_dropped(tmp_path, events):
    """They are what is published, what callbacks see, and what the checkpoint and the result say."""
    seen = Seen()
    made = trainer(tmp_path, seen, cls=Changing, publish_every_steps=4)
    made.train()
    assert [(step, metrics["loss"], metrics["number"]) for step, metrics in seen.published] == [
        (4, 2.5, 25.0),
        (8, 6.5, 65.0),
        (12, 10.5, 105.0),
    ]
    for _, metrics in seen.published:
        assert metrics["twice"] == pytest.approx(2 * metrics["grad_norm"], rel=1e-5)
        assert "accuracy" not in metrics
    assert losses(events) == {4: 2.5, 8: 6.5, 12: 10.5}
    assert [loss for loss, _ in seen.steps] == list(range(1, 13))
    assert all(parts["number"] == 10 * loss and "accuracy" not in parts for loss, parts in seen.steps)
    _, meta = load_from(made.output.checkpoint_path, made.placement.placed_state)
    assert (meta["metrics"]["loss"], meta["metrics"]["number"]) == (10.5, 105.0)
    assert made.output.metrics["train_loss"] == 10.5


def test_a_metric_that_a_hook_gives_at_some_steps_is_their_mean(tmp_path):
    class Sometimes(BaseTrainer):
        def on_step_end(self, state, metrics, step):
            return state, {**metrics, **({"odd": float(step)} if step % 2 else {})}

    seen = Seen()
    trainer(tmp_path, seen, cls=Sometimes, publish_every_steps=4, max_num_steps=4).train()
    assert seen.published[0][1]["odd"] == 2.0


# ---------------------------------------------------------------------- traced hooks


class Traced(BaseTrainer):
    def preforward(self, batch):
        return {**batch, "weight": batch["weight"] * (batch["sample_id"] % 2)}

    def postforward(self, loss, batch):
        parts = {**loss.parts, "even": (jnp.sum(batch["weight"] * (batch["sample_id"] % 2 == 0)), loss.num_targets)}
        return loss._replace(loss_sum=3 * loss.loss_sum, parts=parts)


@pytest.mark.slow("trains several times")
def test_preforward_and_postforward_are_around_the_loss(tmp_path):
    """One example in two, three times its loss: the same as the plain trainer with a third of the rate on those alone."""
    seen, plain_seen = Seen(), Seen()
    changes = {"optimizer": SGD, "max_num_steps": 3, "accumulation_steps": 2}
    made = trainer(tmp_path, seen, cls=Traced, **changes)
    made.train()
    other = trainer(tmp_path / "plain", plain_seen, cls=OddOnly, **{**changes, "optimizer": {**SGD, "learning_rate": 3.0}})
    other.train()
    got, expected = ([metrics for _, metrics in one.published] for one in (seen, plain_seen))
    for one, two in zip(got, expected, strict=True):
        assert one["loss"] == pytest.approx(3 * two["loss"], rel=1e-5)
        assert one["even"] == 0
    assert made.output.metrics["tokens"] == 3 * 8 * 8
    assert made.evaluate()["loss"] == pytest.approx(3 * other.evaluate()["loss"], rel=1e-4)


class OddOnly(BaseTrainer):
    def preforward(self, batch):
        return {**batch, "weight": batch["weight"] * (batch["sample_id"] % 2)}


class MicroStep(BaseTrainer):
    def on_micro_step(self, loss, gradients, batch):
        return loss, jax.tree.map(lambda leaf: leaf * 0.5, gradients)


def test_the_micro_step_hook_sees_the_gradients_of_each_micro_batch(tmp_path):
    changes = {"optimizer": SGD, "max_num_steps": 3, "accumulation_steps": 2}
    halved_state = trainer(tmp_path, cls=MicroStep, **changes).train()
    plain = trainer(tmp_path / "plain", **{**changes, "optimizer": {**SGD, "learning_rate": 0.5}}).train()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), halved_state.params, plain.params)


def test_a_hook_that_is_not_overridden_costs_nothing():
    plain, changing = (cls.__new__(cls) for cls in (BaseTrainer, Changing))
    assert not overrides(plain, "on_step_end")
    assert overrides(changing, "on_step_end")
    assert not overrides(changing, "on_micro_step")


# ---------------------------------------------------------------------- errors


HOST_HOOKS = [name for name in vars(BaseTrainer) if name.startswith("on_") and name != "on_micro_step"]
TRACED_HOOKS = ["preforward", "postforward", "forward_backward", "on_micro_step"]


class OnException(Callback):
    def __init__(self):
        self.errors, self.ended = [], 0

    def on_exception(self, state, *, error, **kwargs):
        self.errors.append(error)

    def on_train_end(self, state, **kwargs):
        self.ended += 1


def raising(name, error):
    def hook(self, *arguments):
        raise error

    return type("Raising", (BaseTrainer,), {name: hook})


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "error"),
    [
        *((name, KeyboardInterrupt()) for name in HOST_HOOKS),
        *((name, RuntimeError("mine")) for name in ("on_step_end", "on_evaluation_end", *TRACED_HOOKS)),
        ("on_training_start", SystemExit(0)),
    ],
)
def test_an_error_in_a_hook_never_ends_training_as_a_success(tmp_path, name, error):
    told = OnException()
    made = trainer(
        tmp_path, told, cls=raising(name, error), max_num_steps=6, global_batch_size=BATCH, evaluation={"max_batches": 1}
    )
    with pytest.raises(type(error)) as raised:
        made.train()
    assert raised.value is error
    assert (told.errors, told.ended, made.output) == ([error], 0, None)


@pytest.mark.slow("trains twice")
def test_after_an_error_in_a_hook_a_run_goes_on_from_its_checkpoint(tmp_path):
    class Once(BaseTrainer):
        def on_step_end(self, state, metrics, step):
            if step == 6:
                raise RuntimeError("mine")
            return state, metrics

    made = trainer(tmp_path, cls=Once, optimizer=FIXED)
    with pytest.raises(RuntimeError, match="mine") as raised:
        made.train()
    assert exception_event(raised.value)["step"] == 6  # steps are in flight: fewer are completed
    made.functions.checkpoint_manager.wait()  # in this process it is still on its way
    assert_equal(trainer(tmp_path, optimizer=FIXED).train(), trainer(tmp_path / "whole", optimizer=FIXED).train())
