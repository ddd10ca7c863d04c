"""Trains in this one process, without Ray: `python -m trainers.run CONFIG`.

Reads the same files as the orchestrator; the sections that concern machines have no meaning here. Ctrl-C saves and stops.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
from pathlib import Path
from typing import Any

import yaml

from trainers.config.arguments import ORCHESTRATOR_SECTIONS, TrainingArguments, from_dict, load_object
from trainers.config.masking import masked
from trainers.errors import TransientError, UsageError
from trainers.recorders.dispatch import Recorders
from trainers.recorders.recorder import About

DEFAULT_ARGUMENTS = "trainers.config.arguments:TrainingArguments"
CONSOLE = "trainers.recorders.console:Console"


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        arguments = read(sys.argv[1])
        feeds = open_recorders(arguments)
        try:
            trainer = build(arguments, feeds)
            trainer.train()
        finally:
            feeds.close()
    except (UsageError, TransientError, ValueError) as error:
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


def open_recorders(arguments: TrainingArguments) -> Recorders:
    folder = str(Path(arguments.storage, arguments.name).absolute())
    about = About(arguments.name, folder, masked(dataclasses.asdict(arguments)))
    return Recorders((CONSOLE, *arguments.recorders), about, lambda message: print(message, flush=True))


def build(arguments: TrainingArguments, feeds: Recorders) -> Any:
    from trainers import runtime

    host = runtime.Runtime(lambda event: show(event, feeds))
    runtime.install(host)
    signal.signal(signal.SIGINT, lambda number, frame: host.request_stop("interrupted"))
    signal.signal(signal.SIGTERM, lambda number, frame: host.request_stop("terminated"))
    return load_object(arguments.trainer)(arguments, *load_object(arguments.data.dataset)(arguments))


def show(event: dict[str, Any], feeds: Recorders) -> None:
    if event["ev"] == "metrics":
        feeds.record(event["step"], event["metrics"], event.get("distributions"))
    elif event["ev"] in ("note", "preview", "saved", "save_failed", "restored", "anomaly", "profile"):
        print({key: value for key, value in event.items() if key != "t"}, flush=True)


if __name__ == "__main__":
    sys.exit(main())
