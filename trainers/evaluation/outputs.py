"""Metrics of a task's predictions: each host adds up its own rows, and the states of all hosts are merged once at the end.

So what is no mean over targets (a median, a rank, a text score) is exact on any number of hosts.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from gangway.errors import UsageError
from trainers.parallel.platform import wait_for_device
from trainers.protocol import EvaluationMetrics, Task
from trainers.runtime import multihost

ARRAY = "numpy array"
"""The key by which an array is known in the JSON of a state."""
EXPECTED = "expected JSON values and NumPy arrays, in lists and in dicts whose keys are texts"


def check(unit: str, metrics: EvaluationMetrics, task: Task, taken: Iterable[str]) -> None:
    """Raises UsageError if the metrics cannot be computed. `taken` are the names of the metrics of the loss."""
    where = f"metrics of the validation unit {unit!r}"
    if not callable(getattr(task, "predictions", None)):
        raise UsageError(f"{where}: {type(task).__name__} has no method predictions(model, batch), which gives their rows")
    lacking = [name for name in ("names", "add", "state", "merge", "compute") if not hasattr(metrics, name)]
    if lacking:
        expected = "expected what trainers.protocol.EvaluationMetrics describes"
        raise UsageError(f"{where}: {type(metrics).__name__} has no {', '.join(lacking)}; {expected}")
    if isinstance(metrics.names, str) or not all(isinstance(name, str) for name in metrics.names):
        raise UsageError(f"{where}: names = {metrics.names!r}: expected a list of names")
    if twice := set(metrics.names) & set(taken):
        raise UsageError(f"{where}: the loss has metrics named {', '.join(sorted(twice))} too: rename them")


class Collector:
    """Gives the outputs of this host's rows to an accumulator. It is one batch behind the devices, so that they never wait."""

    def __init__(self, unit: str, new_metrics: Callable[[], EvaluationMetrics]):
        self.unit, self._new_metrics = unit, new_metrics
        self._metrics = new_metrics()
        self._pending: Any = None

    def add(self, outputs: tuple[Any, Mapping[str, jax.Array]]) -> None:
        """Takes (predictions, rows of the batch) of one step: leaves [rows, ...] on the devices of all hosts."""
        for leaf in jax.tree.leaves(outputs):
            for shard in _own_shards(leaf):
                shard.data.copy_to_host_async()
        self._collect()
        self._pending = outputs

    def result(self) -> dict[str, float]:
        """Returns the metrics of all hosts' rows, the same on all hosts. All hosts must call this."""
        self._collect()
        topic = f"metrics of {self.unit}"
        states = multihost.to_host0(topic, encoded(self._metrics.state()))
        # On host 0 alone, whose error ends it, which the others notice at once.
        return multihost.from_host0(topic, None if states is None else self._merged(states))

    def _collect(self) -> None:
        if self._pending is None:
            return
        predictions, rows = jax.tree.map(local_rows, self._pending)
        self._pending = None
        # Rows that only fill up the batch are no examples.
        counts = rows["weight"] > 0
        if counts.any():
            predictions, rows = jax.tree.map(lambda leaf: leaf[counts], (predictions, rows))
            self._metrics.add(predictions, rows)

    def _merged(self, states: list[Any]) -> dict[str, float]:
        # A new one: that of this host has its own rows already, which would count twice.
        total = self._new_metrics()
        total.merge([decoded(state) for state in states])
        values = {name: float(value) for name, value in total.compute().items()}
        if values.keys() != set(total.names):
            raise UsageError(
                f"metrics of the validation unit {self.unit!r}: compute returned {', '.join(sorted(values)) or 'nothing'}; "
                f"expected the declared names: {', '.join(total.names)}"
            )
        return values


def local_rows(leaf: jax.Array) -> np.ndarray:
    """Returns the rows of an array [rows, ...] that this host counts: one host counts a row, even if several hold it."""
    shards = sorted(_own_shards(leaf), key=lambda shard: shard.index[0].start or 0)
    parts = [wait_for_device(shard.data) for shard in shards]
    return np.concatenate(parts) if parts else np.zeros((0, *leaf.shape[1:]), leaf.dtype)


def _own_shards(leaf: jax.Array) -> list[Any]:
    # The first replica: devices that differ only along the tensor axis hold the same rows.
    return [shard for shard in leaf.addressable_shards if shard.replica_id == 0]


def encoded(value: Any) -> Any:
    """Returns a state as JSON values. Raises UsageError for anything that `decoded` could not give back."""
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        text = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
        return {ARRAY: text, "dtype": array.dtype.name, "shape": array.shape}
    if isinstance(value, Mapping):
        if wrong := [key for key in value if not isinstance(key, str)]:
            raise UsageError(f"the state of evaluation metrics has the key {wrong[0]!r}: {EXPECTED}")
        return {key: encoded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encoded(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise UsageError(f"the state of evaluation metrics has a {type(value).__name__}: {EXPECTED}")


def decoded(value: Any) -> Any:
    """Returns a state from what `encoded` made of it; tuples have become lists."""
    if isinstance(value, dict) and ARRAY in value:
        flat = np.frombuffer(base64.b64decode(value[ARRAY]), np.dtype(value["dtype"]))
        return flat.reshape(value["shape"]).copy()
    if isinstance(value, dict):
        return {key: decoded(item) for key, item in value.items()}
    return [decoded(item) for item in value] if isinstance(value, list) else value
