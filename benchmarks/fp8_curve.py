"""The loss of a small Llama whose linear layers multiply in 8 bits (`model.fp8: current`) beside those of bfloat16 and float32:
the same parameters, data and steps. The held-out loss of all three is that of the weights as they are.

    python -m benchmarks.fp8_curve [--steps 400] [--seeds 1 2]

A CPU has no products of 8 bits: it rounds, and multiplies in a wider type. So the losses mean something here, and the seconds do
not.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import jax

from gangway.user_modules import load_object
from trainers import runtime
from trainers.base import BaseTrainer
from trainers.config.arguments import TrainingArguments, from_dict

EVERY = 50
MODEL = {"vocab_size": 256, "width": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "mlp_width": 384}
BETWEEN = "bfloat16"
"""What the others are compared with."""
KINDS = {"float32": ("float32", "none"), BETWEEN: ("bfloat16", "none"), "fp8": ("bfloat16", "current")}
"""`dtype` and `model.fp8`."""
LOSSES = ("loss", "eval_loss")
Curves = dict[int, dict[str, float]]
"""The published metrics by step."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args()
    for seed in options.seeds:
        runs = {kind: trained(kind, seed, options.steps) for kind in KINDS}
        curves = {kind: found for kind, (found, _) in runs.items()}
        for line in (*by_step(curves), *apart(curves)):
            print(f"seed {seed}, {line}", flush=True)
        print(f"seed {seed}: {', '.join(f'{kind} {seconds:.0f} s' for kind, (_, seconds) in runs.items())}", flush=True)


def trained(kind: str, seed: int, steps: int) -> tuple[Curves, float]:
    """Returns what was published of a training, and the seconds that it took."""
    found: Curves = {}

    def hear(event: Any) -> None:
        if event["ev"] == "metrics":
            found.setdefault(event["step"], {}).update(event["metrics"])

    runtime.install(runtime.Runtime(hear))
    with tempfile.TemporaryDirectory() as storage:
        arguments = from_dict(TrainingArguments, arguments_of(kind, seed, steps, storage))
        trainer = BaseTrainer(arguments, *load_object(arguments.data.dataset)(arguments))
        began_s = time.monotonic()
        trainer.train()
    jax.clear_caches()
    return found, time.monotonic() - began_s


def arguments_of(kind: str, seed: int, steps: int, storage: str) -> dict[str, Any]:
    dtype, fp8 = KINDS[kind]
    schedule = {"name": "cosine", "warmup_steps": min(20, steps // 10)}
    return {
        "name": "run",
        "storage": storage,
        "seed": seed,
        "global_batch_size": 16,
        "max_num_steps": steps,
        "publish_every_steps": min(EVERY, steps),
        "dtype": dtype,
        "model": {**MODEL, "fp8": fp8},
        "data": {"paths": ["python-stdlib"], "sequence_length": 64, "packing": "concat", "eval_fraction": 0.05},
        "optimizer": {"name": "adamw", "learning_rate": 2e-3, "schedule": schedule},
        "evaluation": {"every_steps": min(EVERY, steps), "max_batches": 64},
        "checkpoint": {"save_at_end": False},
        "kept_programs_gb": 0.0,
    }


def by_step(curves: dict[str, Curves]) -> list[str]:
    """Returns a line for each publish: the training loss since the one before, and the held-out loss."""

    def told(step: int, name: str) -> str:
        return " ".join([name, *(f"{curve[step][name]:.4f}" for curve in curves.values())])

    return [f"step {step}: {', '.join(told(step, name) for name in LOSSES)}" for step in sorted(curves[BETWEEN])]


def apart(curves: dict[str, Curves]) -> list[str]:
    """Returns by how much the losses differ from those of bfloat16."""
    lines = []
    for kind in KINDS.keys() - {BETWEEN}:
        for name in LOSSES:
            shares = [abs(curves[kind][step][name] / found[name] - 1) for step, found in curves[BETWEEN].items()]
            lines.append(f"{kind}: {name} differs by {statistics.median(shares):.2%} (median), {max(shares):.2%} at most")
    return sorted(lines)


if __name__ == "__main__":
    main()
