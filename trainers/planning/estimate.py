"""What a run will be, worked out before any machine is taken, without touching a device.

`python -m trainers.planning.estimate` reads JSON and writes JSON.

In: {"arguments_class", "arguments", "num_devices"}. Out: {"problems": [one line each, empty if it can run], "facts": {...}}.
"""

from __future__ import annotations

import functools
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from trainers.base import BaseTrainer
from trainers.config.arguments import TrainingArguments, from_dict, load_object
from trainers.config.recorders import BUILT_IN
from trainers.data.sources.iterable import num_examples
from trainers.errors import DataMissingError, UsageError, may_pass
from trainers.protocol import TrainerProtocol
from trainers.step.loss import LossFunction
from trainers.step.state import TrainState, num_parameters, state_shardings

Facts = dict[str, Any]


def main() -> None:
    # Whatever a user's module prints goes to standard error: standard output is the answer.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answer:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        request = json.load(sys.stdin)
        arguments = from_dict(load_object(request["arguments_class"]), request["arguments"])
        problems, facts = plan(arguments, request["num_devices"])
        json.dump({"problems": problems, "facts": facts}, answer)


def plan(arguments: TrainingArguments, num_devices: int) -> tuple[list[str], Facts]:
    """Everything that is wrong with the run as far as it can be known here, and its numbers."""
    problems: list[str] = []
    trainer_class = attempt(problems, "trainer", lambda: load_trainer(arguments.trainer))
    doubts: list[str] = []
    datasets = attempt(problems, "data", lambda: load_datasets(arguments), doubts)
    # Without data there still is a model to look at.
    train, held_out = datasets or (None, None)
    facts = data_facts(arguments, train, held_out) | ({"doubt": doubts[0]} if doubts else {})
    check_evaluation(problems, arguments, has_held_out=bool(held_out) or not datasets)
    for name in arguments.recorders:
        attempt(problems, "recorders", functools.partial(load_object, BUILT_IN.get(name, name)))
    # A trainer that only implements the protocol builds what it likes, when it is built: on the machines.
    if trainer_class is not None and issubclass(trainer_class, BaseTrainer):
        facts |= model_facts(problems, trainer_class, arguments, (train, held_out), num_devices)
    return problems, facts


def attempt(problems: list[str], what: str, make: Callable[[], Any], doubts: list[str] | None = None) -> Any:
    """What `make` returns; None if it raised, and then the problem is recorded: in `doubts`, if given, where it may go away by
    itself."""
    try:
        return make()
    except (UsageError, DataMissingError, ValueError) as error:
        lines = [f"{what}: {error}"] if isinstance(error, ValueError) else str(error).splitlines()
        problems.extend(line for line in lines if line not in problems)  # The optimizer says again what the schedule said.
    except Exception as error:  # the user's code, at the boundary of this process: recorded, with where it happened
        if doubts is not None and may_pass(error):
            doubts.append(f"{what}: {type(error).__name__}: {error}")
            return None
        traceback.print_exc()
        frame = traceback.extract_tb(error.__traceback__)[-1]
        problems.append(f"{what}: {type(error).__name__}: {error} ({frame.filename}, line {frame.lineno})")
    return None


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
    """What evaluations name is there, and each has data."""
    config, units = arguments.evaluation, arguments.evaluation.units
    wanted = [name for name in ("every_steps", "every_epochs", "at_start") if getattr(config, name)]
    if wanted and not units and not has_held_out:
        problems.append(f"evaluation.{wanted[0]}: there is no held-out data to evaluate on; set data.eval_fraction")
    for name, unit in units.items():
        if unit.dataset is not None:
            make = functools.partial(lambda path: load_object(path)(arguments), unit.dataset)
            examples = attempt(problems, f"evaluation.units.{name}.dataset", make)
            if examples is not None and not len(examples):
                problems.append(f"evaluation.units.{name}.dataset: {unit.dataset!r} has no examples; give it some")
        elif not has_held_out:
            problems.append(f"evaluation.units.{name}: there is no held-out data; set its dataset, or data.eval_fraction")
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
) -> Facts:
    before = len(problems)
    trainer = attempt(problems, "trainer", lambda: trainer_class(arguments, *datasets))
    # One by one, so that each can say what is wrong with it.
    for part in ("task", "scheduler", "optimizer") if trainer is not None else ():
        attempt(problems, part, functools.partial(getattr, trainer, part))
    if len(problems) > before:
        return {}
    return attempt(problems, "model", lambda: count(trainer, num_devices)) or {}


def count(trainer: BaseTrainer, num_devices: int) -> Facts:
    """The numbers of a model, from its shapes alone."""
    parts, state = trainer.configure_model()
    task, arguments = trainer.task, trainer.arguments
    if trainer.dataset_train is not None:
        check_loss(trainer._loss_function_of(parts), state, trainer._batch_shapes((1, arguments.micro_batch_size)))
    parameters = num_parameters(state.params)
    tokens_per_step = arguments.global_batch_size * task.tokens_per_example
    facts = {
        "parameters": parameters,
        "tokens_per_step": tokens_per_step,
        "tokens_per_example": task.tokens_per_example,
        "flops_per_step": task.flops_per_token(parameters) * tokens_per_step,
        "checkpoint_bytes": sum(num_bytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)),
    }
    if padded := arguments.padded_rows_per_step(num_devices):
        facts["padded_rows_per_step"] = padded
    if type(trainer).configure_model is BaseTrainer.configure_model:
        facts["state_bytes_per_device"] = state_bytes_per_device(state, trainer._axes, arguments.check_devices(num_devices))
    return facts


def check_loss(loss: LossFunction, state: TrainState, shapes: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Traces the loss on a batch of the data's shapes: raises what the first step would raise."""
    batch = {
        name: jax.ShapeDtypeStruct(leaf.shape[1:], jax.dtypes.canonicalize_dtype(leaf.dtype)) for name, leaf in shapes.items()
    }
    jax.eval_shape(loss, state.params, batch, state.step)


def state_bytes_per_device(state: TrainState, axes: Any, mesh_sizes: Mapping[str, int]) -> int:
    """Parameters, optimizer state and counters as they lie on one device; activations and gradients come on top."""
    mesh: Any = AbstractMesh(tuple(mesh_sizes.values()), tuple(mesh_sizes), axis_types=(AxisType.Auto,) * len(mesh_sizes))
    placed = zip(jax.tree.leaves(state), jax.tree.leaves(state_shardings(mesh, state, axes)), strict=True)
    return sum(num_bytes(sharding.shard_shape(leaf.shape), leaf.dtype) for leaf, sharding in placed)


def num_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


if __name__ == "__main__":
    main()
