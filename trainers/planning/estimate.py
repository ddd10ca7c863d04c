"""Estimates what a run needs before any machine is taken, without touching a device.

`python -m trainers.planning.estimate` reads JSON and writes JSON.

In: {"arguments_class", "arguments", "num_devices", "absent": [keys of paths that only the hosts have]}.
Out: {"problems": [one line each, empty if it can run], "facts": {...}}.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import sys
import traceback
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from gangway.errors import (
    CheckpointError,
    CheckpointMissingError,
    CheckpointUnavailableError,
    DataMissingError,
    UsageError,
    may_pass,
    notes_of,
    user_frame,
    user_traceback,
)
from gangway.storage.documents import is_url
from gangway.storage.row import CHECKPOINTS
from gangway.surroundings import end_with_parent
from trainers.checkpoint import going_on, layout, weights
from trainers.checkpoint.validate import check_same_model
from trainers.checkpoint.weights import META
from trainers.config import InitConfig, without_effect
from trainers.config.arguments import TrainingArguments, dataset_function, folder_around, from_dict, load_object
from trainers.config.monitoring import BUILT_IN
from trainers.data import identity
from trainers.data.loader import HasNotes
from trainers.data.sources.iterable import num_examples
from trainers.diagnostics import memory
from trainers.evaluation.exact_match import questions
from trainers.evaluation.validation import lacks_data
from trainers.loop import start_from
from trainers.loop.frozen import check_same
from trainers.loop.hooks import overrides
from trainers.optim.param_groups import parameter_paths
from trainers.parallel import host_memory
from trainers.planning import first_batch
from trainers.protocol import Loss, TrainerConfigureModelOutput, TrainerProtocol
from trainers.runtime.distributed import no_devices_yet
from trainers.step.frozen import shapes_of
from trainers.step.loss import LossFunction
from trainers.step.state import TrainState, arrays_of_model, num_parameters, state_shardings
from trainers.tasks.causal_lm import CausalLMTask
from trainers.text import tokenizers
from trainers.trainer import metric_names
from trainers.trainer.base_trainer import BaseTrainer


def attempt(problems: list[str], what: str, make: Callable[[], Any], doubts: list[str] | None = None) -> Any:
    """Returns what `make` returns. If it raises, returns None and records the problem: in `doubts`, if given, when it may go
    away by itself."""
    try:
        return make()
    except Exception as error:  # the user's code, at the boundary of this process: recorded, with where it happened
        if doubts is not None and may_pass(error):
            doubts.append(f"{what}: {type(error).__name__}: {error}")
            return None
        # The optimizer repeats those of the schedule.
        problems.extend(line for line in described(what, error) if line not in problems)
    return None


def described(what: str, error: Exception) -> list[str]:
    """Returns the lines for an error of `what`, with where it arose in the user's code."""
    frame = user_frame(error)
    where = (f" ({frame})" if frame else "") + "".join(f"; {note}" for note in notes_of(error))
    if isinstance(error, UsageError | DataMissingError):
        *lines, last = str(error).splitlines() or [""]
        return [*lines, last + where]
    if isinstance(error, ValueError) and not frame:  # a check's own words
        return [f"{what}: {error}"]
    sys.stderr.write(user_traceback(error) or "".join(traceback.format_exception(error)))
    inside = traceback.extract_tb(error.__traceback__)[-1]
    inside_of = "" if frame else f" ({inside.filename}, line {inside.lineno})"
    return [f"{what}: {type(error).__name__}: {error}{inside_of}{where}"]


Facts = dict[str, Any]
STAND_IN_STEPS = 1_000_000


def answer(work: Callable[[TrainingArguments, Mapping[str, Any]], tuple[list[str], Facts]], *expected: type[Exception]) -> None:
    """Reads a request from standard input, and writes the problems and the facts that `work` finds for its arguments. An
    `expected` error is a problem, too: of the settings, the code or the data."""
    end_with_parent()
    # What a user's module or a compiler prints goes to standard error: standard output carries the answer alone.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as stream:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        request = json.load(sys.stdin)
        try:
            arguments = from_dict(load_object(request["arguments_class"]), request["arguments"])
            problems, facts = work(arguments, request)
        except expected as error:
            problems, facts = [str(error)], {}
        json.dump({"problems": problems, "facts": facts}, stream)


