"""Learning rates over steps, by name: warm-up to `learning_rate`, then a shape that ends at `final_factor` of it.

The rate of a step s (steps done before it, so the first has s = 0) is `learning_rate` times

    (s + 1) / (w + 1)         while s < w, where w = `warmup_steps`: the first step is not lost to a rate of 0;
                              with `start_factor` a: a + (1 - a) s / w
    shape(s)                  from then on

with p = (s - w - h) / (decay_steps - w - h), from 0 to 1, where h = `hold_steps`, and f = `final_factor`:

    constant      1
    linear        1 - (1 - f) p
    cosine        f + (1 - f) (1 + cos(pi p)) / 2                                           Loshchilov & Hutter 2017
    polynomial    f + (1 - f) (1 - p)^`power`
    wsd           1, and over the last fifth (q from 0 to 1): 1 - (1 - f) sqrt(q)            Haegele et al. 2024
    tri_stage     f^p: held for h steps, then an exponential decay                          Park et al. 2019; fairseq2
    inverse_sqrt  sqrt(max(w, 1) / max(s, w, 1)), at least f; has no end                    Vaswani et al. 2017
    cosine_restarts  in the n-th cycle (from 0; q from 0 to 1): `cycle_factor`^n (f + (1 - f) (1 + cos(pi q)) / 2), which is
                  `cycle_steps` `cycle_growth`^n steps long; has no end                     Loshchilov & Hutter 2017

`optax.<function>` is any schedule of optax, with `arguments`; the largest of the rates it goes by (`peak_value`, else
`init_value`, else `value`) is `learning_rate`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gangway.errors import UsageError, unknown_name
from trainers.config import ScheduleConfig
from trainers.config.arguments import load_object
from trainers.optim import optax_registry

WSD_DECAY_FRACTION = 0.2

OPTAX_PEAKS = ("peak_value", "init_value", "value")

Shape = Callable[[jax.Array, ScheduleConfig], jax.Array]
"""A function (progress p, settings) -> factor of the learning rate."""


def build_schedule(config: ScheduleConfig, learning_rate: float, max_num_steps: int | None) -> optax.Schedule:
    """Returns the function step -> learning rate; the step may be traced. `max_num_steps`: the run's steps, by its own limit or
    by its epochs; None: not known.

    A name with a colon is a user's function (config, learning_rate, max_num_steps) -> schedule; in its config, ratios have become
    steps. Raises UsageError if the name is unknown, or if the shape ends somewhere and nothing says where.
    """
    config = _in_steps(config, max_num_steps)
    if config.name.startswith(optax_registry.PREFIX):
        return optax_registry.call("optimizer.schedule", config.name, config.arguments, OPTAX_PEAKS, learning_rate)
    if ":" in config.name:
        return load_object(config.name)(config, learning_rate, max_num_steps)
    if config.name == "constant":
        return _with_warmup(config, learning_rate, jnp.ones_like)
    if config.name == "inverse_sqrt":
        return _with_warmup(config, learning_rate, _inverse_sqrt(config))
    if config.name == "cosine_restarts":
        return _with_warmup(config, learning_rate, _cosine_restarts(config))
    if config.name not in SHAPES:
        raise unknown_name("optimizer.schedule.name", config.name, NAMES)
    start = config.warmup_steps + config.hold_steps
    end = config.decay_steps if config.decay_steps is not None else max_num_steps
    if end is None:
        raise UsageError(
            f"optimizer.schedule.name = {config.name!r} does not know where to end: set optimizer.schedule.decay_steps, "
            "max_num_steps or max_num_data_epochs, or use 'constant', 'inverse_sqrt' or 'cosine_restarts', which have no end"
        )
    if end <= start:
        held = f" + hold_steps = {config.hold_steps}" if config.hold_steps else ""
        raise UsageError(
            f"optimizer.schedule.warmup_steps = {config.warmup_steps}{held}: expected less than the {end} steps after which the "
            "decay has ended (optimizer.schedule.decay_steps, or else the run's steps)"
        )
    shape = SHAPES[config.name]

    def factor(step: jax.Array) -> jax.Array:
        # Clipped: before the decay p is 0, and after its end it stays at 1.
        return shape(jnp.clip((step - start) / (end - start), 0.0, 1.0), config)

    return _with_warmup(config, learning_rate, factor)


def _linear(p: jax.Array, config: ScheduleConfig) -> jax.Array:
    return 1 - (1 - config.final_factor) * p


def _cosine(p: jax.Array, config: ScheduleConfig) -> jax.Array:
    return config.final_factor + (1 - config.final_factor) * (1 + jnp.cos(math.pi * p)) / 2


def _polynomial(p: jax.Array, config: ScheduleConfig) -> jax.Array:
    return config.final_factor + (1 - config.final_factor) * (1 - p) ** config.power


def _wsd(p: jax.Array, config: ScheduleConfig) -> jax.Array:
    q = jnp.maximum(0.0, (p - (1 - WSD_DECAY_FRACTION)) / WSD_DECAY_FRACTION)
    return 1 - (1 - config.final_factor) * jnp.sqrt(q)


def _tri_stage(p: jax.Array, config: ScheduleConfig) -> jax.Array:
    return config.final_factor**p


SHAPES: dict[str, Shape] = {
    "linear": _linear,
    "cosine": _cosine,
    "polynomial": _polynomial,
    "wsd": _wsd,
    "tri_stage": _tri_stage,
}
NAMES = ("constant", *SHAPES, "inverse_sqrt", "cosine_restarts")


def _inverse_sqrt(config: ScheduleConfig) -> Callable[[jax.Array], jax.Array]:
    # At least 1: without a warm-up, step 0 would divide 0 by 0.
    first = max(config.warmup_steps, 1)
    return lambda step: jnp.maximum(jnp.sqrt(first / jnp.maximum(step, first)), config.final_factor)


def _cosine_restarts(config: ScheduleConfig) -> Callable[[jax.Array], jax.Array]:
    first, growth = config.cycle_steps or 1, config.cycle_growth

    def factor(step: jax.Array) -> jax.Array:
        steps_after_warmup = jnp.maximum(step - config.warmup_steps, 0.0)
        if growth == 1:
            cycle, q = jnp.floor(steps_after_warmup / first), jnp.mod(steps_after_warmup, first) / first
        else:
            # Exact sums, and no logarithms: rounding would put the first step of a cycle at the end of the one before.
            starts = np.array([first * (growth**n - 1) // (growth - 1) for n in range(32)], np.float32)
            cycle = jnp.searchsorted(starts, steps_after_warmup, side="right") - 1
            q = (steps_after_warmup - jnp.asarray(starts)[cycle]) / (first * jnp.float32(growth) ** cycle)
        return config.cycle_factor**cycle * _cosine(q, config)

    return factor


def _with_warmup(config: ScheduleConfig, learning_rate: float, factor: Callable[[jax.Array], jax.Array]) -> optax.Schedule:
    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        # float32 counts steps exactly up to 2**24, about 16.8 million.
        steps_done = jnp.asarray(step, jnp.float32)
        if config.start_factor is None:
            warmup = (steps_done + 1) / (config.warmup_steps + 1)
        else:
            warmup = config.start_factor + (1 - config.start_factor) * steps_done / max(config.warmup_steps, 1)
        # `where`, for the step is traced: both sides are computed.
        return learning_rate * jnp.where(steps_done < config.warmup_steps, warmup, factor(steps_done))

    return schedule


def _in_steps(config: ScheduleConfig, max_num_steps: int | None) -> ScheduleConfig:
    """Returns the settings with steps in the place of ratios."""
    changes: dict[str, Any] = {}
    for ratio, steps, total in (
        ("warmup_ratio", "warmup_steps", max_num_steps or config.decay_steps),
        ("decay_ratio", "decay_steps", max_num_steps),
    ):
        if (share := getattr(config, ratio)) is None:
            continue
        if total is None:
            raise UsageError(
                f"optimizer.schedule.{ratio} = {share}: nothing says how many steps the run has; set max_num_steps or "
                f"max_num_data_epochs, or optimizer.schedule.{steps} instead"
            )
        changes |= {ratio: None, steps: round(share * total)}
    if changes.get("decay_steps") == 0:
        raise UsageError(f"optimizer.schedule.decay_ratio = {config.decay_ratio}: that is no step of {max_num_steps}")
    return dataclasses.replace(config, **changes) if changes else config
