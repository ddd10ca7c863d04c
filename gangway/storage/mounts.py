"""A bucket that is mounted as a folder, by the table of mounts of Linux. Without JAX.

A run in a mounted bucket would seem to work, and lose what a run needs most when something goes wrong: that of two drivers one
gets the run, and that a checkpoint is whole or not there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

TABLE = Path("/proc/self/mountinfo")
_COPIES = "renames a folder object by object, so that a checkpoint can be half there"
LACKS = {
    "gcsfuse": (f"{_COPIES}, has no locks and no links between machines, and shows them what another one wrote only later", "gs"),
    "s3fs": (f"{_COPIES}, and lets two machines create one file: they do not know of each other", "s3"),
    "rclone": (f"{_COPIES}, sends files after they were closed, and shows other machines old listings for minutes", "s3"),
    "goofys": (f"{_COPIES}, forgets what fsync asks for, and lets the last of several writers win", "s3"),
    "geesefs": (f"{_COPIES}, and sends files after they were closed", "s3"),
    "mountpoint-s3": ("cannot rename a folder, nor replace or append to a file unless told to", "s3"),
}
"""What a mount of this kind does not do, and the scheme of the buckets that it mounts."""
_BY_OTHER_NAMES = {"mount-s3": "mountpoint-s3", "rclonefs": "rclone"}


class Mount(NamedTuple):
    folder: str
    kind: str
    """Such as `ext4`, or `fuse.gcsfuse`."""
    source: str
    """Such as `/dev/sda1`; of a mounted bucket its name, or that of the program."""


def parse(table: str) -> Iterator[Mount]:
    """Yields the mounts of a text as in TABLE, in its order. Lines of another form are left out."""
    for line in table.splitlines():
        # So many optional fields come before the dash as the kernel likes.
        before, _, after = (part.split() for part in line.partition(" - "))
        if len(before) >= 5 and len(after) >= 2:
            yield Mount(_plain(before[4]), after[0], _plain(after[1]))


def mount_of(path: str | os.PathLike[str], mounts: list[Mount]) -> Mount | None:
    """Returns the mount that a path is on, which need not be there yet; None if none of them holds it."""
    real = os.path.realpath(path)
    holding = [mount for mount in mounts if os.path.commonpath([real, mount.folder]) == mount.folder]
    # Of two at one place the later one hides the earlier one.
    return max(enumerate(holding), key=lambda item: (len(item[1].folder), item[0]), default=(0, None))[1]


def problem_of(path: str | os.PathLike[str]) -> str:
    """Returns why a run must not be kept at `path`, with the way out, as a sentence; empty if nothing is known against it."""
    try:
        table = TABLE.read_text(errors="surrogateescape")
    except OSError:  # not Linux, or nothing is told here: what the folder can do is tried anyway
        return ""
    mount = mount_of(path, [*parse(table)])
    program = _program(mount) if mount else None
    if mount is None or program is None:
        return ""
    what, scheme = LACKS[program]
    return (
        f"{os.fspath(path)} is in a bucket that {program} has mounted at {mount.folder}, which {what}; give the bucket itself: "
        f"storage={scheme}://BUCKET/PREFIX"
    )


def _program(mount: Mount) -> str | None:
    """Returns the program that has mounted a bucket; None if it is none of LACKS."""
    kind, _, subtype = mount.kind.partition(".")
    if kind != "fuse":
        return None
    # Some give the subtype, and some their name as the source.
    names = (subtype, mount.source, _BY_OTHER_NAMES.get(subtype), _BY_OTHER_NAMES.get(mount.source))
    return next((name for name in names if name in LACKS), None)


def _plain(field: str) -> str:
    """Returns a field without the escapes (`\\040` is a space)."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)
