"""Evaluates checkpoints in this one process, on all its devices, without Ray.

    python -m trainers.evaluate CONFIG --checkpoint RUN_OR_CHECKPOINT [--checkpoint ...] [--unit NAME] [--json] [key=value ...]
    python -m trainers.evaluate RUN_OR_CHECKPOINT [CONFIG] [...]

CONFIG is the file that was trained with; key=value changes a setting of it, such as `evaluation.max_batches=100`. The hooks and
callbacks of the trainer are called as in training, so the numbers are those that training published. Nothing is written.
RUN_OR_CHECKPOINT is a run's folder (its newest whole checkpoint), RUN/best (the one with the best score), a checkpoint, what
`save_pretrained` wrote, a file of `python -m trainers.export`, or a folder of Hugging Face.
The second form evaluates any model on the held-out data of CONFIG: the model and its tokenizer are those of RUN_OR_CHECKPOINT.
Without CONFIG the settings are those that the checkpoint has recorded; code of your own that they name must be allowed
(`--trust-code`). With the section `lora`, a model that has no adapters is measured as it is.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangway import program, user_modules
from gangway.errors import TransientError, UsageError
from gangway.first_line import say
from gangway.storage import json_text
from gangway.surroundings import allow_for_forced_devices
from trainers.commands.built import base_trainer
from trainers.commands.saved_models import recorded_with, with_model_of, without_adapters
from trainers.config.arguments import TrainingArguments
from trainers.settings import read

if TYPE_CHECKING:  # it imports JAX
    from trainers.trainer.base_trainer import BaseTrainer


@dataclass(frozen=True)
class Result:
    checkpoint: str
    step: int | None
    """The number of batches drawn; None: a file that does not say it."""
    unit: str
    metrics: dict[str, float]
    rates: dict[str, float]


@program.command(UsageError, TransientError, ValueError, is_read=True)
def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    allow_for_forced_devices(os.environ)
    say(f"evaluating {', '.join(options.checkpoint)}", stream=sys.stderr)
    with named_by(options):
        results = list(results_of(options))
    print(as_json(results) if options.json else table(results))
    return 0


def named_by(options: argparse.Namespace) -> AbstractContextManager[None]:
    """Returns what guards the imports: without CONFIG whoever made the checkpoint has written what is imported."""
    return nullcontext() if options.config is not None else user_modules.named_by_data(options.source, options.trust_code)


def results_of(options: argparse.Namespace) -> Iterator[Result]:
    """Yields the results of all checkpoints."""
    if options.config is None:
        arguments = recorded_with(options.source, options.overrides)
    else:
        arguments = read(options.config, options.overrides)
        arguments = arguments if options.source is None else with_model_of(options.source, arguments)
    # No run begins here: what one would begin with does not matter.
    checkpoint = replace(arguments.checkpoint, start_from=None)
    arguments, trainer = replace(arguments, init_from=None, checkpoint=checkpoint), None
    for source in options.checkpoint:
        if (alone := without_adapters(source, arguments)) is not arguments:
            yield from evaluate(build(alone), source, options.unit)
            continue
        trainer = build(arguments) if trainer is None else trainer
        yield from evaluate(trainer, source, options.unit)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = program.parser("trainers.evaluate", __doc__, example="runs/spirals --json")
    parser.add_argument("config", nargs="+", action=_Places, metavar="[RUN_OR_CHECKPOINT] [CONFIG] [key=value ...]")
    parser.add_argument("--checkpoint", action="append", default=[], metavar="PATH", help="may be given several times")
    parser.add_argument("--unit", metavar="NAME", help="default: all validation units")
    parser.add_argument(
        "--trust-code",
        action="append",
        default=[],
        metavar="MODULE:NAME",
        help="without CONFIG: code of your own that the run names, such as mine.tasks:Task; may be given several times",
    )
    parser.add_argument("--json", action="store_true", help="one list of JSON, in place of the table")
    options = parser.parse_intermixed_args(argv)
    if options.source is not None and options.checkpoint:  # the first form: what comes after CONFIG is a setting
        options.overrides[:0] = [options.config] if options.config else []
        options.config, options.source = options.source, None
    if options.source is not None:
        options.checkpoint.append(options.source)
    if not options.checkpoint:
        parser.error("nothing to evaluate: give --checkpoint PATH, or RUN_OR_CHECKPOINT before CONFIG")
    if options.trust_code and options.config is not None:
        parser.error(f"--trust-code: {options.config} is your own, and says what is imported; leave it out")
    return options


class _Places(argparse.Action):
    """Tells by their form what the arguments without a name are."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: Any = None) -> None:
        paths = [value for value in values if "=" not in value]
        if not 1 <= len(paths) <= 2:
            parser.error(f"{' '.join(paths) or 'no CONFIG'}: expected CONFIG, or RUN_OR_CHECKPOINT and CONFIG")
        source, config = paths if len(paths) == 2 else (None, paths[0])
        if source is None and not config.endswith((".yaml", ".yml", ".json")):
            source, config = config, None
        namespace.source, namespace.config = source, config
        namespace.overrides = [value for value in values if "=" in value]


def build(arguments: TrainingArguments) -> Any:
    """Returns the trainer. Raises UsageError if it is none that can load a checkpoint."""
    return base_trainer(arguments, "loads checkpoints")


def evaluate(trainer: BaseTrainer, checkpoint: str, unit: str | None = None) -> Iterator[Result]:
    """Yields the results of one checkpoint: those of all units, or of one."""
    from trainers.evaluation.validation import DEFAULT_UNIT
    from trainers.trainer.beginnings import saved_state
    from trainers.trainer.build import build

    path, state, step = saved_state(trainer, checkpoint)
    units = build(trainer).units
    # A trainer that overrides `evaluate` may have no units.
    first, *others = tuple(units) or (DEFAULT_UNIT,)
    for name in (first, *others) if unit is None else (unit,):
        # The first unit without its name: a user's override `evaluate(self, state)` need not take a unit.
        metrics = trainer.evaluate(state) if name == first else trainer.evaluate(state, unit=name)
        rates = dict(getattr(units.get(name), "rates", {}))
        yield Result(path, step, name, metrics, rates)


def as_json(results: Sequence[Result]) -> str:
    """Returns a list of objects."""
    return json_text.dumps([asdict(row) for row in results], indent=2)


def table(results: Sequence[Result]) -> str:
    """Returns a line for each checkpoint and unit, below the names of the columns."""
    names = list(dict.fromkeys(name for row in results for name in row.metrics))
    lines = [["checkpoint", "step", "unit", *names, "seconds"]]
    for row in results:
        numbers = [row.metrics.get(name) for name in names] + [row.rates.get("seconds")]
        shown = ["-" if number is None else f"{number:.6g}" for number in numbers]
        lines.append([_short(row.checkpoint), "-" if row.step is None else str(row.step), row.unit, *shown])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def _short(path: str) -> str:
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path
