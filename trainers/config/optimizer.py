"""How parameters are updated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from trainers.config.section import Section, not_patterns, require_none, too_small


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Section):
    """Learning rate over steps, as a factor of `learning_rate`. See `trainers/optim/schedules.py` for the names."""

    name: str = "cosine"
    warmup_steps: int = 0
    decay_steps: int | None = None
    """Steps after which the decay has ended, warm-up included; default: `max_num_steps`."""
    final_factor: float = 0.1
    power: float = 2.0
    """Of `polynomial`."""
    hold_steps: int = 0
    """Of `tri_stage`: steps at the full rate, between warm-up and decay."""
    cycle_steps: int | None = None
    """Of `cosine_restarts`: the length of the first cycle."""
    cycle_growth: int = 1
    """Of `cosine_restarts`: how many times longer each cycle is than the one before."""
    cycle_factor: float = 1.0
    """Of `cosine_restarts`: the peak of each cycle, as a factor of the one before."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of `optax.<function>`."""

    def __post_init__(self):
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from too_small(self, 0, "warmup_steps", "final_factor", "hold_steps", "cycle_factor")
        yield from too_small(self, 1, "decay_steps", "cycle_steps", "cycle_growth")
        if not self.power > 0:
            yield f"power = {self.power}: expected a positive number"
        if self.name == "cosine_restarts" and self.cycle_steps is None:
            yield "cycle_steps = null: expected the length of the first cycle of cosine_restarts"
        if self.name == "tri_stage" and not self.final_factor > 0:
            yield f"final_factor = {self.final_factor}: expected a positive number, for an exponential decay never ends at 0"
        for name, field_ in self.__dataclass_fields__.items():
            owner = SCHEDULE_OF.get(name)
            given = getattr(self, name) not in (field_.default, {})
            if owner and given and not self.name.startswith(owner):
                yield f"{name} = {getattr(self, name)}: it is a setting of {owner}, and name is {self.name!r}; leave it out"
            if owner is None and given and name != "name" and self.name.startswith("optax."):
                yield f"{name} = {getattr(self, name)}: {self.name} takes arguments alone; leave it out"


SCHEDULE_OF = {
    "power": "polynomial",
    "hold_steps": "tri_stage",
    "cycle_steps": "cosine_restarts",
    "cycle_growth": "cosine_restarts",
    "cycle_factor": "cosine_restarts",
    "arguments": "optax.",
}
"""Which schedule a setting belongs to that most have not."""


@dataclass(frozen=True, kw_only=True)
class ParameterGroup(Section):
    """Parameters that are trained in another way than the rest, or not at all. The first group that takes a parameter has it."""

    pattern: str
    """A regular expression that is searched in the names of parameters, such as `layers.query`."""
    learning_rate: float | None = None
    """At the peak, the schedule's shape being that of all; default: `optimizer.learning_rate`."""
    weight_decay: float | None = None
    """Default: `optimizer.weight_decay`."""
    frozen: bool = False
    """Not trained: no optimizer state, no part in the gradient's norm, not a bit changed."""

    def __post_init__(self):
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from not_patterns(self, "pattern")
        yield from too_small(self, 0, "weight_decay")
        if self.learning_rate is not None and not self.learning_rate > 0:
            yield f"learning_rate = {self.learning_rate}: expected a positive number; to train nothing, set frozen"
        if self.frozen and (self.learning_rate is not None or self.weight_decay is not None):
            yield f"frozen = true: the group {self.pattern!r} is not trained; leave out its learning_rate and weight_decay"


MOMENT_DTYPE_TAKEN = ("adamw", "adam", "lion", "sgd", "muon")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """See `trainers/optim/optimizers.py` for the names."""

    name: str = "adamw"
    learning_rate: float = 3e-4
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    max_grad_norm: float | None = 1.0
    """Clips by global norm; null: no clipping (the norm is published all the same)."""
    moment_dtype: Literal["float32", "bfloat16"] | None = None
    """Of the first moment; the second is too small for bfloat16."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    groups: tuple[ParameterGroup, ...] = ()
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of `optax.<factory>`, in the place of all settings above but `learning_rate`."""

    def __post_init__(self):
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        if not self.learning_rate > 0:
            yield f"learning_rate = {self.learning_rate}: expected a positive number"
        yield from too_small(self, 0, "weight_decay", "eps")
        if not all(0 <= beta < 1 for beta in self.betas):
            yield f"betas = {list(self.betas)}: expected 0 <= beta < 1"
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            yield f"max_grad_norm = {self.max_grad_norm}: expected a positive number, or null for no clipping"
        if self.arguments and not self.name.startswith("optax."):
            yield f"arguments = {self.arguments}: they are for a name of the form optax.<factory>, and name is {self.name!r}"
        if self.moment_dtype == "bfloat16" and ":" not in self.name and self.name not in MOMENT_DTYPE_TAKEN:
            yield (
                f"moment_dtype = {self.moment_dtype!r}: {self.name} keeps its moments as they are; leave it out, or use one of "
                f"{', '.join(MOMENT_DTYPE_TAKEN)}"
            )
        if self.name == "schedule_free_adamw" and self.schedule.name != "constant":
            yield (
                f"schedule.name = {self.schedule.name!r}: schedule_free_adamw averages parameters where others decay the "
                "learning rate; expected 'constant' (with warmup_steps)"
            )
        if self.name == "schedule_free_adamw" and not self.betas[0] > 0:
            yield f"betas = {list(self.betas)}: expected a positive first one, by which schedule_free_adamw averages"


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig(Section):
    """Of `dtype: float16`: the loss is multiplied by a scale, lest small gradients become 0, and gradients are divided by it."""

    initial: float = 128.0
    minimum: float = 1e-4
    """A scale that would have to fall below it is an error."""
    growth_factor: float = 2.0
    """By which the scale grows after a window, and is divided when gradients overflow."""
    window_steps: int = 2000
    """So many updates in a row without an overflow, and the scale grows."""

    def __post_init__(self):
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from too_small(self, 1, "window_steps")
        if not self.minimum > 0:
            yield f"minimum = {self.minimum}: expected a positive number"
        if self.initial < self.minimum:
            yield f"initial = {self.initial}: expected at least minimum ({self.minimum})"
        if not self.growth_factor > 1:
            yield f"growth_factor = {self.growth_factor}: expected more than 1"


@dataclass(frozen=True, kw_only=True)
class PruningConfig(Section):
    """Weights of the smallest magnitude become 0 and stay 0: more and more of them, after Zhu & Gupta (2017)."""

    pattern: str | None = None
    """Which parameters: a regular expression that is searched in names such as `layers.query`; null: none."""
    final_sparsity: float = 0.5
    """The part of each parameter that is 0 from `end_step` on."""
    begin_step: int = 0
    end_step: int = 1000
    every_steps: int = 100

    def __post_init__(self):
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from not_patterns(self, "pattern")
        yield from too_small(self, 0, "begin_step")
        yield from too_small(self, 1, "every_steps")
        if not 0 < self.final_sparsity < 1:
            yield f"final_sparsity = {self.final_sparsity}: expected 0 < final_sparsity < 1"
        if self.end_step <= self.begin_step:
            yield f"end_step = {self.end_step}: expected more than begin_step ({self.begin_step})"
