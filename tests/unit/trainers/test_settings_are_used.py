"""Settings and overrides that could be ignored without any other test failing: each is seen in what training does."""

from __future__ import annotations

import dataclasses
import signal
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import trainers.commands.run
from gangway.config.masking import masked
from gangway.errors import NotConfiguredError
from gangway.stop_reason import StopReason
from tests.unit.training import FIXED, StopAt, arguments, losses, of, trainer
from trainers import runtime
from trainers.base import BaseTrainer
from trainers.checkpoint.standalone import load_from
from trainers.config.model import ModelConfig
from trainers.loop.saver import TimeUsed
from trainers.tasks.causal_lm import CausalLMTask

ONE_STEP = {"max_num_steps": 1, "checkpoint": {"save_at_end": False}}
SGD = {"name": "sgd", "learning_rate": 0.5, "weight_decay": 0.0}


def norm_of_the_first_update(tmp_path, **optimizer):
    """The global norm of what one step adds to the parameters."""
    made = trainer(tmp_path, optimizer={**SGD, **optimizer}, **ONE_STEP)
    after = made.train().params
    before = made.training.loop.resume.beginning.make().params
    return float(jnp.sqrt(sum(jnp.sum((a - b) ** 2) for a, b in zip(*map(jax.tree.leaves, (after, before)), strict=True))))


def test_the_output_names_the_mesh_and_the_last_checkpoint(tmp_path, events):
    made = trainer(tmp_path, max_num_steps=2)
    made.train()
    assert made.output.mesh is made.functions.mesh
    assert dict(made.output.mesh.shape) == {"data": 8, "fsdp": 1, "expert": 1, "tensor": 1}
    assert made.output.last_save_file_name == "2"


def test_save_pretrained_writes_the_trainers_own_arguments(tmp_path, events):
    made = trainer(tmp_path, max_num_steps=1)
    made.train()
    path = made.save_pretrained(str(tmp_path / "out"))
    with pytest.raises(NotConfiguredError):  # after training nothing is built again to save
        _ = made.dataloaders
    _, meta = load_from(path, made.placement.placed_state)
    expected = masked(dataclasses.asdict(made.arguments))
    assert {name: meta["arguments"][name] for name in ("name", "max_num_steps", "task", "seed")} == {
        name: expected[name] for name in ("name", "max_num_steps", "task", "seed")
    }
    assert meta["arguments"].keys() == expected.keys()


class Overrides(BaseTrainer):
    """Counts what the trainer takes from the two overrides."""

    def configure_model(self):
        self.model_output = super().configure_model()
        return self.model_output

    def configure_functions(self):
        self.functions_output = super().configure_functions()
        return self.functions_output


def test_overrides_of_the_model_and_of_the_functions_are_what_is_used(tmp_path, events):
    made = trainer(tmp_path, cls=Overrides, **ONE_STEP)
    made.train()
    assert made.model is made.model_output.model
    for name in ("train_step_fn", "eval_step_fn", "mesh", "checkpoint_manager"):
        assert getattr(made.functions, name) is getattr(made.functions_output, name)
    assert made.training.loop.steps.train is made.functions_output.train_step_fn


def test_the_types_are_those_of_the_arguments(tmp_path):
    made = trainer(tmp_path, dtype="bfloat16", param_dtype="float32")
    assert (made.dtype, made.param_dtype) == (jnp.bfloat16, jnp.float32)


def test_the_train_step_donates_the_state(tmp_path, events):
    class Keeps(BaseTrainer):
        def on_step_start(self, state, step):
            self.before = state
            return state

    made = trainer(tmp_path, cls=Keeps, **ONE_STEP)
    after = made.train()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(made.before.params))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(after.params))


LATE_S = 1e9
"""On the clock of this machine this comes after all tests: no limit that is counted from it passes meanwhile."""


