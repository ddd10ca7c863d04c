"""The names of the metrics that the evaluations of a trainer will publish, found by tracing the loss, without a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gangway.config.section import did_you_mean
from gangway.errors import UsageError
from trainers.config import UnitConfig
from trainers.evaluation import outputs
from trainers.evaluation.exact_match import task_of_unit
from trainers.evaluation.validation import DEFAULT_UNIT
from trainers.metrics.publisher import with_perplexity

if TYPE_CHECKING:  # it imports this module
    from trainers.trainer.base_trainer import BaseTrainer

MAKE_METRICS = (
    "evaluate",
    "eval",
    "calculate_metrics",
    "on_evaluation_end",
    "build_validation_units",
    "configure_dataloaders",
    "configure_functions",
    "configure_model",
)
"""Methods of a trainer that may add metrics to those of its loss: with one of them any name will do."""


def check_when_built(trainer: BaseTrainer) -> None:
    """Does what `check_score` does, if the names can be known now. Errors of the model or the data come where they are used."""
    if trainer.arguments.evaluation.score is None or _may_add(trainer) or not _is_ours(type(trainer).__init__):
        return
    design = trainer.design
    try:
        design.configure()
        _ = design.loss_layout
    except Exception:  # whatever the user's model raises, is raised again, and reported, when training begins
        design.forget()
        return
    check_score(trainer)


def check_score(trainer: BaseTrainer) -> None:
    """Raises UsageError for metrics of the score that no evaluation will have. After `configure_model`."""
    score = trainer.arguments.evaluation.score
    if score is None or trainer.design.traced_layout is None or _may_add(trainer):
        return
    known: list[str] = []
    free: list[str] = []  # the beginnings of names: another task has metrics of its own
    for name, unit in units_of(trainer).items():
        found = of_loss(trainer, unit)
        try:
            names, is_known = [*found, *of_outputs(trainer, name, unit, found)], unit.task is None and unit.exact_match is None
        except Exception:  # of the user's metrics, reported where they are used
            names, is_known = found, False
        known += [f"{name}_{metric}" for metric in names]
        free += [] if is_known else [f"{name}_"]
    if problems := list(_unknown(score.metrics, known, tuple(free))):
        raise UsageError("\n".join(problems))


def units_of(trainer: BaseTrainer) -> Mapping[str, UnitConfig]:
    return trainer.arguments.evaluation.units or {DEFAULT_UNIT: UnitConfig()}


def of_loss(trainer: BaseTrainer, unit: UnitConfig) -> list[str]:
    """Returns the names of the metrics of a unit's loss; none if they are not known."""
    if trainer.design.traced_layout is None or unit.task is not None or unit.exact_match is not None:
        return []
    layout = trainer.design.loss_layout
    return [*with_perplexity(dict.fromkeys(layout.names, 0.0), layout)]


def of_outputs(trainer: BaseTrainer, name: str, unit: UnitConfig, taken: Sequence[str]) -> Sequence[str]:
    """Returns the names of the metrics of a unit's predictions. Raises UsageError if they cannot be computed."""
    metrics = trainer.build_evaluation_metrics(name)
    if metrics is None:
        return ()
    outputs.check(name, metrics, task_of_unit(unit, trainer.arguments) or trainer.task, taken)
    return metrics.names


def _unknown(metrics: Sequence[str], known: Sequence[str], free: tuple[str, ...]) -> Iterator[str]:
    for metric in metrics:
        if metric not in known and not metric.startswith(free):
            expected = f"expected a metric of an evaluation: {', '.join(known)}"
            yield f"evaluation.score.metrics: {metric!r}: {expected}{did_you_mean(metric, known)}"


def _may_add(trainer: BaseTrainer) -> bool:
    return not all(_is_ours(getattr(type(trainer), name)) for name in MAKE_METRICS)


def _is_ours(method: Any) -> bool:
    return getattr(method, "__module__", "").partition(".")[0] == __name__.partition(".")[0]
