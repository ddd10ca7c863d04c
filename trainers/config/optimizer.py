"""The sections for the optimizer, its schedule, parameter groups, loss scaling and pruning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from gangway.config.conversion import CheckedSection
from gangway.config.section import not_paths, not_patterns, not_positive, too_small


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(CheckedSection):
    """The learning rate over steps, as a factor of `learning_rate`. See `trainers/optim/schedules.py` for the names."""

    name: str = "cosine"
    """The shape after the warm-up: a name of `trainers/optim/schedules.py`, `optax.FUNCTION`, or `package.module:function`
    (config, learning_rate, max_num_steps)."""
    warmup_steps: int = 0
    """The steps in which the rate rises to `optimizer.learning_rate`."""
    warmup_ratio: float | None = None
    """Instead of `warmup_steps`: the share of the run's steps, rounded. The run's steps are `max_num_steps`, else those of
    `max_num_data_epochs`, else `decay_steps`."""
    start_factor: float | None = None
    """The rate of the first step of the warm-up, as a factor; default: that of an even step, 1 / (`warmup_steps` + 1)."""
    decay_steps: int | None = None
    """Steps after which the decay has ended, warm-up included; default: the run's steps."""
    decay_ratio: float | None = None
    """Instead of `decay_steps`: the share of the run's steps, rounded."""
    final_factor: float = 0.1
    """The rate at the end of the decay, as a factor."""
    power: float = 2.0
    """The exponent of `polynomial`."""
    hold_steps: int = 0
    """For `tri_stage`: the steps at the full rate, between warm-up and decay."""
    cycle_steps: int | None = None
    """For `cosine_restarts`: the length of the first cycle."""
    cycle_growth: int = 1
    """For `cosine_restarts`: how many times longer each cycle is than the one before."""
    cycle_factor: float = 1.0
    """For `cosine_restarts`: the peak of each cycle, as a factor of the one before."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """The arguments of `optax.<function>`."""

    def _problems(self) -> Iterator[str]:
        yield from too_small(self, 0, "warmup_steps", "start_factor", "final_factor", "hold_steps", "cycle_factor")
        if self.warmup_ratio is not None and not 0 <= self.warmup_ratio < 1:
            yield f"warmup_ratio = {self.warmup_ratio}: expected 0 <= warmup_ratio < 1"
        if self.decay_ratio is not None and not 0 < self.decay_ratio <= 1:
            yield f"decay_ratio = {self.decay_ratio}: expected 0 < decay_ratio <= 1"
        if self.warmup_ratio is not None and self.warmup_steps:
            yield f"warmup_ratio = {self.warmup_ratio}: warmup_steps = {self.warmup_steps} says the same; leave one of them out"
        if self.decay_ratio is not None and self.decay_steps is not None:
            yield f"decay_ratio = {self.decay_ratio}: decay_steps = {self.decay_steps} says the same; leave one of them out"
        yield from too_small(self, 1, "decay_steps", "cycle_steps", "cycle_growth")
        yield from not_positive(self, "power")
        if self.name == "cosine_restarts" and self.cycle_steps is None:
            yield "cycle_steps = null: expected the length of the first cycle of cosine_restarts"
        if self.name == "tri_stage" and not self.final_factor > 0:
            yield f"final_factor = {self.final_factor}: expected a positive number, for an exponential decay never ends at 0"
        for name, field_ in self.__dataclass_fields__.items():
            owner = SCHEDULE_OF.get(name)
            # `{}` too: `arguments` has a factory, and so no default to compare with.
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
"""The schedule that a setting belongs to, for settings that most schedules do not have."""


@dataclass(frozen=True, kw_only=True)
class ParameterGroup(CheckedSection):
    """Parameters with their own settings, or frozen. The first group that matches a parameter counts."""

    pattern: str
    """A regular expression that is searched in the names of parameters, such as `layers.query`."""
    learning_rate: float | None = None
    """The rate at the peak; the shape of the schedule is the same for all. Default: `optimizer.learning_rate`."""
    weight_decay: float | None = None
    """Default: `optimizer.weight_decay`."""
    frozen: bool = False
    """Not trained: no optimizer state, no part in the gradient's norm, not a bit changed."""

    def _problems(self) -> Iterator[str]:
        yield from not_patterns(self, "pattern")
        yield from too_small(self, 0, "weight_decay")
        if self.learning_rate is not None and not self.learning_rate > 0:
            yield f"learning_rate = {self.learning_rate}: expected a positive number; to train nothing, set frozen"
        if self.frozen and (self.learning_rate is not None or self.weight_decay is not None):
            yield f"frozen = true: the group {self.pattern!r} is not trained; leave out its learning_rate and weight_decay"


# Those whose function of optax takes a type for its first moment (`mu_dtype`, `accumulator_dtype`).
MOMENT_DTYPE_TAKEN = ("adamw", "adam", "lion", "sgd", "muon")

