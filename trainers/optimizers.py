"""Optimizers by name, from optax. Clipping is not theirs: the training step does it.

Weight decay is decoupled from the gradient (Loshchilov & Hutter 2019), scaled by the learning rate, and for matrices only.

    adamw      betas, eps
    adam       adamw without weight decay
    lion       betas                               Chen et al. 2023: wants about a third of AdamW's learning rate
    sgd        momentum betas[0]
    rmsprop    decay betas[1], eps
    adafactor  factored second moments; no first moment, no scaling by the parameter's size      Shazeer & Stern 2018
    muon       orthogonalized momentum betas[1] for the matrices of the layers, with the update size of AdamW, so that
               AdamW's learning rate fits (Liu et al. 2025, arXiv:2502.16982); AdamW for all other parameters
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import optax
from optax import contrib

from trainers.arguments import load_object
from trainers.errors import unknown_name
from trainers.sections import OptimizerConfig

STACKED = "layers"
"""Parameters under this key have a leading dimension over the layers of the model."""

TABLES = ("embed", "unembed")
"""Matrices whose rows are looked up by token or scored against one: no linear maps, so Muon leaves them to AdamW."""

ADAFACTOR_MAX_UPDATE_RMS = 1.0
MUON_UPDATE_RMS = 0.2

Mask = Callable[[Any], Any]
"""From the parameters to a tree of the same structure, of bools."""


def build_optimizer(
    config: OptimizerConfig, schedule: optax.Schedule, decay_mask: Mask | None = None
) -> optax.GradientTransformation:
    """The named optimizer with its learning rate and weight decay; `decay_mask` says what decays (default: `matrices`).

    A name with a colon is a user's function (config, schedule) -> optax transformation. Raises UsageError if it is unknown.
    """
    if ":" in config.name:
        return load_object(config.name)(config, schedule)
    if config.name not in DIRECTIONS:
        raise unknown_name("optimizer.name", config.name, NAMES)
    weight_decay = 0.0 if config.name == "adam" else config.weight_decay
    return optax.chain(
        DIRECTIONS[config.name](config),
        optax.add_decayed_weights(weight_decay, decay_mask or matrices),
        optax.scale_by_learning_rate(schedule),
    )


def matrices(params: Any) -> Any:
    """True for parameters that are matrices, of one layer each where layers are stacked: not norms' scales, not biases."""
    return jax.tree_util.tree_map_with_path(lambda path, leaf: _num_dimensions(path, leaf) >= 2, params)


def _num_dimensions(path: Any, leaf: Any) -> int:
    return leaf.ndim - (STACKED in _names(path))


def _names(path: Any) -> list[str]:
    return [str(getattr(entry, "key", getattr(entry, "name", entry))) for entry in path]


def _adam(config: OptimizerConfig) -> optax.GradientTransformation:
    b1, b2 = config.betas
    return optax.scale_by_adam(b1=b1, b2=b2, eps=config.eps, mu_dtype=config.moment_dtype)


def _lion(config: OptimizerConfig) -> optax.GradientTransformation:
    b1, b2 = config.betas
    return optax.scale_by_lion(b1=b1, b2=b2, mu_dtype=config.moment_dtype)


def _sgd(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.trace(decay=config.betas[0], accumulator_dtype=config.moment_dtype)


def _rmsprop(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.scale_by_rms(decay=config.betas[1], eps=config.eps)


def _adafactor(config: OptimizerConfig) -> optax.GradientTransformation:
    return optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(ADAFACTOR_MAX_UPDATE_RMS))


def _muon(config: OptimizerConfig) -> optax.GradientTransformation:
    # Not optax's own composition (contrib.muon): it decays vectors too, and gives its AdamW a Nesterov momentum.
    orthogonal = contrib.scale_by_muon(
        beta=config.betas[1], eps=config.eps, mu_dtype=config.moment_dtype, weight_dimension_numbers=_dimension_numbers
    )
    resized = optax.stateless(lambda updates, _: jax.tree.map(_with_size_of_adam, updates))
    return optax.partition({"linear_maps": optax.chain(orthogonal, resized), "others": _adam(config)}, _muon_labels)


def _with_size_of_adam(update: jax.Array) -> jax.Array:
    return update * (MUON_UPDATE_RMS * math.sqrt(max(update.shape[-2:])))


def _dimension_numbers(params: Any) -> Any:
    return jax.tree.map(lambda _: contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1), params)


def _muon_labels(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, leaf: "linear_maps" if _is_linear_map(path, leaf) else "others", params)


def _is_linear_map(path: Any, leaf: Any) -> bool:
    return _num_dimensions(path, leaf) == 2 and not any(name in TABLES for name in _names(path))


DIRECTIONS: dict[str, Callable[[OptimizerConfig], optax.GradientTransformation]] = {
    "adamw": _adam,
    "adam": _adam,
    "lion": _lion,
    "sgd": _sgd,
    "rmsprop": _rmsprop,
    "adafactor": _adafactor,
    "muon": _muon,
}
NAMES = tuple(DIRECTIONS)
