"""Methods that were meant as hooks and would never be called are errors when the trainer is built."""

from __future__ import annotations

import pytest

from tests.unit.training import trainer
from trainers.base import BaseTrainer
from trainers.errors import UsageError


def method(self, *args):
    return None


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("train_step", "Task.loss"),
        ("forward_backward_step", "forward_backward"),
        ("start_training_hook", "on_training_start"),
        ("start_evaluation_hook", "on_evaluation_start"),
        ("_preprocess_batch_input", "preprocess_batch"),
        ("on_training_strat", "did you mean on_training_start"),
        ("build_data_transfrom", "did you mean build_data_transform"),
        ("configure_dataloader", "did you mean configure_dataloaders"),
    ],
)
def test_a_method_that_nothing_would_call_is_an_error(tmp_path, name, remedy):
    with pytest.raises(UsageError, match=f"Mine has methods that nothing would call:\n  {name}: .*{remedy}"):
        trainer(tmp_path, cls=type("Mine", (BaseTrainer,), {name: method}))


def test_all_such_methods_are_named_at_once(tmp_path):
    names = ("on_step_strat", "start_training_hook")
    with pytest.raises(UsageError, match=r"on_step_strat: .*\n  start_training_hook: "):
        trainer(tmp_path, cls=type("Mine", (BaseTrainer,), dict.fromkeys(names, method)))


def test_hooks_helpers_and_steps_of_own_functions_are_no_errors(tmp_path):
    names = ("on_training_start", "_on_training_strat", "sample_rollouts", "build_data_transform")
    trainer(tmp_path, cls=type("Hooked", (BaseTrainer,), dict.fromkeys(names, method)))
    own = {"configure_functions": method, "train_step": method}
    trainer(tmp_path, cls=type("Own", (BaseTrainer,), {**own, "__module__": __name__}))