def plan(arguments: TrainingArguments, num_devices: int, absent: Collection[str] = ()) -> tuple[list[str], Facts]:
    """Returns every problem of the run that can be found here, and its numbers. What is `absent` is not looked at; if any of the
    data are, none are read."""
    problems: list[str] = []
    doubts: list[str] = []
    facts: Facts = {}
    trainer = None
    with without_effect.watched(arguments) as read, ExitStack() as early:
        early.enter_context(no_devices_yet())
        trainer_class = attempt(problems, "trainer", lambda: load_trainer(arguments.trainer))
        if arguments.data.tokenizer is not None and "data.tokenizer" not in absent:
            # Data of one's own need not look at it.
            attempt(problems, "data.tokenizer", lambda: tokenizers.check(tokenizers.of(arguments), arguments))
        is_read = not any(key.startswith("data.") for key in absent)
        datasets = attempt(problems, "data", lambda: load_datasets(arguments), doubts) if is_read else None
        # Without data the model can still be checked.
        train, held_out = datasets or (None, None)
        facts |= data_facts(arguments, train, held_out)
        check(problems, arguments, has_held_out=not datasets or (held_out is not None and len(held_out) > 0))
        for name in arguments.recorders:
            attempt(problems, "recorders", functools.partial(load_object, BUILT_IN.get(name, name)))
        # A trainer that only implements the protocol may touch devices when it is built: it is built on the machines only.
        if trainer_class is not None and issubclass(trainer_class, BaseTrainer):
            trainer = built(problems, trainer_class, arguments, (train, held_out))
            early.close()
            facts |= model_facts(problems, trainer, num_devices, doubts) if trainer is not None else {}
    if trainer is not None and "parameters" in facts:
        facts |= beginning_facts(problems, trainer, num_devices, doubts)
        # Where something is not known yet, it may not be read yet.
        unread = [] if problems or doubts else without_effect.unread(arguments, read)
        facts["without_effect"] = [
            *without_effect.by_rules(arguments),
            *without_effect.of_previews(arguments, trainer.task),
            *unread,
        ]
    return problems, facts | ({"doubt": doubts[0]} if doubts else {})


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
    if (begun := going_on.newest(arguments.run_folder)) is not None:
        identity.check_ahead(begun[1], arguments)
    datasets = dataset_function(arguments)(arguments)
    if not (isinstance(datasets, tuple) and len(datasets) == 2):
        raise ValueError(f"data.dataset {arguments.data.dataset!r} returned {type(datasets).__name__}: expected (train, eval)")
    if datasets[1] is not None and not (hasattr(datasets[1], "__len__") and hasattr(datasets[1], "__getitem__")):
        raise ValueError(
            f"the held-out data of {arguments.data.dataset!r} is {type(datasets[1]).__name__}: expected examples by index "
            "(__getitem__ and __len__), or None"
        )
    return datasets


def data_facts(arguments: TrainingArguments, train: Any, held_out: Any) -> Facts:
    batch, epochs = arguments.global_batch_size, arguments.max_num_data_epochs
    steps = [arguments.max_num_steps] if arguments.max_num_steps is not None else []
    if train is not None and epochs is not None:
        steps.append(math.ceil(epochs * (num_examples(train) or 0) / batch))
    return {
        "train_examples": num_examples(train),
        "eval_examples": None if held_out is None else num_examples(held_out) or 0,
        "data_notes": train.notes() if isinstance(train, HasNotes) else [],
        "max_steps": min(steps) if steps else None,
    }


def built(
    problems: list[str], trainer_class: type[BaseTrainer], arguments: TrainingArguments, datasets: tuple[Any, Any]
) -> BaseTrainer | None:
    """Returns the trainer; None, with the problems added, if it or a part of it cannot be built."""
    before = len(problems)
    if datasets[0] is None and arguments.max_num_steps is None and arguments.max_num_data_epochs is not None:
        # A schedule would end with the data, which cannot be read now: any number stands for its steps.
        arguments = dataclasses.replace(arguments, max_num_steps=STAND_IN_STEPS)
    trainer = attempt(problems, "trainer", lambda: trainer_class(arguments, *datasets))
    # One by one, so that the problems of each are reported.
    for part in ("task", "scheduler", "optimizer") if trainer is not None else ():
        attempt(problems, part, functools.partial(getattr, trainer, part))
    # A model without its parts would only repeat the same problems.
    return trainer if len(problems) == before else None


