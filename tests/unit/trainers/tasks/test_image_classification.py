"""The classification of images: the loss of each row, the accuracy, and rows that only fill up a batch."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

from gangway.errors import UsageError
from tests.unit.training import arguments, losses
from trainers.base import BaseTrainer
from trainers.config import LossConfig, VisionConfig
from trainers.config.arguments import TrainingArguments
from trainers.tasks.image_classification import ImageClassificationTask

VISION = VisionConfig(image_size=4, patch_size=2, num_channels=1, width=8, num_layers=1, num_heads=2, mlp_width=8, num_labels=3)
IMAGES = np.random.default_rng(0).normal(size=(4, 4, 4, 1)).astype(np.float32)
LABELS = np.array([0, 1, 2, 1], np.int32)


def task_of(**changes):
    return ImageClassificationTask(TrainingArguments(name="t", max_num_steps=1, **{"vision": VISION, **changes}))


def test_the_loss_of_a_row_is_the_cross_entropy_of_its_class():
    task = task_of(loss=LossConfig(label_smoothing=0.3))
    model = task.build_model(nnx.Rngs(0))
    found = task.loss(model, {"image": IMAGES, "label": LABELS})
    log_p = np.asarray(jax.nn.log_softmax(model(IMAGES)))
    expected = -(0.7 * log_p[range(4), LABELS] + 0.1 * log_p.sum(1))
    np.testing.assert_allclose(found.losses, expected, rtol=1e-5)
    np.testing.assert_array_equal(found.metrics["accuracy"], log_p.argmax(1) == LABELS)
    np.testing.assert_array_equal(task.predictions(model, {"image": IMAGES})["label"], log_p.argmax(1))


def test_a_label_that_is_no_class_is_no_number():
    task = task_of()
    found = task.loss(task.build_model(nnx.Rngs(0)), {"image": IMAGES, "label": np.array([0, 3, -1, 1], np.int32)})
    np.testing.assert_array_equal(np.isnan(found.losses), [False, True, True, False])


def test_a_task_needs_an_encoder_that_scores_classes():
    with pytest.raises(UsageError, match=r"vision = null: the task classifies images by an encoder"):
        task_of(vision=None)
    with pytest.raises(UsageError, match=r"vision.num_labels = null"):
        task_of(vision=VisionConfig())


def data():
    columns = {"image": np.tile(IMAGES, (3, 1, 1, 1)), "label": np.tile(LABELS, 3)}
    return columns, {"image": IMAGES[:3], "label": LABELS[:3]}


@pytest.mark.slow("compiles several steps")
def test_training_counts_no_row_that_only_fills_up_a_batch(tmp_path, events):
    changes = {
        "task": "trainers.tasks.image_classification:ImageClassificationTask",
        "vision": vars(VISION),
        "data": {},
        "global_batch_size": 12,
        "max_num_steps": 4,
        "optimizer": {"name": "adamw", "learning_rate": 0.01, "schedule": {"name": "constant"}},
    }
    made = BaseTrainer(arguments(tmp_path, **changes), *data())
    state = made.train()
    task, model = made.task, made.model.merge(state.params, state.model_state)
    # On 8 devices, 5 rows of the evaluation fill it up.
    expected = np.mean(task.loss(model, {"image": IMAGES[:3], "label": LABELS[:3]}).losses)
    assert made.output.metrics["eval_loss"] == pytest.approx(float(expected), rel=1e-5)
    assert losses(events)[4] < losses(events)[1]