def test_a_time_limit_counts_from_the_start_of_training_in_full(tmp_path, events, monkeypatch):
    monkeypatch.setattr("trainers.trainer.base_trainer.TimeUsed", partial(TimeUsed, clock=lambda: LATE_S))
    made = trainer(tmp_path, time_limit="2h", **ONE_STEP)
    made.train()
    assert made.training.loop.agreement.requests.limits.deadline_s == LATE_S + 2 * 3600


def test_a_time_limit_counts_what_earlier_processes_have_used(tmp_path, events, monkeypatch):
    """By the checkpoint, or by what the driver tells, whichever is more."""
    now_s = [LATE_S]
    monkeypatch.setattr("trainers.trainer.base_trainer.TimeUsed", partial(TimeUsed, clock=lambda: now_s[0]))

    class Slow(BaseTrainer):
        def on_step_start(self, state, step):
            now_s[0] += 300.0
            return state

    trainer(tmp_path, cls=Slow, time_limit="2h", max_num_steps=4, optimizer=FIXED).train()
    now_s[0] = 2 * LATE_S
    resumed = trainer(tmp_path, time_limit="2h", max_num_steps=5, checkpoint={"save_at_end": False}, optimizer=FIXED)
    resumed.train()
    assert resumed.training.loop.agreement.requests.limits.deadline_s == 2 * LATE_S + 2 * 3600 - 4 * 300
    runtime.install(runtime.Runtime(lambda event: None, time_used_s=1500.0))
    told = trainer(tmp_path, time_limit="2h", max_num_steps=5, optimizer=FIXED)
    told.train()
    assert told.training.loop.agreement.requests.limits.deadline_s == 2 * LATE_S + 2 * 3600 - 1500


def test_a_run_whose_time_is_used_up_trains_no_further_step(tmp_path, events, monkeypatch):
    now_s = [LATE_S]
    monkeypatch.setattr("trainers.trainer.base_trainer.TimeUsed", partial(TimeUsed, clock=lambda: now_s[0]))
    trainer(tmp_path, StopAt(3, "requested"), time_limit="1h", checkpoint={}, optimizer=FIXED).train()
    steps = of(events, "saved")[-1]["step"]
    runtime.install(runtime.Runtime(events.append, time_used_s=3600.0))
    again = trainer(tmp_path, time_limit="1h", optimizer=FIXED)
    assert int(again.train().batch_index) == steps
    assert again.output.stop_reason is StopReason.TIME_LIMIT


def test_saves_come_by_the_minute(tmp_path, events):
    trainer(tmp_path, checkpoint={"save_minutes": 1e-6, "save_at_end": False}).train()
    assert len(of(events, "saved")) >= 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_without_ray_a_signal_asks_training_to_stop(tmp_path, number):
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        trainers.commands.run.build(arguments(tmp_path), lambda event: None)
        signal.raise_signal(number)
        assert runtime.current().stop_reason == {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}[number]
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)


@pytest.mark.parametrize("max_batches", [1, None])
def test_evaluation_reads_no_more_batches_than_it_may(tmp_path, events, max_batches):
    made = trainer(tmp_path, evaluation={"max_batches": max_batches}, **ONE_STEP)
    state = made.train()
    assert len(list(made.eval(state))) == (max_batches or 2)
    means = [batch["loss"] for batch in made.eval(state)]
    if max_batches == 1:
        assert made.evaluate(state)["loss"] == pytest.approx(means[0])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("batch_size", "num_batches"), [(None, 2), (8, 3), (5, 5), (21, 1)])
def test_an_evaluation_has_batches_of_its_own_size_and_the_same_means(tmp_path, events, batch_size, num_batches):
    made = trainer(tmp_path, evaluation={"batch_size": batch_size}, **ONE_STEP)
    state = made.train()
    assert len(list(made.eval(state))) == num_batches  # of 21 examples
    usual = trainer(tmp_path / "usual", **ONE_STEP)
    usual.train()
    assert made.output.metrics["eval_loss"] == pytest.approx(usual.output.metrics["eval_loss"], rel=1e-6)