def model_facts(problems: list[str], trainer: BaseTrainer, num_devices: int, doubts: list[str]) -> Facts:
    for what, check in first_batch.checks(trainer):
        attempt(problems, what, check, doubts)
    facts = attempt(problems, "model", lambda: count(trainer, num_devices, problems))
    if facts is None or problems or doubts or trainer.dataset_train is None:
        return facts or {}
    tried = attempt(problems, "loss", lambda: first_batch.check_padding(trainer))
    return facts | ({} if tried is None else {"padding": tried})


def beginning_facts(problems: list[str], trainer: BaseTrainer, num_devices: int, doubts: list[str]) -> Facts:
    """Returns what is known of where the run begins."""
    continued = attempt(problems, "checkpoints", lambda: going_on_from(trainer, num_devices), doubts)
    found = attempt(problems, "init_from", lambda: first_parameters(trainer, doubts))
    attempt(problems, start_from.KEY, lambda: whole_state(trainer, doubts))
    read = attempt(problems, "frozen", lambda: frozen_weights(trainer, doubts))
    known = {"continues": continued, "init_from": found, "frozen": read or None}
    return {name: fact for name, fact in known.items() if fact is not None}


def going_on_from(trainer: BaseTrainer, num_devices: int) -> dict[str, Any] | None:
    """Returns {"step", "notes"} of the checkpoint that the run will go on from; None if none is to be seen. Raises UsageError if
    it is of another model or optimizer, or learned from other data, or by other rules."""
    found = going_on.newest(trainer.arguments.run_folder)
    if lost := layout.lost(layout.named(trainer.arguments.run_folder) / CHECKPOINTS):
        raise CheckpointUnavailableError(lost)
    if found is None:
        return None
    path, meta = found
    try:
        check_same_model(meta, trainer.design.state, str(path))
    except CheckpointError as error:
        raise UsageError(str(error)) from error
    told = list[str]()
    # Without data there is nothing to compare, and what is wrong with it is known.
    if trainer.dataset_train is not None and (problem := trainer.batching.identity.problem(meta, told.append)[0]):
        raise UsageError(problem)
    changed = going_on.changes(meta, trainer.arguments, num_devices)
    return {"step": meta["batch_index"], "notes": [*going_on.notes(meta["batch_index"], changed), *told]}


def has_begun(trainer: BaseTrainer) -> bool:
    """Whether the run has checkpoints, as far as can be seen from here. Raises OSError or StorageError of a bucket."""
    return bool(layout.steps(layout.named(trainer.arguments.run_folder) / CHECKPOINTS))


def whole_state(trainer: BaseTrainer, doubts: list[str]) -> None:
    """Raises UsageError if `checkpoint.start_from` names no whole state of this model. What cannot be seen from here is added to
    `doubts`."""
    source = trainer.arguments.checkpoint.start_from
    if source is None or has_begun(trainer):
        return

    def check() -> None:
        path, meta = start_from.found(source)
        check_same_model(meta, trainer.design.state, str(path))

    seen_from_here(start_from.KEY, source, check, doubts)


def first_parameters(trainer: BaseTrainer, doubts: list[str]) -> str | None:
    """Returns what `init_from` gives, in one line; None if it is not used, or cannot be seen from here, which is added to
    `doubts`. Raises UsageError if it does not fit the model."""
    config, state = trainer.arguments.init_from, trainer.design.state
    # A run that has a checkpoint goes on from that: what it began with may be gone by now.
    if config is None or has_begun(trainer):
        return None
    arrays = arrays_of_model(state.params, state.model_state)
    return looked_at("init_from", config, arrays, doubts, trainer.design.adapted)


def frozen_weights(trainer: BaseTrainer, doubts: list[str]) -> dict[str, str]:
    """Returns what the frozen weights of each name are, in one line, as far as they can be seen from here. Raises UsageError with
    all that do not fit their models, or are not those that the run has been trained with."""
    problems: list[str] = []
    read = {}
    for name, model in trainer.design.frozen_models.items():
        config = InitConfig(path=model.path)
        read[name] = attempt(problems, model.asked_by, functools.partial(looked_at, model.asked_by, config, model.shapes, doubts))
    found = going_on.newest(trainer.arguments.run_folder)
    for name, before in ((found[1].get(META) or {}) if found else {}).items():
        if read.get(name) and before["path"] != (path := trainer.design.frozen_models[name].path):
            there = weights.find(path)
            now = {"path": path, "checkpoint": str(there), "digest": weights.open_model(there).digest()}
            asked_by = trainer.design.frozen_models[name].asked_by
            attempt(problems, asked_by, functools.partial(check_same, asked_by, before, now))
    if problems:
        raise UsageError("\n".join(problems))
    return {name: line for name, line in read.items() if line is not None}


