"""What is measured of a state by one program on its devices: the fingerprint of each leaf, and values that are not finite."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from trainers.checkpoint import array_fingerprints, model_only
from trainers.checkpoint.array_fingerprints import leaf_names, measured
from trainers.checkpoint.validate import shapes
from trainers.parallel import host_memory
from trainers.parallel.mesh import replicated
from trainers.parallel.platform import wait_for_device
from trainers.runtime.executables import Program, ProgramStore
from trainers.step.finite import must_be_finite
from trainers.step.state import TrainState


@dataclass(frozen=True)
class Measurement:
    """What the devices compute of one state."""

    names: list[str]
    shapes: dict[str, str]
    _on_device: jax.Array

    @cached_property
    def described(self) -> Mapping[str, Any]:
        """What a checkpoint's meta says of the arrays in it. The first look waits for the device; it may be in any thread."""
        rows = wait_for_device(self._on_device)
        return {
            "shapes": self.shapes,
            "fingerprints": dict(zip(self.names, rows[:, :2].tolist(), strict=True)),
            "not_finite": _not_finite(self.names, rows),
        }


class MeasuredState:
    """Measures states of one shape. What was infinite as the run began, such as a mask, may stay so."""

    def __init__(self, mesh: Mesh, store: ProgramStore, note: Callable[[str], None]):
        try:
            # The text of all of ours that `measured` runs.
            code = "".join(map(inspect.getsource, (array_fingerprints, host_memory)))
        except OSError:  # the modules have none
            code = None
        self._program = Program("fingerprints", jax.jit(measured, out_shardings=replicated(mesh)), store, note, code=code)
        self._first: jax.Array | None = None
        """What was measured of the state that the run began with; not waited for."""
        self._first_names: list[str] = []
        self._allowed: Mapping[str, int] | None = None
        """How many words of a leaf were not finite as the run began. None: not known."""

    def load_ahead(self, state: TrainState) -> None:
        """Begins to load the program. `state` may be shapes with shardings."""
        self._program.load_ahead(state)

    def prepare(self, state: TrainState) -> None:
        """Compiles the program, and measures the state that the run begins with. `state` may be shapes with shardings."""
        if self._program.compiled is None:
            self._program.prepare(state)
        # Not waited for: the device may still compute the first state, while the host compiles the step.
        if self._allowed is None and all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state)):
            self._first, self._first_names = self._program(state), leaf_names(state)

    def fingerprint(self, state: TrainState) -> np.ndarray:
        """Returns uint32[num_leaves, 2], the same on all hosts. All hosts must call this."""
        return self._rows(state)[:, :2]

    def begin(self, state: TrainState) -> Measurement:
        """Begins to measure a state, which may be donated as soon as this returns. All hosts must call this."""
        on_device = self._program(state)  # first: the devices compute while the host finds the names
        return Measurement(leaf_names(state), shapes(state), on_device)

    def broken(self, not_finite: Mapping[str, int]) -> list[str]:
        """Returns the names of the leaves that have more values that are not finite than as the run began. `not_finite` are
        those of `described`."""
        allowed = self.allowed() or {}
        return [name for name, number in not_finite.items() if number > allowed.get(name, 0)]

    def broken_in(self, state: TrainState) -> list[str]:
        """As `broken`, of a state. All hosts must call this."""
        return self.broken(_not_finite(leaf_names(state), self._rows(state)))

    def allowed(self) -> Mapping[str, int] | None:
        """Returns how many words of each leaf may be not finite; None: not known. Waits for the device."""
        if self._allowed is None and self._first is not None:
            self._allowed, self._first = _not_finite(self._first_names, wait_for_device(self._first)), None
        return self._allowed

    def allow(self, not_finite: Mapping[str, int]) -> None:
        """The run goes on from a state that had these."""
        self._allowed = not_finite

    @property
    def infinite_parameters(self) -> bool | None:
        """Whether parameters were not finite as the run began; None: not known. Waits for the device."""
        return None if (allowed := self.allowed()) is None else any(name.startswith(f".{model_only.PART}") for name in allowed)

    def _rows(self, state: TrainState) -> np.ndarray:
        """Returns uint32[num_leaves, 3]: `array_fingerprints.measured`."""
        return wait_for_device(self._program(state))


def _not_finite(names: Sequence[str], rows: np.ndarray) -> dict[str, int]:
    """Returns how many words of each leaf are of values that are not finite, without leaves that have none and those that need
    not be finite. `rows` are those of `array_fingerprints.measured`."""
    counts = zip(names, rows[:, 2].tolist(), strict=True)
    return {name: count for name, count in counts if count and must_be_finite(name)}
