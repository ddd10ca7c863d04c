"""Has the report of a run written by a process of its own: what it costs or breaks there does nothing to the run."""

from __future__ import annotations

import subprocess
import sys

from trainers.storage import documents

TIMEOUT_S = 60.0
NAME, FIGURES = "report.html", "figures"


def write_report(run_dir: str, *, figures: bool) -> list[str]:
    """Writes `report.html` into the folder of a run, and with `figures` its pictures beside it. Returns what was written. Raises
    OSError that says why it could not be."""
    page, pictures = documents.join(run_dir, NAME), documents.join(run_dir, FIGURES)
    command = [sys.executable, "-m", "orchestrator.report", run_dir, "--out", page, *(["--figures", pictures] if figures else [])]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"it was not ready within {TIMEOUT_S:.0f} s: gangway report {run_dir}") from error
    if ended.returncode != 0:
        last = (ended.stderr.strip().splitlines() or [f"exit status {ended.returncode}"])[-1]
        raise OSError(f"{last}: gangway report {run_dir}")
    return [page, *([pictures] if figures else [])]
