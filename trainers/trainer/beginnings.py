"""Where a run that has no checkpoint begins, and the state of what is saved elsewhere."""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from gangway.errors import UsageError
from trainers.checkpoint import model_only, weights
from trainers.loop.beginning import Beginning, FromSettings, Given, arrays_in, given_arrays, placed_like, with_arrays
from trainers.loop.start_from import FromCheckpoint
from trainers.optim.param_groups import parameter_paths
from trainers.runtime.multihost import note_from_host0
from trainers.step.state import TrainState

if TYPE_CHECKING:  # it imports this module
    from trainers.trainer.base_trainer import BaseTrainer


def beginning(trainer: BaseTrainer, model_parameters: Any = None, state: TrainState | None = None) -> Beginning:
    """Returns where a run without a checkpoint begins. In this order: 1. the given state; 2. the given parameters, with a new
    optimizer state; 3. the arrays in the state of `configure_model`, with the rest from the seed; 4. the state that
    `checkpoint.start_from` names; 5. the parameters that `init_from` names; 6. the seed. Raises UsageError for 3 together with 4
    or 5."""
    arguments, design, placement = trainer.arguments, trainer.design, trainer.placement
    shardings, shapes, new = placement.state_shardings, placement.model_arrays, design.initial_state
    # Only a rollback comes back to the beginning within this process.
    keep = "rollback" in (arguments.anomalies.non_finite, arguments.anomalies.loss_spike)
    given = state is not None or model_parameters is not None
    named = {"init_from": arguments.init_from, "checkpoint.start_from": arguments.checkpoint.start_from}
    for name in (name for name, value in named.items() if given and value is not None):
        note_from_host0(f"{name} is not used: train was given a state or parameters")
    if state is not None:
        # To this trainer's shardings: the given state may lie on other devices.
        return Given("the given state", lambda: jax.device_put(state, shardings), lambda placed: placed, keep=keep)
    # Jitted with the shardings of the state: every device makes its own part only. Nothing is compiled here: a run that finds a
    # checkpoint never calls it.
    if model_parameters is not None:
        first = jax.jit(new, out_shardings=shardings)
        return Given("model_parameters", lambda: _placed(trainer, model_parameters, shapes), first, keep=keep)
    if arrays := arrays_in(design.state):
        if others := [name for name, value in named.items() if value is not None]:
            raise UsageError(
                f"{others[0]}: configure_model has returned a state with arrays ({next(iter(arrays))} ...), which begins the "
                "run: leave one of them out"
            )
        return _from_arrays(trainer, arrays, keep)
    if arguments.checkpoint.start_from is not None:
        return FromCheckpoint(arguments, arguments.run_folder, placement.placed_state)
    # What was loaded becomes part of the state: there are no two of it in memory.
    first = jax.jit(new, out_shardings=shardings, donate_argnums=0)

    def fresh(loaded: dict[str, jax.Array], others: dict[str, jax.Array]) -> TrainState:
        base = {name: value for name, value in placement.values_of_base().items() if name not in loaded}
        return first(loaded, {**base, **others})

    return FromSettings(arguments.init_from, arguments.run_folder, shapes, fresh, design.adapted)


def saved_state(trainer: BaseTrainer, source: str) -> tuple[str, TrainState, int | None]:
    """Returns the path, the state and the step of what is saved at `source`: of a model alone with a new state of the optimizer;
    no step of a file or a folder that does not say it."""
    found = weights.open_model(weights.find(source))
    path, meta = str(found.path), found.meta
    step = int(meta["batch_index"]) if meta else None
    trainer.prepare()
    counters: dict[str, Any] = {} if step is None else {"batch_index": jnp.int32(step)}
    if trainer.arguments.lora is not None and not found.has_adapters:
        return path, dataclasses.replace(beginning(trainer, None, None).make(), **counters), step
    if meta and not all(map(model_only.part_of, meta["shapes"])):
        # With the state of the optimizer: it may hold the averages that are evaluated, and a hook may want it.
        return path, trainer.load_pretrained(path), step
    if meta and trainer.placement.frozen is not None:
        trainer.placement.frozen.check(meta)
    if step is not None:
        counters["step"] = jnp.int32(step - len(meta.get("skipped_batches") or ()))
    state = beginning(trainer, weights.load(found, trainer.placement.model_arrays), None).make()
    return path, dataclasses.replace(state, **counters), step


def _from_arrays(trainer: BaseTrainer, arrays: dict[str, Any], keep: bool) -> Beginning:
    """Returns the beginning with these arrays of the state, by path, and the rest from the seed."""
    abstract, lora = trainer.placement.placed_state, trainer.arguments.lora
    named = [f".params{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(abstract.params)]
    if lora is not None and lora.whole and any(name not in arrays for name in named):
        raise UsageError(
            "configure_model has returned a state in which some parameters are shapes alone, and lora.whole says that they "
            "begin as those of the base: return initial_state() with your arrays in it"
        )
    finish = functools.partial(with_arrays, abstract=abstract, fresh=trainer.design.initial_state)
    first = jax.jit(finish, out_shardings=trainer.placement.state_shardings)
    return Given("", lambda: placed_like(arrays, abstract), first, keep=keep)


def _placed(trainer: BaseTrainer, model_parameters: Any, shapes: Any) -> dict[str, jax.Array]:
    """Returns the given arrays of the model, on the devices, by name. State beside the parameters may be missing."""
    optional = parameter_paths(trainer.design.state.model_state)
    placed = given_arrays(model_parameters, shapes, optional)
    if missing := [name for name in optional if name not in placed]:
        about = f"{', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}"
        note_from_host0(f"model_parameters: {about} are not among them, and begin as in a new run")
    return placed
