"""`pytest` trains the model for a moment, in this process. It needs no Ray."""

from pathlib import Path

import numpy as np
from data import points, spirals

from gangway import read
from trainers.base import BaseTrainer

CONFIG = Path(__file__).with_name("config.yaml")


def trained(storage, num_steps):
    arguments = read(str(CONFIG), [f"storage={storage}", f"max_num_steps={num_steps}"])
    trainer = BaseTrainer(arguments, *spirals(arguments))
    trainer.train()
    return trainer.output


def test_the_data_is_the_same_each_time_and_other_data_for_another_seed():
    assert np.array_equal(points(8, seed=1)["point"], points(8, seed=1)["point"])
    assert not np.array_equal(points(8, seed=1)["point"], points(8, seed=2)["point"])


def test_the_model_learns(tmp_path):
    output = trained(tmp_path, 300)
    assert output.metrics["steps"] == 300
    assert output.metrics["eval_accuracy"] > 0.9  # of held-out points; a guess gives 0.5
