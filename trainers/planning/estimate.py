"""Estimates what a run needs before any machine is taken, without touching a device.

`python -m trainers.planning.estimate` reads JSON and writes JSON.

In: {"arguments_class", "arguments", "num_devices"}. Out: {"problems": [one line each, empty if it can run], "facts": {...}}.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from trainers import tokenizers
from trainers.base import BaseTrainer
from trainers.checkpoint import going_on, weights
from trainers.checkpoint.validate import check_same_model
from trainers.config import UnitConfig
from trainers.config.arguments import TrainingArguments, from_dict, load_object
from trainers.config.recorders import BUILT_IN
from trainers.config.section import did_you_mean
from trainers.data.sources.iterable import num_examples
from trainers.errors import (
    CheckpointError,
    CheckpointMissingError,
    CheckpointUnavailableError,
    DataMissingError,
    UsageError,
    may_pass,
    user_frame,
)
from trainers.evaluation import outputs
from trainers.evaluation.validation import DEFAULT_UNIT, lacks_data
from trainers.metrics.publisher import with_perplexity
from trainers.optim.param_groups import parameter_paths
from trainers.protocol import Loss, TrainerConfigureModelOutput, TrainerProtocol
from trainers.step.loss import LossFunction
from trainers.step.state import TrainState, arrays_of_model, num_parameters, state_shardings
from trainers.tasks.causal_lm import CausalLMTask

Facts = dict[str, Any]
STAND_IN_STEPS = 1_000_000
MAKE_EVALUATION_METRICS = (
    "evaluate",
    "calculate_metrics",
    "on_evaluation_end",
    "build_validation_units",
    "configure_dataloaders",
    "configure_model",
)
"""Methods of a trainer that may add metrics to those of its loss."""


def main() -> None:
    # What a user's module prints goes to standard error: standard output carries the answer alone.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answer:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        request = json.load(sys.stdin)
        arguments = from_dict(load_object(request["arguments_class"]), request["arguments"])
        problems, facts = plan(arguments, request["num_devices"])
        json.dump({"problems": problems, "facts": facts}, answer)


def plan(arguments: TrainingArguments, num_devices: int) -> tuple[list[str], Facts]:
    """Returns every problem of the run that can be found here, and its numbers."""
    problems: list[str] = []
    trainer_class = attempt(problems, "trainer", lambda: load_trainer(arguments.trainer))
    doubts: list[str] = []
    if arguments.data.tokenizer is not None:
        # Data of one's own need not look at it.
        attempt(problems, "data.tokenizer", lambda: tokenizers.check(tokenizers.of(arguments), arguments))
    datasets = attempt(problems, "data", lambda: load_datasets(arguments), doubts)
    # Without data the model can still be checked.
    train, held_out = datasets or (None, None)
    facts = data_facts(arguments, train, held_out)
    check_evaluation(problems, arguments, has_held_out=bool(held_out) or not datasets)
    for name in arguments.recorders:
        attempt(problems, "recorders", functools.partial(load_object, BUILT_IN.get(name, name)))
    # A trainer that only implements the protocol may touch devices when it is built: it is built on the machines only.
    if trainer_class is not None and issubclass(trainer_class, BaseTrainer):
        facts |= model_facts(problems, trainer_class, arguments, (train, held_out), num_devices, doubts)
    return problems, facts | ({"doubt": doubts[0]} if doubts else {})


def attempt(problems: list[str], what: str, make: Callable[[], Any], doubts: list[str] | None = None) -> Any:
    """Returns what `make` returns. If it raises, returns None and records the problem: in `doubts`, if given, when it may go
    away by itself."""
    try:
        return make()
    except Exception as error:  # the user's code, at the boundary of this process: recorded, with where it happened
        if doubts is not None and may_pass(error):
            doubts.append(f"{what}: {type(error).__name__}: {error}")
            return None
        problems.extend(line for line in told(what, error) if line not in problems)  # the optimizer repeats those of the schedule
    return None


def told(what: str, error: Exception) -> list[str]:
    """Returns the lines for an error of `what`, with where it arose in the user's code."""
    frame = user_frame(error)
    where = f" ({frame})" if frame else ""
    if isinstance(error, UsageError | DataMissingError):
        *lines, last = str(error).splitlines() or [""]
        return [*lines, last + where]
    if isinstance(error, ValueError) and not frame:  # a check's own words
        return [f"{what}: {error}"]
    traceback.print_exc()
    inside = traceback.extract_tb(error.__traceback__)[-1]
    return [f"{what}: {type(error).__name__}: {error}" + (where or f" ({inside.filename}, line {inside.lineno})")]


