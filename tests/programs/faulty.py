"""Programs of users that cannot be resumed, each for a reason of its own; `verify` has to find it."""

from __future__ import annotations

import numpy as np

from tests.programs.tiny import Numbers, TableTask, numbers
from trainers.base import BaseTrainer
from trainers.callbacks import Callback
from trainers.protocol import Loss


class Unseeded(Numbers):
    """Draws noise without the seed."""

    def __getitem__(self, index):
        example = super().__getitem__(index)
        noise = np.random.default_rng().integers(0, 2, len(example["tokens"]))
        return {**example, "tokens": (example["tokens"] + noise).astype(np.int32) % 256}


def unseeded(arguments):
    train, held_out = numbers(arguments)
    return Unseeded(train.num_examples, train.length), held_out


class Moody(TableTask):
    """The loss depends on when it was compiled."""

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        return Loss(loss.loss_sum * (1 + np.random.default_rng().uniform()), loss.num_targets, loss.parts)


class Curriculum(Callback):
    """Counts the steps of this process."""

    def __init__(self):
        self.level = 1.0

    def on_step_begin(self, state, *, batch, **kwargs):
        self.level *= 1.01
        batch["weight"] = batch["weight"].at[0, 0].multiply(self.level)


class Forgetful(BaseTrainer):
    """What its curriculum has come to is in no checkpoint."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.add_callback(Curriculum())


class Writing(BaseTrainer):
    """Writes at its end into what it has learned from."""

    def on_training_end(self, state):
        with open(f"{self.arguments.data.paths[0]}/a.txt", "a") as file:
            file.write("more")
        return state
