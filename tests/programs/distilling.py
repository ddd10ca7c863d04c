"""A student that learns from a teacher: the trainer's hook makes the teacher's logits, or the task does so itself."""

from __future__ import annotations

from functools import cached_property

import jax
import jax.numpy as jnp

from tests.programs.tiny import TableTask
from trainers.base import BaseTrainer
from trainers.protocol import Loss
from trainers.step import rng
from trainers.step.state import abstract_model, initial_parameters

TEACHER_SEED = 1234


class Student(TableTask):
    """The loss is the cross entropy with the teacher's distribution."""

    def loss(self, model, batch):
        return self.distance(model, batch, batch["teacher_logits"])

    def distance(self, model, batch, teacher_logits):
        log_probabilities = jax.nn.log_softmax(model(batch["tokens"][:, :-1]))
        losses = -jnp.sum(jax.nn.softmax(5.0 * teacher_logits) * log_probabilities, axis=-1)
        weight = batch["weight"][:, None] * jnp.ones_like(losses)
        return Loss(jnp.sum(losses * weight), jnp.sum(weight))


class OwnTeacher(Student):
    """Makes the teacher's logits in the loss."""

    def loss(self, model, batch):
        teacher = abstract_model(self, TEACHER_SEED)[0].merge(initial_parameters(self, TEACHER_SEED))
        return self.distance(model, batch, teacher(batch["tokens"][:, :-1]))


class Distilling(BaseTrainer):
    @cached_property
    def teacher(self):
        make = jax.jit(lambda: initial_parameters(self.task, TEACHER_SEED), out_shardings=self.state_shardings.params)
        return make()

    @cached_property
    def teacher_logits(self):
        return jax.jit(lambda params, tokens: self.model.merge(params)(tokens[..., :-1]))

    def prepare_batch(self, state, batch, *, training):
        return {**batch, "teacher_logits": self.teacher_logits(self.teacher, batch["tokens"])}


class Rollouts(Distilling):
    """What the batch becomes depends on the state and on random numbers, as with data that a model has made itself."""

    @cached_property
    def roll_out(self):
        def tokens(params, tokens, index):
            noise = jax.random.gumbel(rng.key(0, "rollouts", index), (*tokens.shape[:-1], tokens.shape[-1] - 1, 256))
            drawn = jnp.argmax(self.model.merge(params)(tokens[..., :-1]) + noise, axis=-1)
            return jnp.concatenate([tokens[..., :1], drawn.astype(tokens.dtype)], axis=-1)

        return jax.jit(tokens)

    def prepare_batch(self, state, batch, *, training):
        tokens = self.roll_out(state.params, batch["tokens"], state.batch_index) if training else batch["tokens"]
        return super().prepare_batch(state, {**batch, "tokens": tokens}, training=training)