def load_trainer(path: str) -> type:
    cls = load_object(path)
    methods = [name for name, member in vars(TrainerProtocol).items() if callable(member) and not name.startswith("_")]
    missing = [name for name in methods if not callable(getattr(cls, name, None))]
    if not isinstance(cls, type) or missing:
        raise ValueError(
            f"{path!r} is not a trainer: expected a class with the methods of trainers.protocol.TrainerProtocol"
            + (f"; it lacks {', '.join(missing)}" if missing else "")
        )
    return cls


def load_datasets(arguments: TrainingArguments) -> tuple[Any, Any]:
    datasets = load_object(arguments.data.dataset)(arguments)
    if not (isinstance(datasets, tuple) and len(datasets) == 2):
        raise ValueError(f"data.dataset {arguments.data.dataset!r} returned {type(datasets).__name__}: expected (train, eval)")
    if datasets[1] is not None and not (hasattr(datasets[1], "__len__") and hasattr(datasets[1], "__getitem__")):
        raise ValueError(
            f"the held-out data of {arguments.data.dataset!r} is {type(datasets[1]).__name__}: expected examples by index "
            "(__getitem__ and __len__), or None"
        )
    return datasets


def check_evaluation(problems: list[str], arguments: TrainingArguments, *, has_held_out: bool) -> None:
    """Checks that everything that evaluations name exists, and that each has data."""
    config, units = arguments.evaluation, arguments.evaluation.units
    if not has_held_out and (problem := lacks_data(config)):
        problems.append(problem)
    for name, unit in units.items():
        if unit.dataset is not None:
            make = functools.partial(lambda path: load_object(path)(arguments), unit.dataset)
            examples = attempt(problems, f"evaluation.units.{name}.dataset", make)
            if examples is not None and not len(examples):
                problems.append(f"evaluation.units.{name}.dataset: {unit.dataset!r} has no examples; give it some")
        elif not has_held_out:
            problems.append(f"evaluation.units.{name}: there is no held-out data; set its dataset, or data.eval_fraction")
        if unit.metrics is not None:
            attempt(problems, f"evaluation.units.{name}.metrics", functools.partial(load_object, unit.metrics))
        if unit.task is not None:
            attempt(problems, f"evaluation.units.{name}.task", functools.partial(load_object, unit.task))
    if config.score is not None and config.score.early_stopper is not None:
        attempt(problems, "evaluation.score.early_stopper", functools.partial(load_object, config.score.early_stopper))


def data_facts(arguments: TrainingArguments, train: Any, held_out: Any) -> Facts:
    batch, epochs = arguments.global_batch_size, arguments.max_num_data_epochs
    steps = [arguments.max_num_steps] if arguments.max_num_steps is not None else []
    if train is not None and epochs is not None:
        steps.append(math.ceil(epochs * (num_examples(train) or 0) / batch))
    return {
        "train_examples": num_examples(train),
        "eval_examples": None if held_out is None else len(held_out),
        "max_steps": min(steps) if steps else None,
    }


