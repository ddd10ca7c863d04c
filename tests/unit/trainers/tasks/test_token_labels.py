"""Labels beside the tokens, with -100 where there is no target; and leaves of a batch that nothing reads."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

from gangway.errors import UsageError
from trainers.config.arguments import TrainingArguments, from_dict
from trainers.tasks.causal_lm import CausalLMTask
from trainers.tasks.classification import ClassificationTask
from trainers.tasks.distillation import DistillationTask
from trainers.tasks.preference import PreferenceTask
from trainers.tasks.reward import RewardTask

MODEL = {"vocab_size": 16, "width": 8, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "mlp_width": 8}
TOKENS = np.arange(12, dtype=np.int32).reshape(2, 6) % 7


def of(cls, **settings):
    return cls(from_dict(TrainingArguments, {"name": "t", "max_num_steps": 1, "model": MODEL, **settings}))


@pytest.fixture(scope="module")
def causal():
    task = of(CausalLMTask)
    model = nnx.jit(lambda: task.build_model(nnx.Rngs(0)))()

    def loss(**leaves):
        batch = {"tokens": TOKENS, "weight": np.ones(2, np.float32), **leaves}
        found = jax.jit(task.loss)(model, batch)
        return float(found.loss_sum), float(found.num_targets)

    return loss


def test_labels_of_minus_100_are_no_targets(causal):
    labels = TOKENS.copy()
    labels[0, :4], labels[1, 5] = -100, -100
    weight = (labels != -100).astype(np.float32)
    assert causal(labels=labels) == pytest.approx(causal(token_weight=weight))
    assert causal(labels=labels)[1] == 2 + 4
    assert causal(labels=TOKENS) == pytest.approx(causal())


def test_other_labels_are_the_targets(causal):
    labels = np.where(np.arange(6) < 5, -100, 3).astype(np.int32) * np.ones((2, 1), np.int32)
    changed = np.where(np.arange(6) < 5, TOKENS, 3)
    weight = (labels != -100).astype(np.float32)
    assert causal(labels=labels) == pytest.approx(causal(tokens=changed, token_weight=weight))
    half = np.full((2, 6), 0.5, np.float32)
    assert causal(labels=labels, token_weight=half)[1] == 1.0


def test_labels_of_another_shape_are_an_error(causal):
    with pytest.raises(UsageError, match=r"labels has the shape \(2, 5\), and tokens \(2, 6\): expected a label for each token"):
        causal(labels=TOKENS[:, 1:])


@pytest.mark.parametrize("leaf", ["attention_mask", "loss_mask", "label"])
def test_a_leaf_that_nothing_reads_is_an_error(causal, leaf):
    with pytest.raises(UsageError, match=rf"nothing reads the columns {leaf} of .* reads .*labels.*ignore_columns=\[{leaf}\]"):
        causal(**{leaf: TOKENS})
    assert causal(**{"sample_id": np.arange(2), "source": np.zeros(2, np.int32), "metric/x": np.ones(2)}) == causal()


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (DistillationTask, {"frozen": {"teacher": {"path": "t"}}}),
        (PreferenceTask, {"preference": {"loss": "simpo"}}),
        (RewardTask, {}),
        (ClassificationTask, {"classification": {"labels": ["a", "b"]}}),
    ],
)
def test_other_tasks_of_texts_have_no_use_for_labels(cls, settings):
    given = ({"teacher": None},) if cls in (DistillationTask, PreferenceTask) else ()
    with pytest.raises(UsageError, match=rf"nothing reads the columns labels of the examples: {cls.__name__} reads"):
        of(cls, **settings).loss(None, {"tokens": TOKENS, "labels": TOKENS, "weight": np.ones(2)}, *given)


class Own(CausalLMTask):
    def loss(self, model, batch):
        return super().loss(model, {**batch, "tokens": batch["words"]})


def test_a_loss_of_ones_own_may_read_other_leaves():
    task = of(Own)
    model = nnx.jit(lambda: task.build_model(nnx.Rngs(0)))()
    shape = jax.eval_shape(task.loss, model, {"words": TOKENS, "weight": np.ones(2, np.float32)})
    assert shape.loss_sum.shape == ()
