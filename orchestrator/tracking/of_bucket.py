"""The tracking of a run in a bucket: its files are on the driver's machine, and their lines in the bucket, in sealed segments.

A bucket has nothing that lines can be appended to. So the folder `tracking` lies in `~/.gangway/runs/IDENTITY` here, and the
bucket has `tracking/segments/OFFSET-ID.jsonl`: what was appended since the segment before, each written once. A driver on another
machine makes the file again from them, and MLflow gets all of it again, which keeps each point once.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

from gangway.storage import documents, durable, identity, several
from gangway.storage.opening import place_of
from gangway.storage.store import Place
from orchestrator.tracking.spool import FOLDER, SPOOL

SEGMENTS = "segments"
"""The folder of the segments, in that of the tracking."""
EVERY_S = 10.0
MOST_BYTES = 16 << 20
_NAME = re.compile(r"(\d{15})-[0-9a-f]{8}\.jsonl")


def segments_of(run_dir: str) -> Place:
    """Returns where the segments of a run in a bucket are."""
    return place_of(run_dir) / FOLDER / SEGMENTS


def fetch(run_dir: str) -> None:
    """Makes the file of lines of a run in a bucket again, if the bucket has more of it than this machine. Raises OSError."""
    path = Path(identity.local_folder(run_dir), FOLDER, SPOOL)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    here = path.stat().st_size if path.exists() else 0
    place = segments_of(run_dir)
    wanted = in_order(place)
    if sum(size for _, size in wanted) <= here:
        return
    with durable.whole(path) as file:
        file.writelines(several.contents(place, [name for name, _ in wanted]))


def in_order(segments: Place) -> list[tuple[str, int]]:
    """Returns names and sizes of the segments that make up the file. Raises OSError."""
    found, end = [], 0
    for entry in segments.list():
        match = _NAME.fullmatch(entry.name)
        # Of two drivers that have both written from one offset on, the first counts.
        if match and int(match[1]) == end:
            found.append((entry.name, entry.size))
            end += entry.size
    return found


class Segments:
    """Copies a file of lines to a bucket, in a thread of its own, until `close`. It raises nothing: see `problem`."""

    def __init__(self, run_dir: str, path: str, every_s: float = EVERY_S):
        self.problem: str | None = None
        """Why the newest lines are not in the bucket yet."""
        self._place, self._path, self._every_s = segments_of(run_dir), path, every_s
        self._offset: int | None = None
        """How much of the file is in the bucket. None: not known."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="segments", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float) -> None:
        """Copies the rest, for at most `timeout_s`."""
        self._stop.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self._attempt(self.copy)
        self._attempt(self.copy)

    def _attempt(self, work: Callable[[], None]) -> None:
        try:
            work()
            self.problem = None
        except (OSError, documents.StorageError) as error:  # tried again with the next lines
            self.problem = f"metrics are not copied to {self._place.parent.url}: {error}"

    def copy(self) -> None:
        """Copies what is new. Raises OSError."""
        if self._offset is None:
            found = [(match, entry.size) for entry in self._place.list() if (match := _NAME.fullmatch(entry.name))]
            self._offset = max((int(match[1]) + size for match, size in found), default=0)
        while data := self._read(self._offset):
            (self._place / f"{self._offset:015}-{uuid.uuid4().hex[:8]}.jsonl").put(data)
            self._offset += len(data)

    def _read(self, offset: int) -> bytes:
        """Returns whole lines from `offset` on."""
        with durable.reading(self._path) as file:
            file.seek(offset)
            data = file.read(MOST_BYTES)
        return data[: data.rfind(b"\n") + 1]