def model_facts(
    problems: list[str],
    trainer_class: type[BaseTrainer],
    arguments: TrainingArguments,
    datasets: tuple[Any, Any],
    num_devices: int,
    doubts: list[str],
) -> Facts:
    before = len(problems)
    if datasets[0] is None and arguments.max_num_steps is None and arguments.max_num_data_epochs is not None:
        # A schedule would end with the data, which cannot be read now: any number stands for its steps.
        arguments = dataclasses.replace(arguments, max_num_steps=STAND_IN_STEPS)
    trainer = attempt(problems, "trainer", lambda: trainer_class(arguments, *datasets))
    # One by one, so that the problems of each are reported.
    for part in ("task", "scheduler", "optimizer") if trainer is not None else ():
        attempt(problems, part, functools.partial(getattr, trainer, part))
    # A model without its parts would only repeat the same problems.
    if len(problems) > before:
        return {}
    facts = attempt(problems, "model", lambda: count(trainer, num_devices, problems))
    if facts is None:
        return {}
    continued = attempt(problems, "checkpoints", lambda: going_on_from(trainer, num_devices))
    facts |= {} if continued is None else {"continues": continued}
    found = attempt(problems, "init_from", lambda: first_parameters(trainer, doubts))
    return facts | ({} if found is None else {"init_from": found})


def going_on_from(trainer: BaseTrainer, num_devices: int) -> dict[str, Any] | None:
    """Returns {"step", "told"} of the checkpoint that the run will go on from; None if none is to be seen. Raises UsageError if
    it is of another model or optimizer."""
    found = going_on.newest(trainer._run_folder)
    if found is None:
        return None
    path, meta = found
    try:
        check_same_model(meta, trainer._model_state, str(path))
    except CheckpointError as error:
        raise UsageError(str(error)) from error
    changed = going_on.changes(meta, trainer.arguments, num_devices)
    return {"step": meta["batch_index"], "told": going_on.told(meta["batch_index"], changed)}


def first_parameters(trainer: BaseTrainer, doubts: list[str]) -> str | None:
    """Returns what `init_from` gives, in one line; None if it is not used, or cannot be seen from here, which is added to
    `doubts`. Raises UsageError if it does not fit the model."""
    config, state = trainer.arguments.init_from, trainer._model_state
    # A run that has a checkpoint goes on from that: what it began with may be gone by now.
    if config is None or os.path.isdir(f"{trainer._run_folder}/checkpoints"):
        return None
    arrays = arrays_of_model(state.params, state.model_state)
    shapes = dict(zip(parameter_paths(arrays), (leaf.shape for leaf in jax.tree.leaves(arrays)), strict=True))
    try:
        found = weights.look(weights.find(config.path))
    except CheckpointMissingError as error:
        # Where not even the folder around it is to be seen, the storage may be one that only the hosts have.
        if os.path.isdir(os.path.dirname(os.path.abspath(config.path))):
            raise UsageError(f"init_from: {error}") from error
        doubts.append(f"init_from: {error}")
        return None
    except CheckpointUnavailableError as error:
        doubts.append(f"init_from: {error}")
        return None
    except CheckpointError as error:
        raise UsageError(f"init_from: {error}") from error
    pairs = weights.match(found, shapes, config)
    return f"{len(pairs)} of {len(shapes)} parameters from {found.path}" + (f" ({found.about})" if found.about else "")


def check_metrics(trainer: BaseTrainer, problems: list[str]) -> None:
    """Adds to `problems` what is wrong with the metrics of validation units: with those of predictions, and with the score. After
    `configure_model`. A trainer that overrides what makes the metrics of an evaluation may publish any metric."""
    units, layout = trainer.arguments.evaluation.units or {DEFAULT_UNIT: UnitConfig()}, trainer._layout
    known: list[str] = []
    free: list[str] = []  # the beginnings of names: another task has metrics of its own
    for name, unit in units.items():
        of_loss: list[str] = []
        if layout is not None and unit.task is None:
            of_loss = [*with_perplexity(dict.fromkeys(trainer.loss_layout.names, 0.0), trainer.loss_layout)]
        names = attempt(problems, f"evaluation.units.{name}", functools.partial(names_of_outputs, trainer, name, unit, of_loss))
        known += [f"{name}_{metric}" for metric in (*of_loss, *(names or ()))]
        free += [f"{name}_"] if unit.task is not None or names is None else []
    score = trainer.arguments.evaluation.score
    if score is None or layout is None or any(overrides(trainer, name) for name in MAKE_EVALUATION_METRICS):
        return
    for metric in score.metrics:
        if metric not in known and not metric.startswith(tuple(free)):
            expected = f"expected a metric of an evaluation: {', '.join(known)}"
            problems.append(f"evaluation.score.metrics: {metric!r}: {expected}{did_you_mean(metric, known)}")


