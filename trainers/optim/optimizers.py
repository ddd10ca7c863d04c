"""Optimizers by name, from optax. They do not clip: the training step does.

Weight decay is decoupled from the gradient (Loshchilov & Hutter 2019), scaled by the learning rate, and for matrices only.

    adamw      betas, eps
    adam       adamw without weight decay
    lion       betas                               Chen et al. 2023: wants about a third of AdamW's learning rate
    sgd        momentum betas[0]
    rmsprop    decay betas[1], eps added to the root of the mean square, as by torch     Hinton 2012, lecture 6e
    adafactor  factored second moments; no first moment, no scaling by the parameter's size      Shazeer & Stern 2018
    muon       orthogonalized momentum betas[1] for the matrices of the layers, with the update size of AdamW, so that
               AdamW's learning rate fits (Liu et al. 2025, arXiv:2502.16982); AdamW for all other parameters
    schedule_free_adamw  betas, eps: the average of the parameters, weighted by the square of the learning rate, takes the place
               of a decay of it; what is evaluated is the average       Defazio et al. 2024, "The Road Less Scheduled"

`optax.<factory>` is any optimizer of optax with a `learning_rate`, which follows the schedule; all else is in `arguments`.
`package.module:function` is a user's function (config, schedule) -> optax transformation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from gangway.errors import unknown_name
from trainers.config import OptimizerConfig, ParameterGroup
from trainers.config.arguments import load_object
from trainers.optim import optax_registry
from trainers.optim.param_groups import Groups, group_of, parameter_path, rate_names
from trainers.optim.parameter_kinds import Kinds, Mask, ParameterKind, matrices, tree_of_kinds
from trainers.optim.precision import in_float32

SCHEDULE_FREE = "schedule_free_adamw"

OTHERS = "others"
"""The label of parameters that are in no group."""

# The threshold d of update clipping (Shazeer & Stern 2018, section 6).
ADAFACTOR_MAX_UPDATE_RMS = 1.0
# Liu et al. 2025: the usual RMS of an AdamW update. An orthogonal [A, B] matrix has the RMS 1 / sqrt(max(A, B)).
MUON_UPDATE_RMS = 0.2


def build_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule, kinds: Kinds, decay_mask: Mask | None = None
) -> optax.GradientTransformation:
    """Returns the named optimizer with its learning rate and weight decay. `kinds` are those of the model's parameters
    (`ModelDesign.parameter_kinds` of a trainer); `decay_mask` says what decays (default: the matrices among them).

    Raises UsageError if the name is unknown.
    """
    if config.name.startswith(optax_registry.PREFIX):
        return optax_registry.call("optimizer", config.name, config.arguments, ("learning_rate",), schedule)
    if ":" in config.name:
        return load_object(config.name)(config, schedule)
    if config.name not in DIRECTIONS:
        raise unknown_name("optimizer.name", config.name, NAMES)
    # Adam is AdamW without decay: one function serves both.
    weight_decay = 0.0 if config.name == "adam" else config.weight_decay
    # The decay comes after the direction and before the rate: it is not part of the gradient, and follows the schedule.
    optimizer = optax.chain(
        DIRECTIONS[config.name](config, kinds),
        optax.add_decayed_weights(weight_decay, decay_mask or matrices(kinds)),
        optax.scale_by_learning_rate(schedule),
    )
    if config.name != SCHEDULE_FREE:
        return optimizer
    # schedule_free counts steps from 1, the optimizer inside it from 0.
    return optax.contrib.schedule_free(optimizer, lambda count: schedule(count - 1), b1=config.betas[0])


def parameters_to_evaluate(opt_state: Any, params: Any) -> Any:
    """Returns the averages that a schedule-free optimizer keeps; for any other optimizer, the parameters themselves. Traced or
    not. `opt_state` may also come from files, where everything is dicts and lists."""
    # Anywhere in the state: the optimizer may lie inside a partition or a chain.
    for node in jax.tree.leaves(opt_state, is_leaf=lambda node: _schedule_free_state(node) is not None):
        if (state := _schedule_free_state(node)) is not None:
            params = _averages(state, params)
    return params


def _schedule_free_state(node: Any) -> optax.contrib.ScheduleFreeState | None:
    if isinstance(node, Mapping) and node.keys() == set(optax.contrib.ScheduleFreeState._fields):
        return optax.contrib.ScheduleFreeState(**node)
    return node if isinstance(node, optax.contrib.ScheduleFreeState) else None


def _averages(state: Any, params: Any) -> Any:
    """Returns x = (y - (1 - b1) z) / b1, where gradients are taken at y. `state` may hold only some of the parameters."""
    fast = {parameter_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state.z)}

    def average(path: Any, param: jax.Array) -> jax.Array:
        z = fast.get(parameter_path(path))
        return param if z is None else ((param - (1 - state.b1) * z) / state.b1).astype(param.dtype)

    return jax.tree_util.tree_map_with_path(average, params)


def build_grouped(
    config: OptimizerConfig, schedule: optax.Schedule, kinds: Kinds, param_groups: Groups
) -> optax.GradientTransformation:
    """Returns the optimizer, with the settings of each group for its parameters, in float32. Frozen groups are left to
    `param_groups.freezing`."""
    groups = {f"group_{number}": group for number, group in enumerate(param_groups) if not group.frozen}
    default = build_optimizer(config, schedule, kinds)
    if not groups:
        return in_float32(default)
    transforms = {name: build_optimizer(*_settings_of(group, config, schedule), kinds) for name, group in groups.items()}

    def label(path: Any, _: Any) -> str:
        name = f"group_{group_of(param_groups, parameter_path(path))}"
        return name if name in groups else OTHERS

    labels = partial(jax.tree_util.tree_map_with_path, label)
    return in_float32(optax.partition({OTHERS: default, **transforms}, labels))


def group_rates(config: OptimizerConfig, schedule: optax.Schedule, param_groups: Groups) -> dict[str, optax.Schedule]:
    """Returns the schedules of the groups that are trained, by the names of their metrics."""
    return {name: _settings_of(group, config, schedule)[1] for name, group in rate_names(param_groups).items()}


def _settings_of(
    group: ParameterGroup, config: OptimizerConfig, schedule: optax.Schedule
) -> tuple[OptimizerConfig, optax.Schedule]:
    rate = config.learning_rate if group.learning_rate is None else group.learning_rate
    decay = config.weight_decay if group.weight_decay is None else group.weight_decay
    factor = rate / config.learning_rate  # the schedule is built for the rate of the whole optimizer
    return dataclasses.replace(config, learning_rate=rate, weight_decay=decay), lambda step: factor * schedule(step)


def _adam(config: OptimizerConfig, kinds: Kinds) -> optax.GradientTransformation:
    b1, b2 = config.betas
    return optax.scale_by_adam(b1=b1, b2=b2, eps=config.eps, mu_dtype=config.moment_dtype)


def _lion(config: OptimizerConfig, kinds: Kinds) -> optax.GradientTransformation:
    b1, b2 = config.betas
    return optax.scale_by_lion(b1=b1, b2=b2, mu_dtype=config.moment_dtype)


def _sgd(config: OptimizerConfig, kinds: Kinds) -> optax.GradientTransformation:
    return optax.trace(decay=config.betas[0], accumulator_dtype=config.moment_dtype)


def _rmsprop(config: OptimizerConfig, kinds: Kinds) -> optax.GradientTransformation:
    return optax.scale_by_rms(decay=config.betas[1], eps=config.eps, eps_in_sqrt=False)


def _adafactor(config: OptimizerConfig, kinds: Kinds) -> optax.GradientTransformation:
    def clip(update: jax.Array, kind: ParameterKind) -> jax.Array:
        rms = jnp.sqrt(jnp.mean(update**2, axis=kind.dimensions, keepdims=True))
        return update / jnp.maximum(1.0, rms / ADAFACTOR_MAX_UPDATE_RMS)

    # Not optax's `clip_by_block_rms`: it takes all stacked parameters for one.
    clipped = optax.stateless(lambda updates, _: jax.tree.map(clip, updates, tree_of_kinds(kinds, updates)))
    return optax.chain(optax.scale_by_factored_rms(), clipped)


def _muon(config: OptimizerConfig, kinds: Kinds) -> optax.GradientTransformation:
    def dimension_numbers(params: Any) -> Any:
        # Of stacked parameters each one is orthogonalized by itself.
        return jax.tree.map(lambda kind: optax.contrib.MuonDimensionNumbers(*kind.dimensions), tree_of_kinds(kinds, params))

    def with_size_of_adam(update: jax.Array, kind: ParameterKind) -> jax.Array:
        return update * (MUON_UPDATE_RMS * math.sqrt(max(update.shape[dimension] for dimension in kind.dimensions)))

    def label(kind: ParameterKind) -> str:
        return "linear_maps" if kind.is_linear_map else "others"

    # Not optax's own composition (optax.contrib.muon): it decays vectors too, and gives its AdamW a Nesterov momentum.
    orthogonal = optax.contrib.scale_by_muon(
        beta=config.betas[1], eps=config.eps, mu_dtype=config.moment_dtype, weight_dimension_numbers=dimension_numbers
    )
    resized = optax.stateless(lambda updates, _: jax.tree.map(with_size_of_adam, updates, tree_of_kinds(kinds, updates)))
    return optax.partition(
        {"linear_maps": optax.chain(orthogonal, resized), "others": _adam(config, kinds)},
        lambda params: jax.tree.map(label, tree_of_kinds(kinds, params)),
    )


def _schedule_free(config: OptimizerConfig, kinds: Kinds) -> optax.GradientTransformation:
    # AdamW without its momentum, which the average replaces.
    return optax.scale_by_rms(decay=config.betas[1], eps=config.eps, eps_in_sqrt=False, bias_correction=True)


DIRECTIONS: dict[str, Callable[[OptimizerConfig, Kinds], optax.GradientTransformation]] = {
    "adamw": _adam,
    "adam": _adam,
    "lion": _lion,
    "sgd": _sgd,
    "rmsprop": _rmsprop,
    "adafactor": _adafactor,
    "muon": _muon,
    SCHEDULE_FREE: _schedule_free,
}
NAMES = tuple(DIRECTIONS)
