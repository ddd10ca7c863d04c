"""The sections for held-out data, scores, exact matches and previews. Free of JAX."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from gangway.config.conversion import CheckedSection
from gangway.config.section import not_paths, too_small

PLACE = "{question}"


@dataclass(frozen=True, kw_only=True)
class ExactMatchConfig(CheckedSection):
    """Questions whose answers the model generates, greedily (`trainers/evaluation/exact_match.py`)."""

    paths: tuple[str, ...]
    """Files of records, as in `data.paths`."""
    question_column: str = "question"
    """The column of the question."""
    answer_column: str = "answer"
    """The column of the right answer."""
    prompt: str = PLACE + "\n"
    """The text that the model continues, with the question in the place of `{question}`."""
    chat: bool = False
    """Whether this text is the user's message of a conversation, in the chat template of the tokenizer."""
    answer_pattern: str = r"####\s*(-?[0-9.,]*[0-9])"
    """A regular expression for the answer in a text: its first group, where it first matches. In the data, a text in which it
    does not match is the answer itself. The default is the form of GSM8K (Cobbe et al., 2021): the number after `####`."""
    num_tokens: int = 256
    """The tokens of a generated text at most."""

    def _problems(self) -> Iterator[str]:
        if not self.paths:
            yield "paths = []: expected at least one file or folder"
        if PLACE not in self.prompt:
            yield f"prompt = {self.prompt!r}: expected a text with {PLACE} in it"
        yield from too_small(self, 1, "num_tokens")
        try:
            groups = re.compile(self.answer_pattern).groups
        except re.error as error:
            yield f"answer_pattern = {self.answer_pattern!r}: expected a regular expression ({error})"
        else:
            if groups < 1:
                yield f"answer_pattern = {self.answer_pattern!r}: expected a group, (...), which is the answer"


@dataclass(frozen=True, kw_only=True)
class UnitConfig(CheckedSection):
    """A validation unit: held-out data, and the task that measures it."""

    dataset: str | None = None
    """`package.module:function` (arguments) -> examples; default: the held-out ones of `data.dataset`."""
    task: str | None = None
    """The task whose loss is measured, with the parameters that are trained; default: the task that is trained."""
    max_batches: int | None = None
    """Default: `evaluation.max_batches`."""
    batch_size: int | None = None
    """Default: `evaluation.batch_size`."""
    metrics: str | None = None
    """`package.module:Class` (arguments): metrics of the task's predictions (`trainers.protocol.EvaluationMetrics`)."""
    exact_match: ExactMatchConfig | None = None
    """Questions, in the place of a dataset, a task and metrics: the model generates answers, and those that are right are
    counted."""

    def _problems(self) -> Iterator[str]:
        yield from not_paths(self, *(name for name in ("dataset", "task", "metrics") if getattr(self, name) is not None))
        yield from too_small(self, 1, "max_batches", "batch_size")
        if self.exact_match is not None:
            for name in ("dataset", "task", "metrics"):
                if (value := getattr(self, name)) is not None:
                    yield f"{name} = {value!r}: exact_match says it; leave it out"


LOWER_IS_BETTER = {"loss", "nll", "perplexity", "error", "errors", "wer", "cer", "mse", "rmse", "mae", "divergence", "kl"}
OF_TEXTS = {"bleu", "chrf", "rouge", "reward", "em", "match"}
HIGHER_IS_BETTER = {"accuracy", "acc", "f1", "precision", "recall", "auc", "map", "iou"} | OF_TEXTS
"""Words in the name of a metric that tell in which direction it gets better."""
TOLD = {True: "lower is better", False: "higher is better", None: "not known"}


def lower_is_better(metric: str) -> bool | None:
    """Returns whether lower values of a metric are better; None if its name does not tell."""
    words = set(re.split(r"[^a-z0-9]+", metric.lower()))
    lower, higher = bool(words & LOWER_IS_BETTER), bool(words & HIGHER_IS_BETTER)
    return lower if lower != higher else None


