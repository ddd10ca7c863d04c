"""Has the report of a run written by a process of its own: what it costs or breaks there does nothing to the run."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cluster.agent.child_process import child_env, import_path
from gangway.storage import documents
from gangway.storage.opening import place_of
from orchestrator.run_state.incident_log import NAME as INCIDENTS
from orchestrator.run_state.launch import TIMELINE
from orchestrator.tracking import of_bucket
from orchestrator.tracking.spool import FOLDER, SPOOL

TIMEOUT_S = 60.0
NAME, FIGURES = "report.html", "figures"


def write_report(run_dir: str, *, figures: bool) -> list[str]:
    """Writes `report.html` into the folder of a run, and with `figures` its pictures beside it. Returns what was written. Raises
    OSError that says why it could not be."""
    if documents.is_url(run_dir):
        return [_in_bucket(run_dir)]
    page, pictures = documents.join(run_dir, NAME), documents.join(run_dir, FIGURES)
    command = [sys.executable, "-m", "orchestrator.report", run_dir, "--out", page, *(["--figures", pictures] if figures else [])]
    # A driver that Ray Train has started finds this program by its `sys.path` alone.
    paths = import_path(os.environ.get("PYTHONPATH", "").split(os.pathsep))
    env = child_env(os.environ, {"PYTHONPATH": os.pathsep.join(paths)})
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=env)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"it was not ready within {TIMEOUT_S:.0f} s: gangway report {run_dir}") from error
    if ended.returncode != 0:
        last = (ended.stderr.strip().splitlines() or [f"exit status {ended.returncode}"])[-1]
        raise OSError(f"{last}: gangway report {run_dir}")
    return [page, *([pictures] if figures else [])]


def _in_bucket(run_dir: str) -> str:
    """Writes the page from a copy of the run's files, without pictures; returns its URL."""
    with tempfile.TemporaryDirectory(prefix="gangway-report-") as made:
        folder = Path(made, run_dir.rstrip("/").rpartition("/")[2])
        try:
            fetch_from_bucket(run_dir, folder)
            page, *_ = write_report(str(folder), figures=False)
            place = place_of(run_dir) / NAME
            place.store.upload(place.key, Path(page))
        except documents.StorageError as error:
            raise OSError(str(error)) from error
    return place.url


LEFT_OUT = ("checkpoints", "models", "row", "logs", "requests")
"""Folders that are large, or mean nothing elsewhere."""
OF_LINES = (TIMELINE, INCIDENTS)
"""Files of lines: in a bucket each line, or some lines, are an object."""


def fetch_from_bucket(run_dir: str, folder: Path) -> None:
    """Writes the copy into `folder`, which is made. Raises OSError, or StorageError."""
    place = place_of(run_dir)
    names = [entry.name for entry in place.list()]
    for name in names:
        top = name.partition("/")[0]
        if top not in (*LEFT_OUT, *OF_LINES) and not name.startswith(f"{FOLDER}/segments/"):
            place_of(folder / name).put((place / name).get() or b"")
    for name in OF_LINES:
        if parts := sorted(each for each in names if each.startswith(f"{name}/")):
            place_of(folder / name).put(b"".join((place / each).get() or b"" for each in parts))
    # On the driver's machine there may be more than was copied yet.
    place_of(folder / FOLDER / SPOOL).put(of_bucket.content(run_dir))
