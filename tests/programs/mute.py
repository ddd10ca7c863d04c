"""A language model whose host 1 once finds no words for what was generated, and whose loss overflows where sample 40 is."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from trainers.tasks.causal_lm import CausalLMTask


class MuteTask(CausalLMTask):
    told = False

    def loss(self, model, batch):
        loss = super().loss(model, batch)
        with jax.named_scope("penalty"):
            planted = jnp.any(batch["sample_id"] == 40)
            penalty = jnp.exp(jnp.where(planted, 1e4, 0.0) * jnp.abs(model.final_norm[...][0]))
        return loss._replace(loss_sum=loss.loss_sum + 0.0 * jnp.where(planted, penalty, 0.0))

    def decode(self, tokens):
        if jax.process_index() == 1 and not self.told:
            self.told = True
            raise RuntimeError("no words for it")
        return super().decode(tokens)
