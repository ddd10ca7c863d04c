"""When training is looked at and saved: held-out data, scores, checkpoints, previews."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from trainers.config.section import Section, not_paths, require_none, too_small


@dataclass(frozen=True, kw_only=True)
class UnitConfig(Section):
    """Held-out data of its own, and what is measured on it."""

    dataset: str | None = None
    """`package.module:function` (arguments) -> examples; default: the held-out ones of `data.dataset`."""
    task: str | None = None
    """Whose loss is measured, on the parameters that are trained; default: the task that is trained."""
    max_batches: int | None = None
    """Default: `evaluation.max_batches`."""

    def __post_init__(self):
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from not_paths(self, *(name for name in ("dataset", "task") if getattr(self, name) is not None))
        yield from too_small(self, 1, "max_batches")


@dataclass(frozen=True, kw_only=True)
class ScoreConfig(Section):
    """What makes one evaluation better than another, and when there is no hope of a better one."""

    metrics: tuple[str, ...] = ("eval_loss",)
    """As they are published: the unit's name, `_`, the metric's."""
    combine: Literal["mean", "min", "max"] = "mean"
    """How several metrics become one number."""
    lower_better: bool = True
    min_delta: float = 0.0
    """A score is better if it beats the best one by more than this."""
    patience: int | None = None
    """Training stops after so many evaluations that brought no better score."""
    early_stopper: str | None = None
    """`package.module:function` (step, score) -> whether to stop; called on host 0 alone."""

    def __post_init__(self):
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        if not self.metrics:
            yield "metrics = []: expected at least one metric, such as eval_loss"
        yield from too_small(self, 0, "min_delta")
        yield from too_small(self, 1, "patience")
        if self.early_stopper is not None:
            yield from not_paths(self, "early_stopper")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Section):
    """Evaluations never come twice at a step. One comes at the end of a run in any case."""

    at_start: bool = False
    """Before the first step of the run."""
    every_steps: int | None = None
    every_epochs: int | None = None
    after_step: int = 0
    """The first step at which one may be due."""
    max_batches: int | None = None
    """How many global batches of the held-out data to use; default: all."""
    units: dict[str, UnitConfig] = field(default_factory=dict)
    """By name, which begins the names of its metrics; default: `eval`, the held-out data of `data.dataset`."""
    score: ScoreConfig | None = None

    def __post_init__(self):
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from too_small(self, 1, "every_steps", "every_epochs", "max_batches")
        yield from too_small(self, 0, "after_step")
        for name in self.units:
            if not re.fullmatch(r"[A-Za-z]\w*", name) or name == "train":
                yield f"units: {name!r}: expected a name of letters, digits and '_', starting with a letter, and not 'train'"
        if self.score is not None and (self.score.patience or self.score.early_stopper) and not self.scheduled:
            yield "score.patience and score.early_stopper: nothing calls for evaluations; set every_steps or every_epochs"

    @property
    def scheduled(self) -> bool:
        """Whether there are evaluations before the end."""
        return self.every_steps is not None or self.every_epochs is not None


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """When a state is saved, and which checkpoints stay: all that any of the settings asks for, and always the newest."""

    save_steps: int | None = None
    save_epochs: int | None = None
    save_after_step: int = 0
    """The first step at which `save_steps` and `save_epochs` may save."""
    save_minutes: float | None = None
    save_at_end: bool = True
    storage_patience_s: float = 5.0
    """How long training waits before a save for a storage that does not answer. It then goes on, and tries again soon."""
    save_total_limit: int = 3
    """How many of the newest checkpoints are kept."""
    keep_best: int | None = None
    """How many of those with the best scores (`evaluation.score`) are kept."""
    keep_every_steps: int | None = None
    """Those of a step that is a multiple of this are kept."""
    keep_model_only: Literal["none", "best", "every", "all"] = "none"
    """Of which older checkpoints the parameters alone are kept, in the run's folder `models`: those that `keep_best` keeps, those
    that `keep_every_steps` keeps, or both. What is also kept for another reason stays whole."""

    def __post_init__(self):
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from too_small(self, 1, "save_steps", "save_epochs", "save_total_limit", "keep_best", "keep_every_steps")
        yield from too_small(self, 0, "save_after_step")
        if not self.storage_patience_s > 0:
            yield f"storage_patience_s = {self.storage_patience_s}: expected a positive number of seconds"
        if self.save_minutes is not None and not self.save_minutes > 0:
            yield f"save_minutes = {self.save_minutes}: expected a positive number"
        needs = {"best": ("keep_best",), "every": ("keep_every_steps",), "all": ("keep_best", "keep_every_steps")}
        for name in needs.get(self.keep_model_only, ()):
            if getattr(self, name) is None:
                yield f"keep_model_only = {self.keep_model_only!r}: nothing is kept by {name}; set it, or keep_model_only=none"


@dataclass(frozen=True, kw_only=True)
class PreviewConfig(Section):
    """Texts that the model generates, a look at what it has learnt: at the end of a run, and on the way if wanted."""

    every_steps: int | None = None
    """Default: at the end alone."""
    prompts: tuple[str, ...] = ("def ",)
    """Continued all at once; []: no previews."""
    num_tokens: int = 200
    """Of each continuation."""
    greedy: bool = False
    """Take the likeliest token each time."""
    temperature: float = 0.7
    """Of what is drawn otherwise; 0 is greedy too."""
    top_k: int | None = None
    """Draw from the likeliest so many tokens; default: from all."""
    top_p: float | None = None
    """Draw from the likeliest tokens that together have this probability; default: from all."""

    def __post_init__(self):
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from too_small(self, 1, "every_steps", "num_tokens", "top_k")
        yield from too_small(self, 0, "temperature")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            yield f"top_p = {self.top_p}: expected 0 < top_p <= 1"
        if "" in self.prompts:
            yield f"prompts = {list(self.prompts)}: expected at least one character in each; [] for no previews"