@dataclass(frozen=True, kw_only=True)
class ScoreConfig(CheckedSection):
    """How evaluations are compared, and when training stops because none gets better."""

    metrics: tuple[str, ...] = ("eval_loss",)
    """The published names of the metrics: the unit's name, `_`, the metric's name."""
    combine: Literal["mean", "min", "max"] = "mean"
    """How several metrics become one number. It is NaN if one of them is, and so never the best."""
    lower_better: bool | None = None
    """Whether a lower score is better. Default: as the names of the metrics tell, such as `loss` and `accuracy`."""
    min_delta: float = 0.0
    """A score is better if it beats the best one by more than this."""
    patience: int | None = None
    """Training stops after this many evaluations without a better score."""
    early_stopper: str | None = None
    """`package.module:function` (step, score) -> whether to stop; called on host 0 alone."""

    def _problems(self) -> Iterator[str]:
        if not self.metrics:
            yield "metrics = []: expected at least one metric, such as eval_loss"
        elif self.lower_better is None and (len(directions := self._directions()) > 1 or None in directions):
            detail = ", ".join(f"{name} ({TOLD[lower_is_better(name)]})" for name in self.metrics)
            yield f"lower_better = null: expected true or false, for the names of the metrics do not tell: {detail}"
        yield from too_small(self, 0, "min_delta")
        yield from too_small(self, 1, "patience")
        if self.early_stopper is not None:
            yield from not_paths(self, "early_stopper")

    def _directions(self) -> set[bool | None]:
        return {lower_is_better(metric) for metric in self.metrics}

    @property
    def lowest_is_best(self) -> bool:
        """The direction that counts."""
        return self._directions() == {True} if self.lower_better is None else self.lower_better


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(CheckedSection):
    """When and how to evaluate. There is never more than one evaluation at a step, and always one at the end of a run."""

    at_start: bool = False
    """Whether to evaluate before the first step of the run."""
    every_steps: int | None = None
    """An evaluation is due at each step that is a multiple of this. null: not by steps."""
    every_epochs: int | None = None
    """An evaluation is due at the end of every so many epochs. null: not by epochs."""
    after_step: int = 0
    """The first step at which an evaluation may be due."""
    after_epochs: int = 0
    """How many epochs must be complete before an evaluation may be due."""
    max_batches: int | None = None
    """How many global batches of the held-out data to use; default: all."""
    batch_size: int | None = None
    """Examples in a global batch of an evaluation; default: those of a micro-batch of the training, which fit into memory."""
    units: dict[str, UnitConfig] = field(default_factory=dict)
    """The validation units by name, which begins the names of their metrics; default: `eval`, the held-out data of
    `data.dataset`."""
    score: ScoreConfig | None = None
    """How evaluations are compared, for the best checkpoint and for an early stop. null: they are not."""

    def _problems(self) -> Iterator[str]:
        yield from too_small(self, 1, "every_steps", "every_epochs", "max_batches", "batch_size")
        yield from too_small(self, 0, "after_step", "after_epochs")
        for name in self.units:
            if not re.fullmatch(r"[A-Za-z]\w*", name) or name == "train":
                yield f"units: {name!r}: expected a name of letters, digits and '_', starting with a letter, and not 'train'"
        if self.score is not None and (self.score.patience or self.score.early_stopper) and not self.scheduled:
            yield "score.patience and score.early_stopper: nothing calls for evaluations; set every_steps or every_epochs"

    @property
    def scheduled(self) -> bool:
        """Whether evaluations are scheduled before the end of the run."""
        return self.every_steps is not None or self.every_epochs is not None


@dataclass(frozen=True, kw_only=True)
class PreviewConfig(CheckedSection):
    """Texts that the model generates to show what it has learnt: at the end of a run, and every `every_steps`."""

    every_steps: int | None = None
    """Default: only at the end."""
    prompts: tuple[str, ...] = ()
    """The texts to continue, all in one batch; []: no previews."""
    num_tokens: int = 200
    """The number of tokens of each continuation."""
    greedy: bool = False
    """Whether to take the likeliest token each time."""
    temperature: float = 0.7
    """The temperature of the sampling if not greedy; 0 is greedy too."""
    top_k: int | None = None
    """Draw from this many of the likeliest tokens; default: from all."""
    top_p: float | None = None
    """Draw from the likeliest tokens that together have this probability; default: from all."""

    def _problems(self) -> Iterator[str]:
        yield from too_small(self, 1, "every_steps", "num_tokens", "top_k")
        yield from too_small(self, 0, "temperature")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            yield f"top_p = {self.top_p}: expected 0 < top_p <= 1"
        if "" in self.prompts:
            yield f"prompts = {list(self.prompts)}: expected at least one character in each; [] for no previews"