OFFLOADED = ("adamw", "adam", "lion", "sgd", "rmsprop")
"""Those that compute each value of an update from the same value of the gradient, the parameter and the moments."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(CheckedSection):
    """The optimizer. See `trainers/optim/optimizers.py` for the names."""

    name: str = "adamw"
    """A name of `trainers/optim/optimizers.py`, `optax.FACTORY`, or `package.module:function` (config, schedule)."""
    # Weight decay, betas, eps and clipping are those of GPT-3 (Brown et al., 2020, appendix B).
    learning_rate: float = 3e-4
    """The rate at the peak of the schedule."""
    weight_decay: float = 0.1
    """Decoupled from the gradient, scaled by the learning rate, and of matrices only."""
    betas: tuple[float, float] = (0.9, 0.95)
    """The decays of the first and of the second moment. `sgd` has the first alone, as momentum; `rmsprop` the second."""
    eps: float = 1e-8
    """What is added to the root of the second moment."""
    max_grad_norm: float | None = 1.0
    """Clips by global norm; null: no clipping (the norm is published all the same)."""
    moment_dtype: Literal["float32", "bfloat16"] | None = None
    """The dtype of the first moment; null: float32, whatever `param_dtype` is. All else that an optimizer keeps is float32: a
    second moment in bfloat16 no longer moves at half of its value."""
    master_weights: Literal["float32", "stochastic", "none"] = "float32"
    """What becomes of updates that a parameter of bfloat16 is too coarse for. `float32`: the optimizer keeps each parameter in
    float32 too, 4 bytes more. `stochastic`: it is rounded up or down at random, without a copy. `none`: they are lost, and the
    share of the values that did not move is published as `lost_updates`. Parameters of float32 need none of it."""
    offload: Literal["none", "host"] = "none"
    """`host`: the moments lie in the memory of the devices' hosts, and each step brings them to the devices a layer at a time. It
    takes the time of reading and writing them once a step."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    groups: tuple[ParameterGroup, ...] = ()
    """Parameters with settings of their own, or frozen. The first group that matches counts."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """The arguments of `optax.<factory>`, instead of all settings above except `learning_rate`."""

    def _problems(self) -> Iterator[str]:
        yield from not_positive(self, "learning_rate")
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
        if self.offload == "host" and self.name not in OFFLOADED:
            yield (
                f"offload = 'host': {self.name} may need several values of a parameter at once, and the devices get a layer at a "
                f"time; set offload: none, or use one of {', '.join(OFFLOADED)}"
            )
        if self.offload == "host" and self.master_weights == "stochastic":
            yield "master_weights = 'stochastic': with offload = 'host' all layers draw alike; expected 'float32' or 'none'"
        if self.name == "schedule_free_adamw" and self.schedule.name != "constant":
            yield (
                f"schedule.name = {self.schedule.name!r}: schedule_free_adamw averages parameters where others decay the "
                "learning rate; expected 'constant' (with warmup_steps)"
            )
        if self.name == "schedule_free_adamw" and not self.betas[0] > 0:
            yield f"betas = {list(self.betas)}: expected a positive first one, by which schedule_free_adamw averages"


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig(CheckedSection):
    """Settings of loss scaling, for `dtype: float16`. The loss is multiplied by a scale, so that small gradients do not become
    0, and the gradients are divided by it."""

    initial: float = 128.0
    """The scale at the first step."""
    minimum: float = 1e-4
    """The run fails when the scale would have to fall below this."""
    growth_factor: float = 2.0
    """The factor by which the scale grows after a window, and is divided when gradients overflow."""
    # As many as in PyTorch's GradScaler (`growth_interval`).
    window_steps: int = 2000
    """The scale grows after this many updates in a row without an overflow."""

    def _problems(self) -> Iterator[str]:
        yield from too_small(self, 1, "window_steps")
        yield from not_positive(self, "minimum")
        if self.initial < self.minimum:
            yield f"initial = {self.initial}: expected at least minimum ({self.minimum})"
        if not self.growth_factor > 1:
            yield f"growth_factor = {self.growth_factor}: expected more than 1"


@dataclass(frozen=True, kw_only=True)
class PruningConfig(CheckedSection):
    """Pruning: the weights of the smallest magnitude become 0 and stay 0, more and more of them, after Zhu & Gupta (2017); or by
    a pruner of one's own."""

    pruner: str | None = None
    """A class or function (arguments) -> `trainers.protocol.Pruner`, as `package.module:Name` (`build_pruner`); the other
    settings are then left out."""
    pattern: str | None = None
    """The parameters to prune: a regular expression that is searched in names such as `layers.query`; null: none."""
    final_sparsity: float = 0.5
    """The fraction of each parameter that is 0 from `end_step` on."""
    begin_step: int = 0
    """The step at which pruning begins."""
    end_step: int = 1000
    """The step at which the final sparsity is reached."""
    every_steps: int = 100
    """Between the two, weights are pruned at each step that is a multiple of this."""

    def _problems(self) -> Iterator[str]:
        yield from not_patterns(self, "pattern")
        if self.pruner is not None:
            yield from not_paths(self, "pruner")
            if self.pattern is not None:
                yield f"pattern = {self.pattern!r}: expected null with pruner = {self.pruner!r}, which says itself what to prune"
        yield from too_small(self, 0, "begin_step")
        yield from too_small(self, 1, "every_steps")
        if not 0 < self.final_sparsity < 1:
            yield f"final_sparsity = {self.final_sparsity}: expected 0 < final_sparsity < 1"
        if self.end_step <= self.begin_step:
            yield f"end_step = {self.end_step}: expected more than begin_step ({self.begin_step})"
