"""The task of a reward model: a number for each text, larger for the preferred one of a pair."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trainers.protocol import Batch, PerExample
from trainers.tasks.causal_lm import check_leaves
from trainers.tasks.completions import metrics_of_rewards
from trainers.tasks.scoring import ScoringDecoder, ScoringTask
from trainers.tasks.segments import per_example


class RewardTask(ScoringTask):
    """Learns from pairs. `batch` is that of `trainers.tasks.preference.PreferenceTask`. The reward of a text is the head's score
    of the last token of its completion.

    The loss is that of Bradley and Terry, -log sigmoid(reward of the chosen text - reward of the rejected one) (Ouyang et al.,
    2022, equation 1), as a mean over the pairs.
    """

    dataset = "trainers.data.sources.preference:preference_pairs"

    @property
    def num_scores(self) -> int:
        return 1

    def loss(self, model: ScoringDecoder, batch: Batch) -> PerExample:
        check_leaves(self, batch, RewardTask)
        rewards = self.predictions(model, batch)["rewards"]
        losses, metrics = -jax.nn.log_sigmoid(rewards[..., 0] - rewards[..., 1]), metrics_of_rewards(rewards)
        num_tokens = jnp.sum(batch["token_weight"] > 0, (1, 2))
        return per_example(batch, losses, metrics, num_tokens)

    def predictions(self, model: ScoringDecoder, batch: Batch) -> dict[str, jax.Array]:
        """Returns the rewards of both texts, float32[B, 2]; of packed rows [B, S, 2], where `example_weight` says which count."""
        rewards = self.scores(model, batch)[..., 0]
        if "example_weight" not in batch:
            return {"rewards": rewards.reshape(-1, 2)}
        return {"rewards": rewards.reshape(-1, 2, rewards.shape[-1]).swapaxes(1, 2)}

    @property
    def tokens_per_example(self) -> int:
        return 2 * self.arguments.data.sequence_length
