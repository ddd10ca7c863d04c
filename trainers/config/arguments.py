"""The arguments of a training run: frozen dataclasses, checked as they are built.

Free of JAX, so that a driver or a command line can read a configuration without importing it. A trainer that needs more fields
subclasses `TrainingArguments` and names the subclass in the configuration (`arguments: package.module:Class`).
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from trainers.config import (
    AnomalyConfig,
    CheckpointConfig,
    DataConfig,
    DistributionConfig,
    EvaluationConfig,
    FrozenConfig,
    InitConfig,
    LoraConfig,
    LossConfig,
    LossScaleConfig,
    MeshConfig,
    MetricsConfig,
    ModelConfig,
    OptimizerConfig,
    PreviewConfig,
    ProfileConfig,
    PruningConfig,
    attention,
    recorders,
)
from trainers.config.frozen import BASE
from trainers.config.section import PATH, Section, not_paths, parse_duration_s, require, require_none, too_small

T = TypeVar("T")

ORCHESTRATOR_SECTIONS = ("hosts", "driver", "tracking")
"""Top-level keys of a configuration file that concern machines; `python -m trainers.run` ignores them."""


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
    """The run's wall time, such as `30m` or `2h30m`; the state is saved at the limit. It counts from when the processes of a
    launch begin to train, and over all launches: restarts and waits of the run count, the time between launches does not. A
    later launch goes on only with a larger limit. Processes that do not stop by themselves get `driver.watchdog.evaluate_s` and
    `save_s` to do so, and are then ended. Without the orchestrator the checkpoint has the time used: what a process did after
    its last checkpoint does not count."""
    publish_every_steps: int = 10
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The dtype of the computation; parameters and optimizer have `param_dtype`. float16 scales the loss (`loss_scale`)."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    mesh: MeshConfig = field(default_factory=MeshConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    anomalies: AnomalyConfig = field(default_factory=AnomalyConfig)
    previews: PreviewConfig = field(default_factory=PreviewConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    loss_scale: LossScaleConfig = field(default_factory=LossScaleConfig)
    pruning: PruningConfig = field(default_factory=PruningConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    recorders: tuple[str, ...] = ()
    """Further recorders of the metrics, beside the console, MLflow and Ray Train: `jsonl`, `tensorboard`, `wandb`, or
    `package.module:Class` (`trainers.recorders`)."""
    recorder_folders: dict[str, str] = field(default_factory=dict)
    """Where recorders write, by name: a folder, relative to that of the run or absolute. The others have their own defaults."""
    distributions: DistributionConfig = field(default_factory=DistributionConfig)
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    init_from: InitConfig | None = None
    """Parameters to begin with: `PATH`, or a section. A run that has a checkpoint goes on from that."""
    frozen: dict[str, FrozenConfig] = field(default_factory=dict)
    """Weights of other models that a task's loss needs, by name: a reference policy, a teacher. They are no part of a
    checkpoint."""
    lora: LoraConfig | None = None
    """Low-rank adapters in place of the model's own weights are trained; null: the weights themselves are."""
    gc_every_steps: int | None = None
    """Python collects its garbage at each step that is a multiple of this, on all hosts alike, and at no other time: hosts that
    collect at different steps wait for each other each time. null: whenever Python wants to."""
    kept_programs_gb: float | None = 10.0
    """The limit on each machine for the compiled programs of all runs, which the next start loads; null: no limit. Those used
    least recently are deleted first, but none that is in use."""

    def __post_init__(self):
        require_none(self._problems())

    def _problems(self) -> Iterator[str]:
        # It becomes a folder's name (`storage`/`name`): without a separator, and with no dot in front.
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            yield f"name = {self.name!r}: expected letters, digits, '.', '_' and '-', starting with a letter or digit"
        if not self.storage:
            yield "storage = '': expected a folder or a URL"
        yield from not_paths(self, "trainer", "task")
        yield from too_small(self, 0, "seed")
        yield from too_small(
            self, 1, "global_batch_size", "accumulation_steps", "max_num_steps", "max_num_data_epochs", "publish_every_steps"
        )
        yield from too_small(self, 1, "gc_every_steps")
        yield from too_small(self, 0, "kept_programs_gb")
        # All micro-batches of the scan have one shape.
        if self.accumulation_steps >= 1 and self.global_batch_size % self.accumulation_steps:
            yield (
                f"global_batch_size = {self.global_batch_size}: expected a multiple of accumulation_steps "
                f"({self.accumulation_steps})"
            )
        yield from recorders.problems(self.recorders, self.recorder_folders, self.storage)
        every = self.distributions.every_steps
        # Histograms travel with a publish: between two publishes nobody would fetch them.
        if self.distributions.pattern is not None and self.publish_every_steps >= 1 and every % self.publish_every_steps:
            yield (
                f"distributions.every_steps = {every}: expected a multiple of publish_every_steps ({self.publish_every_steps}), "
                "which is when they are recorded"
            )
        if self.max_num_steps is None and self.max_num_data_epochs is None and self.time_limit is None:
            yield "nothing ends this run: set max_num_steps, max_num_data_epochs or time_limit"
        if self.pruning.pattern is not None and self.optimizer.name == "schedule_free_adamw":
            yield f"pruning.pattern = {self.pruning.pattern!r}: expected null, for schedule_free_adamw averages zeros away"
        if self.checkpoint.keep_model_only != "none" and self.optimizer.name == "schedule_free_adamw":
            yield (
                f"checkpoint.keep_model_only = {self.checkpoint.keep_model_only!r}: expected 'none', for the averages that "
                "schedule_free_adamw evaluates are in its state"
            )
        if self.checkpoint.model_every_steps is not None and self.optimizer.name == "schedule_free_adamw":
            yield (
                f"checkpoint.model_every_steps = {self.checkpoint.model_every_steps}: expected null, for the averages that "
                "schedule_free_adamw evaluates are in its state"
            )
        if self.dtype == "float16" and self.param_dtype != "float32":
            yield f"param_dtype = {self.param_dtype!r}: expected 'float32' with dtype float16, or updates are lost"
        yield from attention.check(self.model.attention, self.attention_needs)
        yield from self._problems_of_frozen()
        if self.time_limit is not None:
            try:
                parse_duration_s(self.time_limit)
            except ValueError as error:
                yield f"time_limit: {error}"
        if self.checkpoint.keep_best is not None and self.evaluation.score is None:
            yield (
                f"checkpoint.keep_best = {self.checkpoint.keep_best}: nothing says what is best; set evaluation.score, such as "
                "evaluation.score.metrics=[eval_loss]"
            )

    def _problems_of_frozen(self) -> Iterator[str]:
        for name in self.frozen:
            if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
                yield f"frozen.{name}: expected a name of letters, digits and '_', starting with a letter"
        if self.lora is None:
            return
        if self.lora.base is None and self.model.pretrained is None:
            yield "lora.base = null: nothing names the weights to adapt; set model.pretrained, or lora.base"
        if BASE in self.frozen:
            yield f"frozen.{BASE}: with lora this is the name of the weights that it adapts; use another name"

    @property
    def attention_needs(self) -> attention.Needs:
        return attention.needs_of(self.model, self.data.sequence_length, self.dtype)

    @property
    def micro_batch_size(self) -> int:
        """Sequences of one micro-batch, over all hosts."""
        return self.global_batch_size // self.accumulation_steps

    def check_devices(self, num_devices: int) -> dict[str, int]:
        """Returns the mesh's axis sizes on `num_devices` devices. Raises ValueError if the mesh does not fit, or has more
        replicas than a micro-batch has sequences."""
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
        """Returns the number of rows that are computed and do not count, because a micro-batch does not divide evenly over the
        replicas."""
        sizes = self.check_devices(num_devices)
        return -self.micro_batch_size % (sizes["data"] * sizes["fsdp"]) * self.accumulation_steps


def load_object(path: str) -> Any:
    """Returns the object named `package.module:attribute`. Raises ValueError that says which part was not found."""
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
    """Builds a (nested) configuration dataclass from what JSON or YAML gives. Raises ValueError on unknown keys and wrong
    types.

    The orchestrator checks with better messages (`orchestrator/config/job.py`); this is for those who run `trainers` alone.
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
    if isinstance(value, str) and (key := getattr(section, "shorthand", None)):
        value = {key: value}
    if section is not None and isinstance(value, Mapping | None):
        return from_dict(typing.cast(type, section), value or {})
    require(section is None, f"{name} = {value!r}: expected a section of keys and values")
    if typing.get_origin(hint) is tuple:
        require(isinstance(value, list | tuple), f"{name} = {value!r}: expected a list")
        return tuple(_convert(typing.get_args(hint)[0], item, name) for item in value)
    if typing.get_origin(hint) is dict:
        require(isinstance(value, Mapping), f"{name} = {value!r}: expected a section of keys and values")
        return {key: _convert(typing.get_args(hint)[1], item, f"{name}.{key}") for key, item in value.items()}
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
