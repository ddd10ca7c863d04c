"""The arguments of a training run: frozen dataclasses, checked as they are built.

Free of JAX, so that a driver or a command line can read a configuration without importing it. A trainer that needs more fields
subclasses `TrainingArguments` and names the subclass in the configuration (`arguments: package.module:Class`).
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from typing import Any, Literal

from gangway.config.conversion import CheckedSection, from_dict
from gangway.config.masking import masked
from gangway.config.section import not_paths, parse_duration_s, require, require_none, too_small
from gangway.user_modules import load_object
from trainers.config import (
    AnomalyConfig,
    CheckpointConfig,
    ClassificationConfig,
    DataConfig,
    DistillationConfig,
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
    PreferenceConfig,
    PreviewConfig,
    ProfileConfig,
    PruningConfig,
    SnapshotConfig,
    VisionConfig,
    attention,
    mesh,
)
from trainers.config.frozen import BASE
from trainers.config.hf_files import BYTES
from trainers.config.mesh import CONTEXT, PipelineConfig, batch_axes, num_replicas
from trainers.config.monitoring import recorder_problems

__all__ = ["ORCHESTRATOR_SECTIONS", "TrainingArguments", "from_dict", "load_object"]

ORCHESTRATOR_SECTIONS = {
    "hosts": "cluster.hosts.config:HostsConfig",
    "driver": "orchestrator.config.job:DriverConfig",
    "tracking": "orchestrator.tracking.config:TrackingConfig",
    "notify": "orchestrator.policies.notices:NotifyConfig",
}
"""The sections of a configuration file that concern machines, and their classes. The commands of `trainers` use none of them, and
still refuse a wrong key."""
PLACE = ("name", "storage")
"""Settings that say where a run is, and not what it does."""


@dataclass(frozen=True, kw_only=True)
class TrainingArguments(CheckedSection):
    name: str
    """The run's name: its folder is `storage`/`name`."""
    storage: str = "runs"
    """The folder that holds the runs: a local or shared folder, or a bucket (`gs://BUCKET/NAME`, `s3://BUCKET/NAME`). All hosts
    must see it."""
    trainer: str = "trainers.base:BaseTrainer"
    """The class that trains: `package.module:Class`, most often a subclass of `BaseTrainer`."""
    task: str = "trainers.tasks.causal_lm:CausalLMTask"
    """The class that says what is learned: it builds the model, and has the loss."""
    seed: int = 0
    """Of all that is random: initial parameters, the order of the data, dropout, sampling. The same seed gives the same run,
    bit for bit."""
    global_batch_size: int = 16
    """Sequences per optimizer step, over all hosts and micro-batches."""
    accumulation_steps: int = 1
    """Micro-batches per step."""
    max_num_steps: int | None = None
    """The run ends after this many batches. null: no limit of steps."""
    max_num_data_epochs: int | None = None
    """The run ends after this many passes over the training data. null: no limit of epochs."""
    time_limit: str | None = None
    """The run's wall time, such as `30m` or `2h30m`; the state is saved at the limit. It counts from when the processes of a
    launch begin to train, and over all launches: restarts and waits of the run count, the time between launches does not. A
    later launch goes on only with a larger limit. Processes that do not stop by themselves get `driver.watchdog.evaluate_s` and
    `save_s` to do so, and are then ended. Without the orchestrator the checkpoint has the time used: what a process did after
    its last checkpoint does not count."""
    publish_every_steps: int | None = 10
    """null: not by steps."""
    publish_every_epochs: int | None = None
    """Metrics are published at the end of every so many epochs, too. They cover the steps since the last publish."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The dtype of the computation; parameters have `param_dtype`. float16 scales the loss (`loss_scale`)."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the parameters. What the optimizer keeps is float32 (`optimizer.master_weights`, `optimizer.moment_dtype`)."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    vision: VisionConfig | None = None
    """An encoder of images; null: the model has none."""
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    snapshot: SnapshotConfig = field(default_factory=SnapshotConfig)
    anomalies: AnomalyConfig = field(default_factory=AnomalyConfig)
    previews: PreviewConfig = field(default_factory=PreviewConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    classification: ClassificationConfig = field(default_factory=ClassificationConfig)
    distillation: DistillationConfig = field(default_factory=DistillationConfig)
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

    def _problems(self) -> Iterator[str]:
        # It becomes a folder's name (`storage`/`name`): without a separator, and with no dot in front.
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", self.name):
            yield f"name = {self.name!r}: expected letters, digits, '.', '_' and '-', starting with a letter or digit"
        if not self.storage:
            yield "storage = '': expected a folder or a URL"
        yield from not_paths(self, "trainer", "task")
        yield from too_small(self, 0, "seed")
        yield from too_small(self, 1, "global_batch_size", "accumulation_steps", "max_num_steps", "max_num_data_epochs")
        yield from too_small(self, 1, "publish_every_steps", "publish_every_epochs", "gc_every_steps")
        yield from too_small(self, 0, "kept_programs_gb")
        # All micro-batches of the scan have one shape.
        if self.accumulation_steps >= 1 and self.global_batch_size % self.accumulation_steps:
            yield (
                f"global_batch_size = {self.global_batch_size}: expected a multiple of accumulation_steps "
                f"({self.accumulation_steps})"
            )
        yield from recorder_problems(self.recorders, self.recorder_folders, self.storage)
        yield from self._publish_problems()
        if self.max_num_steps is None and self.max_num_data_epochs is None and self.time_limit is None:
            yield "nothing ends this run: set max_num_steps, max_num_data_epochs or time_limit"
        if (self.pruning.pattern or self.pruning.pruner) is not None and self.optimizer.name == "schedule_free_adamw":
            key = "pattern" if self.pruning.pattern is not None else "pruner"
            value = getattr(self.pruning, key)
            yield f"pruning.{key} = {value!r}: expected null, for schedule_free_adamw averages zeros away"
        if self.checkpoint.start_from is not None and self.init_from is not None:
            yield f"init_from.path = {self.init_from.path!r}: expected null with checkpoint.start_from, which has the parameters"
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
        yield from self._problems_of_fp8()
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

    def _publish_problems(self) -> Iterator[str]:
        if self.publish_every_steps is None and self.publish_every_epochs is None:
            yield "publish_every_steps = null: nothing is published before the end; set it, or publish_every_epochs"
        every, publish_every = self.distributions.every_steps, self.publish_every_steps
        # Histograms travel with a publish: between two publishes nobody would fetch them.
        if self.distributions.pattern is not None and (publish_every is None or (publish_every >= 1 and every % publish_every)):
            yield (
                f"distributions.every_steps = {every}: expected a multiple of publish_every_steps "
                f"({'null' if publish_every is None else publish_every}), which is when they are recorded"
            )

    def _problems_of_fp8(self) -> Iterator[str]:
        if self.model.fp8 == "none":
            return
        if self.dtype == "float16":
            yield (
                f"model.fp8 = {self.model.fp8!r}: expected 'none' with dtype float16, in which sums of products of 8 bits "
                "overflow; use dtype bfloat16"
            )
        if self.vision is not None:
            yield f"model.fp8 = {self.model.fp8!r}: expected 'none' with vision, whose encoder is not computed in 8 bits"

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
        return attention.needs_of(self.model, self.data.sequence_length, self.dtype, max(self.mesh.context, 1))

    @property
    def run_folder(self) -> str:
        """The folder of the run, in the storage."""
        return f"{self.storage}/{self.name}"

    @property
    def micro_batch_size(self) -> int:
        """Sequences of one micro-batch, over all hosts."""
        return self.global_batch_size // self.accumulation_steps

    def check_devices(self, num_devices: int) -> dict[str, int]:
        """Returns the mesh's axis sizes on `num_devices` devices. Raises ValueError if the mesh does not fit, cannot divide what
        its devices share, or has more replicas than a micro-batch has sequences."""
        sizes = self.mesh.resolve(num_devices)
        not_divided = mesh.problems(mesh.of_arguments(self, sizes), sizes, num_devices)
        require_none([*mesh.context_problems(self, sizes.get(CONTEXT, 1)), *mesh.pipeline_problems(self, sizes), *not_divided])
        replicas, rows = num_replicas(sizes), self.micro_batch_size
        shown = " x ".join(f"{axis} {sizes[axis]}" for axis in batch_axes(sizes))
        require(
            replicas <= rows,
            f"global_batch_size {self.global_batch_size} / accumulation_steps {self.accumulation_steps} = {rows} sequences for "
            f"{replicas} replicas ({shown}): expected at least one sequence for each; set "
            f"global_batch_size to {replicas * self.accumulation_steps} or more, use fewer accumulation_steps, or fewer devices",
        )
        return sizes

    def padded_rows_per_step(self, num_devices: int) -> int:
        """Returns the number of rows that are computed and do not count, because a micro-batch does not divide evenly over the
        replicas."""
        sizes = self.check_devices(num_devices)
        return -self.micro_batch_size % num_replicas(sizes) * self.accumulation_steps


def dataset_function(arguments: TrainingArguments) -> Any:
    """Returns the function that `data.dataset` names. If the section says none, it is the one that the task's class names in its
    attribute `dataset`, if it has one. Raises ValueError."""
    path, default = arguments.data.dataset, DataConfig.dataset
    return load_object(getattr(load_object(arguments.task), "dataset", path) if path == default else path)


def recorded_arguments(arguments: TrainingArguments) -> dict[str, Any]:
    """Returns what a checkpoint records of the arguments: their values, without secrets, and the name of their class."""
    cls = type(arguments)
    return {"arguments": masked(asdict(arguments)), "arguments_class": f"{cls.__module__}:{cls.__qualname__}"}


def absent_paths(arguments: TrainingArguments, copied: str | None = None) -> tuple[list[str], dict[str, str]]:
    """Returns a line for each file or folder of the configuration that is not here, and that the hosts cannot have either; and by
    their keys the lines for those that only the hosts may have (data, tokenizers, weights). `copied`: the folder that the hosts
    get from here, None if they get none."""
    wrong, elsewhere = list[str](), dict[str, str]()
    sections = ("data", "evaluation", "init_from", "frozen", "lora", "checkpoint")
    for key, path in _paths({name: getattr(arguments, name) for name in sections}, ""):
        is_read = arguments.data.prepared is None or not re.fullmatch(r"data\..*paths\.\d+", key)
        whole = os.path.abspath(os.path.expanduser(path))
        if not is_read or "://" in path or path in (*DataConfig.paths, BYTES) or os.path.exists(whole) or glob.glob(whole):
            continue
        if os.path.isdir(around := folder_around(path)) and around != os.sep:
            why = f"the folder around it is here, {around}; correct the path, or make it"
            wrong.append(f"{key} = {path}: it does not exist, and {why}")
        elif copied is not None and os.path.commonpath((whole, copied)) == copied:
            wrong.append(f"{key} = {path}: it does not exist, and the hosts have what this folder has, {copied}; put it there")
        else:
            elsewhere[key] = f"{key} = {path} is not here, so it was not looked at: only the hosts may have it"
    return wrong, elsewhere


def folder_around(path: str) -> str:
    """Returns the folder that a file, a folder or a pattern of them is in. Where not even that is here, what is in it may be on a
    storage that only the hosts have."""
    return os.path.dirname(re.split(r"[*?[]", os.path.abspath(os.path.expanduser(path)))[0])


def _paths(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yields (key, path) of each path in a value of the configuration."""
    name = re.sub(r"\.\d+$", "", key).rpartition(".")[2]
    if is_dataclass(value) or isinstance(value, tuple):
        value = vars(value) if is_dataclass(value) else dict(enumerate(value))
    for inner, item in value.items() if isinstance(value, Mapping) and name not in ("columns", "template_fields") else ():
        yield from _paths(item, f"{key}.{inner}".lstrip("."))
    if isinstance(value, str) and name in ("paths", "prepared", "tokenizer", "path", "base", "start_from"):
        yield key, value
