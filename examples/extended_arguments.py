"""Arguments of one's own: a new section, checked like all others, reached by YAML and the command line."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import optax

from gangway import TrainingArguments
from gangway.config.section import Section, require
from trainers.protocol import Loss
from trainers.tasks.causal_lm import CausalLMTask


@dataclass(frozen=True, kw_only=True)
class SmoothingConfig(Section):
    amount: float = 0.1
    """Of the probability, spread over all tokens."""
    warmup_steps: int = 0
    """Updates until the whole amount is used."""

    def __post_init__(self):
        require(0 <= self.amount < 1, f"amount = {self.amount}: expected 0 <= amount < 1")


@dataclass(frozen=True, kw_only=True)
class SmoothingArguments(TrainingArguments):
    smoothing: SmoothingConfig = field(default_factory=SmoothingConfig)


class SmoothedTask(CausalLMTask):
    """Predicts the next token with label smoothing (Szegedy et al., 2016, section 7)."""

    def set_step_nr(self, step):
        self.step = step

    def loss(self, model, batch):
        config, targets = self.arguments.smoothing, batch["tokens"][:, 1:]
        amount = config.amount * jnp.minimum(1.0, (self.step + 1) / (config.warmup_steps + 1))
        logits = model(batch["tokens"][:, :-1])
        labels = optax.smooth_labels(jax.nn.one_hot(targets, logits.shape[-1]), amount)
        weight = jnp.broadcast_to(batch["weight"][:, None], targets.shape)
        losses = optax.softmax_cross_entropy(logits, labels)
        return Loss(jnp.sum(losses * weight), jnp.sum(weight), {"smoothing": (amount, 1.0)})
