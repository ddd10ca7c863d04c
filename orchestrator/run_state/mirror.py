"""Copies what a run in a bucket keeps beside its checkpoints to a folder of this machine, in the form of a run on a disk."""

from __future__ import annotations

from pathlib import Path

from gangway.storage import identity, several
from gangway.storage.opening import place_of
from orchestrator.run_state.incident_log import NAME as INCIDENTS
from orchestrator.run_state.launch import TIMELINE
from orchestrator.tracking import of_bucket
from orchestrator.tracking.spool import FOLDER, SPOOL

LEFT_OUT = ("checkpoints", "models", "row", "logs", "requests")
"""Folders that are large, or mean nothing elsewhere."""
OF_LINES = (TIMELINE, INCIDENTS)
"""Files of lines: in a bucket each line, or some lines, are an object."""


def fetch(run_dir: str, folder: Path) -> None:
    """Writes the copy into `folder`, which is made. Raises OSError, or StorageError."""
    place = place_of(run_dir)
    names = [entry.name for entry in place.list()]
    for name in names:
        top = name.partition("/")[0]
        if top not in (*LEFT_OUT, *OF_LINES) and not name.startswith(f"{FOLDER}/segments/"):
            _write(folder / name, (place / name).get() or b"")
    for name in OF_LINES:
        if parts := sorted(each for each in names if each.startswith(f"{name}/")):
            _write(folder / name, b"".join((place / each).get() or b"" for each in parts))
    _write(folder / FOLDER / SPOOL, _metrics(run_dir))


def _metrics(run_dir: str) -> bytes:
    segments = of_bucket.segments_of(run_dir)
    copied = b"".join(several.contents(segments, [name for name, _ in of_bucket.in_order(segments)]))
    # On the driver's machine there may be more than was copied yet.
    here = Path(identity.local_folder(run_dir), FOLDER, SPOOL)
    return max(copied, here.read_bytes() if here.exists() else b"", key=len)


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "xb") as file:
        file.write(data)
