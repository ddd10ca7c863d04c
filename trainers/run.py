"""Trains in this one process, without Ray: `python -m trainers.run CONFIG`.

Reads the same files as the orchestrator; the sections that concern machines have no meaning here. Ctrl-C saves and stops.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from trainers.checkpoint import going_on
from trainers.config.arguments import ORCHESTRATOR_SECTIONS, TrainingArguments, from_dict, load_object
from trainers.config.masking import masked
from trainers.errors import TransientError, UsageError
from trainers.models.hf.pretrained import resolved
from trainers.recorders.dispatch import Recorders
from trainers.recorders.recorder import About
from trainers.runtime.events import Event

DEFAULT_ARGUMENTS = "trainers.config.arguments:TrainingArguments"
CONSOLE = "trainers.recorders.console:Console"


def main() -> int:
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(__doc__)
        return 0
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        arguments = read(sys.argv[1])
        recorders = open_recorders(arguments)
        try:
            trainer = build(arguments, recorders)
            for line in going_on.of_run(os.path.join(arguments.storage, arguments.name), arguments):
                print(line, flush=True)
            trainer.train()
        finally:
            # After an error too: what was published before it is recorded.
            recorders.close()
    except (UsageError, TransientError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    output = trainer.output
    print(f"{output.stop_reason}: {output.metrics}")
    return 0


def read(path: str, overrides: Sequence[str] = ()) -> TrainingArguments:
    """Returns the arguments in a file, changed by `key=value`. Raises UsageError or ValueError."""
    try:
        settings = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise UsageError(f"{path}: expected keys and values, such as those of configs/tiny.yaml")
    for item in overrides:
        override(settings, item)
    settings.setdefault("name", Path(path).stem)
    cls = load_object(settings.pop("arguments", DEFAULT_ARGUMENTS))
    return resolved(from_dict(cls, {key: value for key, value in settings.items() if key not in ORCHESTRATOR_SECTIONS}))


def override(settings: dict[str, Any], item: str) -> None:
    """Sets what `section.key=value` says; the value is YAML. Raises UsageError."""
    key, equals, text = item.partition("=")
    *sections, name = key.split(".")
    if not equals or not all((*sections, name)):
        raise UsageError(f"{item!r}: expected key=value, such as evaluation.max_batches=100")
    within = settings
    for section in sections:
        within[section] = within.get(section) or {}
        within = within[section]
        if not isinstance(within, dict):
            raise UsageError(f"{item!r}: {section} is no section, it is {within!r}")
    try:
        within[name] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"{item!r}: the value is no YAML: {error}") from error


def open_recorders(arguments: TrainingArguments) -> Recorders:
    folder = str(Path(arguments.storage, arguments.name).absolute())
    about = About(arguments.name, folder, masked(dataclasses.asdict(arguments)))
    names, folders = (CONSOLE, *arguments.recorders), arguments.recorder_folders
    return Recorders(names, about, lambda message: print(message, flush=True), folders=folders)


def build(arguments: TrainingArguments, recorders: Recorders) -> Any:
    from trainers import runtime

    host = runtime.Runtime(lambda event: show(event, recorders))
    runtime.install(host)
    # The loop then stops between two steps, with the state saved.
    signal.signal(signal.SIGINT, lambda number, frame: host.request_stop("interrupted"))
    signal.signal(signal.SIGTERM, lambda number, frame: host.request_stop("terminated"))
    return load_object(arguments.trainer)(arguments, *load_object(arguments.data.dataset)(arguments))


def show(event: Event, recorders: Recorders) -> None:
    if event["ev"] == "metrics":
        recorders.record(event["step"], event["metrics"], event.get("distributions"))
    elif event["ev"] in ("note", "preview", "evaluating", "saved", "save_failed", "restored", "anomaly", "profile"):
        print({key: value for key, value in event.items() if key != "t"}, flush=True)


if __name__ == "__main__":
    sys.exit(main())
