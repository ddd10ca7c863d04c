"""The sections of the configuration, each checked as it is built. Free of JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from trainers.checks import Section, not_paths, require, require_none, too_small


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

    def __post_init__(self):
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from not_paths(self, "dataset")
        yield from too_small(self, 2, "sequence_length")
        if not self.paths:
            yield "paths = []: expected at least one file or folder"
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

    def __post_init__(self):
        require_none([*too_small(self, 0, "warmup_steps", "final_factor"), *too_small(self, 1, "decay_steps")])


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """See `trainers/optimizers.py` for the names; `package.module:function` may return any optax transformation."""

    name: str = "adamw"
    learning_rate: float = 3e-4
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    max_grad_norm: float | None = 1.0
    """Clips by global norm; null: no clipping (the norm is published all the same)."""
    moment_dtype: Literal["float32", "bfloat16"] | None = None
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

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


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig(Section):
    every_steps: int | None = None
    """Default: once, at the end."""
    max_batches: int | None = None
    """How many global batches of the held-out data to use; default: all."""

    def __post_init__(self):
        require_none(too_small(self, 1, "every_steps", "max_batches"))


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    save_steps: int | None = None
    save_minutes: float | None = None
    save_at_end: bool = True
    save_total_limit: int = 3
    """How many of the newest checkpoints are kept."""

    def __post_init__(self):
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        yield from too_small(self, 1, "save_steps", "save_total_limit")
        if self.save_minutes is not None and not self.save_minutes > 0:
            yield f"save_minutes = {self.save_minutes}: expected a positive number"


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
class SampleConfig(Section):
    """The text generated at the end of a run."""

    prompt: str = "def "
    num_tokens: int = 200
    temperature: float = 0.7

    def __post_init__(self):
        require_none(too_small(self, 0, "num_tokens", "temperature"))
