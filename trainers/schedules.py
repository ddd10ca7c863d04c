"""Learning rates over steps, by name: warm-up to `learning_rate`, then a shape that ends at `final_factor` of it.

The rate of a step s (steps done before it, so the first has s = 0) is `learning_rate` times

    (s + 1) / (w + 1)         while s < w, where w = `warmup_steps`: the first step is not lost to a rate of 0
    shape(s)                  from then on

with p = (s - w) / (decay_steps - w), at most 1, and f = `final_factor`:

    constant      1
    linear        1 - (1 - f) p
    cosine        f + (1 - f) (1 + cos(pi p)) / 2                                           Loshchilov & Hutter 2017
    polynomial    f + (1 - f) (1 - p)^2
    wsd           1, and over the last fifth (q from 0 to 1): 1 - (1 - f) sqrt(q)            Haegele et al. 2024
    inverse_sqrt  sqrt(max(w, 1) / max(s, w, 1)), at least f; has no end                    Vaswani et al. 2017
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from trainers.arguments import load_object
from trainers.errors import UsageError, unknown_name
from trainers.sections import ScheduleConfig

WSD_DECAY_FRACTION = 0.2

Shape = Callable[[jax.Array, float], jax.Array]
"""(progress p, final factor f) -> factor of the learning rate."""


def build_schedule(config: ScheduleConfig, learning_rate: float, max_num_steps: int | None) -> optax.Schedule:
    """The function step -> learning rate; the step may be traced.

    A name with a colon is a user's function (config, learning_rate, max_num_steps) -> schedule. Raises UsageError if the name is
    unknown, or if the shape ends somewhere and nothing says where.
    """
    if ":" in config.name:
        return load_object(config.name)(config, learning_rate, max_num_steps)
    if config.name == "constant":
        return _with_warmup(config, learning_rate, jnp.ones_like)
    if config.name == "inverse_sqrt":
        return _with_warmup(config, learning_rate, _inverse_sqrt(config))
    if config.name not in SHAPES:
        raise unknown_name("optimizer.schedule.name", config.name, NAMES)
    end, shape = _end_of_decay(config, max_num_steps), SHAPES[config.name]

    def factor(step: jax.Array) -> jax.Array:
        progress = jnp.clip((step - config.warmup_steps) / (end - config.warmup_steps), 0.0, 1.0)
        return shape(progress, config.final_factor)

    return _with_warmup(config, learning_rate, factor)


def _linear(p: jax.Array, f: float) -> jax.Array:
    return 1 - (1 - f) * p


def _cosine(p: jax.Array, f: float) -> jax.Array:
    return f + (1 - f) * (1 + jnp.cos(math.pi * p)) / 2


def _polynomial(p: jax.Array, f: float) -> jax.Array:
    return f + (1 - f) * (1 - p) ** 2


def _wsd(p: jax.Array, f: float) -> jax.Array:
    q = jnp.maximum(0.0, (p - (1 - WSD_DECAY_FRACTION)) / WSD_DECAY_FRACTION)
    return 1 - (1 - f) * jnp.sqrt(q)


SHAPES: dict[str, Shape] = {"linear": _linear, "cosine": _cosine, "polynomial": _polynomial, "wsd": _wsd}
NAMES = ("constant", *SHAPES, "inverse_sqrt")


def _inverse_sqrt(config: ScheduleConfig) -> Callable[[jax.Array], jax.Array]:
    first = max(config.warmup_steps, 1)
    return lambda step: jnp.maximum(jnp.sqrt(first / jnp.maximum(step, first)), config.final_factor)


def _with_warmup(config: ScheduleConfig, learning_rate: float, factor: Callable[[jax.Array], jax.Array]) -> optax.Schedule:
    def schedule(step: jax.typing.ArrayLike) -> jax.Array:
        steps_done = jnp.asarray(step, jnp.float32)
        warmup = (steps_done + 1) / (config.warmup_steps + 1)
        return learning_rate * jnp.where(steps_done < config.warmup_steps, warmup, factor(steps_done))

    return schedule


def _end_of_decay(config: ScheduleConfig, max_num_steps: int | None) -> int:
    end = config.decay_steps if config.decay_steps is not None else max_num_steps
    if end is None:
        raise UsageError(
            f"optimizer.schedule.name = {config.name!r} does not know where to end: set optimizer.schedule.decay_steps "
            "or max_num_steps, or use 'constant' or 'inverse_sqrt', which have no end"
        )
    if end <= config.warmup_steps:
        raise UsageError(
            f"optimizer.schedule.warmup_steps = {config.warmup_steps}: expected less than the {end} steps after which the decay "
            "has ended (optimizer.schedule.decay_steps, or else max_num_steps)"
        )
    return end
