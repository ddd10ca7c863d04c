"""Trains in this one process, without Ray.

    python -m trainers.run CONFIG [key=value ...]

CONFIG is a file as the orchestrator reads it; the sections that concern machines have no meaning here. Overrides are as there,
such as `max_num_steps=100` or `optimizer.learning_rate=1e-4`. Ctrl-C saves and stops.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from trainers.checkpoint import going_on
from trainers.config.arguments import ORCHESTRATOR_SECTIONS, TrainingArguments, from_dict, load_object
from trainers.config.masking import masked
from trainers.config.program import program
from trainers.errors import TransientError, UsageError, user_frame
from trainers.models.hf.pretrained import resolved
from trainers.recorders.dispatch import Recorders
from trainers.recorders.recorder import About
from trainers.runtime.events import Event

if TYPE_CHECKING:  # it imports JAX, which the checks of a configuration do without
    from trainers.protocol import TrainerOutput

DEFAULT_ARGUMENTS = "trainers.config.arguments:TrainingArguments"
CONSOLE = "trainers.recorders.console:Console"


def main() -> int:
    given = sys.argv[1:]
    if given in (["-h"], ["--help"]):
        print(usage())
        return 0
    if not given or given[0].startswith("-") or "=" in given[0] or not all("=" in item for item in given[1:]):
        print(usage(), file=sys.stderr)
        return 2
    try:
        arguments = read(given[0], given[1:])
        recorders = open_recorders(arguments)
        try:
            trainer = build(arguments, recorders)
            for line in going_on.of_run(os.path.join(arguments.storage, arguments.name), arguments):
                print(line, flush=True)
            trainer.train()
        finally:
            # After an error too: what was published before it is recorded.
            recorders.close()
    except Exception as error:  # the command's boundary: told, with where it arose in the user's code
        return failed(error)
    print(result(trainer.output))
    return 0


def usage() -> str:
    return str(__doc__).replace("python -m trainers.run", program("trainers.run"))


def failed(error: Exception) -> int:
    """Tells an error. Returns the exit status: 2 for one that explains itself, 1 for one that needs its traceback."""
    frame = user_frame(error)
    is_explained = isinstance(error, UsageError | TransientError) or (isinstance(error, ValueError) and not frame)
    if not is_explained:
        traceback.print_exc()
    what = f"error: {error}" if is_explained else f"error: {type(error).__name__}: {error}"
    print(what + (f"\nin your code: {frame}" if frame else ""), file=sys.stderr)
    return 2 if is_explained else 1


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
    for line in lines(event):
        print(line, flush=True)


def lines(event: Event) -> list[str]:
    """Returns what a user reads of an event; of metrics the recorders tell."""
    found: list[str] = []
    match event["ev"]:
        case "note":
            found = [event["message"]]
        case "preview":
            found = [f"step {event['step']}  {shown['prompt']!r} -> {shown['text']!r}" for shown in event["previews"]]
        case "saved":
            found = [f"saved step {event['step']} in {event['path']}"]
        case "save_failed":
            found = [f"the checkpoint of step {event['step']} failed, training goes on and tries again: {event['error']}"]
        case "restored":
            found = [f"checkpoint {bad['step']} was not used: {bad['why']}" for bad in event["skipped"]]
            found.append(f"the state of step {event['step']} is restored")
        case "anomaly":
            back = "" if event["restored_step"] is None else f", back to step {event['restored_step']}"
            found = [f"{event['kind']} in batch {event['batch_index']} (loss {event['loss']}): {event['action']}{back}"]
        case "profile":
            found = [f"no profile: {event['problem']}" if event["problem"] else f"a profile is in {event['path']}"]
        case "evaluating" if event["done"] == event["total"]:
            found = [f"evaluated {event['unit']}: {event['total']} batches"]
    return found


def result(output: TrainerOutput) -> str:
    """Returns the line at the end."""
    metrics = output.metrics
    numbers = {"loss": metrics.get("train_loss"), **metrics.get("evaluation", {})}
    # A trainer of another base says what it likes, or nothing.
    steps = [f"{metrics['steps']} steps"] if "steps" in metrics else []
    parts = steps + [f"{name} {value:.4g}" for name, value in numbers.items() if value is not None]
    saved = f"; saved in {output.checkpoint_path}" if output.checkpoint_path else ""
    return f"ended ({output.stop_reason})" + (f": {', '.join(parts)}" if parts else "") + saved


if __name__ == "__main__":
    sys.exit(main())
