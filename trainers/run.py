"""Trains in this one process, without Ray: `python -m trainers.run CONFIG`.

Reads the same files as the orchestrator; the sections that concern machines have no meaning here. Ctrl-C saves and stops.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import yaml

from trainers.arguments import ORCHESTRATOR_SECTIONS, TrainingArguments, from_dict, load_object
from trainers.errors import UsageError

DEFAULT_ARGUMENTS = "trainers.arguments:TrainingArguments"
SHOWN = ("loss", "eval_loss", "accuracy", "learning_rate", "grad_norm", "tokens_per_s")


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        trainer = build(read(sys.argv[1]))
        trainer.train()
    except (UsageError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    output = trainer.output
    print(f"{output.stop_reason}: {output.metrics}")
    return 0


def read(path: str) -> TrainingArguments:
    try:
        settings = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise UsageError(f"{path}: expected keys and values, such as those of configs/tiny.yaml")
    settings.setdefault("name", Path(path).stem)
    cls = load_object(settings.pop("arguments", DEFAULT_ARGUMENTS))
    return from_dict(cls, {key: value for key, value in settings.items() if key not in ORCHESTRATOR_SECTIONS})


def build(arguments: TrainingArguments) -> Any:
    from trainers import runtime

    host = runtime.Runtime(show)
    runtime.install(host)
    signal.signal(signal.SIGINT, lambda number, frame: host.request_stop("interrupted"))
    signal.signal(signal.SIGTERM, lambda number, frame: host.request_stop("terminated"))
    return load_object(arguments.trainer)(arguments, *load_object(arguments.data.dataset)(arguments))


def show(event: dict[str, Any]) -> None:
    if event["ev"] == "metrics":
        numbers = "  ".join(f"{name} {event['metrics'][name]:.4g}" for name in SHOWN if name in event["metrics"])
        print(f"step {event['step']:>6}  {numbers}", flush=True)
    elif event["ev"] in ("note", "saved", "save_failed", "restored", "anomaly"):
        print({key: value for key, value in event.items() if key != "t"}, flush=True)


if __name__ == "__main__":
    sys.exit(main())
