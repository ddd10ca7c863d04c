"""Trains in this one process, without Ray.

CONFIG is a file as the orchestrator reads it. The sections that concern machines have no meaning here, but a wrong key in them
is refused; `driver.restart.retry_for_s` alone counts: so long it waits for room on the storage. Overrides are as there, such as
`max_num_steps=100` or `optimizer.learning_rate=1e-4`. Ctrl-C saves and stops; a second one ends the command at once.
Exit status: 0 training finished; 1 it failed; 2 the configuration is wrong; 3 stopped on request, state saved.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangway import program
from gangway.config import yaml_source
from gangway.config.masking import masked
from gangway.config.yaml_source import ConfigError
from gangway.errors import SaveFailedError, TransientError, UsageError, user_frame, user_traceback
from gangway.first_line import say
from gangway.stop_reason import StopReason
from gangway.storage.documents import is_url, write_text
from gangway.surroundings import allow_for_forced_devices
from gangway.user_modules import load_object
from gangway.wire.events import Event, course_left_at
from trainers.checkpoint import going_on
from trainers.config import without_effect
from trainers.config.arguments import TrainingArguments, dataset_function, recorded_arguments
from trainers.console.screens import CONSOLE_LOG, Console, LoggedConsole, added_to, make_console
from trainers.console.view import for_console
from trainers.recorders.dispatch import Recorders
from trainers.recorders.recorder import About
from trainers.settings import ARGUMENTS_CLASS, load

if TYPE_CHECKING:  # it imports JAX, which the checks of a configuration do without
    from trainers.protocol import TrainerOutput

EXIT_STOPPED = 3
CONFIG = "config.yaml"
CACHE = "~/.cache/gangway/single"
"""Where compiled programs are kept for the next launch."""


@program.command()
def main() -> int:
    options = parse(sys.argv[1:])
    began_s = time.monotonic()
    say(f"reading {options.config}", clock=True)
    keep_programs()
    allow_for_forced_devices(os.environ)
    log: Path | None = None
    try:
        settings = load(options.config, options.overrides)
        retry_for_s = getattr(settings.machines["driver"].restart, "retry_for_s", None)  # all of a driver that counts here
        log = Path(settings.training.run_folder, CONSOLE_LOG)
        output = train(settings.training, began_s, retry_for_s)
    except Exception as error:  # the command's boundary: reported, with where it arose in the user's code
        return failed(error, log)
    print(result(output))
    # All that was trained is saved then: a last save that fails raises.
    return 0 if StopReason(output.stop_reason).finished else EXIT_STOPPED


def keep_programs() -> None:
    """Lets the next launch load what this one compiles, as the processes of a job do. Must be called before JAX is imported. What
    the environment says comes first."""
    cache = os.path.expanduser(CACHE)
    os.environ.setdefault("GANGWAY_PROGRAMS", f"{cache}/programs")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", cache)
    # Without these two JAX keeps only what is large or slow to compile.
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def parse(argv: list[str]) -> argparse.Namespace:
    parser = program.parser("trainers.run", __doc__, example="config.yaml max_num_steps=100")
    parser.add_argument("config", metavar="CONFIG", help="a YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="such as optimizer.learning_rate=1e-4")
    options = parser.parse_intermixed_args(argv)
    if wrong := [word for word in options.overrides if "=" not in word] or [options.config] * ("=" in options.config):
        parser.error(f"{wrong[0]}: expected one CONFIG, and settings as key=value after it")
    return options


def train(arguments: TrainingArguments, began_s: float, retry_for_s: float | None = None) -> TrainerOutput:
    """Trains, and shows how it goes on standard output; times count from `began_s`, by the monotonic clock. `retry_for_s` is that
    of `Runtime`."""
    from trainers.data import identity  # these import JAX
    from trainers.runtime.distributed import check_platform

    log = os.path.join(arguments.run_folder, CONSOLE_LOG)
    console: Console = make_console(sys.stdout, began_s, log=log, logged=True)
    recorders: Recorders | None = None

    def on_event(event: Event) -> None:
        # Of a trainer that is only being built there are notes alone, and perhaps no run.
        show(event, recorders, console)

    def note(message: str, level: str = "info") -> None:
        console.show({"ev": "note", "message": message, "level": level})

    try:
        if (begun := going_on.newest(arguments.run_folder)) is not None:
            identity.check_ahead(begun[1], arguments)
        trainer = build(arguments, on_event, retry_for_s)
        first = header(arguments, trainer)
        console = with_files(arguments, console, began_s)
        folder = arguments.run_folder if is_url(arguments.run_folder) else str(Path(arguments.run_folder).absolute())
        about = About(arguments.name, folder, masked(dataclasses.asdict(arguments)))
        recorders = Recorders(arguments.recorders, about, note, folders=arguments.recorder_folders)
        console.show(first)
        for line in going_on.of_run(begun, arguments):
            note(line)
        for line in (*without_effect.by_rules(arguments), *without_effect.of_previews(arguments, getattr(trainer, "task", None))):
            note(line, "warning")
        check_platform(lambda message: note(message, "warning"), of_gang=False)
        trainer.train()
    finally:
        # After an error too: what was published before it is recorded.
        if recorders is not None:
            recorders.close()
        # What follows must not be drawn into the live lines.
        console.close()
    return trainer.output


def with_files(arguments: TrainingArguments, console: Console, began_s: float) -> Console:
    """Writes `config.yaml` to the run's folder, and returns the console with `console.log` there. Called when the trainer is
    built: a run that is refused leaves no folder."""
    if is_url(arguments.storage):
        return console
    folder = Path(arguments.run_folder)
    try:
        write_text(folder / CONFIG, settings_yaml(arguments))
        return LoggedConsole(console, folder / CONSOLE_LOG, began_s)
    except OSError as error:
        console.show({"ev": "note", "message": f"{folder} has no {CONFIG} and {CONSOLE_LOG}: {error}", "level": "warning"})
        return console


def settings_yaml(arguments: TrainingArguments) -> str:
    """Returns all settings, as they were resolved, in a form that `read` takes. Secrets are masked."""
    recorded = recorded_arguments(arguments)
    settings = json.loads(json.dumps(recorded["arguments"]))  # tuples become lists
    if recorded["arguments_class"] != ARGUMENTS_CLASS:
        settings["arguments"] = recorded["arguments_class"]
    return "# All settings, as they were resolved:\n" + yaml_source.to_text(settings)


def header(arguments: TrainingArguments, trainer: object) -> dict[str, Any]:
    """Returns the event of what will run. Of a trainer that only implements the protocol little is known."""
    import jax

    about: dict[str, Any] = {"ev": "run", "name": arguments.name, "hosts": jax.process_count(), "devices": jax.device_count()}
    known: dict[str, Any] = {"parameters": None, "tokens_per_step": None, "max_steps": arguments.max_num_steps}
    from trainers.trainer.base_trainer import BaseTrainer

    if isinstance(trainer, BaseTrainer):
        trainer.prepare()
        each = trainer.task.tokens_per_example
        known["parameters"] = trainer.design.num_parameters
        known["tokens_per_step"] = arguments.global_batch_size * each
        known["unit"] = "examples" if each == 1 else "tokens"
    return about | known


def failed(error: Exception, log: Path | None) -> int:
    """Tells an error: what it is, then the lines of the user's code. `log`: the file of the run that gets the whole traceback, if
    it is there. Returns the exit status: 2 for an error that explains itself, 1 for one that needs its traceback."""
    frame = user_frame(error)
    is_explained = isinstance(error, UsageError | TransientError | ConfigError) or (isinstance(error, ValueError) and not frame)
    if isinstance(error, SaveFailedError):
        print(f"error: {error}", file=sys.stderr)
        return 1
    what = f"error: {error}" if is_explained else f"error: {type(error).__name__}: {error}"
    print(what + (f"\nin your code: {frame}" if frame else ""), file=sys.stderr)
    if is_explained:
        return 2
    whole, own = "".join(traceback.format_exception(error)), user_traceback(error)
    if own and log is not None and added_to(log, whole):
        whole = f"{own}(lines of your own code alone; the whole traceback is in {log})\n"
    print(f"\n{whole}", end="", file=sys.stderr)
    return 1


def build(arguments: TrainingArguments, on_event: Callable[[Event], None], retry_for_s: float | None = None) -> Any:
    from trainers import runtime
    from trainers.runtime import signals

    # A key of this launch alone: a later one may have other code, and finds a program by what it is traced to.
    host = runtime.Runtime(on_event, program_key=uuid.uuid4().hex, retry_for_s=retry_for_s)
    runtime.install(host)
    # The loop then stops between two steps, with the state saved.
    signals.handle(host)
    return load_object(arguments.trainer)(arguments, *dataset_function(arguments)(arguments))


def show(event: Event, recorders: Recorders | None, console: Console) -> None:
    """Gives an event to the recorders, if there are any yet, and to the console."""
    match event["ev"]:
        case _ if recorders is None:
            pass
        case "metrics":
            recorders.record(event["step"], event["metrics"], event.get("distributions"))
        case "first_step":  # of a new start: it may have other settings than the one before
            recorders.go_back(event.get("resumed_step", event["step"] - 1))
        case "anomaly" if (step := course_left_at(event)) is not None:
            recorders.go_back(step)
    for shown in for_console(event):
        console.show(shown)


def result(output: TrainerOutput) -> str:
    """Returns the line at the end."""
    metrics = output.metrics
    numbers = {"loss": metrics.get("train_loss"), **metrics.get("train_metrics", {}), **metrics.get("evaluation", {})}
    # A trainer of another base says what it likes, or nothing.
    steps = [f"{metrics['steps']} steps"] if "steps" in metrics else []
    parts = steps + [f"{name} {value:.4g}" for name, value in numbers.items() if value is not None]
    saved = f"; saved in {output.checkpoint_path}" if output.checkpoint_path else ""
    return f"ended ({output.stop_reason})" + (f": {', '.join(parts)}" if parts else "") + saved
