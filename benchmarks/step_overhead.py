"""What the training loop costs: its steps against a bare loop over the same compiled program, in one process, interleaved.

    python -m benchmarks.step_overhead [CONFIG] [--rounds 7] [--steps 40]

The bare loop calls the very program that `trainers` compiled, on batches that lie ready, and fetches nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
import time
from typing import Any

import jax

from gangway.user_modules import load_object
from trainers import runtime
from trainers.base import BaseTrainer
from trainers.callbacks import Callback, RunInfo
from trainers.config import CheckpointConfig, EvaluationConfig
from trainers.loop.inflight import Flags
from trainers.loop.saver import TimeUsed
from trainers.settings import read
from trainers.trainer import build as parts_of
from trainers.trainer.beginnings import beginning
from trainers.trainer.training_run import TrainingRun

WARM_UP_STEPS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", nargs="?", default="configs/quickstart.yaml")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    runtime.install(runtime.Runtime(lambda event: None))
    with tempfile.TemporaryDirectory() as storage:
        trainer = build(options.config, storage)
        state = trainer.train()  # compiles; the rounds below go on from its state
        runtime.install(runtime.Runtime(lambda event: None))
        parts_of.build(trainer)
        ratios = []
        for number in range(options.rounds):
            state, bare = bare_loop(trainer, state, options.steps)
            state, ours = our_loop(trainer, state, options.steps)
            ratios.append(ours / bare)
            print(
                f"round {number}: bare {bare:,.0f} tokens/s, trainers {ours:,.0f} tokens/s, ratio {ours / bare:.3f}", flush=True
            )
    print(f"median ratio {statistics.median(ratios):.3f}")


def build(config: str, storage: str) -> BaseTrainer:
    arguments = dataclasses.replace(
        read(config),
        storage=storage,
        evaluation=EvaluationConfig(max_batches=1),
        checkpoint=CheckpointConfig(save_at_end=False),
    )
    return BaseTrainer(arguments, *load_object(arguments.data.dataset)(arguments), callbacks=(StopAfterWarmUp(),))


class StopAfterWarmUp(Callback):
    def on_step_end(self, state: RunInfo, **kwargs: Any) -> None:
        if state.global_step == WARM_UP_STEPS:
            runtime.current().request_stop("requested")


def our_loop(trainer: BaseTrainer, state: Any, steps: int) -> tuple[Any, float]:
    """Everything the loop does: reading, requests, publishing every few steps."""
    first = int(state.batch_index)
    run = TrainingRun(trainer, parts_of.build(trainer), TimeUsed())
    loop = run.build_loop(run.build_resume(beginning(trainer, state=state)), first)
    requests = loop.agreement.requests
    requests.limits = dataclasses.replace(requests.limits, max_steps=first + steps)
    loop.resumed_step = -1  # the first step of a generation is waited for; these are not the first
    start = time.perf_counter()
    state, _ = loop.run(state)
    jax.block_until_ready(state)
    return state, rate(trainer, steps, time.perf_counter() - start)


def bare_loop(trainer: BaseTrainer, state: Any, steps: int) -> tuple[Any, float]:
    program = trainer.functions.train_step_fn.compiled
    batches = [trainer.dataloaders.dataloader_train.batch(k) for k in range(4)]
    parts = parts_of.build(trainer)
    metric_sums, flags = parts.placement.zeros(parts.steps.step_layout), Flags(parts.placement.mesh).array()
    jax.block_until_ready(batches)
    start = time.perf_counter()
    for k in range(steps):
        state, metric_sums, *_ = program(state, metric_sums, batches[k % len(batches)], flags)
    jax.block_until_ready(state)
    return state, rate(trainer, steps, time.perf_counter() - start)


def rate(trainer: BaseTrainer, steps: int, seconds: float) -> float:
    return steps * trainer.arguments.global_batch_size * trainer.arguments.data.sequence_length / seconds


if __name__ == "__main__":
    main()