def test_units_may_have_batches_of_different_sizes(tmp_path, events):
    units = {"small": {"batch_size": 3, "max_batches": 2}, "usual": {}}
    made = trainer(tmp_path, evaluation={"units": units}, **ONE_STEP)
    made.train()
    state = made.state
    assert len(list(made.eval(state, unit="small"))) == 2
    first_six = next(iter(trainer(tmp_path / "six", evaluation={"batch_size": 6}, **ONE_STEP).eval(state)))
    assert made.evaluate(state, unit="small")["loss"] == pytest.approx(first_six["loss"], rel=1e-6)
    assert len(list(made.eval(state, unit="usual"))) == 2


def test_what_is_saved_of_a_given_state_says_where_that_state_is(tmp_path, events):
    state = trainer(tmp_path / "first", max_num_steps=5, checkpoint={"save_at_end": False}).train()
    other = trainer(tmp_path / "other", max_num_steps=5)
    path = other.save_pretrained(str(tmp_path / "out"), state)
    _, meta = load_from(path, other.placement.placed_state)
    assert meta["batch_index"] == 5


def test_gradients_are_clipped_to_the_norm_of_the_settings(tmp_path, events):
    clipped = norm_of_the_first_update(tmp_path / "clipped", max_grad_norm=1e-3)
    free = norm_of_the_first_update(tmp_path / "free", max_grad_norm=None)
    assert clipped == pytest.approx(0.5 * 1e-3, rel=1e-3)
    assert free > 10 * clipped


def test_the_optimizer_follows_the_schedule(tmp_path, events):
    warm = {"schedule": {"name": "constant", "warmup_steps": 4}, "max_grad_norm": None}
    flat = {"schedule": {"name": "constant"}, "max_grad_norm": None}
    rate = float(trainer(tmp_path, optimizer={**SGD, **warm}).scheduler(0))
    assert 0 < rate < 0.5
    ratio = norm_of_the_first_update(tmp_path / "warm", **warm) / norm_of_the_first_update(tmp_path / "flat", **flat)
    assert ratio == pytest.approx(rate / 0.5, rel=1e-3)


def test_the_seed_makes_the_first_parameters(tmp_path, events):
    def first(folder, seed):
        made = trainer(tmp_path / folder, seed=seed, **ONE_STEP)
        made.train()
        return np.asarray(made.training.loop.resume.beginning.make().params["embed"])

    np.testing.assert_array_equal(first("a", 1), first("b", 1))
    assert not np.array_equal(first("c", 1), first("d", 2))


@pytest.mark.parametrize(("dtype", "param_dtype"), [("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")])
def test_the_language_model_computes_and_keeps_in_the_types_of_the_settings(tmp_path, dtype, param_dtype):
    from flax import nnx

    model = ModelConfig(width=16, num_layers=1, num_heads=2, num_kv_heads=1, mlp_width=16)
    settings = dataclasses.replace(arguments(tmp_path), model=model, dtype=dtype, param_dtype=param_dtype)
    built = CausalLMTask(settings).build_model(nnx.Rngs(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(built, nnx.Param))} == {jnp.dtype(param_dtype)}
    products = str(jax.make_jaxpr(built)(jnp.zeros((1, 4), jnp.int32)))
    assert ("bf16[1,4,16]" in products) == (dtype == "bfloat16")


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ({"fsdp": 2}, {"data": 4, "fsdp": 2}),
        ({"data": 2, "fsdp": -1}, {"data": 2, "fsdp": 4}),
        ({"data": 4, "tensor": 2}, {"data": 4, "tensor": 2}),
        ({"expert": 2, "tensor": 2}, {"data": 2, "expert": 2, "tensor": 2}),
        ({"context": 4}, {"data": 2, "context": 4}),
        ({"pipeline": 2}, {"data": 4, "pipeline": 2}),
        ({"slice": 2}, {"slice": 2, "data": 4}),
    ],
)
def test_the_mesh_is_that_of_the_settings(tmp_path, mesh, expected):
    made = trainer(tmp_path, mesh=mesh)
    assert {axis: size for axis, size in made.mesh.shape.items() if size > 1} == expected


