"""The sections of the configuration, each checked as it is built. Free of JAX."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from trainers.checks import Section, not_paths, not_patterns, require, require_none, too_small


@dataclass(frozen=True, kw_only=True)
class MeshConfig(Section):
    """Sizes of the mesh axes over all devices of the run; one of them may be -1: whatever is left."""

    data: int = -1
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self):
        sizes = dataclasses.asdict(self)
        for name, size in sizes.items():
            require(size == -1 or size >= 1, f"mesh axis {name} = {size}: expected a positive size, or -1 for what is left")
        require(list(sizes.values()).count(-1) <= 1, f"mesh {sizes}: at most one axis may be -1")

    def resolve(self, num_devices: int) -> dict[str, int]:
        """Axis sizes for `num_devices` devices. Raises ValueError when they do not multiply to it."""
        sizes = dataclasses.asdict(self)
        fixed = 1
        for size in sizes.values():
            fixed *= size if size != -1 else 1
        shown = " x ".join(f"{name} {size}" for name, size in sizes.items())
        if num_devices % fixed or (-1 not in sizes.values() and fixed != num_devices):
            fits = [n for n in range(1, num_devices + 1) if num_devices % n == 0]
            raise ValueError(
                f"mesh {shown} does not fit {num_devices} devices: the sizes must multiply to {num_devices} "
                f"(each a divisor: {', '.join(map(str, fits))}); set one axis to -1 to let it take what is left"
            )
        return {name: num_devices // fixed if size == -1 else size for name, size in sizes.items()}


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    vocab_size: int = 256
    width: int = 256
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 4
    mlp_width: int = 768
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tie_embeddings: bool = True

    def __post_init__(self):
        require_none(too_small(self, 1, "vocab_size", "width", "num_layers", "num_heads", "num_kv_heads", "mlp_width"))
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        if self.width % self.num_heads or (self.width // self.num_heads) % 2:
            yield f"width = {self.width}: expected an even number of channels for each of the {self.num_heads} heads (num_heads)"
        if self.num_heads % self.num_kv_heads:
            yield f"num_kv_heads = {self.num_kv_heads}: expected a divisor of num_heads ({self.num_heads})"
        if self.rope_theta <= 0:
            yield f"rope_theta = {self.rope_theta}: expected a positive number"


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """Text as bytes, from files and folders. `dataset` names a function (arguments) -> (train, eval) to use another source."""

    dataset: str = "trainers.data.text:byte_text"
    paths: tuple[str, ...] = ("python-stdlib",)
    """Files or folders; `python-stdlib` stands for the sources of the running Python's standard library."""
    pattern: str = "*.py"
    """Which files of a folder to read (a file named in `paths` is always read)."""
    sequence_length: int = 256
    eval_fraction: float = 0.05
    """The tail of the text that is held out."""
    shuffle: bool = True
    truncation: Literal["keep_start", "keep_end"] = "keep_start"
    """Which part of an example remains that is longer than `build_data_collate_info` allows."""
    sources: tuple[str, ...] = ()
    """Names of what the examples come from, if each has a leaf `source` with a place in this list: loss and tokens are then told
    of each."""

    def __post_init__(self):
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from not_paths(self, "dataset")
        yield from too_small(self, 2, "sequence_length")
        if not self.paths:
            yield "paths = []: expected at least one file or folder"
        if len(set(self.sources)) < len(self.sources):
            yield f"sources = {list(self.sources)}: expected each name once"
        if not 0 <= self.eval_fraction < 1:
            yield f"eval_fraction = {self.eval_fraction}: expected 0 <= eval_fraction < 1"


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Section):
    """Learning rate over steps, as a factor of `learning_rate`. See `trainers/schedules.py` for the names."""

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
    """See `trainers/optimizers.py` for the names."""

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
        if self.save_minutes is not None and not self.save_minutes > 0:
            yield f"save_minutes = {self.save_minutes}: expected a positive number"
        needs = {"best": ("keep_best",), "every": ("keep_every_steps",), "all": ("keep_best", "keep_every_steps")}
        for name in needs.get(self.keep_model_only, ()):
            if getattr(self, name) is None:
                yield f"keep_model_only = {self.keep_model_only!r}: nothing is kept by {name}; set it, or keep_model_only=none"


