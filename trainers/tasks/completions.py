"""The log-probabilities that a model gives to the completions of pairs.

Dimensions: B rows, T tokens that predict, T + 1 tokens of a line, S pairs that share a row.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from trainers.config import LossConfig
from trainers.protocol import Batch
from trainers.tasks.causal_lm import HasHidden, Packed, inputs_of, packing_of
from trainers.tasks.cross_entropy import from_hidden, from_logits
from trainers.tasks.segments import lines_of, sums


class Completions(NamedTuple):
    """float32[N] each, or of other dimensions."""

    log_p: jax.Array
    """The sum of the log-probabilities of the targets of a completion."""
    num_targets: jax.Array

    @property
    def mean_log_p(self) -> jax.Array:
        # What only fills up a batch or a row may have no target.
        return self.log_p / jnp.maximum(self.num_targets, 1.0)


def completions_of_pairs(model: Any, batch: Batch) -> Completions:
    """Returns the log-probabilities of pairs: [B, 2]; or of packed rows, with S pairs in each, [B, S, 2].

    `batch` has `tokens` (int32[B, 2, T + 1]) and `token_weight` (float32[B, 2, T + 1]): targets are the tokens whose weight is
    more than 0, and padding has weight 0. Packed rows also have `segments` and `positions`, and `example_weight` of S. The logits
    of a whole batch are never in memory (`trainers.tasks.cross_entropy`).
    """
    lines = lines_of(batch)
    targets, counts = lines["tokens"][:, 1:], lines["token_weight"][:, 1:] > 0
    packed = packing_of(lines)
    log_p = -_losses(model, lines["tokens"][:, :-1], targets, packed)
    if packed is None:
        return Completions(*(jnp.sum(values * counts, 1).reshape(-1, 2) for values in (log_p, counts.astype(jnp.float32))))
    num_segments, counts = batch["example_weight"].shape[-1], counts & packed.has_target
    of_segments = (sums(values * counts, packed.segments, num_segments) for values in (log_p, counts.astype(jnp.float32)))
    return Completions(*(values.reshape(-1, 2, num_segments).swapaxes(1, 2) for values in of_segments))


def _losses(model: Any, inputs: jax.Array, targets: jax.Array, packed: Packed | None) -> jax.Array:
    about, plain = inputs_of(model, packed), LossConfig()
    if isinstance(model, HasHidden):
        return from_hidden(model.hidden(inputs, **about), targets, plain).losses
    return from_logits(model(inputs), targets, plain).losses


def metrics_of_rewards(rewards: jax.Array) -> dict[str, jax.Array]:
    """Returns the metrics [...] of the rewards [..., 2] of the chosen and the rejected text of each pair."""
    chosen, rejected = rewards[..., 0], rewards[..., 1]
    return {
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "rewards/margin": chosen - rejected,
        "accuracy": (chosen > rejected).astype(jnp.float32),
    }
