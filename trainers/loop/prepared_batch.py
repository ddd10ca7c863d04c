"""Batches that `BaseTrainer.prepare_batch` has changed: checked, with the layout that compiled steps expect, and their shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from gangway.errors import DataError, UsageError
from trainers import runtime
from trainers.parallel import mesh as meshes
from trainers.protocol import METRIC, Batch
from trainers.runtime import distributed
from trainers.step.state import TrainState

Shapes = dict[str, jax.ShapeDtypeStruct]
REQUIRED = ("weight", "sample_id")


class PreparedBatches:
    """Calls `hook`, a `prepare_batch`, and gives what it returns the sharding of batches. All hosts must call it alike."""

    def __init__(self, hook: Callable[..., Any], mesh: Mesh):
        self._hook, self.sharding = hook, meshes.micro_batches(mesh)
        self._called: set[bool] = set()

    def __call__(self, state: Any, batch: Batch, *, training: bool) -> Batch:
        call = functools.partial(self._hook, state, dict(batch), training=training)
        if training in self._called:
            returned = call()
        else:
            # The hook's own functions compile now: otherwise the watchdog would take that for a step that hangs.
            with runtime.current().within("compile"):
                returned = call()
            self._called.add(training)
        leaves = checked(returned, batch)
        return {name: self._placed(leaf) for name, leaf in leaves.items()}

    def _placed(self, leaf: Any) -> jax.Array:
        if isinstance(leaf, np.ndarray):
            # Not `device_put`, with which the hosts would compare their copies, and wait for each other.
            leaf = leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype), copy=False)
            return jax.make_array_from_callback(leaf.shape, self.sharding, lambda index: leaf[index])
        if leaf.sharding.is_equivalent_to(self.sharding, leaf.ndim):
            return leaf
        return jax.device_put(leaf, self.sharding)


def checked(returned: Any, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the leaves of what the hook has returned, those of its metrics among them. Raises DataError for what is no batch of
    the same rows as `batch`."""
    leaves, metrics = returned if isinstance(returned, tuple) and len(returned) == 2 else (returned, {})
    if not (isinstance(leaves, Mapping) and isinstance(metrics, Mapping)):
        found = f"({type(leaves).__name__}, {type(metrics).__name__})" if leaves is not returned else type(returned).__name__
        raise DataError(f"prepare_batch returned {found}: expected the batch, a dict of arrays by name, or (batch, metrics)")
    rows = tuple(np.shape(batch["weight"]))
    leaves = {**leaves, **{METRIC + name: _for_each_row(name, value, rows) for name, value in metrics.items()}}
    _check_rows(leaves, rows)
    return leaves


def _for_each_row(name: str, value: Any, rows: tuple[int, ...]) -> Any:
    """Returns a metric as one value for each row, so that rows that only fill up the batch drop out by their weight."""
    if np.shape(value) not in ((), rows):
        raise DataError(
            f"prepare_batch returned the metric {name} of shape {list(np.shape(value))}: expected a scalar, or {list(rows)}"
        )
    if isinstance(value, jax.Array):
        return jnp.broadcast_to(value.astype(jnp.float32), rows)
    return np.broadcast_to(np.asarray(value, np.float32), rows)


def _check_rows(returned: Mapping[str, Any], rows: tuple[int, ...]) -> None:
    wrong = [f"{name} {np.shape(leaf)}" for name, leaf in returned.items() if np.shape(leaf)[:2] != rows]
    lacking = [name for name in REQUIRED if name not in returned]
    if wrong or lacking:
        raise DataError(
            f"prepare_batch returned {', '.join(wrong) or 'no ' + ' or '.join(lacking)}: expected leaves "
            f"[{rows[0]}, {rows[1]}, ...] (micro-batches, rows), `weight` and `sample_id` among them"
        )


def traced_shapes(hook: Callable[[Any, Any], Any], state: TrainState, shapes: Shapes) -> Shapes:
    """Returns the shapes of what `hook`, a `prepare_batch`, makes of a batch of `shapes`. `state`: the shapes of a state. Touches
    no device. Raises UsageError if the hook cannot be traced."""
    touched_before = distributed.devices_touched()

    def traced(state: Any, batch: Any) -> Mapping[str, Any]:
        return checked(hook(state, batch), batch)

    try:
        prepared = jax.eval_shape(traced, state, dict(shapes))
    except DataError:
        raise
    except Exception as error:
        raise UsageError(
            f"prepare_batch cannot be traced for the shapes of what it returns ({type(error).__name__}: {_first_line(error)}): "
            "if it reads values, or uses what is made only later, override prepared_shapes, too"
        ) from error
    if distributed.devices_touched() and not touched_before:
        raise UsageError(
            "prepare_batch uses devices while it is traced for its shapes, where there are none yet: override "
            "prepared_shapes, too"
        )
    return prepared


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
