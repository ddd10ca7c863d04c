"""What a run's evaluations name: datasets, tasks, metrics, the score."""

from __future__ import annotations

import functools

from trainers.config.arguments import TrainingArguments, load_object
from trainers.evaluation import score_metrics
from trainers.evaluation.exact_match import questions
from trainers.evaluation.validation import lacks_data
from trainers.planning.problems import attempt
from trainers.trainer.base_trainer import BaseTrainer


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
    `configure_model`."""
    for name, unit in score_metrics.units_of(trainer).items():
        of_loss = score_metrics.of_loss(trainer, unit)
        attempt(problems, f"evaluation.units.{name}", functools.partial(score_metrics.of_outputs, trainer, name, unit, of_loss))
    attempt(problems, "evaluation.score", functools.partial(score_metrics.check, trainer))
