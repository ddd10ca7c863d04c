"""The protocols: what a trainer is to the program that runs it, and what its parts exchange."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np

from gangway.stop_reason import StopReason
from trainers.config.arguments import TrainingArguments

SKIPPED = "skipped_example"
"""The name of a leaf: 1 for a row in place of an example that could not be read, else 0."""


class Ids(NamedTuple):
    """The numbers that a leaf of a batch may have."""

    number: int
    """From 0 up to this, which is not one of them."""
    others: frozenset[int] = frozenset()
    """Others, such as one that stands for no target."""


METRIC = "metric/"
"""The prefix of the names of the leaves of a batch that are metrics of its rows."""

Batch = Mapping[str, jax.Array]


class Sum(NamedTuple):
    """A part of a loss that is summed over micro-batches and steps. If its name begins with `total_`, the sum continues over
    restarts, and is published as the sum since the run began."""

    value: Any
    weight: Any = 1.0
    """0: this batch has no value."""


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
    """The loss as sums over the examples of one (micro-)batch; the step divides once, by the global number of targets.

    `parts` are further metrics by name: (sum, weight) pairs that are divided when they are published, or `Sum`, `Max`, `Min`,
    `Last`. `num_tokens` counts the tokens trained on, without padding; default: the targets, and of weights
    that add up to a fraction the next whole number for a global batch.
    """

    loss_sum: jax.Array
    num_targets: jax.Array
    parts: Mapping[str, Any] = {}
    num_tokens: jax.Array | None = None
    rows: tuple[jax.Array, ...] | None = None
    """(loss_sum, num_targets) of each row of the batch, for `data.sources`; perhaps with num_tokens as the third."""
    model_state: Mapping[str, Any] = {}
    """The model's state after this batch, beside its parameters. The trainer fills it in; a task leaves it alone."""


class PerExample(NamedTuple):
    """The loss of each example of a (micro-)batch. The trainer adds the examples up by their weights, so that rows that only
    fill up a batch do not count. An array of losses alone will do in its place."""

    losses: jax.Array
    """[B]: the loss of each example, summed over its targets."""
    metrics: Mapping[str, jax.Array] = {}
    """[B] each, summed over the targets of each example. They are published as means over the targets."""
    num_targets: jax.Array | None = None
    """[B]: how many targets each example has, such as tokens; None: one."""
    num_tokens: jax.Array | None = None
    """[B]: how many tokens of each example are trained on; None: its targets."""


class TrainerConfigureModelOutput(NamedTuple):
    model: Any
    state: Any


class TrainerConfigureDataloaderOutput(NamedTuple):
    dataloader_train: Any
    dataloader_eval: Any | None


class TrainerConfigureFunctionOutput(NamedTuple):
    """What `configure_functions` returns. None stands for what the trainer itself would have made."""

    train_step_fn: Any
    eval_step_fn: Any = None
    mesh: Any = None
    """A `jax.sharding.Mesh`: that of the settings (`mesh`). Another one is refused."""
    checkpoint_manager: Any = None


SHOWN_STATE = 120
"""Characters. The state of a trainer that inherits nothing may be of any type."""


class TrainerOutput(NamedTuple):
    state: Any
    mesh: jax.sharding.Mesh
    checkpoint_path: str | None
    last_save_file_name: str | None
    stop_reason: StopReason
    metrics: dict[str, Any]

    def __repr__(self) -> str:
        """Without what would fill a screen: arrays, and metrics that are no numbers, such as the lineage."""
        numbers = {name: float(f"{value:.6g}") for name, value in self.metrics.items() if isinstance(value, int | float)}
        about = f"stop_reason={self.stop_reason}, checkpoint_path={self.checkpoint_path!r}"
        state = repr(self.state)
        shown = state if len(state) <= SHOWN_STATE else type(self.state).__name__
        return f"TrainerOutput(state={shown}, {about}, metrics={numbers})"


@runtime_checkable
class Task(Protocol):
    """The task to learn: a model, and its loss on a batch. Named by `task` in the configuration."""

    def build_model(self, rngs: Any) -> Any:
        """Returns a new Flax NNX module. Called under `jax.eval_shape` and `jax.jit`. Its variables of type `nnx.Param` are
        trained. All others, such as batch statistics, keep the values that a call in training has given them. Random streams
        begin anew with each micro-batch."""

    def loss(self, model: Any, batch: Batch) -> PerExample | jax.Array | Loss | tuple[Any, Any] | Mapping[str, Any]:
        """Returns the loss of each example. Pure and traced. `batch` leaves are [micro_batch, ...].

        It may also return the sums over the batch, as a `Loss`: then rows with `batch["weight"]` 0 must not count in them.

        The model is in train mode in training (`model.train()`), and in evaluation mode in evaluations (`model.eval()`). If the
        loss has a parameter `training`, it also gets True or False.

        It may also return (loss_sum, num_targets), where num_targets None means that the loss is a mean over the batch; or a
        dict of such losses, or of parts, whose total drives the update (`trainers.step.loss.as_loss`). If the task has a method
        `set_step_nr(step)`, it is called before each loss with the number of updates, a traced value.

        If the loss has a parameter `frozen`, it gets the models of the frozen weights by their names in the section `frozen`
        (with `lora` also `base`, the model without its adapters), in evaluation mode. Each is built by the task's method
        `build_frozen(name, rngs)`, or by `build_model` if there is none.

        A task may have a method `predictions(model, batch)`, which returns arrays [rows, ...] in any pytree, for
        `EvaluationMetrics`.
        """

    @property
    def tokens_per_example(self) -> int:
        """The number of targets of an example. 1: the run counts examples, and has no perplexity."""

    def flops_per_token(self, num_parameters: int) -> float:
        """Returns the floating-point operations for a token, forward and backward."""


