"""The held-out loss of small models on Tiny Shakespeare, with the settings of nanoGPT's example for a CPU: 4 layers, 4 heads,
width 128, 64 characters, 12 rows, 2,000 steps, no dropout.

    python -m benchmarks.shakespeare FILE [--seeds 1 2 3]

`gpt2` begins as GPT-2 does, with all matrices drawn at 0.02, and those into the residual stream at less by the square root of
their number (Radford et al., 2019). `gpt2, own start` and `llama` begin as models here do: each matrix by the root of its inputs.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import jax
from flax import nnx

from gangway.user_modules import load_object
from trainers import runtime
from trainers.base import BaseTrainer
from trainers.config.arguments import TrainingArguments, from_dict
from trainers.tasks.causal_lm import CausalLMTask

STEPS, EVERY = 2000, 250
SIZES = {"vocab_size": 256, "width": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 4}
GPT2 = {**SIZES, "family": "gpt2", "mlp_width": 512, "num_positions": 64}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"model": GPT2, "task": "benchmarks.shakespeare:StartOfGPT2"},
    "gpt2, own start": {"model": GPT2},
    "llama": {"model": {**SIZES, "family": "llama", "mlp_width": 344}},
}
SCALE = 0.02


class StartOfGPT2(CausalLMTask):
    def build_model(self, rngs: nnx.Rngs) -> nnx.Module:
        model: Any = super().build_model(rngs)
        for name in ("query", "key", "value", "out", "up", "down"):
            matrix = getattr(model.layers, name)
            matrix.set_value(matrix[...] * (SCALE * matrix.shape[1] ** 0.5))  # drawn at 1 / sqrt(inputs)
        return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    for kind, settings in KINDS.items():
        runs = [trained(options.file, seed, options.steps, settings) for seed in options.seeds]
        curve = {step: statistics.mean(run[step] for run, _ in runs) for step in runs[0][0]}
        told = ", ".join(f"{step}: {loss:.3f}" for step, loss in curve.items())
        seconds = statistics.median(seconds for _, seconds in runs)
        last = [f"{run[max(run)]:.3f}" for run, _ in runs]
        print(f"{kind}: {curve[max(curve)]:.3f} (seeds {', '.join(last)}), {seconds:.0f} s; {told}", flush=True)


def trained(file: str, seed: int, steps: int, settings: dict[str, Any]) -> tuple[dict[int, float], float]:
    """Returns the held-out loss by step, over the whole split, and the seconds that training took."""
    losses: dict[int, float] = {}

    def hear(event: Any) -> None:
        if event["ev"] == "metrics" and "eval_loss" in event["metrics"]:
            losses[event["step"]] = event["metrics"]["eval_loss"]

    runtime.install(runtime.Runtime(hear))
    with tempfile.TemporaryDirectory() as storage:
        arguments = from_dict(TrainingArguments, arguments_of(file, seed, steps, storage) | settings)
        trainer = BaseTrainer(arguments, *load_object(arguments.data.dataset)(arguments))
        began_s = time.monotonic()
        trainer.train()
    jax.clear_caches()
    return losses, time.monotonic() - began_s


def arguments_of(file: str, seed: int, steps: int, storage: str) -> dict[str, Any]:
    return {
        "name": "shakespeare",
        "storage": storage,
        "seed": seed,
        "global_batch_size": 12,
        "max_num_steps": steps,
        "publish_every_steps": 50,
        "data": {"paths": [file], "format": "text", "sequence_length": 64, "eval_fraction": 0.1, "tokenizer": "bytes"},
        "optimizer": {
            "learning_rate": 1e-3,
            "betas": [0.9, 0.99],
            "schedule": {"name": "cosine", "warmup_steps": min(100, steps // 10), "final_factor": 0.1},
        },
        "evaluation": {"every_steps": min(EVERY, steps)},
        "checkpoint": {"save_at_end": False},
    }


if __name__ == "__main__":
    main()
