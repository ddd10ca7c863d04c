"""What all that observes a run costs: every callback, recorder and metric at a publish interval of 10 against nothing of it.

    python -m benchmarks.everything_on [CONFIG] [--rounds 7] [--steps 40]

In one process, interleaved: `off` publishes nothing, `on` publishes every 10 steps to all recorders, with callbacks at every
event and a norm of every parameter; `distributions` measures all parameters and gradients besides, each 20 steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.step_overhead import StopAfterWarmUp, our_loop
from gangway.user_modules import load_object
from trainers import runtime
from trainers.base import BaseTrainer
from trainers.callbacks import Callback
from trainers.config import CheckpointConfig, DistributionConfig, EvaluationConfig, MetricsConfig
from trainers.config.arguments import TrainingArguments
from trainers.recorders.dispatch import Recorders
from trainers.recorders.recorder import About
from trainers.settings import read
from trainers.trainer.build import build

PUBLISH_EVERY_STEPS = 10
NEVER = 1_000_000
RECORDERS = ("jsonl", "tensorboard")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("config", nargs="?", default="configs/quickstart.yaml")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as storage:
        kinds = {name: Kind(name, settings, storage) for name, settings in variants(options.config, storage).items()}
        rates: dict[str, list[float]] = {name: [] for name in kinds}
        for number in range(options.rounds):
            # The one that comes first in a round is another each time: what a machine does besides is shared out.
            order = [*kinds][number % len(kinds) :] + [*kinds][: number % len(kinds)]
            for name in order:
                rates[name].append(kinds[name].round(options.steps))
            shown = ", ".join(f"{name} {rates[name][-1]:,.0f}" for name in kinds)
            print(f"round {number}: tokens/s {shown}", flush=True)
        for kind in kinds.values():
            kind.close()
    for name in kinds:
        ratios = [own / off for own, off in zip(rates[name], rates["off"], strict=True)]
        print(f"{name}: median {statistics.median(ratios):.3f} of off")


def variants(config: str, storage: str) -> dict[str, TrainingArguments]:
    off = dataclasses.replace(
        read(config),
        storage=storage,
        evaluation=EvaluationConfig(max_batches=1),
        checkpoint=CheckpointConfig(save_at_end=False),
        publish_every_steps=NEVER,
    )
    norms = MetricsConfig(per_parameter_grad_norm=True, peak_flops_per_s=1e12)
    on = dataclasses.replace(off, publish_every_steps=PUBLISH_EVERY_STEPS, metrics=norms, recorders=RECORDERS)
    shapes = dataclasses.replace(on, distributions=DistributionConfig(pattern=".", every_steps=2 * PUBLISH_EVERY_STEPS))
    return {"off": off, "on": on, "distributions": shapes}


class Looks(Callback):
    """Takes part in every event, and keeps what it is given."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_step_begin(self, state: Any, **kwargs: Any) -> None:
        self.seen |= kwargs

    def on_step_end(self, state: Any, **kwargs: Any) -> None:
        self.seen |= kwargs

    def on_publish(self, state: Any, **kwargs: Any) -> None:
        self.seen |= kwargs


class Kind:
    """A trainer, compiled and warm, with what its process would have."""

    def __init__(self, name: str, arguments: TrainingArguments, storage: str):
        arguments = dataclasses.replace(arguments, name=name)
        about = About(name, str(Path(storage, name)), {})
        self.recorders = Recorders(arguments.recorders, about, lambda message: print(message, flush=True))
        callbacks: tuple[Callback, ...] = (Looks(),) if arguments.recorders else ()
        datasets = load_object(arguments.data.dataset)(arguments)
        self.trainer = BaseTrainer(arguments, *datasets, callbacks=(StopAfterWarmUp(), *callbacks))
        self._install()
        self.state = self.trainer.train()
        self._install()  # anew: this one was asked to stop
        build(self.trainer)

    def round(self, steps: int) -> float:
        """Tokens per second."""
        self._install()
        self.state, rate = our_loop(self.trainer, self.state, steps)
        return rate

    def close(self) -> None:
        self.recorders.close()

    def _install(self) -> None:
        runtime.install(runtime.Runtime(self._take))

    def _take(self, event: dict[str, Any]) -> None:
        if event["ev"] == "metrics":
            self.recorders.record(event["step"], event["metrics"], event.get("distributions"))


if __name__ == "__main__":
    main()
