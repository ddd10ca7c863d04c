"""The task of predicting the next token."""

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
    """Predicts each next token. `batch` is {"tokens": int32[B, T + 1], "weight": float32[B]}: each of the first T tokens
    predicts its successor.

    A leaf `token_weight` (float32[B, T + 1], such as the mask of padding) says how much each token counts as a target.
    """

    def __init__(self, arguments: TrainingArguments):
        self.arguments = arguments

    def build_model(self, rngs: nnx.Rngs) -> nnx.Module:
        return Llama(self.arguments.model, rngs=rngs, dtype=self.arguments.dtype, param_dtype=self.arguments.param_dtype)

    def loss(self, model: nnx.Module, batch: Batch) -> Loss:
        # [B, T] each: the targets are the inputs, one place further on.
        tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        logits = model(tokens)
        # [B, T]: rows of padding have weight 0, so none of their tokens is a target.
        weight = jnp.broadcast_to(batch["weight"][:, None], targets.shape)
        if "token_weight" in batch:
            # A token's weight counts where it is the target, which the first token never is.
            weight = weight * batch["token_weight"][:, 1:]
        config = self.arguments.loss
        if config.ignore_index is not None:
            weight = jnp.where(targets == config.ignore_index, 0.0, weight)
        # [B, T]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        if config.label_smoothing:
            uniform = jax.nn.logsumexp(logits, -1) - jnp.mean(logits, -1)
            losses = (1 - config.label_smoothing) * losses + config.label_smoothing * uniform
        hits = (jnp.argmax(logits, -1) == targets).astype(jnp.float32)
        num_targets = jnp.sum(weight)
        parts = {"accuracy": (jnp.sum(hits * weight), num_targets)}
        if z_loss_weight := config.z_loss_weight:
            # The z-loss of PaLM (Chowdhery et al., 2022, section 5): it keeps log Z near 0, and so the logits
            # from drifting.
            z_losses = z_loss_weight * jax.nn.logsumexp(logits, -1) ** 2
            losses += z_losses
            parts["z_loss"] = (jnp.sum(z_losses * weight), num_targets)
        # [B] each.
        rows = (jnp.sum(losses * weight, axis=1), jnp.sum(weight, axis=1))
        return Loss(jnp.sum(losses * weight), num_targets, parts, rows=rows)

    @property
    def tokens_per_example(self) -> int:
        return self.arguments.data.sequence_length

    def flops_per_token(self, num_parameters: int) -> float:
        """Returns 6 N + 6 L T D: each parameter multiplies and adds once forward and twice backward; causal attention attends
        to T / 2 tokens on average, with two products of width D (Chowdhery et al., 2022, appendix B, halved for causality). A
        table that is only looked up multiplies nothing."""
        model = self.arguments.model
        looked_up = 0 if model.tie_embeddings else model.vocab_size * model.width
        return 6.0 * (num_parameters - looked_up) + 6.0 * model.num_layers * self.tokens_per_example * model.width

    def encode(self, text: str) -> list[int]:
        """Returns the bytes of the text: a token is a byte."""
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        # The vocabulary may be larger than the bytes: such tokens have no text.
        return bytes(token for token in tokens if token < BYTES).decode(errors="replace")
