"""The hook on batches on the devices: it sees the present state; what it returns is trained and evaluated."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gangway.errors import DataError, NonFiniteLossError, UsageError
from tests.programs.distilling import Distilling, Rollouts
from tests.programs.tiny import Numbers
from tests.unit.training import FIXED, arguments, assert_equal, losses, of, trainer
from trainers.base import BaseTrainer
from trainers.planning.estimate import plan

pytestmark = pytest.mark.usefixtures("events")
STUDENT = {"task": "tests.programs.distilling:Student", "optimizer": FIXED}


@pytest.mark.slow("compiles a step and trains")
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_logits_of_a_teacher_are_as_if_the_task_made_them(tmp_path, events, accumulation_steps):
    changes = {"global_batch_size": 20, "accumulation_steps": accumulation_steps, "max_num_steps": 4, "optimizer": FIXED}
    made = trainer(tmp_path, cls=Distilling, task=STUDENT["task"], **changes)
    made.train()
    with_hook = losses(events)
    assert not [event for event in of(events, "note") if "compiles again" in event["message"]]
    events.clear()
    other = trainer(tmp_path / "task", task="tests.programs.distilling:OwnTeacher", **changes)
    other.train()
    np.testing.assert_allclose(list(with_hook.values()), list(losses(events).values()), rtol=1e-5)
    assert with_hook[4] < with_hook[1]
    got, expected = made.output.metrics, other.output.metrics
    assert got["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)
    assert [got[name] for name in ("samples", "samples_digest")] == [expected[name] for name in ("samples", "samples_digest")]


def test_a_plan_finds_the_leaves_that_the_hook_adds(tmp_path):
    made = arguments(tmp_path, trainer="tests.programs.distilling:Distilling", task=STUDENT["task"])
    assert plan(made, 8)[0] == []
    without = plan(arguments(tmp_path, task=STUDENT["task"]), 8)[0]
    assert any("teacher_logits" in problem for problem in without)


@pytest.mark.slow("trains more than once")
def test_what_depends_on_the_state_is_the_same_after_a_restart(tmp_path, events):
    whole = trainer(tmp_path / "whole", cls=Rollouts, **STUDENT)
    state = whole.train()
    trainer(tmp_path, cls=Rollouts, max_num_steps=6, **STUDENT).train()
    assert_equal(trainer(tmp_path, cls=Rollouts, **STUDENT).train(), state)
    fixed = trainer(tmp_path / "fixed", cls=Distilling, **STUDENT).train()
    assert not np.array_equal(fixed.params["out"], state.params["out"])


class NanAt7(Rollouts):
    def prepare_batch(self, state, batch, *, training):
        batch = super().prepare_batch(state, batch, training=training)
        factor = jnp.where(training & (state.batch_index == 7), jnp.nan, 1.0)
        return {**batch, "teacher_logits": batch["teacher_logits"] * factor}


@pytest.mark.slow("compiles a step and trains")
def test_a_rollback_prepares_the_same_batches_again(tmp_path, events):
    changes = {**STUDENT, "anomalies": {"non_finite": "rollback"}}
    state = trainer(tmp_path / "bad", cls=NanAt7, **changes).train()
    assert [event["restored_step"] for event in of(events, "anomaly")] == [4]
    origins = [event["message"] for event in of(events, "note") if event["message"].startswith("batch 7")]
    assert len(origins) == 1
    assert "not found" not in origins[0]  # the batch that is diagnosed has the leaf of the hook, too
    skipping = trainer(tmp_path / "skip", cls=NanAt7, **{**changes, "anomalies": {"non_finite": "skip"}})
    assert_equal(state, skipping.train())


@pytest.mark.slow("trains")
def test_an_anomaly_of_a_prepared_batch_is_an_error(tmp_path):
    with pytest.raises(NonFiniteLossError):
        trainer(tmp_path, cls=NanAt7, anomalies={"non_finite": "raise"}, **STUDENT).train()


class OnTheHost(BaseTrainer):
    """Reads values, and returns NumPy arrays."""

    def prepare_batch(self, state, batch, *, training):
        tokens = np.asarray(batch["tokens"])
        logits = np.zeros((*tokens.shape[:-1], tokens.shape[-1] - 1, 256))
        self.seen = [*getattr(self, "seen", []), (training, int(state.batch_index), tokens.shape[:2])]
        return {**batch, "teacher_logits": logits}


class OnTheHostWithShapes(OnTheHost):
    def prepared_shapes(self, shapes):
        rows, length = shapes["tokens"].shape[:2], shapes["tokens"].shape[2] - 1
        return {**shapes, "teacher_logits": jax.ShapeDtypeStruct((*rows, length, 256), np.float32)}


def test_a_hook_that_reads_values_tells_its_shapes(tmp_path, events):
    with pytest.raises(UsageError, match=r"prepare_batch cannot be traced .*Tracer.* override prepared_shapes, too"):
        trainer(tmp_path, cls=OnTheHost, **STUDENT).train()
    made = trainer(tmp_path, cls=OnTheHostWithShapes, max_num_steps=3, accumulation_steps=2, **STUDENT)
    made.train()
    assert losses(events)[1] == pytest.approx(np.log(256), rel=1e-3)
    assert not [event for event in of(events, "note") if "compiles again" in event["message"]]
    assert made.seen[:3] == [(True, step, (2, 8)) for step in range(3)]
    assert set(made.seen[3:]) == {(False, 3, (1, 8))}
    assert len(made.seen[3:]) == 3  # 21 held-out examples


@pytest.mark.parametrize(
    ("returned", "problem"),
    [
        (lambda batch: {**batch, "more": jnp.zeros((1, 3))}, r"returned more \(1, 3\): expected leaves \[1, 16, ...\]"),
        (lambda batch: {"weight": batch["weight"]}, "returned no sample_id"),
        (lambda batch: None, "returned NoneType: expected the batch"),
        (lambda batch: (batch, 3), r"returned \(dict, int\): expected the batch, .*or \(batch, metrics\)"),
        (
            lambda batch: (batch, {"mine": jnp.zeros(3)}),
            r"the metric mine of shape \[3\]: expected a scalar, or \[1, 16\]",
        ),
    ],
)
def test_what_is_no_batch_is_an_error(tmp_path, returned, problem):
    class Bad(BaseTrainer):
        def prepare_batch(self, state, batch, *, training):
            return returned(batch)

    with pytest.raises(DataError, match=problem):
        trainer(tmp_path, cls=Bad).train()


def test_a_validation_unit_of_its_own_gets_prepared_batches(tmp_path):
    unit = {"dataset": f"{__name__}:held_out", "task": STUDENT["task"], "batch_size": 4}
    made = trainer(tmp_path, cls=Distilling, max_num_steps=1, evaluation={"units": {"own": unit}}, **STUDENT)
    made.train()
    assert made.output.metrics["own_loss"] > 0


def held_out(made):
    return Numbers(9, 8)


def test_shapes_are_found_without_a_device_and_nothing_of_the_trace_stays(tmp_path):
    made = trainer(tmp_path, cls=Distilling, **STUDENT)
    made.prepare()
    assert "teacher" not in vars(made)
    assert "_mesh" not in vars(made)


class Measures(BaseTrainer):
    def prepare_batch(self, state, batch, *, training):
        batch, metrics = dict(batch), {"step": state.batch_index, "two": 2, "is_training": float(training)}
        return batch, {**metrics, "odd": batch["sample_id"] % 2, "host": np.ones(np.shape(batch["weight"]))}


def test_metrics_beside_the_batch_are_means_over_the_rows(tmp_path, events):
    trainer(tmp_path, cls=Measures, max_num_steps=2, global_batch_size=20, accumulation_steps=2).train()
    published = [event["metrics"] for event in of(events, "metrics")]
    names = ("step", "two", "is_training", "odd", "host")
    assert [[metrics[name] for name in names] for metrics in published[:2]] == [[0, 2, 1, 0.5, 1], [1, 2, 1, 0.5, 1]]
    assert [published[2][f"eval_{name}"] for name in names] == pytest.approx([2, 2, 0, 10 / 21, 1])
    assert not [event for event in of(events, "note") if "compiles again" in event["message"]]
