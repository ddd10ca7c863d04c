"""Plain lines on standard output, for `python -m trainers.run`."""

from __future__ import annotations

from collections.abc import Mapping

from trainers.recorders.recorder import About, Distribution

SHOWN = ("loss", "eval_loss", "accuracy", "learning_rate", "grad_norm", "tokens_per_s", "mfu")


class Console:
    def __init__(self, about: About): ...

    def record(self, step: int, metrics: Mapping[str, float], distributions: Mapping[str, Distribution]) -> None:
        numbers = "  ".join(f"{name} {metrics[name]:.4g}" for name in SHOWN if name in metrics)
        print(f"step {step:>6}  {numbers}", flush=True)

    def close(self) -> None: ...
