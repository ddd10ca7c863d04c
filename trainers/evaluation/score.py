"""The score: one number of an evaluation, the best of them so far, and whether there is hope of a better one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from trainers.config import ScoreConfig
from trainers.config.arguments import load_object
from trainers.errors import UsageError
from trainers.runtime import multihost

COMBINE: Mapping[str, Callable[[list[float]], float]] = {
    "mean": lambda values: sum(values) / len(values),
    "min": min,
    "max": max,
}


@dataclass(frozen=True)
class Scores:
    """Of the evaluations of one course of training. Every checkpoint carries those up to its step (`meta`), so that they go back
    with it, and the best is known when its checkpoint is gone."""

    metrics: tuple[str, ...] = ()
    """That the scores are made of."""
    step: int | None = None
    """Of the last one."""
    score: float | None = None
    best_step: int | None = None
    best: float | None = None
    num_since_best: int = 0
    """Evaluations after the best one."""
    stopped: bool = False
    """`early_stopper` said so at the last one."""

    def after(self, step: int, score: float, config: ScoreConfig) -> Scores:
        """These, and that of one more evaluation. A score that is no number is never better."""
        sign = 1.0 if config.lower_better else -1.0
        better = not math.isnan(score) and (self.best is None or sign * (self.best - score) > config.min_delta)
        best_step, best = (step, score) if better else (self.best_step, self.best)
        return Scores(config.metrics, step, score, best_step, best, 0 if better else self.num_since_best + 1)


def combined(metrics: Mapping[str, float], config: ScoreConfig) -> float:
    """Raises UsageError if there is no such metric."""
    if missing := [name for name in config.metrics if name not in metrics]:
        raise UsageError(
            f"evaluation.score.metrics = {list(config.metrics)}: the evaluation gave no {', '.join(missing)}; "
            f"expected names among {', '.join(sorted(metrics))}"
        )
    return float(COMBINE[config.combine]([metrics[name] for name in config.metrics]))


@dataclass
class ScoreKeeper:
    """Scores evaluations, and says when to stop early. All hosts must call its methods alike."""

    config: ScoreConfig | None
    scores: Scores = field(default_factory=Scores)
    _early_stopper: Callable[[int, float], bool] | None = None

    def __post_init__(self) -> None:
        if self.config is not None and self.config.early_stopper is not None:
            self._early_stopper = load_object(self.config.early_stopper)

    def add(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Scores the evaluation at `step`; returns what is published of it."""
        if self.config is None:
            return {}
        # Of host 0, although all have the same metrics: a hook may have put in what one host measured.
        score = multihost.from_host0("score", combined(metrics, self.config))
        after = self.scores.after(step, score, self.config)
        self.scores = dataclasses.replace(after, stopped=self._ask(step, score))
        return {"score": score} if self.scores.best is None else {"score": score, "best_score": self.scores.best}

    def go_back(self, meta: Mapping[str, Any] | None) -> None:
        """To what a checkpoint knew of; None: to the beginning. Scores made of other metrics are forgotten."""
        known = {**(meta or {}), "metrics": tuple((meta or {}).get("metrics", ()))}
        scores = Scores(**known)
        self.scores = scores if self.config is not None and scores.metrics == self.config.metrics else Scores()

    def meta(self) -> dict[str, Any] | None:
        return None if self.config is None else dataclasses.asdict(self.scores)

    @property
    def wants_stop(self) -> bool:
        """The same on all hosts, and again after a restart."""
        if self.config is None:
            return False
        patience = self.config.patience
        lost = patience is not None and self.scores.num_since_best >= patience
        return lost or (self.scores.stopped and self._early_stopper is not None)

    def _ask(self, step: int, score: float) -> bool:
        """What the user's function says to host 0, for all hosts. Its error ends host 0, which they notice at once."""
        if self._early_stopper is None:
            return False
        return multihost.from_host0("early stop", bool(self._early_stopper(step, score)) if jax.process_index() == 0 else None)
