"""Where a run's state comes from: at its start, and when it goes back to before an anomaly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from trainers import runtime
from trainers.checkpoint.manager import CheckpointManager
from trainers.errors import UsageError
from trainers.loop.anomalies import Decision
from trainers.loop.lineage import Lineage, read_skipped, write_skipped
from trainers.runtime import multihost
from trainers.step.state import TrainState


def known_lineage(run_folder: str, ordered: Iterable[int]) -> Lineage:
    """That of a run which has not begun: the batches that its rollbacks have left out before, and those it is ordered to skip.
    All hosts must call this."""
    before = multihost.from_host0("batches left out", read_skipped(run_folder) if jax.process_index() == 0 else None)
    return Lineage(skipped={*before, *ordered})


@dataclass
class Resume:
    """Keeps `lineage` in step with the state it gives. All hosts must call its methods alike."""

    run_folder: str
    manager: CheckpointManager
    abstract: TrainState
    """Shapes with shardings."""
    make_first: Callable[[], TrainState]
    topology: Mapping[str, Any]
    lineage: Lineage
    meta: dict[str, Any] = field(default_factory=dict)
    """Of the checkpoint that was restored; empty at the beginning of a run."""
    given: bool = False
    """The run began with a state from outside: it cannot be made again."""

    def newest(self) -> TrainState:
        """Of the newest whole checkpoint; at the very beginning of the run, the first state."""
        return self._restored() or self._first()

    def begin_with(self, state: TrainState) -> TrainState:
        """A state that came from outside."""
        self.given = True
        self.lineage.start(int(state.batch_index), self.topology)
        return state

    def go_back(self, decision: Decision) -> tuple[TrainState, int]:
        """A state from before an anomaly, restored in this process, and its batch index."""
        host = runtime.current()
        host.phase("restore")
        if jax.process_index() == 0:
            # First: whatever ends this process now, the next one must not train on these batches.
            write_skipped(self.run_folder, self.lineage.skipped)
        state = self._restored(before=decision.go_back_to)
        if state is None and self.given:
            raise UsageError(
                f"{decision.anomaly}; there is no checkpoint of batch {decision.go_back_to} or before to go back to, and the run "
                "began with a state that was given to it: set checkpoint.save_steps, or skip where anomalies says rollback"
            )
        state = state or self._first()
        batch_index = int(state.batch_index)
        host.phase("train")
        if jax.process_index() == 0:
            host.emit("anomaly", **decision.event(), restored_step=batch_index)
        return state, batch_index

    def _restored(self, before: int | None = None) -> TrainState | None:
        """From the newest whole checkpoint (at or before batch `before`) that was not trained on batches skipped since."""
        restored = self.manager.restore(self.abstract, accept=self.lineage.refuse, before=before)
        if restored is None:
            return None
        batch_index = int(restored.state.batch_index)
        runtime.current().emit("restored", step=batch_index, skipped=restored.skipped)
        self.lineage.start(batch_index, self.topology, restored.meta)
        self.meta = restored.meta
        return restored.state

    def _first(self) -> TrainState:
        self.lineage.start(0, self.topology)
        self.meta = {}
        return self.make_first()
