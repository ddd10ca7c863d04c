"""Whether a run is over already, so that its command has nothing to do. Found by its files alone, within milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gangway.storage import documents
from orchestrator.run_state.stored import CHECKPOINTS, OUTCOME_KIND, SUMMARY_KIND
from orchestrator.run_state.summary import training_digest
from trainers.checkpoint import committed, layout


def finished_at(run_dir: str, configuration: Mapping[str, Any]) -> int | None:
    """Returns the step at which the training of this configuration is complete already, and saved; None if there may be
    something to do, or if that is not known.

    It is complete if a launch finished with the same settings of training, or if its last checkpoint is at `max_num_steps`.
    """
    if documents.is_url(run_dir):
        return None
    try:
        outcome, summary = (kind.read(documents.join(run_dir, kind.name)) for kind in (OUTCOME_KIND, SUMMARY_KIND))
        step = _whole_step(Path(run_dir))
    except (OSError, documents.StorageError):
        return None  # the launch itself finds out what is wrong, and says so
    if outcome is None or summary is None or step is None:
        return None
    if outcome.get("status") != "finished" or outcome.get("launch_id") != summary.get("launch_id"):
        return None
    limit = configuration.get("max_num_steps")
    same = summary.get("training_digest") == training_digest(configuration)
    return step if same or (limit is not None and step >= limit) else None


def _whole_step(run_dir: Path) -> int | None:
    """Returns the step of the newest checkpoint, if it is whole and no newer one was ever committed."""
    folder = run_dir / CHECKPOINTS
    newest = max(layout.steps(folder), default=None)
    if newest is None or newest != committed.of_run(run_dir, folder).step:
        return None
    return newest if layout.is_whole(layout.at(folder, newest)) else None
