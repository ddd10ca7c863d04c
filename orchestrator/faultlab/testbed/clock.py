"""A wall clock that can be set: copied as `sitecustomize.py` to where every Python process of a node looks for it, for `chaos`.

The processes of a node share a file with the seconds that their clock is ahead. What asks the kernel past Python (Ray's own
processes, the file system's times) is not deceived; of a run, everything asks Python.
"""

import mmap
import os
import struct
import time

VARIABLE = "GANGWAY_CLOCK"
"""Names the file."""
AHEAD_S = struct.Struct("d")


def deceive(path: str) -> None:
    """From now on `time.time` and `time.time_ns` of this process tell what the file says."""
    with open(path, "rb") as file:
        shared = mmap.mmap(file.fileno(), AHEAD_S.size, access=mmap.ACCESS_READ)
    true_s, true_ns = time.time, time.time_ns

    def told_s() -> float:
        return true_s() + AHEAD_S.unpack(shared)[0]

    def told_ns() -> int:
        return true_ns() + int(AHEAD_S.unpack(shared)[0] * 1e9)

    for name, patched in {"time": told_s, "time_ns": told_ns}.items():
        patched.__module__, patched.__name__, patched.__qualname__ = "time", name, name  # so that it is pickled by its name
        setattr(time, name, patched)


def set_ahead(path: str | os.PathLike[str], seconds: float) -> None:
    """Makes the file, or sets the clock of all who look at it, at once."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        os.pwrite(descriptor, AHEAD_S.pack(seconds), 0)
    finally:
        os.close(descriptor)


if VARIABLE in os.environ:
    deceive(os.environ[VARIABLE])
