"""Every target counts the same, however batches are cut: against one big batch, computed without the trainer."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from gangway.errors import CheckpointError
from tests.programs import ragged
from tests.unit.training import FIXED, of, trainer
from trainers.base import BaseTrainer
from trainers.config.arguments import TrainingArguments, from_dict
from trainers.step.state import initial_parameters


def run(tmp_path, task, **changes):
    settings = {"name": "run", "storage": str(tmp_path), "task": f"tests.programs.ragged:{task}", **ragged.SETTINGS, **changes}
    arguments = from_dict(TrainingArguments, settings)
    made = BaseTrainer(arguments, *ragged.examples(arguments))
    params = jax.device_get(jax.jit(lambda: initial_parameters(made.task, 0))())
    return made.train(model_parameters=params), params


@pytest.mark.sampled(3)
@pytest.mark.parametrize("accumulation_steps", [1, 2, 4])
@pytest.mark.parametrize("task", ["Plain", "Terms", "TermsInAnotherOrder", "Preference"])
def test_losses_and_gradients_are_those_of_one_big_batch(tmp_path, events, task, accumulation_steps):
    """36 rows in micro-batches of 36, 18 and 9, for 8 devices: padded to 40, 24 and 16."""
    state, params = run(tmp_path, task, accumulation_steps=accumulation_steps)
    losses, norms, expected = ragged.direct_run(task, params, 36, 3)
    published = [event["metrics"] for event in of(events, "metrics")]
    np.testing.assert_allclose([metrics["grad_norm"] for metrics in published], norms, rtol=1e-4)
    seen = [metrics.get("loss") for metrics in published]
    np.testing.assert_allclose([loss for loss in seen if loss is not None], losses, rtol=1e-5)
    jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5), state.params, expected)


def test_the_batches_are_ragged_indeed():
    """A mean of micro-batch means would be far off."""
    data = ragged.Examples()
    counts = [sum(int(data[i]["length"]) for i in range(start, start + 9)) for start in range(0, 36, 9)]
    assert max(counts) > 5 * min(counts)


# ---------------------------------------------------------------------- an optimizer's state is restored, or it is an error


@pytest.mark.parametrize(
    "optimizer", [{**FIXED, "name": "lion"}, {**FIXED, "name": "sgd"}, {**FIXED, "moment_dtype": "bfloat16"}]
)
def test_another_optimizer_never_starts_from_zero_moments(tmp_path, events, optimizer):
    trainer(tmp_path, max_num_steps=4, optimizer=FIXED).train()
    events.clear()
    with pytest.raises(CheckpointError, match=r"another model or optimizer .*give the run another name"):
        trainer(tmp_path, max_num_steps=8, optimizer=optimizer).train()
    assert of(events, "first_step") == []
