"""Decides which checkpoints stay, and which keep their parameters alone. Pure, without JAX."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainers.config import CheckpointConfig, ScoreConfig


class MayGo(NamedTuple):
    """The checkpoints that may be deleted, as steps, oldest first."""

    checkpoints: list[int]
    into_models: list[int]
    """Those of `checkpoints` whose parameters are kept."""
    models: list[int]


@dataclass(frozen=True)
class Retention:
    """The rules for what stays: the union of the newest, the best, and every n-th checkpoint."""

    newest: int | None
    """How many of the newest stay; at least 1. None: everything stays."""
    best: int = 0
    every_steps: int | None = None
    only_models: frozenset[str] = frozenset()
    """`best`, `every`: of checkpoints that stay only by these rules, the parameters are enough."""
    lower_better: bool = True
    metrics: tuple[str, ...] = ()
    """The metrics that the score is computed from."""
    model_every_steps: int | None = None
    """Models of a step that is a multiple of this are saved by themselves, and have a limit of their own."""
    model_limit: int | None = None
    """How many of the newest of these stay. None: all."""

    @classmethod
    def of(cls, config: CheckpointConfig, score: ScoreConfig | None) -> Retention:
        score = score or ScoreConfig()
        only = {"none": (), "all": ("best", "every")}.get(config.keep_model_only, (config.keep_model_only,))
        return cls(
            config.save_total_limit,
            config.keep_best or 0,
            config.keep_every_steps,
            frozenset(only),
            score.lowest_is_best,
            score.metrics,
            config.model_every_steps,
            config.model_limit,
        )

    def may_go(
        self, steps: Iterable[int], good: Iterable[int], models: Iterable[int] = (), scores: Mapping[int, float] | None = None
    ) -> MayGo:
        """Returns what may be deleted of the checkpoints `steps`, and of the `models` kept alone.

        `good` are the steps of checkpoints that are whole, and belong to the course that training has taken. As long as there
        are fewer than `newest` of them, everything stays, damaged ones too: an old checkpoint is deleted only when newer and
        whole ones are there.
        """
        good, models = set(good), set(models)
        best_models, every_models = self._best(good | models, scores or {}), self._every(good | models)
        scheduled = {step for step in models if self.model_every_steps is not None and step % self.model_every_steps == 0}
        stay = best_models | every_models | set(sorted(scheduled, reverse=True)[: self.model_limit])
        if self.newest is None:
            return MayGo([], [], sorted(scheduled - stay))
        # `newest` is at least 1: with 0 the slice would be the whole list.
        newest = sorted(good)[-self.newest :]
        if len(newest) < self.newest:
            return MayGo([], [], sorted(scheduled - stay))
        kept = {"best": best_models, "every": every_models}
        kept_whole: set[int] = set().union(*(kept[reason] for reason in kept if reason not in self.only_models))
        removed = [step for step in sorted(steps) if step < newest[0] and step not in kept_whole & good]
        any_kept = kept["best"] | kept["every"]
        # Only of those that go: a checkpoint that stays whole has its parameters in it.
        into_models = [step for step in removed if step in any_kept & good and step not in models]
        return MayGo(removed, into_models, sorted(models - stay))

    @property
    def keeps_everything(self) -> bool:
        """Whether nothing may ever be deleted, so that nothing need be looked at."""
        return self.newest is None and self.model_limit is None

    def score(self, meta: Mapping[str, Any]) -> float | None:
        """Returns the score of the state in the checkpoint with this meta; None if it was not evaluated, or scored by other
        metrics."""
        scores = meta.get("scores") or {}
        if scores.get("step") != meta["step"] or tuple(scores.get("metrics", ())) != self.metrics:
            return None
        return scores["score"]

    def _best(self, steps: Iterable[int], scores: Mapping[int, float]) -> set[int]:
        return set(self.best_first({step: scores[step] for step in steps if step in scores})[: self.best])

    def best_first(self, scores: Mapping[int, float]) -> list[int]:
        """Returns the steps, the best first. Among equal scores the newer step is better; NaN is never among the best."""
        sign = 1.0 if self.lower_better else -1.0
        scored = [step for step, score in scores.items() if not math.isnan(score)]
        return sorted(scored, key=lambda step: (sign * scores[step], -step))

    def _every(self, steps: Iterable[int]) -> set[int]:
        return {step for step in steps if self.every_steps is not None and step % self.every_steps == 0}