def looked_at(
    asked_by: str, config: InitConfig, arrays: Any, doubts: list[str], adapted: weights.Adapted | None = None
) -> str | None:
    """Returns in one line what a path gives for these arrays; None if it cannot be seen from here, which is added to `doubts`.
    Raises UsageError if it does not fit."""
    shapes = dict(zip(parameter_paths(arrays), (leaf.shape for leaf in jax.tree.leaves(arrays)), strict=True))
    found = seen_from_here(asked_by, config.path, lambda: weights.open_model(weights.find(config.path), adapted), doubts)
    if found is None:
        return None
    pairs = weights.match(found, shapes, config, asked_by)
    return f"{len(pairs)} of {len(shapes)} parameters from {found.path}" + (f" ({found.about})" if found.about else "")


def seen_from_here(asked_by: str, source: str, look: Callable[[], Any], doubts: list[str]) -> Any:
    """Returns what `look` finds at a path; None if it cannot be seen from here, which is added to `doubts`. Raises UsageError if
    it does not fit."""
    try:
        return look()
    except CheckpointMissingError as error:
        # Where not even the folder around it is to be seen, the storage may be one that only the hosts have.
        if is_url(source) or os.path.isdir(folder_around(source)):
            raise UsageError(f"{asked_by}: {error}") from error
        doubts.append(f"{asked_by}: {error}")
    except CheckpointUnavailableError as error:
        if is_url(source):  # of a bucket all machines see the same
            raise UsageError(f"{asked_by}: {error}") from error
        doubts.append(f"{asked_by}: {error}")
    except CheckpointError as error:
        raise UsageError(f"{asked_by}: {error}") from error
    return None


def count(trainer: BaseTrainer, num_devices: int, problems: list[str]) -> Facts:
    """Returns the numbers of a model, from its shapes alone, and adds to `problems` what they show to be wrong."""
    parts, state = trainer.configure_model()
    task, arguments = trainer.task, trainer.arguments
    if trainer.dataset_train is not None:
        rows = trainer.batching.shapes((1, arguments.micro_batch_size), TrainerConfigureModelOutput(parts, state))
        check_loss(trainer.design.loss_of(parts), state, rows, shapes_of(trainer.design.frozen_models))
        check_metrics(trainer, problems)
    parameters = num_parameters(state.params)
    tokens_per_step = arguments.global_batch_size * task.tokens_per_example
    facts: Facts = {
        "parameters": parameters,
        "tokens_per_step": tokens_per_step,
        "tokens_per_example": task.tokens_per_example,
        "flops_per_step": trainer.design.flops_per_token(task, parameters) * tokens_per_step,
        "checkpoint_bytes": sum(num_bytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)),
    }
    if isinstance(task, CausalLMTask) and type(task).build_model is CausalLMTask.build_model:
        facts["num_layers"] = arguments.model.num_layers
        facts |= expert_facts(arguments, parameters, num_devices)
    if frozen := trainer.design.frozen_models:
        facts["frozen_parameters"] = {name: num_parameters(model.shapes) for name, model in frozen.items()}
    if padded := arguments.padded_rows_per_step(num_devices):
        facts["padded_rows_per_step"] = padded
    # A replaced one may have another state, for whose parameters there are no axes here.
    if not overrides(trainer, "configure_model"):
        axes, sizes = (trainer.design.axes, trainer.design.state_axes), arguments.check_devices(num_devices)
        trainer.design.check_mesh(sizes)
        facts["left_whole"] = trainer.design.left_whole(sizes)
        whole = state_bytes_per_device(state, axes, sizes)
        # Moments alone are in the opt_state that is offloaded, divided as their parameters are.
        offloaded = state_bytes_per_device(state, axes, sizes, offloaded=True) if arguments.optimizer.offload == "host" else 0
        facts["state_bytes_per_device"] = whole - offloaded
        if offloaded:
            facts["host_bytes_per_device"] = offloaded
        if frozen:
            placed = [model.placed(abstract_mesh(sizes)) for model in frozen.values()]
            facts["frozen_bytes_per_device"] = sum(map(memory.bytes_on_a_device, jax.tree.leaves(placed)))
    return facts


