"""Predicting the next token."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from trainers import rng
from trainers.arguments import TrainingArguments
from trainers.errors import UsageError
from trainers.models.llama import Llama
from trainers.protocol import Batch, Loss


class CausalLMTask:
    """`batch` is {"tokens": int32[B, T + 1], "weight": float32[B]}: each of the first T tokens predicts its successor."""

    def __init__(self, arguments: TrainingArguments):
        self.arguments = arguments

    def build_model(self, rngs: nnx.Rngs) -> nnx.Module:
        return Llama(self.arguments.model, rngs=rngs, dtype=self.arguments.dtype, param_dtype=self.arguments.param_dtype)

    def loss(self, model: nnx.Module, batch: Batch) -> Loss:
        tokens, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
        logits = model(tokens)
        weight = jnp.broadcast_to(batch["weight"][:, None], targets.shape)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        hits = (jnp.argmax(logits, -1) == targets).astype(jnp.float32)
        num_targets = jnp.sum(weight)
        return Loss(jnp.sum(losses * weight), num_targets, {"accuracy": (jnp.sum(hits * weight), num_targets)})

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

    def sample(self, model: nnx.Module, prompt: str, num_tokens: int, temperature: float, seed: int) -> str:
        """`prompt` continued by `num_tokens` bytes. All hosts must call this; all get the same text."""
        return generate(model, prompt.encode(), num_tokens, temperature, seed, self.tokens_per_example).decode(errors="replace")


def generate(model: nnx.Module, prompt: bytes, num_tokens: int, temperature: float, seed: int, window: int) -> bytes:
    """One token after another, each from the last `window` tokens; temperature 0 takes the likeliest."""
    if not prompt:
        raise UsageError("sample.prompt is empty: expected at least one character to continue from")
    graph, state = nnx.split(model)
    # On the host all along: every process draws the same numbers, and the batch is one row that every device computes.
    keep = np.frombuffer(prompt, np.uint8)[-window:]
    tokens = np.zeros(window, np.int32)
    tokens[: len(keep)] = keep
    new = _extend(graph, state, tokens, np.int32(len(keep)), np.float32(temperature), np.uint32(seed), num_tokens=num_tokens)
    return prompt + bytes(np.asarray(new).astype(np.uint8))


@partial(jax.jit, static_argnames=("graph", "num_tokens"))
def _extend(
    graph: Any, state: Any, tokens: jax.Array, length: jax.Array, temperature: jax.Array, seed: jax.Array, *, num_tokens: int
) -> jax.Array:
    """`num_tokens` tokens that follow the first `length` of `tokens` (the window, filled up with zeros)."""
    model, window = nnx.merge(graph, state), tokens.shape[0]

    def one(carry: tuple[jax.Array, jax.Array], i: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        tokens, length = carry
        logits = model(tokens[None])[0, length - 1]
        # The likeliest after adding Gumbel noise is a draw from softmax(logits / temperature) (Gumbel 1954).
        noise = jax.random.gumbel(rng.key(seed, "sample", i), logits.shape)
        token = jnp.argmax(logits + temperature * noise).astype(jnp.int32)
        full = length == window
        tokens = jnp.where(full, jnp.roll(tokens, -1), tokens)
        tokens = tokens.at[jnp.where(full, window - 1, length)].set(token)
        return (tokens, jnp.minimum(length + 1, window)), token

    return jax.lax.scan(one, (tokens, length), jnp.arange(num_tokens))[1]
