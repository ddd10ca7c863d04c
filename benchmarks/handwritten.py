"""Tokens/s of `trainers` beside a hand-written JAX loop of the same model in its best form, in one process, interleaved.

    python -m benchmarks.handwritten [--rounds 3] [--steps 12]

The hand-written loop is that of `benchmarks.by_hand`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile

import jax
import jax.numpy as jnp

from benchmarks import by_hand
from benchmarks.by_hand import BATCH, BETAS, EPS, LEARNING_RATE, MAX_NORM, TIME, WEIGHT_DECAY, HandWritten
from benchmarks.step_overhead import WARM_UP_STEPS, StopAfterWarmUp, our_loop
from trainers import runtime
from trainers.base import BaseTrainer
from trainers.config import CheckpointConfig, DataConfig, EvaluationConfig, ModelConfig, OptimizerConfig
from trainers.config.arguments import TrainingArguments, load_object
from trainers.trainer.assembly import assemble

MODEL = ModelConfig(**by_hand.model_settings())


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
        # A layer's weights are arrays of their own: none is cut out of a stack, and no gradient is put back into one.
        flat = {name: params[name] for name in ("embed", "unembed", "final_norm")}
        layers = [{name: stack[i] for name, stack in params["layers"].items()} for i in range(MODEL.num_layers)]
        written = HandWritten({**flat, "layers": layers}, batches)
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


if __name__ == "__main__":
    main()
