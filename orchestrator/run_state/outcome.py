"""The outcome: the document that says how a launch ended. A restarted driver that finds it does nothing else."""

from __future__ import annotations

import os
from typing import Any

from trainers.storage import documents

FILE = "outcome.json"


def write_outcome(run_dir: str | os.PathLike[str], outcome: dict[str, Any]) -> None:
    """Writes the final outcome of the launch. Ray Train runs a driver again after *any* exception, and takes any return for a
    success: so a restarted driver needs it to know that the launch is over."""
    documents.write_json(documents.join(run_dir, FILE), outcome)


def read_outcome(run_dir: str | os.PathLike[str], launch_id: str) -> dict[str, Any] | None:
    """Returns the outcome of this launch; None if it has none. The outcome of an earlier launch does not count."""
    outcome = documents.read_json(documents.join(run_dir, FILE))
    return outcome if outcome is not None and outcome.get("launch_id") == launch_id else None
