"""Settings that change nothing are told: `trainers.config.without_effect`, as the dry run asks it."""

import pytest

from tests.unit.trainers.planning.test_first_batch import Classifier
from trainers.config import without_effect
from trainers.config.arguments import TrainingArguments, from_dict
from trainers.planning import estimate

HERE = __name__
ROWS = f"{Classifier.__module__}:rows"
SMALL = {"vocab_size": 256, "width": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 16}


class Smooth(Classifier):
    """A task of one's own that reads two settings."""

    def loss(self, model, batch):
        found = super().loss(model, batch)
        return found._replace(losses=found.losses + self.arguments.loss.label_smoothing + self.arguments.data.sequence_length)


def arguments(**changes) -> TrainingArguments:
    base = {
        "name": "x",
        "max_num_steps": 5,
        "global_batch_size": 8,
        "task": f"{HERE}:Classifier",
        "data": {"dataset": ROWS},
    }
    return from_dict(TrainingArguments, base | changes)


def told(**changes) -> list[str]:
    problems, facts = estimate.plan(arguments(**changes), num_devices=1)
    assert problems == []
    return facts["without_effect"]


@pytest.mark.slow("trains more than once")
def test_nothing_is_said_of_settings_that_nobody_has_changed():
    assert told() == []
    data = {"paths": [__file__], "sequence_length": 8, "eval_fraction": 0.0}
    assert told(task="trainers.tasks.causal_lm:CausalLMTask", model=SMALL, loss={"z_loss_weight": 0.1}, data=data) == []


def test_master_weights_are_for_parameters_of_bfloat16():
    def lines(**changes):
        made = arguments(optimizer={"master_weights": "stochastic"}, **changes)
        return [line for line in without_effect.by_rules(made) if "master_weights" in line]

    ours = "trainers.tasks.causal_lm:CausalLMTask"
    expected = "optimizer.master_weights = 'stochastic' has no effect: the parameters are float32, and lose no updates"
    assert lines(task=ours) == [expected]
    assert lines(task=ours, param_dtype="bfloat16") == lines() == []


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"previews": {"num_tokens": 50, "prompts": ["a"]}},
            [
                "previews.prompts = ('a',) has no effect: Classifier generates nothing: it has no encode",
                "previews.num_tokens = 50 has no effect: Classifier generates nothing: it has no encode",
            ],
        ),
        ({"previews": {"prompts": [], "top_k": 5}}, ["previews.top_k = 5 has no effect: there are no previews.prompts"]),
        (
            {"loss": {"label_smoothing": 0.1}},
            [f"loss.label_smoothing = 0.1 has no effect: neither task {HERE}:Classifier nor data"],
        ),
        ({"model": {"width": 64, "num_layers": 2}}, ["model.width = 64 has no effect", "model.num_layers = 2 has no effect"]),
        ({"vision": {"num_labels": 3}}, [f"vision.num_labels = 3 has no effect: neither task {HERE}:Classifier nor data"]),
        (
            {"data": {"dataset": ROWS, "sequence_length": 64, "paths": ["text"]}},
            ["data.paths = ('text',) has no effect", "data.sequence_length = 64 has no effect"],
        ),
        ({"evaluation": {"score": {}}}, ["evaluation.score has no effect: the only evaluation is the one at the end"]),
        ({"evaluation": {"after_step": 3}}, ["evaluation.after_step = 3 has no effect: nothing calls for evaluations"]),
        ({"evaluation": {"after_epochs": 2}}, ["evaluation.after_epochs = 2 has no effect: nothing calls for evaluations"]),
        ({"checkpoint": {"save_after_epochs": 2}}, ["checkpoint.save_after_epochs = 2 has no effect: it is about"]),
        ({"checkpoint": {"save_after_step": 3}}, ["checkpoint.save_after_step = 3 has no effect: it is about"]),
        ({"loss_scale": {"initial": 2.0}}, ["loss_scale.initial = 2.0 has no effect: only dtype float16 scales the loss"]),
        ({"pruning": {"every_steps": 5}}, ["pruning.every_steps = 5 has no effect: no pruning.pattern"]),
        ({"distributions": {"bins": 5}}, ["distributions.bins = 5 has no effect: no distributions.pattern"]),
        ({"profile": {"skip_steps": 5}}, ["profile.skip_steps = 5 has no effect: no profile.record_steps"]),
        ({"anomalies": {"spike_zscore": 3.0}}, ["anomalies.spike_zscore = 3.0 has no effect: anomalies.loss_spike is off"]),
        ({"anomalies": {"skip_before": 3}}, ["anomalies.skip_before = 3 has no effect: no anomaly is answered by a rollback"]),
        (
            {"data": {"dataset": ROWS, "retries": 0, "retry_backoff_s": 9.0}},
            ["data.retry_backoff_s = 9.0 has no effect: data.retries is 0"],
        ),
    ],
)
def test_a_setting_that_changes_nothing_is_reported_with_the_reason(changes, expected):
    lines = told(**changes)
    assert len(lines) == len(expected), lines
    assert [want for line, want in zip(lines, expected, strict=True) if not line.startswith(want)] == []


def test_what_a_task_of_ones_own_reads_has_an_effect():
    data = {"dataset": ROWS, "sequence_length": 64}
    assert told(task=f"{HERE}:Smooth", loss={"label_smoothing": 0.1}, data=data) == []


def test_the_watch_ends_and_leaves_the_sections_as_they_were():
    made = arguments(loss={"label_smoothing": 0.1})
    with without_effect.watched(made) as read:
        assert made.loss.label_smoothing == 0.1
        assert arguments().loss.ignore_index is None  # another section of the same class
    assert read["loss"] >= {"label_smoothing"}
    assert "ignore_index" not in read["loss"]
    assert made.loss == arguments(loss={"label_smoothing": 0.1}).loss
    assert "__getattribute__" not in vars(type(made.loss))


@pytest.mark.parametrize(
    "changes",
    [
        {"pruning": {"pruner": "some.module:Pruner", "every_steps": 5}},
        {"pruning": {"pattern": "x", "every_steps": 5}},
        {"evaluation": {"every_epochs": 1, "after_epochs": 2}},
        {"checkpoint": {"save_steps": 1, "save_after_epochs": 2}},
        {"checkpoint": {"save_epochs": 1, "save_after_step": 2}},
    ],
)
def test_a_setting_that_changes_something_is_not_reported(changes):
    assert list(without_effect.by_rules(arguments(**changes))) == []