def names_of_outputs(trainer: BaseTrainer, name: str, unit: UnitConfig, taken: Sequence[str]) -> Sequence[str]:
    """Returns the names of the metrics of a unit's predictions. Raises UsageError if they cannot be computed."""
    metrics = trainer.build_evaluation_metrics(name)
    if metrics is None:
        return ()
    outputs.check(name, metrics, trainer.task if unit.task is None else load_object(unit.task)(trainer.arguments), taken)
    return metrics.names


def overrides(trainer: BaseTrainer, name: str) -> bool:
    return getattr(type(trainer), name) is not getattr(BaseTrainer, name)


def count(trainer: BaseTrainer, num_devices: int, problems: list[str]) -> Facts:
    """Returns the numbers of a model, from its shapes alone, and adds to `problems` what they show to be wrong."""
    parts, state = trainer.configure_model()
    task, arguments = trainer.task, trainer.arguments
    if trainer.dataset_train is not None:
        rows = trainer._batch_shapes((1, arguments.micro_batch_size), TrainerConfigureModelOutput(parts, state))
        check_loss(trainer._loss_function_of(parts), state, rows)
        check_metrics(trainer, problems)
    parameters = num_parameters(state.params)
    tokens_per_step = arguments.global_batch_size * task.tokens_per_example
    facts = {
        "parameters": parameters,
        "tokens_per_step": tokens_per_step,
        "tokens_per_example": task.tokens_per_example,
        "flops_per_step": task.flops_per_token(parameters) * tokens_per_step,
        "checkpoint_bytes": sum(num_bytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)),
    }
    if isinstance(task, CausalLMTask) and type(task).build_model is CausalLMTask.build_model:
        facts["num_layers"] = arguments.model.num_layers
    if padded := arguments.padded_rows_per_step(num_devices):
        facts["padded_rows_per_step"] = padded
    # A replaced one may have another state, for whose parameters there are no axes here.
    if not overrides(trainer, "configure_model"):
        axes, sizes = (trainer._axes, trainer._state_axes), arguments.check_devices(num_devices)
        facts["state_bytes_per_device"] = state_bytes_per_device(state, axes, sizes)
    return facts


def check_loss(loss: LossFunction, state: TrainState, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Traces the loss on a batch with the data's shapes: raises what the first step would raise."""
    batch = {
        name: jax.ShapeDtypeStruct(leaf.shape[1:], jax.dtypes.canonicalize_dtype(leaf.dtype))
        for name, leaf in shapes.items()
        # As the device will have it: without x64, int64 becomes int32.
    }

    def traced(state: TrainState, batch: Any) -> Loss:
        return loss(state.params, batch, state.step, rest=loss.rest(state.model_state, batch))

    jax.eval_shape(traced, state, batch)


def state_bytes_per_device(state: TrainState, axes: tuple[Any, Any], mesh_sizes: Mapping[str, int]) -> int:
    """Returns the bytes of the state on one device; activations and gradients come on top. `axes` are those of the parameters
    and of the model's other state."""
    # Without devices: the machine that plans may have none of those that the run will use.
    mesh: Any = AbstractMesh(tuple(mesh_sizes.values()), tuple(mesh_sizes), axis_types=(AxisType.Auto,) * len(mesh_sizes))
    shardings = jax.tree.leaves(state_shardings(mesh, state, *axes))
    leaves = zip(jax.tree.leaves(state), shardings, strict=True)
    return sum(num_bytes(sharding.shard_shape(leaf.shape), leaf.dtype) for leaf, sharding in leaves)


def num_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


if __name__ == "__main__":
    main()
