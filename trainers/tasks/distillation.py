"""The task of learning what a teacher, another language model, expects of each next token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from gangway.errors import UsageError
from trainers.config import DistillationConfig
from trainers.models.decoder import Hidden
from trainers.protocol import Batch, Loss
from trainers.tasks.causal_lm import CausalLMTask, check_leaves, weights_of
from trainers.tasks.cross_entropy import MAX_LOGITS, over_time, parts_of
from trainers.tasks.preference import without_loss_settings

TEACHER = "teacher"
"""The name of the teacher among the frozen models."""


class Distances(NamedTuple):
    """float32[B, T] each."""

    divergences: jax.Array
    """The Kullback-Leibler divergence of the student's probabilities from the teacher's."""
    agreement: jax.Array
    """1 where both expect the same token most."""


class DistillationTask(CausalLMTask):
    """Learns the probabilities of the frozen model `frozen.teacher`, whose vocabulary must be the same. `batch` is that of a
    language model: {"tokens": int32[B, T + 1], "weight": float32[B]}, and perhaps `token_weight`, or those of packed rows. The
    loss is a mean over the targets."""

    has_perplexity = False
    reads = CausalLMTask.reads - {"labels"}

    def _problems(self) -> Iterator[str]:
        yield from without_loss_settings(self)
        if TEACHER not in self.arguments.frozen:
            yield "frozen.teacher is missing: name the weights to learn from, a run or a folder of Hugging Face"

    def loss(self, model: Any, batch: Batch, frozen: Mapping[str, Any]) -> Loss:  # type: ignore[override]
        check_leaves(self, batch, DistillationTask)
        tokens = batch["tokens"][:, :-1]
        weight, packed = weights_of(batch)
        of_packed = () if packed is None else (packed.positions, packed.segments)
        student, teacher = (each.hidden(tokens, *of_packed) for each in (model, frozen[TEACHER]))
        found = distances(student, teacher, self.arguments.distillation)
        tokens_B = jnp.sum(weight > 0, 1)
        rows = (jnp.sum(found.divergences * weight, 1), jnp.sum(weight, 1), tokens_B)
        num_targets = jnp.sum(rows[1])
        parts = {"agreement": (jnp.sum(found.agreement * weight), num_targets)}
        return Loss(jnp.sum(rows[0]), num_targets, parts, jnp.sum(tokens_B), rows=rows)


def distances(student: Hidden, teacher: Hidden, config: DistillationConfig, max_logits: int | None = None) -> Distances:
    """Returns how far the student is from the teacher at each token. At most `max_logits` logits of a device are in memory at
    once, of both together (`trainers.tasks.cross_entropy`)."""
    vocab_size, of_teacher = student.table_DV.shape[1], teacher.table_DV.shape[1]
    if vocab_size != of_teacher:
        raise UsageError(
            f"frozen.teacher has a vocabulary of {of_teacher} tokens, and the model one of {vocab_size}: expected the same one"
        )

    def part(x_BCD: jax.Array, tables: tuple[jax.Array, jax.Array], teacher_BCD: jax.Array) -> Distances:
        logits, targets = (
            each._replace(table_DV=table).logits(x.reshape(-1, x.shape[-1]))
            for each, table, x in ((student, tables[0], x_BCD), (teacher, tables[1], teacher_BCD))
        )
        agreement = (jnp.argmax(logits, -1) == jnp.argmax(targets, -1)).astype(jnp.float32)
        found = Distances(divergences(logits, targets, config), agreement)
        return Distances(*(leaf.reshape(x_BCD.shape[:2]) for leaf in found))

    num_parts = parts_of(student.x_BTD.shape[:2], 2 * vocab_size, max_logits or MAX_LOGITS)
    # The gradient is that of the student alone.
    taught = jax.lax.stop_gradient((teacher.table_DV, teacher.x_BTD))
    return over_time(part, student.x_BTD, (student.table_DV, taught[0]), taught[1], num_parts)


def divergences(logits_NV: jax.Array, teacher_NV: jax.Array, config: DistillationConfig) -> jax.Array:
    """Returns float32[N]: t^2 sum(q (log q - log p)), with q = softmax(teacher / t) and p = softmax(logits / t) (Hinton et al.,
    2015, section 2). With `top_k`, q is that of the teacher's k likeliest tokens, and 0 elsewhere."""
    log_p = jax.nn.log_softmax(logits_NV / config.temperature)
    if config.top_k is not None:
        teacher_NV, likeliest_NK = jax.lax.top_k(teacher_NV, min(config.top_k, teacher_NV.shape[-1]))
        log_p = jnp.take_along_axis(log_p, likeliest_NK, -1)
    log_q = jax.nn.log_softmax(teacher_NV / config.temperature)
    return config.temperature**2 * jnp.sum(jnp.exp(log_q) * (log_q - log_p), -1)