def test_a_step_has_the_examples_and_the_micro_batches_of_the_settings(tmp_path, events):
    made = trainer(tmp_path, global_batch_size=24, accumulation_steps=3, **ONE_STEP)
    made.train()
    assert made.placement.step_batch_shapes()["tokens"].shape[:2] == (3, 8)


def test_metrics_come_as_often_as_the_settings_say(tmp_path, events):
    trainer(tmp_path, publish_every_steps=4, max_num_steps=9, checkpoint={"save_at_end": False}).train()
    assert sorted({event["step"] for event in of(events, "metrics") if "loss" in event["metrics"]}) == [4, 8, 9]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"publish_every_steps": None, "publish_every_epochs": 1}, [3, 5, 8, 9]),  # 96 examples: the last batches of epochs
        ({"publish_every_steps": None, "publish_every_epochs": 2}, [5, 9]),
        ({"publish_every_steps": 4, "publish_every_epochs": 1}, [3, 4, 5, 8, 9]),
    ],
)
def test_metrics_come_by_epochs_if_the_settings_say_so(tmp_path, events, settings, steps):
    trainer(tmp_path, global_batch_size=40, max_num_steps=9, checkpoint={"save_at_end": False}, **settings).train()
    published = {event["step"]: event["metrics"]["samples"] for event in of(events, "metrics") if "loss" in event["metrics"]}
    assert sorted(published) == steps
    assert sum(published.values()) == 9 * 40


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"publish_every_steps": None}, "publish_every_steps = null: nothing is published before the end"),
        ({"publish_every_epochs": 0}, "publish_every_epochs = 0: expected at least 1"),
        (
            {"publish_every_steps": None, "publish_every_epochs": 1, "distributions": {"pattern": "."}},
            r"expected a multiple of publish_every_steps \(null\)",
        ),
    ],
)
def test_metrics_must_come_some_time(tmp_path, settings, problem):
    with pytest.raises(ValueError, match=problem):
        trainer(tmp_path, **settings)


def test_the_running_mean_of_the_losses_forgets_as_fast_as_the_settings_say(tmp_path, events):
    made = trainer(tmp_path, anomalies={"spike_decay": 0.5}, max_num_steps=4, checkpoint={"save_at_end": False})
    after = made.train()
    first, second, third, fourth = losses(events).values()
    expected = ((first + second) / 2 + third) / 2 * 0.5 + fourth * 0.5
    assert float(after.loss_stats["mean"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("save_at_end", [True, False])
def test_the_last_state_is_saved_if_the_settings_say_so(tmp_path, events, save_at_end):
    trainer(tmp_path, max_num_steps=3, checkpoint={"save_at_end": save_at_end, "save_steps": 2}).train()
    assert [event["step"] for event in of(events, "saved")] == ([2, 3] if save_at_end else [2])


def test_a_schedule_over_epochs_ends_with_the_data(tmp_path, events):
    """96 examples in batches of 16: two epochs are 12 steps."""
    schedule = {"name": "linear", "final_factor": 0.0, "warmup_ratio": 0.25}
    sgd = {"name": "sgd", "learning_rate": 0.5, "schedule": schedule}
    by_epochs = trainer(tmp_path, max_num_steps=None, max_num_data_epochs=2, optimizer=sgd)
    by_steps = trainer(
        tmp_path, max_num_steps=12, optimizer={**sgd, "schedule": {**schedule, "warmup_ratio": None, "warmup_steps": 3}}
    )
    rates = [float(by_epochs.scheduler(step)) for step in range(13)]
    assert rates == [float(by_steps.scheduler(step)) for step in range(13)]
    assert (rates[12], rates[2] < rates[3]) == (0.0, True)
    by_epochs.train()
    assert by_epochs.output.metrics["samples"] == 12 * 16
    published = [event["metrics"]["learning_rate"] for event in of(events, "metrics") if "learning_rate" in event["metrics"]]
    np.testing.assert_allclose(published, rates[:12], rtol=1e-6)
