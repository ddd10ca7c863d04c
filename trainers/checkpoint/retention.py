"""Which checkpoints stay, and of which the parameters alone: pure, without JAX."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainers.config import CheckpointConfig, ScoreConfig


class MayGo(NamedTuple):
    """Steps, oldest first."""

    checkpoints: list[int]
    into_models: list[int]
    """Of these: whose parameters are to be kept."""
    models: list[int]


@dataclass(frozen=True)
class Retention:
    """What stays is the union of the newest, the best and every n-th."""

    newest: int
    """At least 1."""
    best: int = 0
    every_steps: int | None = None
    only_models: frozenset[str] = frozenset()
    """`best`, `every`: of what these alone keep, the parameters suffice."""
    lower_better: bool = True
    metrics: tuple[str, ...] = ()
    """That the scores are made of."""

    @classmethod
    def of(cls, config: CheckpointConfig, score: ScoreConfig | None) -> Retention:
        score = score or ScoreConfig()
        only = {"none": (), "all": ("best", "every")}.get(config.keep_model_only, (config.keep_model_only,))
        return cls(
            config.save_total_limit,
            config.keep_best or 0,
            config.keep_every_steps,
            frozenset(only),
            score.lower_better,
            score.metrics,
        )

    def may_go(
        self, found: Iterable[int], good: Iterable[int], models: Iterable[int] = (), scores: Mapping[int, float] | None = None
    ) -> MayGo:
        """Of the checkpoints `found`, and of the `models` that are kept alone.

        `good` are steps of checkpoints that are whole, and of the course that training has taken. As long as there are fewer than
        `newest` of them, all stays, damaged ones too: what is old goes only for what is newer and whole.
        """
        good, models = set(good), set(models)
        newest = sorted(good)[-self.newest :]
        if len(newest) < self.newest:
            return MayGo([], [], [])
        kept = {"best": self._best(good | models, scores or {}), "every": self._every(good | models)}
        whole: set[int] = set().union(*(steps for reason, steps in kept.items() if reason not in self.only_models))
        go = [step for step in sorted(found) if step < newest[0] and step not in whole & good]
        wanted = kept["best"] | kept["every"]
        into_models = [step for step in go if step in wanted & good and step not in models]
        return MayGo(go, into_models, sorted(models - wanted))

    def score(self, meta: Mapping[str, Any]) -> float | None:
        """Of the state in the checkpoint with this meta; None if it was not evaluated, or was scored by other metrics."""
        scores = meta.get("scores") or {}
        if scores.get("step") != meta["step"] or tuple(scores.get("metrics", ())) != self.metrics:
            return None
        return scores["score"]

    def _best(self, steps: Iterable[int], scores: Mapping[int, float]) -> set[int]:
        """Of equals the newer; what is no number is never among them."""
        sign = 1.0 if self.lower_better else -1.0
        scored = [step for step in steps if step in scores and scores[step] == scores[step]]
        return set(sorted(scored, key=lambda step: (sign * scores[step], -step))[: self.best])

    def _every(self, steps: Iterable[int]) -> set[int]:
        return {step for step in steps if self.every_steps is not None and step % self.every_steps == 0}
