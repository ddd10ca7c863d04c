"""Dynamic loss scaling for float16 (Micikevicius et al. 2018, section 3.2), by the rules of fairseq2's and PyTorch's scalers.

An update whose gradients overflow is not applied, and the scale is divided by `growth_factor`. After `window_steps` updates in
a row without an overflow, the scale is multiplied by it. All of this happens in the train step. A loss that is itself not
finite is no overflow: no scale would help.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from trainers.config import LossScaleConfig
from trainers.step.host_flags import UpdateStatus

Scaler = Mapping[str, jax.Array]
"""`scale` (float32), and `good_steps` (int32): updates since it last changed. Empty where losses are not scaled."""


def initial_scaler(dtype: str, config: LossScaleConfig) -> dict[str, jax.Array]:
    """Returns the scaler of a run that computes in `dtype`."""
    if dtype != "float16":
        return {}
    return {"scale": jnp.float32(config.initial), "good_steps": jnp.zeros((), jnp.int32)}


def overflow(scaler: Scaler, norm: jax.Array, config: LossScaleConfig) -> jax.Array | None:
    """Returns the `UpdateStatus` (int32) of gradients of this norm: APPLIED if none has overflowed. None where losses are not
    scaled."""
    if not scaler:
        return None
    # The scale that the next step would use is below the minimum.
    exhausted = scaler["scale"] / config.growth_factor < config.minimum
    status = jnp.where(exhausted, jnp.int32(UpdateStatus.SCALE_EXHAUSTED), jnp.int32(UpdateStatus.OVERFLOW))
    return jnp.where(jnp.isfinite(norm), jnp.int32(UpdateStatus.APPLIED), status)


def update_scaler(scaler: Scaler, status: jax.Array, config: LossScaleConfig) -> dict[str, jax.Array]:
    """Returns the scaler after an update with this status. A batch that was left out for another reason than an overflow does
    not change it."""
    if not scaler:
        return {}
    scale, good_steps = scaler["scale"], scaler["good_steps"] + 1
    grown = scale * config.growth_factor
    full = (good_steps >= config.window_steps) & jnp.isfinite(grown)  # growing to infinity would end the run
    applied, overflowed = status == UpdateStatus.APPLIED, status == UpdateStatus.OVERFLOW
    return {
        "scale": jnp.select([applied & full, overflowed], [grown, scale / config.growth_factor], scale),
        "good_steps": jnp.select([applied & ~full, ~applied & ~overflowed], [good_steps, scaler["good_steps"]], 0),
    }