class EvaluationMetrics(Protocol):
    """Metrics of the predictions of a task (`Task.predictions`), added up on the hosts: for what is no mean over targets, such as
    a median. A new one is made for each evaluation of a unit."""

    names: Sequence[str]
    """The names that `compute` returns."""

    def add(self, outputs: Any, batch: Mapping[str, np.ndarray]) -> None:
        """Takes rows of this host: what `predictions` returned for them, and their rows of the batch, as NumPy arrays
        [rows, ...]. Rows that only fill up a batch are left out. Every example comes once, on one host."""

    def state(self) -> Any:
        """Returns what this host has added up: JSON values and NumPy arrays, in lists and dicts."""

    def merge(self, states: Sequence[Any]) -> None:
        """Takes the states of all hosts, in the order of the hosts. Called on host 0, on a new object, before `compute`."""

    def compute(self) -> Mapping[str, float]:
        """Returns the metrics by name. They are published with the name of the unit before them."""


class Pruner(Protocol):
    """Changes the parameters around each step: prunes them, or quantizes them. `BaseTrainer.build_pruner` returns one.

    All methods are pure, and traced inside the compiled step. Parameters are nested dicts of arrays, with None in place of the
    frozen ones. `step` (int32) counts the updates applied before this one. The state is part of the checkpoint.
    """

    def init(self, params: Any) -> Any:
        """Returns the first state, arrays in any pytree. A leaf whose path ends like that of a parameter, and has its shape, is
        sharded like it."""

    def pre_forward(self, params: Any, state: Any, step: jax.Array) -> Any:
        """Returns the parameters that the loss of a train step sees. The gradient by them is applied to `params` (a
        straight-through estimate). Evaluations, previews and exports see `params` themselves."""

    def post_gradient(self, params: Any, state: Any, step: jax.Array) -> tuple[Any, Any]:
        """Returns the parameters after an update, and the new state. Not applied where the update is not."""


@runtime_checkable
class CheckpointManagerProtocol(Protocol):
    """What the loop needs of a checkpoint manager, which `BaseTrainer.build_checkpoint_manager` returns. All hosts call the same
    methods in the same order. `trainers.checkpoint.manager.CheckpointManager` describes each, and what must hold after failures.

    With `checkpoint.model_every_steps` it also needs `save_model(step, state, meta, *, patient)`, and with `snapshot.every_steps`
    `go_on_from(step, make, allowed)`.
    """

    @property
    def failing(self) -> bool:
        """Whether the last save failed: the loop then saves again soon. An attribute will do."""

    @property
    def last_saved_step(self) -> int | None:
        """The step of the newest checkpoint that is complete, or was restored. An attribute will do."""

    def save(self, step: int, state: Any, meta: dict[str, Any], *, patient: bool = False) -> None:
        """Starts a save, and returns when `state` may be donated. Does nothing at `last_saved_step`."""

    def wait_for_save(self) -> None:
        """Returns when no save is in progress."""

    def wait(self) -> None:
        """Returns when nothing is in progress, the deletion of old checkpoints included."""

    def close(self) -> None:
        """Called when training is over, after the last callback."""

    def restore(self, abstract: Any, accept: Any = None, before: int | None = None) -> Any:
        """Returns the newest checkpoint of a step up to `before` that `accept(meta)` does not refuse, with the shapes and
        shardings of `abstract`: an object with `state`, `meta` and `skipped`. None: there is none."""

    def path(self, step: int) -> str:
        """Returns where the checkpoint of a step is."""

    def fingerprint(self, state: Any) -> Any:
        """Returns `trainers.checkpoint.fingerprints.fingerprints` of the state."""

    def load_ahead(self, state: Any) -> None:
        """Called before `restore` with the shapes of the state: what restoring needs may be loaded meanwhile."""

    def prepare(self, state: Any) -> None:
        """Called before the first step: compiles what saving needs."""


@runtime_checkable
class TrainerProtocol(Protocol):
    """The interface that the orchestrator needs of a trainer, built as `Class(arguments, dataset_train, dataset_eval,
    **kwargs)`.

    All hosts call the same methods in the same order. What `trainers.runtime` offers (progress, stop requests, the checkpoint
    to restore from) is optional: of a trainer that calls none of it, the driver sees the end of its processes, silence longer
    than `driver.watchdog.silent_s`, and the `time_limit`. A class may inherit from this one, and must then define all methods;
    it need not inherit.
    """

    arguments: TrainingArguments
    output: TrainerOutput | None

    @abstractmethod
    def train(self, model_parameters: Any = None, state: Any = None) -> Any:
        """Starts or resumes training. Returns the final state and sets `output`."""

    @abstractmethod
    def evaluate(self, state: Any, metric_calculator: Any = None) -> dict[str, float]: ...

    @abstractmethod
    def eval(self, model_state: Any) -> Iterator[dict[str, float]]: ...

    @abstractmethod
    def save_pretrained(self, ckpt_path: str, state: Any = None) -> str: ...

    @abstractmethod
    def configure_model(self) -> TrainerConfigureModelOutput: ...

    @abstractmethod
    def configure_dataloaders(self) -> TrainerConfigureDataloaderOutput: ...

    @abstractmethod
    def configure_functions(self) -> TrainerConfigureFunctionOutput: ...
