"""A loop of the user's own: over the batches of the trainer's loader, with its steps as functions (state, batch)."""

from __future__ import annotations

import jax
import pytest

from tests.unit.trainers.step.test_adapted import PLAIN, OwnSteps
from tests.unit.training import FIXED, assert_equal, losses, of, trainer
from trainers.base import BaseTrainer
from trainers.trainer.build import build

CHANGES = {"max_num_steps": 3, "optimizer": FIXED}


@pytest.mark.slow("trains twice")
@pytest.mark.parametrize(("cls", "changes"), [(BaseTrainer, {"accumulation_steps": 2}), (OwnSteps, PLAIN)])
def test_the_loader_and_the_steps_do_by_hand_what_training_does(tmp_path, events, cls, changes):
    whole = trainer(tmp_path, cls=cls, **CHANGES | changes)
    expected, published = whole.train(), losses(events)
    made = trainer(tmp_path / "by_hand", cls=cls, **CHANGES | changes)
    build(made)
    state, found = jax.jit(made.design.initial_state, out_shardings=made.state_shardings)(), {}
    for number, batch in zip(range(1, 4), made.dataloaders.dataloader_train, strict=False):
        state, metrics = made.functions.train_step_fn(state, batch)
        found[number] = metrics["loss"]
    assert found == published
    assert_equal(state, expected)
    by_hand = [made.functions.eval_step_fn(state, batch) for batch in made.dataloaders.dataloader_eval]
    by_trainer = list(whole.eval(expected))
    assert [metrics["loss"] for metrics in by_hand] == [metrics["loss"] for metrics in by_trainer]
    assert all(name in metrics for name in by_hand[0] for metrics in by_trainer)
    assert not [event for event in of(events, "note") if "compiles again" in event["message"]]


def test_a_loader_gives_an_epoch_and_begins_anew(tmp_path):
    made = trainer(tmp_path)
    loader = made.configure_dataloaders().dataloader_train
    assert [[*batch["sample_id"].flatten()] for batch in loader] == [[*batch["sample_id"].flatten()] for batch in loader]
    assert len([*loader]) == 96 / 16
