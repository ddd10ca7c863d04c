"""Tokens/s of `trainers` beside a hand-written JAX loop of the same model in its best form, in one process, interleaved.

    python -m benchmarks.handwritten [--rounds 3] [--steps 12]

The hand-written loop has flat activations [B * T, D], unrolled layers, optax's AdamW with clipping, a donated state, one step
in flight, and batches that lie ready. It has no evaluation, no checkpoint, no metrics but the loss, and no check of anything.
"""

from __future__ import annotations

import argparse
import collections
import statistics
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.step_overhead import WARM_UP_STEPS, StopAfterWarmUp, our_loop
from trainers import runtime
from trainers.base import BaseTrainer
from trainers.config import CheckpointConfig, DataConfig, EvaluationConfig, ModelConfig, OptimizerConfig
from trainers.config.arguments import TrainingArguments, load_object
from trainers.trainer.assembly import assemble

MODEL = ModelConfig(vocab_size=8192, width=384, num_layers=6, num_heads=6, num_kv_heads=6, mlp_width=1024, tie_embeddings=False)
BATCH, TIME = 8, 256
LEARNING_RATE, BETAS, EPS, WEIGHT_DECAY, MAX_NORM = 3e-4, (0.9, 0.95), 1e-8, 0.1, 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    runtime.install(runtime.Runtime(lambda event: None))
    with tempfile.TemporaryDirectory() as storage:
        trainer = build(storage)
        state = trainer.train()
        runtime.install(runtime.Runtime(lambda event: None))
        assemble(trainer)
        params = jax.tree.map(jnp.copy, state.params)
        num_parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
        batches = [trainer.dataloaders.dataloader_train.batch(k)["tokens"][0] for k in range(4)]
        written = HandWritten(params, batches)
        written.run(WARM_UP_STEPS)
        print(f"{num_parameters / 1e6:.1f} M parameters, {BATCH} x {TIME} tokens a step", flush=True)
        rounds = []
        for number in range(options.rounds):
            theirs = written.run(options.steps)
            state, ours = our_loop(trainer, state, options.steps)
            rounds.append(ours / theirs)
            print(
                f"round {number}: by hand {theirs:,.0f} tokens/s, trainers {ours:,.0f} tokens/s, ratio {rounds[-1]:.3f}",
                flush=True,
            )
    print(f"median ratio {statistics.median(rounds):.3f}")


def build(storage: str) -> BaseTrainer:
    arguments = TrainingArguments(
        name="handwritten",
        storage=storage,
        global_batch_size=BATCH,
        max_num_steps=100_000,
        publish_every_steps=10,
        model=MODEL,
        data=DataConfig(paths=("python-stdlib",), sequence_length=TIME),
        optimizer=OptimizerConfig(
            learning_rate=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_NORM
        ),
        evaluation=EvaluationConfig(max_batches=1),
        checkpoint=CheckpointConfig(save_at_end=False),
    )
    return BaseTrainer(arguments, *load_object(arguments.data.dataset)(arguments), callbacks=(StopAfterWarmUp(),))


class HandWritten:
    def __init__(self, params: Any, batches: list[jax.Array]):
        self._optimizer = optax.chain(
            optax.clip_by_global_norm(MAX_NORM),
            optax.adamw(
                LEARNING_RATE,
                *BETAS,
                EPS,
                weight_decay=WEIGHT_DECAY,
                mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
            ),
        )
        # A layer's weights are arrays of their own: none is cut out of a stack, and no gradient is put back into one.
        flat = {name: params[name] for name in ("embed", "unembed", "final_norm")}
        layers = [{name: stack[i] for name, stack in params["layers"].items()} for i in range(MODEL.num_layers)]
        self._params = {**flat, "layers": layers}
        self._opt_state = self._optimizer.init(self._params)
        self._batches = batches
        self._step = jax.jit(self._train_step, donate_argnums=(0, 1))

    def run(self, steps: int) -> float:
        """Returns tokens/s."""
        in_flight: collections.deque[jax.Array] = collections.deque()
        start = time.perf_counter()
        for k in range(steps):
            self._params, self._opt_state, loss = self._step(self._params, self._opt_state, self._batches[k % len(self._batches)])
            in_flight.append(loss)
            if len(in_flight) > 1:
                in_flight.popleft().block_until_ready()
        jax.block_until_ready((self._params, self._opt_state))
        return steps * BATCH * TIME / (time.perf_counter() - start)

    def _train_step(self, params: Any, opt_state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(mean_loss)(params, tokens)
        updates, opt_state = self._optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss


def mean_loss(params: Any, tokens: jax.Array) -> jax.Array:
    inputs, targets = tokens[:, :-1], tokens[:, 1:].reshape(-1)
    x = params["embed"][inputs].reshape(-1, MODEL.width)
    cos, sin = angles()
    for layer in params["layers"]:
        x = x + attention(norm(x, layer["attention_norm"]), layer, cos, sin)
        y = norm(x, layer["mlp_norm"])
        x = x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]
    logits = norm(x, params["final_norm"]) @ params["unembed"]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[:, None], -1)[:, 0])


def attention(x: jax.Array, layer: Any, cos: jax.Array, sin: jax.Array) -> jax.Array:
    def heads(name: str) -> jax.Array:
        return (x @ layer[name]).reshape(BATCH, TIME, MODEL.num_heads, -1)

    query, key = rotate(heads("query"), cos, sin), rotate(heads("key"), cos, sin)
    return jax.nn.dot_product_attention(query, key, heads("value"), is_causal=True).reshape(x.shape) @ layer["out"]


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + MODEL.norm_eps) * scale


def angles() -> tuple[jax.Array, jax.Array]:
    channels = MODEL.width // MODEL.num_heads
    frequencies = MODEL.rope_theta ** (-jnp.arange(0, channels, 2) / channels)
    turned = jnp.arange(TIME)[:, None] * frequencies
    return jnp.cos(turned)[:, None], jnp.sin(turned)[:, None]


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    first, second = jnp.split(x, 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


if __name__ == "__main__":
    main()
