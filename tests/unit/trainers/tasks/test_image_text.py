"""The next token of texts with images: the loss is that of the logits, and images are no targets."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx

from gangway.errors import UsageError
from tests.unit.trainers.models.test_vlm import IMAGES, MODEL, SIZES, TOKENS, VISION
from trainers.config.arguments import TrainingArguments
from trainers.config.vision import VisionConfig
from trainers.evaluation.previews import can_generate
from trainers.tasks.image_text import ImageTextTask


def task_of(**changes):
    return ImageTextTask(TrainingArguments(name="t", max_num_steps=1, **{"model": MODEL, "vision": VISION, **changes}))


@pytest.mark.slow("compiles several steps")
def test_the_loss_is_that_of_the_tokens_that_count():
    task = task_of()
    model = nnx.jit(lambda: task.build_model(nnx.Rngs(0)))()
    weight = np.zeros(TOKENS.shape, np.float32)
    weight[0, [5, 11]] = 1, 0.5
    batch = {"tokens": TOKENS, "images": IMAGES, "weight": np.ones(1, np.float32), "token_weight": weight}
    found = jax.jit(task.loss)(model, batch)
    log_p = np.asarray(jax.nn.log_softmax(model(TOKENS[:, :-1], IMAGES)))
    expected = -(log_p[0, 4, TOKENS[0, 5]] + 0.5 * log_p[0, 10, TOKENS[0, 11]])
    assert float(found.loss_sum) == pytest.approx(expected, rel=1e-5)
    assert float(found.num_targets) == 1.5


def test_a_task_of_images_needs_an_encoder_and_generates_nothing():
    assert not can_generate(task_of())
    with pytest.raises(UsageError, match=r"vision = null: the task reads images by an encoder"):
        task_of(vision=None)
    task = task_of(vision=VisionConfig(**SIZES))
    with pytest.raises(UsageError, match=r"vision.tokens_per_image = null"):
        jax.eval_shape(lambda: nnx.state(task.build_model(nnx.Rngs(0))))
