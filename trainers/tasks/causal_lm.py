"""The task of predicting the next token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx

from trainers.config.arguments import TrainingArguments
from trainers.models.llama import Llama
from trainers.protocol import Batch, Loss
from trainers.tasks.cross_entropy import TokenLosses, from_hidden, from_logits

BYTES = 256


@runtime_checkable
class HasHidden(Protocol):
    """A model whose logits need not all be computed at once. `trainers.models.llama.Llama` is one."""

    def hidden_and_table(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns (x [B, T, D], table [D, V]) for int32 tokens [B, T]: the logits are x @ table."""


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
        config = self.arguments.loss
        losses, hits, z_losses = self._token_losses(model, tokens, targets)
        # [B, T]: rows of padding have weight 0, so none of their tokens is a target.
        weight = jnp.broadcast_to(batch["weight"][:, None], targets.shape)
        if "token_weight" in batch:
            # A token's weight counts where it is the target, which the first token never is.
            weight = weight * batch["token_weight"][:, 1:]
        if config.ignore_index is not None:
            weight = jnp.where(targets == config.ignore_index, 0.0, weight)
        num_targets = jnp.sum(weight)
        parts = {"accuracy": (jnp.sum(hits * weight), num_targets)}
        if config.z_loss_weight:
            parts["z_loss"] = (jnp.sum(z_losses * weight), num_targets)
        # [B] each.
        rows = (jnp.sum(losses * weight, axis=1), jnp.sum(weight, axis=1))
        return Loss(jnp.sum(losses * weight), num_targets, parts, rows=rows)

    def _token_losses(self, model: nnx.Module, tokens: jax.Array, targets: jax.Array) -> TokenLosses:
        if isinstance(model, HasHidden):
            return from_hidden(*model.hidden_and_table(tokens), targets, self.arguments.loss)
        # A model of a subclass may have nothing but its logits.
        return from_logits(model(tokens), targets, self.arguments.loss)

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
