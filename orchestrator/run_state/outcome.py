"""The outcome: the document that says how a launch ended. A restarted driver that finds it does nothing else, and a run that
is over is not begun again."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from gangway.storage import documents
from gangway.storage.object_store import BRIEFLY
from gangway.storage.opening import place_of_run
from gangway.storage.row import FOLDER, Row
from gangway.storage.store import Place
from orchestrator.run_state.stored import CHECKPOINTS, OUTCOME_KIND, SUMMARY_KIND
from orchestrator.run_state.summary import training_digest
from trainers.checkpoint import layout

FILE = OUTCOME_KIND.name
EXIT_FINISHED, EXIT_FAILED, EXIT_REFUSED, EXIT_STOPPED = 0, 1, 2, 3
"""The exit statuses of the command of a run: refused are a configuration, a cluster and a run that cannot be used."""


def write_outcome(run_dir: str | os.PathLike[str], outcome: dict[str, Any]) -> None:
    """Writes the final outcome of the launch. Ray Train runs a driver again after *any* exception, and takes any return for a
    success: so a restarted driver needs it to know that the launch is over."""
    OUTCOME_KIND.write_over(_path(run_dir), outcome)


def read_outcome(run_dir: str | os.PathLike[str], launch_id: str) -> dict[str, Any] | None:
    """Returns the outcome of this launch; None if it has none, or a damaged one. The outcome of an earlier launch does not
    count. Raises NewerDocument."""
    outcome = OUTCOME_KIND.if_whole(_path(run_dir))
    return outcome if outcome is not None and outcome["launch_id"] == launch_id else None


def set_damaged_aside(run_dir: str | os.PathLike[str]) -> str | None:
    """Sets a damaged outcome aside; returns a sentence about it, and None if there is none."""
    return next(iter(OUTCOME_KIND.salvaged(_path(run_dir))[1]), None)


def _path(run_dir: str | os.PathLike[str]) -> str:
    return documents.join(run_dir, OUTCOME_KIND.name)


def finished_at(run_dir: str, configuration: Mapping[str, Any]) -> int | None:
    """Returns the step at which the training of this configuration is complete already, and saved; None if there may be
    something to do, or if that is not known.

    It is complete if a launch finished with the same settings of training, or if its last checkpoint is at `max_num_steps`. A
    bucket is asked briefly.
    """
    try:
        run = place_of_run(run_dir, BRIEFLY)
        outcome, summary = (kind.read(run / kind.name) for kind in (OUTCOME_KIND, SUMMARY_KIND))
        step = _whole_step(run)
    except (OSError, documents.StorageError):
        return None  # the launch itself finds out what is wrong, and says so
    if outcome is None or summary is None or step is None:
        return None
    if outcome.get("status") != "finished" or outcome.get("launch_id") != summary.get("launch_id"):
        return None
    limit = configuration.get("max_num_steps")
    same = summary.get("training_digest") == training_digest(configuration)
    return step if same or (limit is not None and step >= limit) else None


def _whole_step(run: Place) -> int | None:
    """Returns the step of the newest checkpoint, if it is whole and no newer one was ever committed."""
    newest = Row(run / FOLDER).newest()  # not `layout.row_of`, which the launch will use, with more patience
    kept = newest.of(CHECKPOINTS)
    if not kept or (step := max(kept)) != newest.step:
        return None
    return step if layout.is_whole(run / CHECKPOINTS / kept[step].folder) else None
