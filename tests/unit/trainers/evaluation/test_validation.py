"""Validation units in one process, on eight devices: what they measure, when, and what comes of their scores."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from gangway.errors import UsageError
from gangway.stop_reason import StopReason
from gangway.storage.opening import place_of
from tests.programs.tiny import Numbers, TableTask, numbers
from tests.unit.trainers.loop.test_train_loop import World, due
from tests.unit.training import FIXED, arguments, of, trainer
from trainers import runtime
from trainers.base import BaseTrainer
from trainers.checkpoint import layout
from trainers.config import AnomalyConfig, EvaluationConfig, UnitConfig
from trainers.config.arguments import TrainingArguments, from_dict
from trainers.loop.inflight import STOP_REASONS
from trainers.protocol import Loss
from trainers.step.host_flags import UpdateStatus
from trainers.trainer.evaluations import build_unit

RATES = ("_seconds", "_per_s", "_per_s_per_device")
HERE = "tests.unit.trainers.evaluation.test_validation:"


def short(arguments):
    """Another number of examples, of another length, than the data that is trained on."""
    return Numbers(5, 4)


def nothing(arguments):
    return Numbers(0, 4)


class Errors(TableTask):
    """The part of tokens that are guessed wrong."""

    def loss(self, model, batch):
        hits, count = super().loss(model, batch).parts["accuracy"]
        return Loss(count - hits, count)


def expected_loss(state, examples):
    params = {name: np.asarray(leaf) for name, leaf in state.params.items()}
    rows = np.stack([examples[i]["tokens"] for i in range(len(examples))])
    logits = np.tanh(params["embed"][rows[:, :-1]]) @ params["out"]
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -np.take_along_axis(logp, rows[:, 1:, None], -1).mean()


def evaluations(events):
    return dict(told_of(events))


def told_of(events):
    """(step, metrics) of each evaluation, without its rates, which differ each time."""
    told = [(event["step"], event["metrics"]) for event in of(events, "metrics") if event.get("kind") == "eval"]
    return [(step, {name: value for name, value in metrics.items() if not name.endswith(RATES)}) for step, metrics in told]


# ---------------------------------------------------------------------- what is measured


def test_each_unit_has_its_own_data_and_its_own_loss(tmp_path, events):
    units = {"eval": {}, "short": {"dataset": HERE + "short"}, "errors": {"task": HERE + "Errors", "max_batches": 1}}
    made = trainer(tmp_path, max_num_steps=2, evaluation={"units": units})
    state = made.train()
    (metrics,) = evaluations(events).values()
    held_out = numbers(made.arguments)[1]
    assert metrics["eval_loss"] == pytest.approx(expected_loss(state, held_out), rel=1e-5)
    assert metrics["short_loss"] == pytest.approx(expected_loss(state, Numbers(5, 4)), rel=1e-5)
    first = next(made.eval(state))
    assert metrics["errors_loss"] == pytest.approx(1 - first["accuracy"], abs=1e-6)  # of its one batch
    assert {"eval_accuracy", "short_perplexity"} <= metrics.keys()
    assert made.output.metrics["short_loss"] == metrics["short_loss"]
    assert made.evaluate(state) == made.evaluate(state, unit="eval")  # the first
    assert made.evaluate(state, unit="short")["loss"] == metrics["short_loss"]
    assert made.evaluate(state, lambda means: {"twice": 2 * means["loss"]}, unit="short")["twice"] == 2 * metrics["short_loss"]
    with pytest.raises(UsageError, match="unit = 'shirt': expected one of eval, short, errors"):
        made.evaluate(state, unit="shirt")


class OwnUnits(BaseTrainer):
    def build_validation_units(self):
        own = Reader(self.dataloaders.dataloader_eval)
        return {**super().build_validation_units(), "last": build_unit(self, "last", own)}


class Reader:
    """Reads the ragged last batch alone."""

    def __init__(self, loader):
        self.loader = loader

    def epoch(self):
        yield self.loader.batch(1)


def test_units_may_be_built_by_a_subclass_from_any_reader(tmp_path, events):
    made = trainer(tmp_path, cls=OwnUnits, max_num_steps=1)
    state = made.train()
    held_out = numbers(made.arguments)[1]
    tail = [held_out[i] for i in range(16, 21)]
    assert made.output.metrics["last_loss"] == pytest.approx(expected_loss(state, tail), rel=1e-5)


def test_a_unit_without_examples_is_an_error(tmp_path, events):
    with pytest.raises(UsageError, match="validation unit 'empty' has no examples"):
        trainer(tmp_path, evaluation={"units": {"empty": {"dataset": HERE + "nothing"}}}).train()


# ---------------------------------------------------------------------- when: ten batches are an epoch


def evaluated(evaluation, *, max_steps=30, start=0, known=None):
    world = World(max_steps=max_steps)
    world.info.global_step = world.loop.resumed_step = start
    world.loop.due = due(evaluation)
    world.loop.evaluator.evaluated_step = known
    world.loop.run(start)
    return world.loop.evaluator.steps


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        ({}, []),
        ({"every_steps": 10}, [10, 20]),  # that of the last step comes at the end, whatever is due
        ({"every_steps": 10, "at_start": True}, [0, 10, 20]),
        ({"every_epochs": 1}, [10, 20]),
        ({"every_epochs": 2}, [20]),
        ({"every_steps": 4, "every_epochs": 1}, [4, 8, 10, 12, 16, 20, 24, 28]),  # 20 is both, and one
        ({"every_steps": 4, "after_step": 16}, [16, 20, 24, 28]),
        ({"every_epochs": 1, "after_step": 11}, [20]),
        ({"every_epochs": 1, "after_epochs": 2}, [20]),
        ({"every_steps": 4, "after_epochs": 2}, [20, 24, 28]),
    ],
)
def test_evaluations_come_when_they_are_due_and_once(config, steps):
    assert evaluated(EvaluationConfig(**config)) == steps


@pytest.mark.parametrize(
    ("start", "known", "steps"),
    [
        (12, 10, [20]),
        (10, 10, [20]),  # the checkpoint knew of it
        (10, 0, [10, 20]),  # it was stopped before it could evaluate
        (10, None, [10, 20]),
    ],
)
def test_a_run_that_goes_on_repeats_no_evaluation_and_leaves_none_out(start, known, steps):
    assert evaluated(EvaluationConfig(every_epochs=1, at_start=True), start=start, known=known) == steps


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        ({"save_epochs": 1}, [10, 20]),
        ({"save_steps": 8, "save_epochs": 2}, [8, 16, 20, 24]),
        ({"save_steps": 8, "save_after_step": 16}, [16, 24]),
        ({"save_epochs": 1, "save_after_epochs": 2}, [20]),
    ],
)
def test_saves_come_when_they_are_due(config, steps):
    world = World(max_steps=30)
    world.loop.due = due(**config)
    world.loop.run(0)
    assert [step for kind, step in world.log if kind == "save"] == steps


def test_an_evaluation_comes_before_the_save_at_its_step():
    world = World(max_steps=9)
    world.loop.due = due(EvaluationConfig(every_steps=4), save_steps=4)
    world.loop.run(0)
    assert [entry for entry in world.log if entry[0] in ("evaluate", "save")] == [
        ("evaluate", 4),
        ("save", 4),
        ("evaluate", 8),
        ("save", 8),
    ]


def test_after_a_rollback_what_is_trained_again_is_evaluated_again():
    world = World(max_steps=12, anomalies=AnomalyConfig(non_finite="rollback"), statuses={7: UpdateStatus.NON_FINITE})
    world.loop.due = due(EvaluationConfig(every_steps=2))
    world.loop.resume.go_back = lambda decision: (5, 5)
    evaluator = world.loop.evaluator
    world.loop.saver.restore = lambda meta: setattr(evaluator, "evaluated_step", 4)  # what the checkpoint of step 5 knows of
    world.loop.run(0)
    assert evaluator.steps == [2, 4, 6, 6, 8, 10]  # not 8 of the course that was left: its batch 7 was found first


def test_a_stop_does_not_wait_for_an_evaluation():
    """Time is short then; the next process makes it good."""
    world = World(max_steps=30)
    world.loop.due = due(EvaluationConfig(every_steps=1, after_step=8))
    wanted = 1 + STOP_REASONS.index(StopReason.PREEMPTED)
    world.loop.agreement.requests.stop = lambda: wanted if world.dispatched == 5 else 0
    assert world.loop.run(0) == (8, StopReason.PREEMPTED)
    assert world.loop.evaluator.steps == []


# ---------------------------------------------------------------------- what comes of scores


class Scored(BaseTrainer):
    """Its evaluations say what they are told to say."""

    losses = {0: 9.0, 2: 5.0, 4: 1.0, 6: 3.0, 8: 2.0, 10: 4.0, 12: 4.0}  # noqa: RUF012

    def on_evaluation_end(self, state, metrics):
        return state, {"loss": self.losses[self.info.global_step]}


def scored(tmp_path, max_num_steps=12, checkpoint=None, cls=Scored, at_start=False, **score):
    config = {"every_steps": 2, "max_batches": 1, "at_start": at_start, "score": score}
    plain = {"save_steps": 2, "save_total_limit": 1, **(checkpoint or {})}
    return trainer(tmp_path, cls=cls, optimizer=FIXED, max_num_steps=max_num_steps, evaluation=config, checkpoint=plain)


def kept(tmp_path, folder="checkpoints"):
    path = tmp_path / "run" / folder
    return layout.steps(place_of(path))


def test_keep_last_and_keep_best_work_together(tmp_path, events):
    made = scored(tmp_path, checkpoint={"save_total_limit": 2, "keep_best": 2, "keep_every_steps": 6})
    made.train()
    assert kept(tmp_path) == [4, 6, 8, 10, 12]  # the best are 4 and 8, every sixth 6 and 12, the newest 10 and 12
    assert (made.output.metrics["best_score"], made.output.metrics["best_score_step"]) == (1.0, 4)


def test_a_best_score_is_remembered_when_its_checkpoint_was_deleted(tmp_path, events):
    first = scored(tmp_path, max_num_steps=6, patience=5)
    first.train()
    assert kept(tmp_path) == [6]
    events.clear()
    second = scored(tmp_path, patience=3)
    second.train()
    assert (second.output.metrics["best_score"], second.output.metrics["best_score_step"]) == (1.0, 4)
    assert second.output.stop_reason is StopReason.EARLY_STOPPED  # one fruitless evaluation before the restart, two after
    assert sorted(evaluations(events)) == [8, 10]


def test_of_the_best_the_parameters_alone_may_be_kept(tmp_path, events):
    scored(tmp_path, checkpoint={"keep_best": 1, "keep_model_only": "best"}).train()
    assert kept(tmp_path) == [12]
    assert kept(tmp_path, "models") == [4]


def test_patience_ends_a_run_for_good(tmp_path, events):
    made = scored(tmp_path, patience=2)
    state = made.train()
    assert made.output.stop_reason is StopReason.EARLY_STOPPED
    assert made.output.stop_reason.finished
    assert int(state.batch_index) == 8  # 6 and 8 are no better than 4
    assert kept(tmp_path) == [8]
    assert sorted(evaluations(events)) == [2, 4, 6, 8]
    events.clear()
    again = scored(tmp_path, patience=2)
    again.train()
    assert again.output.stop_reason is StopReason.EARLY_STOPPED
    assert again.output.metrics == made.output.metrics
    assert not evaluations(events)
    assert not of(events, "first_step")
    further = scored(tmp_path, patience=3)  # the user changed their mind: 10 is the third
    further.train()
    assert further.output.metrics["batches"] == 10


def at_step_six(step, score):
    return step == 6


def test_a_function_ends_a_run(tmp_path, events):
    made = scored(tmp_path, early_stopper=HERE + "at_step_six")
    made.train()
    assert (made.output.stop_reason, made.output.metrics["batches"]) == (StopReason.EARLY_STOPPED, 6)


class StopsAtFour(Scored):
    def on_step_end(self, state, metrics, step):
        if step == 1:
            runtime.current().request_stop("preempted")
        return state, metrics


@pytest.mark.slow("compiles a decoder and a step")
def test_evaluations_over_restarts_are_those_of_one_run(tmp_path, events):
    whole = scored(tmp_path / "whole", at_start=True)
    whole.train()
    expected = evaluations(events)
    assert list(expected) == [0, 2, 4, 6, 8, 10, 12]
    events.clear()
    cut = scored(tmp_path / "cut", cls=StopsAtFour, at_start=True)
    cut.train()
    assert cut.output.stop_reason is StopReason.PREEMPTED
    runtime.current()._stop = None
    resumed = scored(tmp_path / "cut", at_start=True)
    resumed.train()
    assert told_of(events) == list(expected.items())
    assert resumed.output.metrics["best_score_step"] == whole.output.metrics["best_score_step"]


# ---------------------------------------------------------------------- the configuration


def test_units_come_from_plain_data_and_go_back(tmp_path):
    units = {"eval": None, "short": {"dataset": HERE + "short", "max_batches": 2}}
    made = arguments(tmp_path, evaluation={"every_epochs": 1, "units": units, "score": {"metrics": ["short_loss"]}})
    assert made.evaluation.units == {"eval": UnitConfig(), "short": UnitConfig(dataset=HERE + "short", max_batches=2)}
    assert from_dict(TrainingArguments, dataclasses.asdict(made)) == made


def test_units_come_from_a_file_and_from_overrides(tmp_path):
    from orchestrator.config.job import ConfigError, build, load, to_dict

    path = tmp_path / "job.yaml"
    path.write_text(f"max_num_steps: 1\nstorage: {tmp_path}\nevaluation:\n  units:\n    eval:\n    short: {{max_batches: 2}}\n")
    job = load(path, [f"evaluation.units.short.dataset={HERE}short", "evaluation.score.metrics=[eval_loss, short_loss]"])
    assert job.training.evaluation.units == {"eval": UnitConfig(), "short": UnitConfig(dataset=HERE + "short", max_batches=2)}
    assert job.training.evaluation.score.metrics == ("eval_loss", "short_loss")
    assert build(to_dict(job)) == job
    wrong = ["evaluation.units.short.datset=x:y", "evaluation.units.9.task=x"]
    with pytest.raises(ConfigError) as error:
        load(path, wrong)
    text = str(error.value)
    assert "did you mean evaluation.units.short.dataset?" in text
    assert "evaluation.units.9.task = 'x': expected package.module:Name" in text
    with pytest.raises(ConfigError, match=r"nothing says what is best; set evaluation\.score"):
        load(path, ["checkpoint.keep_best=2"])


def test_a_plan_finds_what_units_lack(tmp_path):
    from trainers.planning.estimate import plan

    units = {"empty": {"dataset": HERE + "nothing"}, "gone": {"dataset": HERE + "no_such"}, "eval": {"task": HERE + "NoTask"}}
    score = {"early_stopper": HERE + "no_stopper"}
    problems, _ = plan(arguments(tmp_path, evaluation={"units": units, "every_steps": 1, "score": score}), 8)
    text = "\n".join(problems)
    assert "evaluation.units.empty.dataset: " in text
    for name in ("'no_such'", "'NoTask'", "'no_stopper'"):
        assert name in text
