"""What a command or a process may find around it: no home folder, a parent that ends. Needs nothing but the standard library."""

from __future__ import annotations

import ctypes
import os
import pwd
import signal
import stat
import tempfile
from collections.abc import MutableMapping
from contextlib import suppress

PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Lets the kernel end this process when the one that has started it is gone, however that ended. In a session of its own it
    gets no signal of its parent's group, and would work on for nobody."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)


def ensure_home(environ: MutableMapping[str, str], user: int | None = None, parent: str = "/tmp") -> str | None:
    """Sets HOME and USER where a user has neither an entry in the list of users nor these variables, as in a container that was
    started with a number: `~` and the name of the user stand for nothing there. Returns the new home folder; None if there is
    one already."""
    user = os.getuid() if user is None else user
    is_listed = True
    try:
        pwd.getpwuid(user)
    except KeyError:
        is_listed = False
    if not is_listed and not any(environ.get(name) for name in ("LOGNAME", "USER", "LNAME", "USERNAME")):
        environ["USER"] = f"user-{user}"
    if environ.get("HOME") or is_listed:
        return None
    environ["HOME"] = _own_folder(user, parent)
    return environ["HOME"]


def _own_folder(user: int, parent: str) -> str:
    """Returns a folder that only this user can enter, the same each time if nobody is in the way."""
    path = os.path.join(parent, f"gangway-home-{user}")
    with suppress(OSError):
        os.mkdir(path, 0o700)
    with suppress(OSError):
        # Checked with `lstat`: somebody else may have made a folder or a link of this name.
        status = os.lstat(path)
        if stat.S_ISDIR(status.st_mode) and status.st_uid == user and not status.st_mode & 0o077:
            return path
    return tempfile.mkdtemp(prefix="gangway-home-")