@dataclass(frozen=True, kw_only=True)
class AnomalyConfig(Section):
    """What to do about a batch whose loss or gradient is not finite, or whose loss leaps up. Its update is never applied."""

    non_finite: Literal["raise", "skip", "rollback"] = "skip"
    """raise: the run fails; skip: it goes on with the next batch; rollback: it goes back to a checkpoint before the batch."""
    loss_spike: Literal["off", "raise", "skip", "rollback"] = "off"
    spike_zscore: float = 6.0
    """A spike is a loss this many standard deviations above its running mean, both over the updates that were applied."""
    spike_warmup_steps: int = 50
    """Updates before the first one that can be a spike."""
    spike_decay: float = 0.98
    """Of the running mean and variance: the weight of the past at each update."""
    skip_before: int = 0
    """How many batches before the offending one a rollback leaves out with it."""
    max_skipped: int = 100
    """One more, and the run fails: the fault is not in the data."""

    def __post_init__(self):
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from too_small(self, 0, "skip_before", "max_skipped")
        yield from too_small(self, 1, "spike_warmup_steps")
        if not self.spike_zscore > 0:
            yield f"spike_zscore = {self.spike_zscore}: expected a positive number"
        if not 0 < self.spike_decay < 1:
            yield f"spike_decay = {self.spike_decay}: expected 0 < spike_decay < 1"


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


@dataclass(frozen=True, kw_only=True)
class LossConfig(Section):
    """Of the tasks that are built in."""

    z_loss_weight: float = 0.0
    """Of the mean square of log Z, the logarithm of the sum of exp(logits), which keeps it near 0 (Chowdhery et al., 2022,
    section 5). 0: it is not computed."""

    def __post_init__(self):
        require_none(too_small(self, 0, "z_loss_weight"))


@dataclass(frozen=True, kw_only=True)
class MetricsConfig(Section):
    """See `docs/metrics.md`."""

    per_parameter_grad_norm: bool = False
    peak_flops_per_s: float | None = None
    """Of one device, for `mfu`; default: as known of its kind (`trainers/peaks.py`)."""

    def __post_init__(self):
        if self.peak_flops_per_s is not None:
            require(self.peak_flops_per_s > 0, f"peak_flops_per_s = {self.peak_flops_per_s}: expected a positive number")


@dataclass(frozen=True, kw_only=True)
class DistributionConfig(Section):
    """Histogram, mean, deviation and extremes of parameters and their gradients, for the recorders that take them."""

    pattern: str | None = None
    """Which parameters: a regular expression that is searched in names such as `layers/attention/query`; `.`: all; null: none."""
    every_steps: int = 100
    bins: int = 64

    def __post_init__(self):
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from too_small(self, 1, "every_steps")
        yield from too_small(self, 2, "bins")
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            yield f"pattern = {self.pattern!r}: expected a regular expression, or null ({error})"


@dataclass(frozen=True, kw_only=True)
class ProfileConfig(Section):
    """A window of steps that JAX's profiler records, below `profile` in the run's folder; more at any time by
    `python -m orchestrator.profile`. Skips, then `repeat` times: waits, warms up, records."""

    record_steps: int | None = None
    """null: nothing is recorded on schedule."""
    skip_steps: int = 0
    """Of this process, at first."""
    wait_steps: int = 0
    warmup_steps: int = 1
    """Steps that are traced and thrown away: what the start of the tracer costs is not to be seen in the record."""
    repeat: int = 1
    hosts: tuple[int, ...] = (0,)

    def __post_init__(self):
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from too_small(self, 1, "record_steps", "repeat")
        yield from too_small(self, 0, "skip_steps", "wait_steps", "warmup_steps")
        if self.repeat > 1 and self.wait_steps < 2:
            yield (
                f"wait_steps = {self.wait_steps}: expected at least 2 with repeat = {self.repeat}: the last steps of a "
                "window are still running when the next ones are begun"
            )
        if not self.hosts or min(self.hosts) < 0:
            yield f"hosts = {list(self.hosts)}: expected at least one host, counted from 0"
