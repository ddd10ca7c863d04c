"""The task of preferring one completion of a prompt to another: DPO, IPO, ORPO, SimPO."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from trainers.config import PreferenceConfig
from trainers.config.frozen import BASE
from trainers.protocol import Batch, PerExample
from trainers.tasks.causal_lm import CausalLMTask, check_leaves
from trainers.tasks.completions import Completions, completions_of_pairs, metrics_of_rewards
from trainers.tasks.segments import per_example

REFERENCE = "reference"
"""The name of the reference among the frozen models."""
REFERENCE_LEAF = "ref_logps"
"""The leaf of a batch with the log-probabilities that the reference gives: float32[B, 2], or [B, S, 2] of packed rows."""
ALMOST_ONE = -1e-6
"""The largest log-probability whose odds are computed: those of 1 are infinite."""


class PreferenceTask(CausalLMTask):
    """Learns from pairs. `batch` is {"tokens": int32[B, 2, T + 1], "token_weight": float32[B, 2, T + 1], "weight": float32[B]}:
    the chosen text and the rejected one; targets are the tokens of the completions alone. With `preference.reference: columns`
    it also has `ref_logps`, float32[B, 2].

    Of packed rows, pair i is segment i of both lines of its row: `segments` and `positions`, int32[B, 2, T + 1];
    `example_weight`, float32[B, S], with S as many as the fullest row of the plan has pairs; and `ref_logps` is [B, S, 2].

    The loss is the mean over the pairs, so that neither padding, nor packing, nor the length of a text counts.
    """

    dataset = "trainers.data.sources.preference:preference_pairs"
    has_perplexity = False
    reads = CausalLMTask.reads - {"labels"} | {"example_weight", REFERENCE_LEAF}

    def _problems(self) -> Iterator[str]:
        yield from without_loss_settings(self)
        preference, arguments = self.arguments.preference, self.arguments
        kind, given = self._reference, REFERENCE in arguments.frozen
        if preference.has_reference and kind == "frozen" and not given:
            yield (
                f"preference.loss = {preference.loss!r} compares the model with a reference: name its weights in "
                "frozen.reference, such as the folder of model.pretrained; or train with lora, whose base is the reference; or "
                "set preference.reference = columns"
            )
        if preference.has_reference and arguments.model.fp8 != "none":
            yield (
                f"model.fp8 = {arguments.model.fp8!r}: preference.loss = {preference.loss!r} compares the model with a "
                "reference, which is not computed in 8 bits: they would differ by its rounding; set model.fp8 = none"
            )
        if kind == "base" and arguments.lora is None:
            yield "preference.reference = 'base': only a run with lora has one; set frozen.reference"
        if given and not (preference.has_reference and kind == "frozen"):
            why = f"the reference is {kind}" if preference.has_reference else f"the loss {preference.loss} needs none"
            yield f"frozen.reference: {why}; leave it out"

    @property
    def reads_base(self) -> bool:
        """Whether the loss compares the model with the base of its adapters."""
        return self.arguments.preference.has_reference and self._reference == "base"

    @property
    def _reference(self) -> str:
        return self.arguments.preference.reference or ("frozen" if self.arguments.lora is None else "base")

    def loss(self, model: Any, batch: Batch, frozen: Mapping[str, Any]) -> PerExample:  # type: ignore[override]
        check_leaves(self, batch, PreferenceTask)
        config = self.arguments.preference
        policy = completions_of_pairs(model, batch)
        reference = self._reference_of(batch, policy, frozen) if config.has_reference else None
        losses, rewards = pair_losses(config, policy, reference)
        metrics, num_tokens = metrics_of_rewards(rewards), jnp.sum(policy.num_targets, range(1, policy.num_targets.ndim))
        return per_example(batch, losses, metrics, num_tokens)

    def _reference_of(self, batch: Batch, policy: Completions, frozen: Mapping[str, Any]) -> Completions:
        if self._reference == "columns":
            return Completions(batch[REFERENCE_LEAF], policy.num_targets)
        model = frozen[BASE if self._reference == "base" else REFERENCE]
        return completions_of_pairs(model, batch)

    @property
    def tokens_per_example(self) -> int:
        return 2 * self.arguments.data.sequence_length

    @property
    def context_length(self) -> int:
        """The targets of one text of a pair."""
        return self.arguments.data.sequence_length

    def flops_per_token(self, num_parameters: int) -> float:
        """Returns those of a language model, and a forward pass of the reference: a third of them."""
        computed = self.arguments.preference.has_reference and self._reference != "columns"
        return super().flops_per_token(num_parameters) * (4 / 3 if computed else 1)


def pair_losses(config: PreferenceConfig, policy: Completions, reference: Completions | None) -> tuple[jax.Array, jax.Array]:
    """Returns (the loss of each pair [...], the rewards of chosen and rejected [..., 2]), given the log-probabilities [..., 2].

    With log p over the tokens of a completion, c the chosen one and r the rejected one, and h the difference between c and r of
    log p - log p of the reference:

    - dpo (Rafailov et al., 2023, equation 7): -log sigmoid(beta h). With label smoothing s (Mitchell, 2023, "cDPO"):
      -(1 - s) log sigmoid(beta h) - s log sigmoid(-beta h).
    - ipo (Azar et al., 2023, equation 17): (h - 1 / (2 beta))^2. Here log p are means over tokens, as the authors have confirmed
      to the maintainers of TRL.
    - orpo (Hong et al., 2024, equations 6 and 7): -mean log p(c) - beta log sigmoid(log odds(c) - log odds(r)), where odds are
      p / (1 - p) of the mean log p.
    - simpo (Meng et al., 2024, equation 6): -log sigmoid(beta (mean log p(c) - mean log p(r)) - gamma), with label smoothing as
      in dpo.

    Rewards are beta times what is compared: the differences from the reference, or the mean log p. They get no gradient.
    """
    by_token = config.loss != "dpo"
    compared = policy.mean_log_p if by_token else policy.log_p
    if reference is not None:
        compared = compared - jax.lax.stop_gradient(reference.mean_log_p if by_token else reference.log_p)
    difference = compared[..., 0] - compared[..., 1]
    if config.loss == "ipo":
        losses = (difference - 1 / (2 * config.beta)) ** 2
    elif config.loss == "orpo":
        log_odds = log_odds_of(compared)
        losses = -compared[..., 0] - config.beta * jax.nn.log_sigmoid(log_odds[..., 0] - log_odds[..., 1])
    else:
        logits = config.beta * difference - (config.margin if config.loss == "simpo" else 0.0)
        smoothing = config.label_smoothing
        losses = -(1 - smoothing) * jax.nn.log_sigmoid(logits) - smoothing * jax.nn.log_sigmoid(-logits)
    return losses, jax.lax.stop_gradient(config.beta * compared)


def log_odds_of(log_p: jax.Array) -> jax.Array:
    """Returns log(p / (1 - p))."""
    log_p = jnp.minimum(log_p, ALMOST_ONE)
    return log_p - jnp.log(-jnp.expm1(log_p))


def without_loss_settings(task: CausalLMTask) -> Iterator[str]:
    """Yields the problems of settings of the section `loss`, which a task with a loss of its own has no use for."""
    loss = task.arguments.loss
    for name, value in vars(loss).items():
        if value != getattr(type(loss), name):
            yield f"loss.{name} = {value}: {type(task).__name__} has a loss of its own; leave it out"
