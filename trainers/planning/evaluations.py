"""What a run's evaluations name: datasets, tasks, metrics, the score."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from trainers.base import BaseTrainer
from trainers.config import UnitConfig
from trainers.config.arguments import TrainingArguments, load_object
from trainers.config.section import did_you_mean
from trainers.evaluation import outputs
from trainers.evaluation.exact_match import questions, task_of_unit
from trainers.evaluation.validation import DEFAULT_UNIT, lacks_data
from trainers.metrics.publisher import with_perplexity
from trainers.planning.overridden import overrides
from trainers.planning.problems import attempt

MAKE_EVALUATION_METRICS = (
    "evaluate",
    "calculate_metrics",
    "on_evaluation_end",
    "build_validation_units",
    "configure_dataloaders",
    "configure_model",
)
"""Methods of a trainer that may add metrics to those of its loss."""


def check(problems: list[str], arguments: TrainingArguments, *, has_held_out: bool) -> None:
    """Checks that everything that evaluations name exists, and that each has data."""
    config, units = arguments.evaluation, arguments.evaluation.units
    if not has_held_out and (problem := lacks_data(config)):
        problems.append(problem)
    for name, unit in units.items():
        if unit.dataset is not None:
            make = functools.partial(lambda path: load_object(path)(arguments), unit.dataset)
            examples = attempt(problems, f"evaluation.units.{name}.dataset", make)
            if examples is not None and not len(examples):
                problems.append(f"evaluation.units.{name}.dataset: {unit.dataset!r} has no examples; give it some")
        elif unit.exact_match is not None:
            attempt(problems, f"evaluation.units.{name}.exact_match", functools.partial(questions, unit.exact_match, arguments))
        elif not has_held_out:
            problems.append(f"evaluation.units.{name}: there is no held-out data; set its dataset, or data.eval_fraction")
        if unit.metrics is not None:
            attempt(problems, f"evaluation.units.{name}.metrics", functools.partial(load_object, unit.metrics))
        if unit.task is not None:
            attempt(problems, f"evaluation.units.{name}.task", functools.partial(load_object, unit.task))
    if config.score is not None and config.score.early_stopper is not None:
        attempt(problems, "evaluation.score.early_stopper", functools.partial(load_object, config.score.early_stopper))


def check_metrics(trainer: BaseTrainer, problems: list[str]) -> None:
    """Adds to `problems` what is wrong with the metrics of validation units: with those of predictions, and with the score. After
    `configure_model`. A trainer that overrides what makes the metrics of an evaluation may publish any metric."""
    units, layout = trainer.arguments.evaluation.units or {DEFAULT_UNIT: UnitConfig()}, trainer._layout
    known: list[str] = []
    free: list[str] = []  # the beginnings of names: another task has metrics of its own
    for name, unit in units.items():
        of_loss: list[str] = []
        if layout is not None and unit.task is None and unit.exact_match is None:
            of_loss = [*with_perplexity(dict.fromkeys(trainer.loss_layout.names, 0.0), trainer.loss_layout)]
        names = attempt(problems, f"evaluation.units.{name}", functools.partial(names_of_outputs, trainer, name, unit, of_loss))
        known += [f"{name}_{metric}" for metric in (*of_loss, *(names or ()))]
        free += [f"{name}_"] if unit.task is not None or unit.exact_match is not None or names is None else []
    score = trainer.arguments.evaluation.score
    if score is None or layout is None or any(overrides(trainer, name) for name in MAKE_EVALUATION_METRICS):
        return
    for metric in score.metrics:
        if metric not in known and not metric.startswith(tuple(free)):
            expected = f"expected a metric of an evaluation: {', '.join(known)}"
            problems.append(f"evaluation.score.metrics: {metric!r}: {expected}{did_you_mean(metric, known)}")


def names_of_outputs(trainer: BaseTrainer, name: str, unit: UnitConfig, taken: Sequence[str]) -> Sequence[str]:
    """Returns the names of the metrics of a unit's predictions. Raises UsageError if they cannot be computed."""
    metrics = trainer.build_evaluation_metrics(name)
    if metrics is None:
        return ()
    outputs.check(name, metrics, task_of_unit(unit, trainer.arguments) or trainer.task, taken)
    return metrics.names
