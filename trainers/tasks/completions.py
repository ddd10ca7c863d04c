"""The log-probabilities that a model gives to completions.

Dimensions: N rows, T tokens that predict, T + 1 tokens of a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainers.config import LossConfig
from trainers.tasks.causal_lm import HasHidden
from trainers.tasks.cross_entropy import from_hidden, from_logits


class Completions(NamedTuple):
    """float32[N] each, or of other leading dimensions."""

    log_p: jax.Array
    """The sum of the log-probabilities of the targets of a row."""
    num_targets: jax.Array

    @property
    def mean_log_p(self) -> jax.Array:
        # Rows that only fill up a batch may have no target.
        return self.log_p / jnp.maximum(self.num_targets, 1.0)


def completions(model: Any, tokens: jax.Array, token_weight: jax.Array) -> Completions:
    """Returns the log-probabilities of the targets: tokens (int32[N, T + 1]) whose `token_weight` (float32[N, T + 1]) is more
    than 0. Padding has weight 0. The logits of a whole batch are never in memory (`trainers.tasks.cross_entropy`)."""
    inputs, targets, plain = tokens[:, :-1], tokens[:, 1:], LossConfig()
    if isinstance(model, HasHidden):
        found = from_hidden(model.hidden(inputs), targets, plain)
    else:
        found = from_logits(model(inputs), targets, plain)
    counts = (token_weight[:, 1:] > 0).astype(jnp.float32)
    return Completions(-jnp.sum(found.losses * counts, 1), jnp.sum(counts, 1))


def completions_of_pairs(model: Any, tokens: jax.Array, token_weight: jax.Array) -> Completions:
    """Returns the log-probabilities [B, 2] of pairs: int32[B, 2, T + 1], float32[B, 2, T + 1]."""
    rows = completions(model, *(leaf.reshape(-1, leaf.shape[-1]) for leaf in (tokens, token_weight)))
    return Completions(*(leaf.reshape(-1, 2) for leaf in rows))


def metrics_of_rewards(rewards: jax.Array) -> dict[str, jax.Array]:
    """Returns the metrics [B] of the rewards [B, 2] of the chosen and the rejected text of each pair."""
    chosen, rejected = rewards[:, 0], rewards[:, 1]
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margin": chosen - rejected,
        "accuracy": (chosen > rejected).astype(jnp.float32),
    }
