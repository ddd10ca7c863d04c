"""Evaluates checkpoints in this one process, on all its devices, without Ray.

    python -m trainers.evaluate CONFIG --checkpoint RUN_OR_CHECKPOINT [--checkpoint ...] [--unit NAME] [--json] [key=value ...]
    python -m trainers.evaluate RUN_OR_CHECKPOINT [CONFIG] [...]

CONFIG is the file that was trained with; key=value changes a setting of it, such as `evaluation.max_batches=100`. The hooks and
callbacks of the trainer are called as in training, so the numbers are those that training published. Nothing is written.
RUN_OR_CHECKPOINT is a run's folder (its newest whole checkpoint), a checkpoint, what `save_pretrained` wrote, a file of
`python -m trainers.export`, or a folder of Hugging Face.
The second form evaluates any model on the held-out data of CONFIG: the model and its tokenizer are those of RUN_OR_CHECKPOINT.
Without CONFIG the settings are those that the checkpoint has recorded; code of your own that they name must be allowed
(`--trust-code`). With the section `lora`, a model that has no adapters is measured as it is.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainers.config.arguments import TrainingArguments
from trainers.config.model import OF_EXECUTION
from trainers.errors import TransientError, UsageError
from trainers.first_line import say
from trainers.program import parser as command_parser
from trainers.runtime.events import Event
from trainers.settings import read, recorded
from trainers.storage import not_finite
from trainers.terminal import command


@dataclass(frozen=True)
class Result:
    checkpoint: str
    step: int | None
    """The number of batches drawn; None: a file that does not say it."""
    unit: str
    metrics: dict[str, float]
    rates: dict[str, float]


@command
def main(argv: list[str] | None = None) -> int:
    options = _parse(argv)
    say(f"evaluating {', '.join(options.checkpoint)}", stream=sys.stderr)
    try:
        with named_by(options):
            results = list(results_of(options))
    except (UsageError, TransientError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(as_json(results) if options.json else table(results))
    return 0


def named_by(options: argparse.Namespace) -> AbstractContextManager[None]:
    """Returns what guards the imports: without CONFIG whoever made the checkpoint has written what is imported."""
    from trainers.config import importable

    return nullcontext() if options.config is not None else importable.named_by_data(options.source, options.trust_code)


def results_of(options: argparse.Namespace) -> Iterator[Result]:
    """Yields the results of all checkpoints."""
    if options.config is None:
        arguments = recorded_with(options.source, options.overrides)
    else:
        arguments = read(options.config, options.overrides)
        arguments = arguments if options.source is None else with_model_of(options.source, arguments)
    # No run begins here: what one would begin with does not matter.
    checkpoint = dataclasses.replace(arguments.checkpoint, start_from=None)
    arguments, trainer = dataclasses.replace(arguments, init_from=None, checkpoint=checkpoint), None
    for source in options.checkpoint:
        if (alone := without_adapters(source, arguments)) is not arguments:
            yield from evaluate(build(alone), source, options.unit)
            continue
        trainer = build(arguments) if trainer is None else trainer
        yield from evaluate(trainer, source, options.unit)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = command_parser("trainers.evaluate", __doc__)
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


def recorded_with(source: str, overrides: Sequence[str]) -> TrainingArguments:
    """Returns the arguments that the checkpoint of `source` was trained with, changed by `key=value`. Raises UsageError if it has
    recorded none, or if a value is masked there."""
    from trainers.checkpoint import manifest, weights

    path = weights.find(source)
    if not (path / manifest.META_FILE).is_file():
        raise UsageError(f"{path} has recorded no configuration: name one after it, which has the held-out data")
    try:
        meta = manifest.read_meta(path)
    except manifest.DamagedError as error:
        raise UsageError(f"{path} cannot be evaluated: {error}") from error
    named = {"arguments": meta["arguments_class"]} if "arguments_class" in meta else {}
    return recorded(str(path), {**meta["arguments"], **named}, overrides)


def with_model_of(source: str, arguments: TrainingArguments) -> TrainingArguments:
    """Returns the arguments with the model, its adapters and the tokenizer that `source` has, in place of those of the
    configuration."""
    from trainers.commands.generate import arguments_of, look

    theirs = arguments_of(look(source))
    data = dataclasses.replace(arguments.data, tokenizer=theirs.data.tokenizer)
    execution = {name: getattr(arguments.model, name) for name in OF_EXECUTION}
    model, vision = dataclasses.replace(theirs.model, **execution), theirs.vision or arguments.vision
    lora = theirs.lora or arguments.lora  # for a model without adapters see `without_adapters`
    if lora is not None and theirs.lora is None:
        lora = dataclasses.replace(lora, new_tokens=0)  # it has the vocabulary of its folder
    if arguments.lora is not None and lora is not None and not Path(os.path.expanduser(str(lora.base))).exists():
        lora = dataclasses.replace(lora, base=arguments.lora.base)  # it has moved; the digest is compared
    return dataclasses.replace(arguments, model=model, vision=vision, data=data, lora=lora)


def without_adapters(source: str, arguments: TrainingArguments) -> TrainingArguments:
    """Returns the arguments to measure a model that has no adapters with, where they have the section `lora`: it is the base, and
    new adapters change nothing of it. Others are returned as they are."""
    from trainers.checkpoint import weights

    if arguments.lora is None or has_adapters(weights.look(weights.find(source))):
        return arguments
    print(f"{source} has no adapters: it is measured as it is", file=sys.stderr)
    return dataclasses.replace(arguments, lora=dataclasses.replace(arguments.lora, base=source))


def has_adapters(found: Any) -> bool:
    """Whether there are adapters among the weights that `trainers.checkpoint.weights.look` has found."""
    from trainers.models import lora

    return any(name.endswith(lora.A) for name in found.parameters)


def build(arguments: TrainingArguments) -> Any:
    """Returns the trainer. Raises UsageError if it is none that can load a checkpoint."""
    from trainers import runtime
    from trainers.commands.built import base_trainer

    runtime.install(runtime.Runtime(show))
    return base_trainer(arguments, "loads checkpoints")


def show(event: Event) -> None:
    # Standard output carries the results alone.
    if event["ev"] == "note":
        print(event["message"], file=sys.stderr)
    elif event["ev"] == "evaluating":
        of = f" of {event['total']}" if event["total"] else ""
        print(f"{event['unit']}: {event['done']}{of} batches", file=sys.stderr)


def evaluate(trainer: Any, checkpoint: str, unit: str | None = None) -> Iterator[Result]:
    """Yields the results of one checkpoint: those of all units, or of one."""
    from trainers.evaluation.validation import DEFAULT_UNIT
    from trainers.trainer.assembly import assemble

    path, state, step = load(trainer, checkpoint)
    units = assemble(trainer).units
    # A trainer that overrides `evaluate` may have no units.
    first, *others = tuple(units) or (DEFAULT_UNIT,)
    for name in (first, *others) if unit is None else (unit,):
        # The first unit without its name: a user's override `evaluate(self, state)` need not take a unit.
        metrics = trainer.evaluate(state) if name == first else trainer.evaluate(state, unit=name)
        rates = dict(getattr(units.get(name), "rates", {}))
        yield Result(path, step, name, metrics, rates)


def load(trainer: Any, source: str) -> tuple[str, Any, int | None]:
    """Returns the path, the state and the step of a checkpoint. A model alone becomes a state with a new optimizer state."""
    import jax.numpy as jnp

    from trainers.checkpoint import hugging_face, manifest, model_only, weights
    from trainers.checkpoint.export import from_safetensors
    from trainers.checkpoint.standalone import load_model
    from trainers.trainer.beginnings import beginning

    path = weights.find(source)
    trainer.prepare()
    if trainer.arguments.lora is not None and not has_adapters(weights.look(path)):
        state, step = beginning(trainer, None, None).make(), step_of(path)
        return str(path), state if step is None else dataclasses.replace(state, batch_index=jnp.int32(step)), step
    if hugging_face.is_folder(path):
        return str(path), beginning(trainer, _of_folder(trainer, path), None).make(), None
    if path.is_file():
        return str(path), beginning(trainer, from_safetensors(path), None).make(), None
    try:
        meta = manifest.read_meta(path)
    except manifest.DamagedError as error:
        raise UsageError(f"{path} cannot be evaluated: {error}") from error
    step = int(meta["batch_index"])
    if not all(map(model_only.part_of, meta["shapes"])):
        # With the state of the optimizer: it may hold the averages that are evaluated, and a hook may want it.
        return str(path), trainer.load_pretrained(str(path)), step
    arrays, _ = load_model(str(path), trainer.assembly.model_arrays)
    if trainer.assembly.frozen is not None:
        trainer.assembly.frozen.check(meta)
    state = beginning(trainer, arrays, None).make()
    updates = step - len(meta.get("skipped_batches") or ())
    counters = {"batch_index": jnp.int32(step), "step": jnp.int32(updates)}
    return str(path), dataclasses.replace(state, **counters), step


def step_of(path: Path) -> int | None:
    """Returns the number of batches that a checkpoint has drawn; None for a file or a folder that does not say it."""
    from trainers.checkpoint import manifest

    return int(manifest.read_meta(path)["batch_index"]) if (path / manifest.META_FILE).is_file() else None


def _of_folder(trainer: Any, path: Path) -> dict[str, Any]:
    """Returns the parameters in a folder of Hugging Face, in nested dicts. Raises CheckpointError if they do not fit."""
    import jax

    from trainers.checkpoint import weights
    from trainers.config import InitConfig
    from trainers.optim.param_groups import parameter_path

    wanted = {parameter_path(key): leaf for key, leaf in jax.tree_util.tree_leaves_with_path(trainer.assembly.model_arrays)}
    found = weights.look(path)
    pairs = weights.match(found, {name: leaf.shape for name, leaf in wanted.items()}, InitConfig(path=str(path)))
    arrays = weights.read(found, pairs, {name: leaf.sharding for name, leaf in wanted.items()})
    return jax.tree_util.tree_map_with_path(lambda key, _: arrays[parameter_path(key)], trainer.assembly.model_arrays)


def as_json(results: Sequence[Result]) -> str:
    """Returns a list of objects."""
    return not_finite.dumps([dataclasses.asdict(row) for row in results], indent=2)


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
