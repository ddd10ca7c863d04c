"""Predicting the next token."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from trainers.config.arguments import TrainingArguments
from trainers.models.llama import Llama
from trainers.protocol import Batch, Loss

BYTES = 256


class CausalLMTask:
    """`batch` is {"tokens": int32[B, T + 1], "weight": float32[B]}: each of the first T tokens predicts its successor.

    A leaf `token_weight` (float32[B, T + 1], such as the mask of what was filled up) says how much each token counts as a target.
    """

    def __init__(self, arguments: TrainingArguments):
        self.arguments = arguments

    def build_model(self, rngs: nnx.Rngs) -> nnx.Module:
        return Llama(self.arguments.model, rngs=rngs, dtype=self.arguments.dtype, param_dtype=self.arguments.param_dtype)

    def loss(self, model: nnx.Module, batch: Batch) -> Loss:
        tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        logits = model(tokens)
        weight = jnp.broadcast_to(batch["weight"][:, None], targets.shape)
        if "token_weight" in batch:
            weight = weight * batch["token_weight"][:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        hits = (jnp.argmax(logits, -1) == targets).astype(jnp.float32)
        num_targets = jnp.sum(weight)
        parts = {"accuracy": (jnp.sum(hits * weight), num_targets)}
        if z_loss_weight := self.arguments.loss.z_loss_weight:
            z_losses = z_loss_weight * jax.nn.logsumexp(logits, -1) ** 2
            losses += z_losses
            parts["z_loss"] = (jnp.sum(z_losses * weight), num_targets)
        rows = (jnp.sum(losses * weight, axis=1), jnp.sum(weight, axis=1))
        return Loss(jnp.sum(losses * weight), num_targets, parts, rows=rows)

    @property
    def tokens_per_example(self) -> int:
        return self.arguments.data.sequence_length

    def flops_per_token(self, num_parameters: int) -> float:
        """6 N + 6 L T D: each parameter multiplies and adds once forward and twice backward; causal attention looks back at T / 2
        tokens on average, with two products of width D (Chowdhery et al., 2022, appendix B, halved for causality).
        A table that is only looked up multiplies nothing."""
        model = self.arguments.model
        looked_up = 0 if model.tie_embeddings else model.vocab_size * model.width
        return 6.0 * (num_parameters - looked_up) + 6.0 * model.num_layers * self.tokens_per_example * model.width

    def encode(self, text: str) -> list[int]:
        """A token is a byte."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < BYTES).decode(errors="replace")
