"""Provides the state that a run starts with, and the one that it goes back to after an anomaly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from trainers import runtime
from trainers.loop.anomalies import Decision
from trainers.loop.beginning import Beginning
from trainers.loop.lineage import Lineage, write_skipped
from trainers.loop.snapshots import Memory
from trainers.protocol import CheckpointManagerProtocol
from trainers.step.state import TrainState


@dataclass
class Resume:
    """Restores or creates states, and keeps `lineage` in step with them. All hosts must call its methods alike."""

    run_folder: str
    manager: CheckpointManagerProtocol
    abstract: TrainState
    """The shapes of a state, with shardings."""
    beginning: Beginning
    topology: Mapping[str, Any]
    lineage: Lineage
    meta: dict[str, Any] = field(default_factory=dict)
    """The meta of the checkpoint that was restored, or that the run began with; empty at the beginning of any other run."""
    memory: Memory | None = None
    """The snapshots that earlier processes have left; None: there are no snapshots."""

    def newest(self) -> TrainState:
        """Returns the state of the newest whole checkpoint; the first state if there is none."""
        restored = self._restored(self.memory)
        if restored is None:
            if self.memory is not None:
                self._forget_older(runtime.current().generation)
            return self._first()
        unused = self.beginning.continues(self.meta)
        if unused and jax.process_index() == 0:
            # What is given is where the run begins. Taken at each start, a restart would lose all training without a word.
            runtime.current().note(
                f"{unused} was not used: the run goes on from its checkpoint of step {int(restored.batch_index)}; to begin with "
                "it, give the run another name"
            )
        return restored

    def go_back(self, decision: Decision) -> tuple[TrainState, int]:
        """Returns a state from before an anomaly, and its batch index."""
        host = runtime.current()
        host.phase("restore")
        if jax.process_index() == 0:
            # Before the restore: if this process ends anywhere from here on, the next one must not train on these batches.
            write_skipped(self.run_folder, self.lineage.skipped)
        state = self._restored(before=decision.go_back_to) or self._first()
        # This waits for the device, which costs nothing beside the restore.
        batch_index = int(state.batch_index)
        host.phase("train")
        if jax.process_index() == 0:
            host.emit({"ev": "anomaly", **decision.event(), "restored_step": batch_index})
        return state, batch_index

    def _restored(self, memory: Memory | None = None, before: int | None = None) -> TrainState | None:
        """Restores the newest whole checkpoint (at or before batch `before`) that was not trained on batches skipped since; or a
        snapshot, if it is no older."""
        restored = memory and memory.restore(self.abstract, self.lineage.refuse, self.manager)
        source: Any = {} if memory is None else {"source": "storage" if restored is None else "memory"}
        restored = restored or self.manager.restore(self.abstract, accept=self.lineage.refuse, before=before)
        if restored is None:
            return None
        batch_index = int(restored.state.batch_index)
        runtime.current().emit({"ev": "restored", "step": batch_index, "skipped": restored.skipped, **source})
        if memory is not None:
            self._forget_older(runtime.current().generation if restored.generation is None else restored.generation)
        self.lineage.start(batch_index, self.topology, restored.meta)
        self.meta = restored.meta
        return restored.state

    def _forget_older(self, generation: int) -> None:
        runtime.current().emit({"ev": "snapshots", "since": generation})

    def _first(self) -> TrainState:
        state = self.beginning.make()
        self.meta = self.beginning.meta
        # Of the state, for one that was given need not be at batch 0.
        self.lineage.start(int(state.batch_index), self.topology, self.meta)
        self.lineage.init_from = self.beginning.origin
        return state
