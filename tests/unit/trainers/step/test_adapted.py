"""Train and eval steps of a user's own, loaders that can only be iterated over, and gradients of one's own."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from gangway.errors import DataError, UsageError
from tests.programs.tiny import Numbers
from tests.unit.training import FIXED, StopAt, arguments, assert_equal, losses, of, trainer
from trainers.base import BaseTrainer
from trainers.callbacks import Callback
from trainers.config import MeshConfig
from trainers.data.iterated_loader import IteratedLoader
from trainers.parallel.mesh import make_mesh
from trainers.protocol import CheckpointManagerProtocol, TrainerConfigureDataloaderOutput, TrainerConfigureFunctionOutput
from trainers.runtime.executables import Program
from trainers.trainer.build import build

pytestmark = pytest.mark.usefixtures("events")
SGD = {"name": "sgd", "learning_rate": 1.0, "weight_decay": 0.0, "max_grad_norm": None, "schedule": {"name": "constant"}}
PLAIN = {"optimizer": SGD}


class OwnSteps(BaseTrainer):
    """What the built-in steps do, in a few lines."""

    jitted = True
    as_object = False

    def mean_loss(self, params, batch):
        loss = self.task.loss(self.model.merge(params), batch)
        return loss.loss_sum / loss.num_targets, loss.parts["accuracy"][0] / loss.num_targets

    def measured(self, **metrics):
        return SimpleNamespace(**metrics, nothing=None) if self.as_object else metrics

    def own_train_step(self, state, batch):
        assert batch["tokens"].shape == (self.arguments.global_batch_size, 9)
        (loss, accuracy), gradients = jax.value_and_grad(self.mean_loss, has_aux=True)(state.params, batch)
        updates, opt_state = self.optimizer.update(gradients, state.opt_state, state.params)
        state = dataclasses.replace(state, params=optax.apply_updates(state.params, updates), opt_state=opt_state)
        return state, self.measured(loss=loss, accuracy=accuracy, grad_norm=optax.tree.norm(gradients))

    def own_eval_step(self, state, batch):
        loss, accuracy = self.mean_loss(state.params, batch)
        return self.measured(loss=loss, accuracy=accuracy)

    def configure_functions(self):
        functions = super().configure_functions()
        train, evaluate = self.own_train_step, self.own_eval_step
        if self.jitted:
            train, evaluate = jax.jit(train, donate_argnums=0), jax.jit(evaluate)
        return functions._replace(train_step_fn=train, eval_step_fn=evaluate)


class OwnPlainSteps(OwnSteps):
    jitted, as_object = False, True


@pytest.mark.slow("compiles a step and trains")
@pytest.mark.parametrize("cls", [OwnSteps, OwnPlainSteps])
def test_steps_of_ones_own_do_what_the_built_in_ones_do(tmp_path, events, cls):
    made = trainer(tmp_path, cls=cls, evaluation={"every_steps": 4}, **PLAIN)
    state = made.train()
    own = losses(events)
    assert not [event for event in of(events, "note") if "compiles again" in event["message"]]
    published = of(events, "metrics")[0]["metrics"]
    assert {"accuracy", "grad_norm", "learning_rate", "mean_loss", "tokens", "total_samples", "tokens_per_s"} <= published.keys()
    # Only the user's step knows whether its loss is the cross-entropy of tokens.
    assert not [name for event in of(events, "metrics") for name in event["metrics"] if "perplexity" in name]
    events.clear()
    other = trainer(tmp_path / "plain", evaluation={"every_steps": 4}, **PLAIN)
    expected = other.train()
    np.testing.assert_allclose(list(own.values()), list(losses(events).values()), rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), state.params, expected.params)
    got, known = made.output.metrics, other.output.metrics
    for name in ("samples", "tokens", "samples_digest", "steps", "batches"):
        assert got[name] == known[name], name
    assert got["eval_loss"] == pytest.approx(known["eval_loss"], rel=1e-4)  # 21 examples in batches of 16: the ragged end, too
    resumed = trainer(tmp_path / "cut", cls=cls, max_num_steps=5, **PLAIN)
    resumed.train()
    assert_equal(trainer(tmp_path / "cut", cls=cls, **PLAIN).train(), trainer(tmp_path / "whole", cls=cls, **PLAIN).train())


class Poisoned(OwnSteps):
    def own_train_step(self, state, batch):
        state, metrics = super().own_train_step(state, batch)
        bad = jnp.where(state.batch_index == 5, jnp.nan, 1.0)
        params = jax.tree.map(lambda leaf: leaf * bad, state.params)
        return dataclasses.replace(state, params=params), {**metrics, "loss": metrics["loss"] * bad}


def test_a_bad_batch_leaves_the_state_as_it_was(tmp_path, events):
    made = trainer(tmp_path, cls=Poisoned, anomalies={"non_finite": "skip"}, **PLAIN)
    state = made.train()
    assert [event["skipped_batches"] for event in of(events, "anomaly")] == [[5]]
    assert (int(state.step), int(state.batch_index)) == (11, 12)
    assert np.isfinite(state.params["out"]).all()


def returning(step):
    return type("Returns", (OwnSteps,), {"jitted": False, "own_train_step": step})


@pytest.mark.parametrize(
    ("cls", "changes", "problem"),
    [
        (OwnSteps, {"accumulation_steps": 2}, "accumulation_steps = 2: expected 1"),
        (OwnSteps, {"dtype": "float16"}, "dtype = 'float16': only the built-in step scales"),
        (OwnSteps, {"pruning": {"pattern": "out", "end_step": 5}}, "pruning.pattern = 'out': only the built-in step prunes"),
        (
            OwnSteps,
            {"pruning": {"pruner": "tests.unit.trainers.optim.test_pruning:KeepsBlocks"}},
            r"build_pruner \(pruning.pruner\): only the built-in step calls",
        ),
        (OwnSteps, {"optimizer": SGD | {"max_grad_norm": 0.5}}, r"optimizer\.max_grad_norm = 0\.5: only the built-in step clips"),
        (
            OwnSteps,
            {"task": "tests.unit.trainers.optim.test_precision:NarrowTask"},
            r"master_weights = 'float32': only the built-in",
        ),
        (OwnSteps, {"optimizer": SGD | {"groups": [{"pattern": "out", "frozen": True}]}}, "freeze_module .*leaves out frozen"),
        (
            type("OwnSteps", (OwnSteps,), {"on_micro_step": lambda self, loss, gradients, batch: (loss, gradients)}),
            {},
            r"OwnSteps overrides what nothing would call:\n  on_micro_step: configure_functions returns a step",
        ),
        (OwnSteps, {"metrics": {"per_parameter_grad_norm": True}}, "per_parameter_grad_norm = true: only the built-in"),
        (returning(lambda self, state, batch: state), {}, "returned TrainState: expected a pair"),
        (returning(lambda self, state, batch: (state, {})), {}, "returned no `loss`"),
        (returning(lambda self, state, batch: (state, {"loss": state.params["out"]})), {}, r"returned loss \(16, 256\) among"),
        (returning(lambda self, state, batch: (state.params, {"loss": state.step})), {}, "returned another state"),
    ],
)
def test_what_cannot_work_with_a_step_of_ones_own_is_refused_by_name(tmp_path, cls, changes, problem):
    with pytest.raises(UsageError, match=problem):
        trainer(tmp_path, cls=cls, **{**PLAIN, **changes}).train()


class OnlyTheStep(OwnSteps):
    returned = None

    def configure_functions(self):
        return self.returned or TrainerConfigureFunctionOutput(self.own_train_step)


def test_what_is_left_out_of_the_functions_is_what_there_would_be(tmp_path):
    made = trainer(tmp_path, cls=OnlyTheStep, **PLAIN)
    build(made)
    functions = made.functions
    assert functions.mesh == made.mesh
    assert isinstance(functions.checkpoint_manager, CheckpointManagerProtocol)
    assert isinstance(functions.eval_step_fn, Program)


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        ((1, 2), "configure_functions returned tuple: expected a trainers.protocol.TrainerConfigureFunctionOutput"),
        (TrainerConfigureFunctionOutput(None), "returned no train_step_fn"),
        (lambda: TrainerConfigureFunctionOutput(min, mesh=make_mesh(MeshConfig(), jax.devices()[:1])), "a mesh of its own"),
    ],
)
def test_what_are_no_functions_is_refused(tmp_path, returned, problem):
    returned = returned() if callable(returned) else returned
    made = trainer(tmp_path, cls=type("Returns", (OnlyTheStep,), {"returned": returned}), **PLAIN)
    with pytest.raises(UsageError, match=problem):
        build(made)


# ---------------------------------------------------------------------- loaders that are iterated over


class Batches:
    """As a loader of torch: it begins anew at each `iter`."""

    def __init__(self, num_examples, rows=16):
        self.data, self.num_examples, self.rows = Numbers(96, 8), num_examples, rows

    def __iter__(self):
        for start in range(0, self.num_examples, self.rows):
            examples = [self.data[index] for index in range(start, min(start + self.rows, self.num_examples))]
            yield {"tokens": np.stack([example["tokens"] for example in examples])}


class Iterated(BaseTrainer):
    """Its loaders are iterables, of 12 batches, or fewer."""

    num_examples = 192

    def configure_dataloaders(self):
        return TrainerConfigureDataloaderOutput(Batches(self.num_examples), Batches(21, self.arguments.micro_batch_size))


class Generated(Iterated):
    def configure_dataloaders(self):
        return super().configure_dataloaders()._replace(dataloader_train=iter(Batches(192)))


@pytest.mark.slow("compiles a step and trains")
@pytest.mark.parametrize("cls", [Iterated, Generated])
def test_any_iterable_of_batches_will_do(tmp_path, events, cls):
    made = trainer(tmp_path, cls=cls, optimizer=FIXED)
    state = made.train()
    plain = trainer(tmp_path / "plain", optimizer=FIXED)
    expected = plain.train()
    assert_equal(state.params, expected.params)
    assert made.output.metrics["eval_loss"] == plain.output.metrics["eval_loss"]
    first = trainer(tmp_path / "cut", StopAt(6, "requested"), cls=cls, optimizer=FIXED)
    first.train()
    events.clear()
    resumed = trainer(tmp_path / "cut", cls=cls, optimizer=FIXED)
    assert_equal(resumed.train(), state)
    (note,) = [event["message"] for event in of(events, "note") if "cannot be positioned" in event["message"]]
    reached = int(first.state.batch_index)
    assert f"{reached} batches were drawn and dropped to find batch {reached}," in note


def test_an_iterable_that_ends_ends_training_with_its_last_rows(tmp_path):
    made = trainer(tmp_path, cls=type("Short", (Iterated,), {"num_examples": 70}), optimizer=FIXED)
    made.train()
    assert (str(made.output.stop_reason), made.output.metrics["samples"], made.output.metrics["batches"]) == (
        "end_of_data",
        70,
        5,
    )


class Heard(Callback):
    def __init__(self):
        self.heard = []

    def on_epoch_begin(self, state, *, epoch, **kwargs):
        self.heard.append(("begin", epoch, state.batch_index))

    def on_epoch_end(self, state, *, epoch, **kwargs):
        self.heard.append(("end", epoch, state.batch_index))


class ThreeBatches(Iterated):
    num_examples = 48


def test_an_iterable_is_begun_anew_each_epoch_and_needs_no_dataset(tmp_path, events):
    heard, changes = Heard(), {"max_num_steps": None, "max_num_data_epochs": 2, "optimizer": FIXED}
    given = arguments(tmp_path, **changes, evaluation={"every_epochs": 1})
    made = ThreeBatches(given, None, None, callbacks=(heard,))
    state = made.train()
    assert (int(state.batch_index), str(made.output.stop_reason)) == (6, "max_data_epochs")
    assert heard.heard == [("begin", 0, 0), ("end", 0, 3), ("begin", 1, 3), ("end", 1, 6)]
    evaluated = [event["step"] for event in of(events, "metrics") if "eval_loss" in event["metrics"]]
    assert evaluated == [3, 6]
    # The same rows as those of a dataset, whose epochs are shuffled.
    first = [event["metrics"]["loss"] for event in of(events, "metrics") if "loss" in event["metrics"]]
    assert len(first) == 6


@pytest.mark.parametrize(
    ("loader", "error", "problem"),
    [
        (iter([]), UsageError, "returned an iterator .list_iterator., and there is no dataset_train: reading the shapes"),
        (5, UsageError, "returned int, and there is no dataset_train, whose first example shows the shapes"),
        ([], DataError, "the loader of batches .list. has none"),
        ([[1]], DataError, "the loader of batches gave list: expected a dict"),
    ],
)
def test_a_loader_without_a_dataset_shows_the_shapes_or_says_why_not(tmp_path, loader, error, problem):
    cls = type("Bad", (BaseTrainer,), {"configure_dataloaders": lambda self: TrainerConfigureDataloaderOutput(loader, None)})
    with pytest.raises(error, match=problem):
        cls(arguments(tmp_path), None, None).train()


def test_micro_batches_of_an_iterable_are_those_of_the_data(tmp_path, events):
    changes = {"optimizer": FIXED, "accumulation_steps": 2, "max_num_steps": 4}
    made = trainer(tmp_path, cls=Iterated, **changes)
    assert_equal(made.train().params, trainer(tmp_path / "plain", **changes).train().params)


@pytest.mark.parametrize(
    ("loader", "changes", "error", "problem"),
    [
        (5, {}, UsageError, "configure_dataloaders returned int: expected an iterable of batches"),
        ([[1, 2]], {}, DataError, "gave list: expected a dict of arrays"),
        ([{"tokens": np.zeros((32, 9), np.int32)}], {}, DataError, "has rows of tokens 32: expected 16 in each leaf"),
        (Batches(192), {"global_batch_size": 20}, UsageError, "20 rows do not"),
    ],
)
def test_what_is_no_loader_says_so(tmp_path, loader, changes, error, problem):
    cls = type("Bad", (BaseTrainer,), {"configure_dataloaders": lambda self: TrainerConfigureDataloaderOutput(loader, None)})
    with pytest.raises(error, match=problem):
        trainer(tmp_path, cls=cls, **changes).train()


def test_an_iterator_cannot_go_back(tmp_path):
    made = trainer(tmp_path)
    loader = IteratedLoader(iter(Batches(320)), 16, made.mesh)
    loader.batch(15)
    assert loader.batch(8)["tokens"].shape == (1, 16, 9)
    with pytest.raises(UsageError, match=r"is an iterator .generator., which cannot go back"):
        loader.batch(0)
    again = IteratedLoader(Batches(320), 16, made.mesh)
    again.batch(15)
    np.testing.assert_array_equal(again.batch(0)["tokens"], IteratedLoader(Batches(320), 16, made.mesh).batch(0)["tokens"])


# ---------------------------------------------------------------------- gradients of one's own


class Twice(BaseTrainer):
    """Twice the gradient, by two calls."""

    def forward_backward(self, objective, params, batch):
        both = jax.value_and_grad(objective, has_aux=True)
        first, gradients = both(params, batch)
        _, again = both(params, batch)
        return first, jax.tree.map(lambda a, b: a + b, gradients, again)


class Sharpness(BaseTrainer):
    """The gradient at a point uphill (Foret et al. 2021)."""

    def forward_backward(self, objective, params, batch):
        both = jax.value_and_grad(objective, has_aux=True)
        value, gradients = both(params, batch)
        scale = 0.5 / (optax.tree.norm(gradients) + 1e-12)
        _, uphill = both(jax.tree.map(lambda p, g: p + scale * g, params, gradients), batch)
        return value, uphill


@pytest.mark.sampled(1)
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_gradients_of_ones_own_add_up_over_micro_batches(tmp_path, accumulation_steps):
    changes = {"accumulation_steps": accumulation_steps, "max_num_steps": 3}
    twice = trainer(tmp_path, cls=Twice, optimizer=SGD, **changes).train()
    plain = trainer(tmp_path / "plain", max_num_steps=3, optimizer={**SGD, "learning_rate": 2.0}).train()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), twice.params, plain.params)


@pytest.mark.slow("compiles a step and trains")
def test_a_gradient_uphill_is_another_one(tmp_path, events):
    first = trainer(tmp_path, cls=Sharpness, optimizer=SGD, max_num_steps=3)
    state = first.train()
    made = trainer(tmp_path / "direct", optimizer=SGD, max_num_steps=3)
    build(made)
    params = jax.jit(made.design.initial_state)().params
    rows = {name: leaf.reshape(-1, *leaf.shape[2:]) for name, leaf in made.dataloaders.dataloader_train.batch(0).items()}

    def mean(params):
        loss = made.task.loss(made.model.merge(params), rows)
        return loss.loss_sum / loss.num_targets

    gradients = jax.grad(mean)(params)
    scale = 0.5 / optax.tree.norm(gradients)
    uphill = jax.grad(mean)(jax.tree.map(lambda p, g: p + scale * g, params, gradients))
    norm = of(events, "metrics")[0]["metrics"]["grad_norm"]
    assert norm == pytest.approx(float(optax.tree.norm(uphill)), rel=1e-4)
    assert norm != pytest.approx(float(optax.tree.norm(gradients)), rel=1e-2)
    assert int(state.step) == 3
