"""What a trainer is to whoever runs it, and what its parts hand to each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax

from trainers.config.arguments import TrainingArguments
from trainers.runtime.stop_reason import StopReason

METRIC = "metric/"
"""Begins the names of the leaves of a batch that are metrics of its rows."""


Batch = Mapping[str, jax.Array]


class Sum(NamedTuple):
    """A part of a loss that is summed over micro-batches and steps. One whose name begins with `total_` goes on over restarts,
    and is published as the sum since the run began."""

    value: Any
    weight: Any = 1.0
    """0: says nothing of this batch."""


class Max(NamedTuple):
    """A part of a loss of which the largest value is published."""

    value: Any
    weight: Any = 1.0


class Min(NamedTuple):
    """A part of a loss of which the smallest value is published."""

    value: Any
    weight: Any = 1.0


class Last(NamedTuple):
    """A part of a loss of which the newest value is published."""

    value: Any
    weight: Any = 1.0


class Loss(NamedTuple):
    """Sums over the examples of one (micro-)batch; the step divides once, by the global number of targets.

    `parts` are further metrics by name: (sum, weight) pairs that are divided at publishing, or `Sum`, `Max`, `Min`, `Last`.
    `num_tokens` counts what was trained on, padding excluded; default: the targets.
    """

    loss_sum: jax.Array
    num_targets: jax.Array
    parts: Mapping[str, Any] = {}
    num_tokens: jax.Array | None = None
    rows: tuple[jax.Array, jax.Array] | None = None
    """(loss_sum, num_targets) of each row of the batch, for `data.sources`."""


class TrainerConfigureModelOutput(NamedTuple):
    model: Any
    state: Any


class TrainerConfigureDataloaderOutput(NamedTuple):
    dataloader_train: Any
    dataloader_eval: Any | None


class TrainerConfigureFunctionOutput(NamedTuple):
    train_step_fn: Any
    eval_step_fn: Any
    mesh: jax.sharding.Mesh
    checkpoint_manager: Any


class TrainerOutput(NamedTuple):
    state: Any
    mesh: jax.sharding.Mesh
    checkpoint_path: str | None
    last_save_file_name: str | None
    stop_reason: StopReason
    metrics: dict[str, float]


@runtime_checkable
class Task(Protocol):
    """A unit of training: what is learnt, from what, by which loss. Named by `task` in the configuration."""

    def build_model(self, rngs: Any) -> Any:
        """A new Flax NNX module; called under `jax.eval_shape` and `jax.jit`."""

    def loss(self, model: Any, batch: Batch) -> Loss | tuple[Any, Any] | Mapping[str, Any]:
        """Pure and traced. `batch` leaves are [micro_batch, ...]; rows of weight 0 must not count.

        Also taken: (loss_sum, num_targets), where num_targets None means that the loss is a mean over the batch; and a dict of
        such losses, or of parts, whose total drives the update (`trainers.step.loss.as_loss`). A task with a method
        `set_step_nr(step)` is told the number of updates, a traced value, before each call.
        """

    @property
    def tokens_per_example(self) -> int: ...

    def flops_per_token(self, num_parameters: int) -> float:
        """Forward and backward."""


@runtime_checkable
class TrainerProtocol(Protocol):
    """What the orchestrator needs of a trainer: built as `Class(arguments, dataset_train, dataset_eval, **kwargs)`.

    All hosts call the same methods in the same order. What `trainers.runtime` offers (progress, stop requests, the
    checkpoint to restore from) is optional: a trainer that calls none of it is watched for process exit only.
    """

    arguments: TrainingArguments
    output: TrainerOutput | None

    def train(self, model_parameters: Any = None, state: Any = None) -> Any:
        """Starts or resumes; returns the final state and sets `output`."""

    def evaluate(self, state: Any, metric_calculator: Any = None) -> dict[str, float]: ...

    def eval(self, state: Any) -> Iterator[dict[str, float]]: ...

    def save_pretrained(self, ckpt_path: str, state: Any = None) -> str: ...

    def configure_model(self) -> TrainerConfigureModelOutput: ...

    def configure_dataloaders(self) -> TrainerConfigureDataloaderOutput: ...

    def configure_functions(self) -> TrainerConfigureFunctionOutput: ...
