"""The section `loss`: the loss of the built-in tasks. Free of JAX."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gangway.config.section import Section, require_none, too_small

NO_TARGET = -100
"""The label that other libraries give to what is no target."""


@dataclass(frozen=True, kw_only=True)
class LossConfig(Section):
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

    def __post_init__(self):
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from too_small(self, 0, "z_loss_weight", "load_balancing_weight", "router_z_loss_weight")
        if not 0 <= self.label_smoothing < 1:
            yield f"label_smoothing = {self.label_smoothing}: expected 0 <= label_smoothing < 1"
        if self.ignore_index is not None and self.ignore_index < 0 and self.ignore_index != NO_TARGET:
            problem = "expected an id of the vocabulary, for targets are the model's input too"
            yield f"ignore_index = {self.ignore_index}: {problem}; or {NO_TARGET}, which is that of no token"
