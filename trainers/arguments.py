"""What a training run is asked to do: frozen dataclasses, checked as they are built.

Free of JAX, so that a driver or a command line can read a configuration without importing it. A trainer that needs more
fields subclasses `TrainingArguments` and names the subclass in the configuration (`arguments: package.module:Class`).
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

T = TypeVar("T")

ORCHESTRATOR_SECTIONS = ("hosts", "driver", "tracking")
"""Top-level keys of a configuration file that concern machines; `python -m trainers.run` has no use for them."""


PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
"""`package.module:Name`"""


class Section:
    """A part of the configuration: unknown keys are errors (read by pydantic, which `trainers` does not import)."""

    __pydantic_config__: ClassVar = {"extra": "forbid", "allow_inf_nan": False}


def require(condition: bool, message: str) -> None:
    """Raises ValueError(message): what is wrong, the value found, what is allowed."""
    if not condition:
        raise ValueError(message)


def require_none(problems: Iterable[str]) -> None:
    """Raises ValueError with a line for each problem, so that a user sees all of them at once."""
    if lines := list(problems):
        raise ValueError("\n".join(lines))


def too_small(config: Any, minimum: float, *names: str) -> Iterator[str]:
    """Problems of the fields that are less than `minimum` (null passes)."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < minimum:
            yield f"{name} = {value}: expected at least {minimum}"


def not_paths(config: Any, *names: str) -> Iterator[str]:
    """Problems of the fields that do not have the form of `package.module:Name`."""
    for name in names:
        value = getattr(config, name)
        if not PATH.fullmatch(value):
            yield f"{name} = {value!r}: expected package.module:Name"


def parse_duration_s(text: str | int | float) -> float:
    """`90`, `45s`, `30m`, `2h30m`, `1d12h` in seconds. Every character must belong to a number with a unit."""
    if isinstance(text, int | float):
        return float(text)
    units = {"d": 86400, "h": 3600, "m": 60, "s": 1}
    parts = re.findall(r"(\d+(?:\.\d+)?)([dhms])", text)
    if text.strip().isdigit():
        return float(text)
    if not parts or "".join(n + u for n, u in parts) != text.replace(" ", ""):
        raise ValueError(f"duration {text!r}: expected seconds or numbers with units d, h, m, s, such as 45s, 30m or 2h30m")
    return sum(float(n) * units[u] for n, u in parts)


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


@dataclass(frozen=True, kw_only=True)
class TrainingArguments(Section):
    name: str
    """The run's name: its folder is `storage`/`name`."""
    storage: str = "runs"
    trainer: str = "trainers.base:BaseTrainer"
    task: str = "trainers.tasks.causal_lm:CausalLMTask"
    seed: int = 0
    global_batch_size: int = 16
    """Sequences per optimizer step, over all hosts and micro-batches."""
    accumulation_steps: int = 1
    """Micro-batches per step."""
    max_num_steps: int | None = None
    max_num_data_epochs: int | None = None
    time_limit: str | None = None
    """Wall time of this process's training, such as `30m` or `2h30m`; the state is saved at the limit."""
    publish_every_steps: int = 10
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the computation; parameters and optimizer keep `param_dtype`."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    mesh: MeshConfig = field(default_factory=MeshConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    anomalies: AnomalyConfig = field(default_factory=AnomalyConfig)
    sample: SampleConfig = field(default_factory=SampleConfig)

    def __post_init__(self):
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            yield f"name = {self.name!r}: expected letters, digits, '.', '_' and '-', starting with a letter or digit"
        if not self.storage:
            yield "storage = '': expected a folder or a URL"
        yield from not_paths(self, "trainer", "task")
        yield from too_small(self, 0, "seed")
        yield from too_small(
            self, 1, "global_batch_size", "accumulation_steps", "max_num_steps", "max_num_data_epochs", "publish_every_steps"
        )
        if self.accumulation_steps >= 1 and self.global_batch_size % self.accumulation_steps:
            yield (
                f"global_batch_size = {self.global_batch_size}: expected a multiple of accumulation_steps "
                f"({self.accumulation_steps})"
            )
        if self.max_num_steps is None and self.max_num_data_epochs is None and self.time_limit is None:
            yield "nothing ends this run: set max_num_steps, max_num_data_epochs or time_limit"
        if self.time_limit is not None:
            try:
                parse_duration_s(self.time_limit)
            except ValueError as error:
                yield f"time_limit: {error}"

    @property
    def micro_batch_size(self) -> int:
        """Sequences of one micro-batch, over all hosts."""
        return self.global_batch_size // self.accumulation_steps

    def check_devices(self, num_devices: int) -> dict[str, int]:
        """The mesh's axis sizes on `num_devices` devices. Raises ValueError if the mesh does not fit, or has more replicas than a
        micro-batch has sequences."""
        sizes = self.mesh.resolve(num_devices)
        replicas, rows = sizes["data"] * sizes["fsdp"], self.micro_batch_size
        require(
            replicas <= rows,
            f"global_batch_size {self.global_batch_size} / accumulation_steps {self.accumulation_steps} = {rows} sequences for "
            f"{replicas} replicas (data {sizes['data']} x fsdp {sizes['fsdp']}): expected at least one sequence for each; set "
            f"global_batch_size to {replicas * self.accumulation_steps} or more, use fewer accumulation_steps, or fewer devices",
        )
        return sizes

    def padded_rows_per_step(self, num_devices: int) -> int:
        """Rows that are computed and do not count, where a micro-batch does not divide over the replicas."""
        sizes = self.check_devices(num_devices)
        return -self.micro_batch_size % (sizes["data"] * sizes["fsdp"]) * self.accumulation_steps


