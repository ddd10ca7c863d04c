"""Dynamic loss scaling for float16 (Micikevicius et al. 2018, section 3.2), by the rules of fairseq2's and PyTorch's scalers.

The scale is divided by `growth_factor` at each update whose gradients overflow, which is not applied, and multiplied by it after
`window_steps` updates in a row that did not. All of it happens in the train step. A loss that is not finite is no overflow: no
scale would help.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from trainers.config import LossScaleConfig
from trainers.config.arguments import TrainingArguments
from trainers.step.host_flags import UpdateStatus

Scaler = Mapping[str, jax.Array]
"""`scale` (float32), and `good_steps` (int32): updates since it last changed. Empty where losses are not scaled."""


def initial_scaler(arguments: TrainingArguments) -> dict[str, jax.Array]:
    if arguments.dtype != "float16":
        return {}
    return {"scale": jnp.float32(arguments.loss_scale.initial), "good_steps": jnp.zeros((), jnp.int32)}


def overflow(scaler: Scaler, norm: jax.Array, config: LossScaleConfig) -> jax.Array | None:
    """int32: the verdict on gradients of this norm, APPLIED if they have not overflowed. None where losses are not scaled."""
    if not scaler:
        return None
    exhausted = scaler["scale"] / config.growth_factor < config.minimum
    verdict = jnp.where(exhausted, jnp.int32(UpdateStatus.SCALE_EXHAUSTED), jnp.int32(UpdateStatus.OVERFLOW))
    return jnp.where(jnp.isfinite(norm), jnp.int32(UpdateStatus.APPLIED), verdict)


def update_scaler(scaler: Scaler, verdict: jax.Array, config: LossScaleConfig) -> dict[str, jax.Array]:
    """After an update with this verdict. A batch left out for another reason than an overflow leaves it as it was."""
    if not scaler:
        return {}
    scale, good_steps = scaler["scale"], scaler["good_steps"] + 1
    grown = scale * config.growth_factor
    full = (good_steps >= config.window_steps) & jnp.isfinite(grown)
    applied, overflowed = verdict == UpdateStatus.APPLIED, verdict == UpdateStatus.OVERFLOW
    return {
        "scale": jnp.select([applied & full, overflowed], [grown, scale / config.growth_factor], scale),
        "good_steps": jnp.select([applied & ~full, ~applied & ~overflowed], [good_steps, scaler["good_steps"]], 0),
    }
