"""Random tokens of a small vocabulary, for the models of `tests/unit/data/parity`, and tasks whose losses need frozen weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tests.programs.tiny import TableTask
from trainers.protocol import PerExample
from trainers.tasks.causal_lm import CausalLMTask

LENGTH = 8


class Tokens:
    def __init__(self, num_examples: int, seed: int):
        self.rows = np.random.default_rng(seed).integers(2, 60, (num_examples, LENGTH + 1)).astype(np.int32)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"tokens": self.rows[index]}


def datasets(arguments):
    return Tokens(64, 1), Tokens(20, 2)


def log_probabilities(model, tokens):
    """The sum of the log-probabilities of each row: [B]."""
    log_p = jax.nn.log_softmax(model(tokens[:, :-1]))
    return jnp.sum(jnp.take_along_axis(log_p, tokens[:, 1:, None], -1)[..., 0], -1)


class DistillTask(TableTask):
    """The Kullback-Leibler divergence from a teacher."""

    def loss(self, model, batch, frozen):
        tokens = batch["tokens"][:, :-1]
        teacher, student = (jax.nn.log_softmax(each(tokens)) for each in (frozen["teacher"], model))
        return PerExample(jnp.sum(jnp.exp(teacher) * (teacher - student), (1, 2)))


class PreferenceTask(CausalLMTask):
    """DPO with the rows in reverse as the rejected ones; the reference is the base of LoRA: no second model."""

    def loss(self, model, batch, frozen):
        chosen = batch["tokens"]
        pairs = (chosen, chosen[:, ::-1])
        policy, reference = ([log_probabilities(each, tokens) for tokens in pairs] for each in (model, frozen["base"]))
        margin = (policy[0] - reference[0]) - (policy[1] - reference[1])
        return PerExample(-jax.nn.log_sigmoid(0.5 * margin))