def expert_facts(arguments: TrainingArguments, parameters: int, num_devices: int) -> Facts:
    """Returns the numbers of a mixture of experts; nothing of another model."""
    model = arguments.model
    if model.num_experts is None:
        return {}
    return {
        "active_parameters": parameters - model.idle_parameters,
        "num_experts": model.num_experts,
        "experts_per_token": model.experts_per_token,
        "experts_per_device": model.num_experts // arguments.check_devices(num_devices)["expert"],
    }


def check_loss(
    loss: LossFunction, state: TrainState, shapes: Mapping[str, jax.ShapeDtypeStruct], frozen: Mapping[str, Any]
) -> None:
    """Traces the loss on a batch with the data's shapes: raises what the first step would raise."""
    batch = {
        name: jax.ShapeDtypeStruct(leaf.shape[1:], jax.dtypes.canonicalize_dtype(leaf.dtype))
        for name, leaf in shapes.items()
        # As the device will have it: without x64, int64 becomes int32.
    }

    def traced(state: TrainState, batch: Any, frozen: Any) -> Loss:
        return loss(state.params, batch, state.step, rest=loss.rest(state.model_state, batch, frozen=frozen))

    jax.eval_shape(traced, state, batch, dict(frozen))


def state_bytes_per_device(
    state: TrainState, axes: tuple[Any, Any], mesh_sizes: Mapping[str, int], *, offloaded: bool = False
) -> int:
    """Returns the bytes of the state on one device; activations and gradients come on top. `axes` are those of the parameters
    and of the model's other state. `offloaded`: of what `optimizer.offload` takes to its host alone."""
    shardings = state_shardings(abstract_mesh(mesh_sizes), state, *axes)
    pairs = zip(*map(jax.tree.leaves, (state.opt_state, shardings.opt_state) if offloaded else (state, shardings)), strict=True)
    leaves = [(leaf, sharding) for leaf, sharding in pairs if not offloaded or host_memory.is_offloaded(leaf)]
    return sum(num_bytes(sharding.shard_shape(leaf.shape), leaf.dtype) for leaf, sharding in leaves)


def abstract_mesh(mesh_sizes: Mapping[str, int]) -> Any:
    """Returns a mesh without devices: the machine that plans may have none of those that the run will use."""
    return AbstractMesh(tuple(mesh_sizes.values()), tuple(mesh_sizes), axis_types=(AxisType.Auto,) * len(mesh_sizes))


def num_bytes(shape: tuple[int, ...], dtype: Any) -> int:
    return math.prod(shape) * np.dtype(dtype).itemsize


def check(problems: list[str], arguments: TrainingArguments, *, has_held_out: bool) -> None:
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
        elif unit.exact_match is not None:
            attempt(problems, f"evaluation.units.{name}.exact_match", functools.partial(questions, unit.exact_match, arguments))
        elif not has_held_out:
            problems.append(f"evaluation.units.{name}: there is no held-out data; set its dataset, or data.eval_fraction")
        if unit.metrics is not None:
            attempt(problems, f"evaluation.units.{name}.metrics", functools.partial(load_object, unit.metrics))
        if unit.task is not None:
            attempt(problems, f"evaluation.units.{name}.task", functools.partial(load_object, unit.task))
    if config.score is not None and config.score.early_stopper is not None:
        attempt(problems, "evaluation.score.early_stopper", functools.partial(load_object, config.score.early_stopper))


def check_metrics(trainer: BaseTrainer, problems: list[str]) -> None:
    """Adds to `problems` what is wrong with the metrics of validation units: with those of predictions, and with the score. After
    `configure_model`."""
    for name, unit in metric_names.units_of(trainer).items():
        of_loss = metric_names.of_loss(trainer, unit)
        attempt(problems, f"evaluation.units.{name}", functools.partial(metric_names.of_outputs, trainer, name, unit, of_loss))
    attempt(problems, "evaluation.score", functools.partial(metric_names.check_score, trainer))


if __name__ == "__main__":
    answer(lambda arguments, request: plan(arguments, request["num_devices"], request["absent"]))
