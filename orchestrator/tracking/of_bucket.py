"""The tracking of a run in a bucket: its files are on the driver's machine, and their lines in the bucket, in sealed segments.

A bucket has nothing that lines can be appended to. So the folder `tracking` lies in `~/.gangway/runs/IDENTITY` here, and the
bucket has `tracking/segments/TERM-OFFSET-ID.jsonl`: what the driver of that term has appended since the segment before, each
written once. A driver on another machine makes the file again from them, and MLflow gets all of it again, which keeps each point
once.
"""

from __future__ import annotations

import re
import threading
import uuid
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypedDict

from gangway.storage import documents, durable, identity, several
from gangway.storage.opening import place_of
from gangway.storage.store import Place
from orchestrator.tracking.spool import FOLDER, SPOOL, STATE

SEGMENTS = "segments"
"""The folder of the segments, in that of the tracking."""
EVERY_S = 10.0
MOST_BYTES = 16 << 20
_NAME = re.compile(r"(\d{8})-(\d{15})-[0-9a-f]{8}\.jsonl")


class _Known(TypedDict):
    names: list[str]
    """Of the segments that the file here begins with."""


KNOWN = documents.DocumentKind("segments.json", _Known, "the file of metrics is made again from the segments in the bucket")


def segments_of(run_dir: str) -> Place:
    """Returns where the segments of a run in a bucket are."""
    return place_of(run_dir) / FOLDER / SEGMENTS


def name_for(driver_term: int, offset: int) -> str:
    """Returns a new name for what the driver of this term has written from `offset` on."""
    return f"{driver_term:08}-{offset:015}-{uuid.uuid4().hex[:8]}.jsonl"


def fetch(run_dir: str) -> None:
    """Makes the file of lines of a run in a bucket again, unless the one here goes on from all that the bucket has. Raises
    OSError."""
    path = _spool_of(run_dir)
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    place = segments_of(run_dir)
    names = [name for name, _ in in_order(place)]
    if not names or (path.exists() and _known(path) == names):
        return
    with durable.whole(path) as file:
        file.writelines(several.contents(place, names))
    documents.delete(path.with_name(STATE))  # how far the other file was shipped says nothing of this one
    _remember(path, names)


def content(run_dir: str) -> bytes:
    """Returns all lines of a run in a bucket: the file here, if it goes on from all that the bucket has. Raises OSError."""
    place, path = segments_of(run_dir), _spool_of(run_dir)
    names = [name for name, _ in in_order(place)]
    return path.read_bytes() if path.exists() and _known(path) == names else b"".join(several.contents(place, names))


def in_order(segments: Place) -> list[tuple[str, int]]:
    """Returns names and sizes of the segments that make up the file. Raises OSError."""
    by_offset: dict[int, list[tuple[int, str, int]]] = defaultdict(list)
    for entry in segments.list():
        if match := _NAME.fullmatch(entry.name):
            by_offset[int(match[2])].append((int(match[1]), entry.name, entry.size))
    found, end, term = [], 0, 0
    # Of two drivers that have both written from one offset on, the later one counts, and from there on no earlier one does.
    while following := [one for one in by_offset.get(end, ()) if one[0] >= term]:
        term, name, size = max(following, key=lambda one: one[0])
        found.append((name, size))
        end += size
    return found


def _spool_of(run_dir: str) -> Path:
    return Path(identity.local_folder(run_dir), FOLDER, SPOOL)


def _known(path: Path) -> list[str]:
    """Returns the names of the segments that the file here begins with; none if that is not known."""
    found = KNOWN.if_whole(path.with_name(KNOWN.name))
    return found["names"] if found else []


def _remember(path: Path, names: Sequence[str]) -> None:
    KNOWN.write_over(path.with_name(KNOWN.name), {"names": [*names]})


class Segments:
    """Copies a file of lines to a bucket, in a thread of its own, until `close`. It raises nothing: see `problem`."""

    def __init__(self, run_dir: str, path: str, driver_term: int = 0, every_s: float = EVERY_S):
        self.problem: str | None = None
        """Why the newest lines are not in the bucket yet."""
        self._place, self._path, self._driver_term, self._every_s = segments_of(run_dir), Path(path), driver_term, every_s
        self._copied: list[tuple[str, int]] | None = None
        """Names and sizes of the segments that the bucket has of the file. None: not known."""
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
        if self._copied is None:
            self._copied = in_order(self._place)
        while data := self._read(offset := sum(size for _, size in self._copied)):
            name = name_for(self._driver_term, offset)
            (self._place / name).put(data)
            self._copied.append((name, len(data)))
            _remember(self._path, [name for name, _ in self._copied])

    def _read(self, offset: int) -> bytes:
        """Returns whole lines from `offset` on."""
        with durable.reading(self._path) as file:
            file.seek(offset)
            data = file.read(MOST_BYTES)
        return data[: data.rfind(b"\n") + 1]
