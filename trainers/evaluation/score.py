"""The score of an evaluation: one number, the best so far, and whether to stop early; and which metrics the evaluations of a
trainer will publish, found by tracing the loss, without a device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax

from gangway.config.section import did_you_mean
from gangway.errors import UsageError
from trainers.config import ScoreConfig, UnitConfig
from trainers.evaluation import outputs
from trainers.evaluation.exact_match import task_of_unit
from trainers.evaluation.validation import DEFAULT_UNIT
from trainers.metrics.publisher import with_perplexity
from trainers.runtime import multihost

COMBINE: Mapping[str, Callable[[list[float]], float]] = {
    "mean": lambda values: sum(values) / len(values),
    "min": min,
    "max": max,
}


@dataclass(frozen=True)
class Scores:
    """The scores of one course of training. Every checkpoint carries those up to its step (`meta`): so they go back with a
    rollback, and the best is known even when its checkpoint is deleted."""

    metrics: tuple[str, ...] = ()
    """The metrics that the score is computed from."""
    step: int | None = None
    """The step of the last evaluation."""
    score: float | None = None
    best_step: int | None = None
    best: float | None = None
    num_since_best: int = 0
    """The number of evaluations after the best one."""
    stopped: bool = False
    """Whether the user's `early_stopper` asked for a stop at the last evaluation."""

    def after(self, step: int, score: float, config: ScoreConfig) -> Scores:
        """Returns the scores with one more evaluation. NaN is never better."""
        sign = 1.0 if config.lowest_is_best else -1.0
        better = not math.isnan(score) and (self.best is None or sign * (self.best - score) > config.min_delta)
        # Kept as numbers and not as a checkpoint: the checkpoint of the best score may be deleted.
        best_step, best = (step, score) if better else (self.best_step, self.best)
        return Scores(config.metrics, step, score, best_step, best, 0 if better else self.num_since_best + 1)


def combined(metrics: Mapping[str, float], config: ScoreConfig) -> float:
    """Returns the score of these metrics. Raises UsageError if a metric is missing."""
    if missing := [name for name in config.metrics if name not in metrics]:
        raise UsageError(
            f"evaluation.score.metrics = {list(config.metrics)}: the evaluation gave no {', '.join(missing)}; "
            f"expected names among {', '.join(sorted(metrics))}"
        )
    values = [metrics[name] for name in config.metrics]
    # Python's min and max return or drop a NaN by its place in the list.
    return math.nan if any(map(math.isnan, values)) else float(COMBINE[config.combine](values))


@dataclass
class ScoreKeeper:
    """Scores evaluations, and decides when to stop early. All hosts must call its methods alike."""

    config: ScoreConfig | None
    early_stopper: Callable[[int, float], bool] | None = None
    """(step, score) -> whether to stop."""
    scores: Scores = field(default_factory=Scores)

    def add(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Scores the evaluation at `step`; returns the metrics to publish."""
        if self.config is None:
            return {}
        # Host 0's score counts: a hook may have added a metric that differs between hosts.
        score = multihost.from_host0("score", combined(metrics, self.config))
        after = self.scores.after(step, score, self.config)
        self.scores = replace(after, stopped=self._asks_for_stop(step, score))
        return {"score": score} if self.scores.best is None else {"score": score, "best_score": self.scores.best}

    def go_back(self, meta: Mapping[str, Any] | None) -> None:
        """Goes back to the scores in a checkpoint; None: to the beginning. Scores of other metrics are dropped."""
        fields = {**(meta or {}), "metrics": tuple((meta or {}).get("metrics", ()))}  # JSON has made a list of the tuple
        scores = Scores(**fields)
        self.scores = scores if self.config is not None and scores.metrics == self.config.metrics else Scores()

    def meta(self) -> dict[str, Any] | None:
        return None if self.config is None else asdict(self.scores)

    @property
    def wants_stop(self) -> bool:
        """Whether to stop early; the same on all hosts, and after a restart."""
        if self.config is None:
            return False
        patience = self.config.patience
        out_of_patience = patience is not None and self.scores.num_since_best >= patience
        return out_of_patience or (self.scores.stopped and self.early_stopper is not None)

    def _asks_for_stop(self, step: int, score: float) -> bool:
        """Asks the user's function on host 0, for all hosts. Its error ends host 0, which the others notice at once."""
        if self.early_stopper is None:
            return False
        return multihost.from_host0("early stop", bool(self.early_stopper(step, score)) if jax.process_index() == 0 else None)


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


def check_when_built(trainer: Any) -> None:
    """Does what `check` does, if the names can be known now. Errors of the model or the data come where they are used."""
    if trainer.arguments.evaluation.score is None or _may_add(trainer) or not _is_ours(type(trainer).__init__):
        return
    design = trainer.assembly.design
    try:
        design.configure()
        _ = design.loss_layout
    except Exception:  # whatever the user's model raises, is raised again, and reported, when training begins
        design.forget()
        return
    check(trainer)


def check(trainer: Any) -> None:
    """Raises UsageError for metrics of the score that no evaluation will have. After `configure_model`."""
    score = trainer.arguments.evaluation.score
    if score is None or trainer.assembly.design.traced_layout is None or _may_add(trainer):
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


def units_of(trainer: Any) -> Mapping[str, UnitConfig]:
    return trainer.arguments.evaluation.units or {DEFAULT_UNIT: UnitConfig()}


def of_loss(trainer: Any, unit: UnitConfig) -> list[str]:
    """Returns the names of the metrics of a unit's loss; none if they are not known."""
    if trainer.assembly.design.traced_layout is None or unit.task is not None or unit.exact_match is not None:
        return []
    layout = trainer.assembly.design.loss_layout
    return [*with_perplexity(dict.fromkeys(layout.names, 0.0), layout)]


def of_outputs(trainer: Any, name: str, unit: UnitConfig, taken: Sequence[str]) -> Sequence[str]:
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


def _may_add(trainer: Any) -> bool:
    return not all(_is_ours(getattr(type(trainer), name)) for name in MAKE_METRICS)


def _is_ours(method: Any) -> bool:
    return getattr(method, "__module__", "").partition(".")[0] == __name__.partition(".")[0]
