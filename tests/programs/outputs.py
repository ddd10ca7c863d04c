"""A task with predictions, and metrics of them that no mean over targets could give."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from tests.programs.tiny import TableTask


class Guesses(TableTask):
    def predictions(self, model, batch):
        guesses = jnp.argmax(model(batch["tokens"][:, :-1]), -1)
        return {"guesses": guesses, "wrong": jnp.sum(guesses != batch["tokens"][:, 1:], -1)}


class MostWrong:
    """How many examples came, how many different ones, the median of the numbers of wrong guesses, and the accuracy."""

    names = ("examples", "different", "median_wrong", "hits")

    def __init__(self, arguments):
        self.length = arguments.data.sequence_length
        self.samples, self.wrong = np.zeros(0, np.int32), np.zeros(0, np.int32)

    def add(self, outputs, batch):
        assert np.array_equal(outputs["wrong"], np.sum(outputs["guesses"] != batch["tokens"][:, 1:], -1))
        self.samples = np.concatenate([self.samples, batch["sample_id"]])
        self.wrong = np.concatenate([self.wrong, outputs["wrong"]])

    def state(self):
        return {"samples": self.samples, "wrong": self.wrong}

    def merge(self, states):
        for state in states:
            self.samples = np.concatenate([self.samples, state["samples"]])
            self.wrong = np.concatenate([self.wrong, state["wrong"]])

    def compute(self):
        hits = 1 - self.wrong.mean() / self.length
        different, median = len(set(self.samples)), np.median(self.wrong)
        return {"examples": len(self.samples), "different": different, "median_wrong": median, "hits": hits}
