"""The checkpoint manager of a run in this process: it reports to the agent what it saves and restores."""

from __future__ import annotations

from collections.abc import Callable

from jax.sharding import Mesh

from trainers import runtime
from trainers.checkpoint.committed import Committed
from trainers.checkpoint.fence import WriterTerm
from trainers.checkpoint.manager import CheckpointManager
from trainers.checkpoint.retention import Retention
from trainers.config.arguments import TrainingArguments
from trainers.runtime.executables import ProgramStore


def manager_of(
    arguments: TrainingArguments, run_folder: str, mesh: Mesh, programs: ProgramStore, on_saved: Callable[[int, str], None]
) -> CheckpointManager:
    """Returns the manager of the folder `checkpoints`. `on_saved` is called on the thread that saves."""
    host = runtime.current()

    def saved(step: int, path: str) -> None:
        on_saved(step, path)
        host.emit({"ev": "saved", "step": step, "path": path})

    manager = CheckpointManager(
        f"{run_folder}/checkpoints",
        Retention.of(arguments.checkpoint, arguments.evaluation.score),
        mesh,
        programs,
        on_saved=saved,
        on_failed=lambda step, error: host.emit({"ev": "save_failed", "step": step, "error": error}),
        note=host.note,
        ordered=Committed(host.run, host.committed_step),
        term=WriterTerm(host.driver_term, host.generation),
        storage_patience_s=arguments.checkpoint.storage_patience_s,
    )
    # The agent may send the fence later, when another driver takes over.
    host.follow_fence(manager.follow_fence)
    return manager
