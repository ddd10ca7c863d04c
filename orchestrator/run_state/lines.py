"""The lines that a run has written, one after the other: what failed, what happened when, and its metrics.

On a disk they are a file that is appended to. A bucket has nothing to append to: there each time is an object in a folder of the
file's name, a *part*, and the names of the parts are in order: by the term of the driver, whatever the clocks of machines say. A
copy of such a run on a disk has that folder, too.
"""

from __future__ import annotations

import errno
import re
import time
import uuid
from collections.abc import Iterator, Sequence

from gangway.storage import several
from gangway.storage.store import Entry, Place
from orchestrator.tracking import of_bucket
from orchestrator.tracking.spool import FOLDER, SPOOL

READ_BYTES = 16 << 20
"""How much is read at once."""
_PART = re.compile(r"\d{28}-[0-9a-f]{8}")


def part_names(driver_term: int) -> Iterator[str]:
    """Yields the names of the parts that a driver adds, each with a token that nobody else takes."""
    number = 0
    while True:
        number = max(number + 1, time.time_ns())
        yield f"{driver_term:08}{number:020}-{uuid.uuid4().hex[:8]}"


def is_in_parts(file: Place) -> bool:
    """Whether these lines are parts. Raises OSError."""
    return not file.store.is_local or (file.is_dir() and bool(_parts(file)))


def of(file: Place) -> Iterator[bytes]:
    """Yields all lines, without their ends, oldest first. Raises FileNotFoundError if there are none at all, and OSError."""
    if is_in_parts(file):
        parts = _parts(file)
        if not parts:
            raise absent(file)
        yield from _split(several.contents(file, [part.name for part in parts]))
    else:
        yield from _split(_of_file(file))


def newest(file: Place, num_bytes: int) -> list[bytes]:
    """Returns the lines in about the last `num_bytes`; none if there are none. Raises OSError."""
    if is_in_parts(file):
        found, size = list[str](), 0
        for part in reversed(_parts(file)):
            size += part.size
            if size > num_bytes and found:
                break
            found.append(part.name)
        return list(_split(several.contents(file, found[::-1])))
    entry = file.store.entry(file.key)
    if entry is None:
        return []
    begin = max(0, entry.size - num_bytes)
    lines = (file.store.get_part(file.key, begin, entry.size) or b"").splitlines()
    return lines[1:] if begin else lines  # the first one began before


def metrics(run: Place) -> Iterator[bytes]:
    """Yields the lines of what a run has tracked (`orchestrator.tracking.spool`), oldest first. Raises FileNotFoundError if it
    has tracked nothing, and OSError."""
    file = run / FOLDER / SPOOL
    if file.store.is_local and file.exists():
        return _split(_of_file(file))
    segments = run / FOLDER / of_bucket.SEGMENTS
    found = of_bucket.in_order(segments)
    if not found:
        raise absent(file)
    return _split(several.contents(segments, [name for name, _ in found]))


def newest_metrics(run: Place, num_bytes: int) -> list[bytes]:
    """Returns the lines in about the last `num_bytes` of what a run has tracked. Raises OSError."""
    file = run / FOLDER / SPOOL
    if file.store.is_local and file.exists():
        return newest(file, num_bytes)
    segments = run / FOLDER / of_bucket.SEGMENTS
    return list(_split(several.contents(segments, [name for name, _ in of_bucket.in_order(segments)[-1:]])))


def absent(file: Place) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, "there is no such file", file.url)


def _parts(file: Place) -> Sequence[Entry]:
    return [entry for entry in file.list() if _PART.fullmatch(entry.name)]


def _of_file(file: Place) -> Iterator[bytes]:
    begin = 0
    while part := file.store.get_part(file.key, begin, begin + READ_BYTES):
        yield part
        begin += len(part)
    if part is None:
        raise absent(file)


def _split(pieces: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
    if rest:
        yield rest
