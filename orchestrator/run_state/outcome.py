"""How a launch ended, for good: the document that a restarted driver believes."""

from __future__ import annotations

import os
from typing import Any

from trainers.storage import documents

VERDICT = "verdict.json"


def write(run_dir: str | os.PathLike[str], verdict: dict[str, Any]) -> None:
    """How the launch ended, for good. Ray Train runs a driver again after *any* exception, and takes any return for a
    success: a restarted driver that finds a verdict of its own launch reports it and does nothing else."""
    documents.write_json(documents.join(run_dir, VERDICT), verdict)


def read(run_dir: str | os.PathLike[str], launch_id: str) -> dict[str, Any] | None:
    """The verdict on this launch; None while it has none (an earlier launch's verdict is no reason not to train on)."""
    verdict = documents.read_json(documents.join(run_dir, VERDICT))
    return verdict if verdict is not None and verdict.get("launch_id") == launch_id else None
