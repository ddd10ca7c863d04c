"""What is learned: the section `loss`, and those of tasks that come after pre-training: `preference`, `classification`,
`distillation`. Free of JAX."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from gangway.config.conversion import CheckedSection
from gangway.config.section import too_small

NO_TARGET = -100
"""The label that other libraries give to what is no target."""


@dataclass(frozen=True, kw_only=True)
class LossConfig(CheckedSection):
    """Settings of the loss of the built-in tasks."""

    z_loss_weight: float = 0.0
    """The weight of the mean square of log Z, the logarithm of the sum of exp(logits), which keeps it near 0 (Chowdhery et al.,
    2022, section 5). 0: it is not computed."""

    load_balancing_weight: float = 0.0
    """Of a mixture of experts: the weight of the loss that keeps the experts' loads equal, E sum(f p) over the E experts, where f
    is the part of the tokens that an expert gets, and p its mean probability, both over all layers (Fedus et al., 2021, section
    2.2). Each micro-batch has its own f and p."""
    router_z_loss_weight: float = 0.0
    """Of a mixture of experts: the weight of the mean square of the logarithm of the sum of exp(router's logits), over tokens and
    layers, which keeps these logits small (Zoph et al., 2022, section 3.1)."""
    label_smoothing: float = 0.0
    """The share of each target's probability that is spread evenly over the vocabulary (Szegedy et al., 2016, section 7). The
    published perplexity is then that of the smoothed loss."""
    ignore_index: int | None = None
    """Tokens with this id (of padding, say) are no targets: they count in no loss and no metric. null: every token is one. -100
    is the id of no token, so it leaves out none."""

    def _problems(self) -> Iterator[str]:
        yield from too_small(self, 0, "z_loss_weight", "load_balancing_weight", "router_z_loss_weight")
        if not 0 <= self.label_smoothing < 1:
            yield f"label_smoothing = {self.label_smoothing}: expected 0 <= label_smoothing < 1"
        if self.ignore_index is not None and self.ignore_index < 0 and self.ignore_index != NO_TARGET:
            problem = "expected an id of the vocabulary, for targets are the model's input too"
            yield f"ignore_index = {self.ignore_index}: {problem}; or {NO_TARGET}, which is that of no token"


WITH_REFERENCE = ("dpo", "ipo")
"""Losses that compare the model with a reference."""
SMOOTHED = ("dpo", "simpo")
DEFAULT_GAMMA = 0.5


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(CheckedSection):
    """Learning from pairs of a chosen and a rejected completion (`trainers/tasks/preference.py`)."""

    loss: Literal["dpo", "ipo", "orpo", "simpo"] = "dpo"
    """`dpo` (Rafailov et al., 2023), `ipo` (Azar et al., 2023), `orpo` (Hong et al., 2024), `simpo` (Meng et al., 2024)."""
    beta: float = 0.1
    """Of `dpo` and `simpo`: the factor of the rewards. Of `ipo`: the regularization, tau. Of `orpo`: the weight of the odds
    ratio, lambda."""
    label_smoothing: float = 0.0
    """Of `dpo` and `simpo`: the probability that a pair is labelled the wrong way round."""
    gamma: float | None = None
    """Of `simpo`: by how much the reward of the chosen completion should be larger. null: 0.5."""
    reference: Literal["frozen", "base", "columns"] | None = None
    """Of `dpo` and `ipo`: where the log-probabilities of the reference come from. `frozen`: the model `frozen.reference`. `base`:
    the model under the adapters of `lora`. `columns`: the columns `ref_chosen_logps` and `ref_rejected_logps` of the data, which
    `gangway reference` writes. null: `base` with `lora`, else `frozen`."""

    @property
    def margin(self) -> float:
        return DEFAULT_GAMMA if self.gamma is None else self.gamma

    @property
    def has_reference(self) -> bool:
        return self.loss in WITH_REFERENCE

    def _problems(self) -> Iterator[str]:
        if not self.beta > 0:
            yield f"beta = {self.beta}: expected more than 0"
        if not 0 <= self.label_smoothing < 0.5:
            yield f"label_smoothing = {self.label_smoothing}: expected 0 <= label_smoothing < 0.5"
        elif self.label_smoothing and self.loss not in SMOOTHED:
            yield f"label_smoothing = {self.label_smoothing}: the loss {self.loss} has none; leave it out"
        yield from too_small(self, 0, "gamma")
        if self.gamma is not None and self.loss != "simpo":
            yield f"gamma = {self.gamma}: the loss {self.loss} has none; leave it out"
        if self.reference is not None and not self.has_reference:
            yield f"reference = {self.reference!r}: the loss {self.loss} needs no reference; leave it out"


@dataclass(frozen=True, kw_only=True)
class ClassificationConfig(CheckedSection):
    """The classes of texts (`trainers/tasks/classification.py`)."""

    labels: tuple[str, ...] = ()
    """The names of the classes. The column `label` of the data has such a name; or, where no name is a number, its place in this
    list, from 0 on."""

    def _problems(self) -> Iterator[str]:
        if len(set(self.labels)) < len(self.labels):
            yield f"labels = {list(self.labels)}: expected each name once"
        if len(self.labels) == 1:
            yield f"labels = {list(self.labels)}: expected at least two"


@dataclass(frozen=True, kw_only=True)
class DistillationConfig(CheckedSection):
    """Learning from the probabilities of a teacher, `frozen.teacher` (`trainers/tasks/distillation.py`)."""

    temperature: float = 1.0
    """Both logits are divided by it. The loss is multiplied by its square, so that the gradients keep their size (Hinton et al.,
    2015)."""
    top_k: int | None = None
    """The teacher's likeliest tokens that count, with their probabilities divided by their sum, and 0 for all others (as in Gemma
    3, section 2.2, of tokens that are drawn). null: all tokens count."""

    def _problems(self) -> Iterator[str]:
        if not self.temperature > 0:
            yield f"temperature = {self.temperature}: expected more than 0"
        yield from too_small(self, 1, "top_k")
