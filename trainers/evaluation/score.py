"""The score of an evaluation: one number, the best so far, and whether to stop early."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import jax

from gangway.errors import UsageError
from trainers.config import ScoreConfig
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
