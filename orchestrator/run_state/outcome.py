"""The outcome: the document that says how a launch ended. A restarted driver that finds it does nothing else."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any

from gangway.storage import documents
from gangway.storage.documents import DamagedDocument
from orchestrator.run_state.stored import OUTCOME_KIND

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
    with suppress(DamagedDocument):
        outcome = OUTCOME_KIND.read(_path(run_dir))
        return outcome if outcome is not None and outcome["launch_id"] == launch_id else None
    return None


def set_damaged_aside(run_dir: str | os.PathLike[str]) -> str | None:
    """Sets a damaged outcome aside; returns a sentence about it, and None if there is none."""
    try:
        OUTCOME_KIND.read(_path(run_dir))
    except DamagedDocument as error:
        return OUTCOME_KIND.set_aside(_path(run_dir), error)
    return None


def _path(run_dir: str | os.PathLike[str]) -> str:
    return documents.join(run_dir, OUTCOME_KIND.name)