def load_object(path: str) -> Any:
    """The object named `package.module:attribute`. Raises ValueError that says which part was not found."""
    module_name, _, attribute = path.partition(":")
    require(PATH.fullmatch(path) is not None, f"{path!r}: expected package.module:Name")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"{path!r}: no module named {error.name!r} (searched from the working directory and PYTHONPATH)"
        ) from error
    if not hasattr(module, attribute):
        raise ValueError(f"{path!r}: module {module_name} has no {attribute!r}")
    return getattr(module, attribute)


def from_dict(cls: type[T], data: Mapping[str, Any]) -> T:
    """Builds a (nested) configuration dataclass from what JSON or YAML gives. Raises ValueError on unknown keys and wrong types.

    The orchestrator checks more kindly (`orchestrator/config.py`); this is for those who run `trainers` alone.
    """
    hints = typing.get_type_hints(cls)
    fields = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if unknown := sorted(set(data) - fields):
        raise ValueError(f"unknown keys of {cls.__name__}: {', '.join(unknown)}; known: {', '.join(sorted(fields))}")
    return cls(**{name: _convert(hints[name], value, name) for name, value in data.items()})


def _convert(hint: Any, value: Any, name: str) -> Any:
    arms = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    section = next((arm for arm in arms if dataclasses.is_dataclass(arm)), None)
    if value is None and type(None) in arms:
        return None
    if section is not None and isinstance(value, Mapping | None):
        return from_dict(typing.cast(type, section), value or {})
    require(section is None, f"{name} = {value!r}: expected a section of keys and values")
    if typing.get_origin(hint) is tuple:
        require(isinstance(value, list | tuple), f"{name} = {value!r}: expected a list")
        return tuple(_convert(typing.get_args(hint)[0], item, name) for item in value)
    if typing.get_origin(hint) is Literal and value not in typing.get_args(hint):
        raise ValueError(f"{name} = {value!r}: expected one of {', '.join(map(repr, typing.get_args(hint)))}")
    return _scalar(arms, value, name)


def _scalar(arms: tuple[Any, ...], value: Any, name: str) -> Any:
    scalars = tuple(arm for arm in arms if arm in (bool, int, float, str))
    if not scalars or type(value) in scalars:
        return value
    try:
        # YAML 1.1 takes 3e-4 for text; 1e3 may stand for an integer.
        number = float(value) if isinstance(value, int | float | str) and not isinstance(value, bool) else None
    except ValueError:
        number = None
    if number is not None and float in scalars:
        return number
    if number is not None and int in scalars and number.is_integer():
        return int(number)
    raise ValueError(f"{name} = {value!r}: expected {' or '.join(kind.__name__ for kind in scalars)}")
