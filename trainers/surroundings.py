"""What a command or a process may find around it: no home folder, a working folder that is a copy, a folder with a package's
name. Needs nothing but the standard library."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pwd
import signal
import stat
import tempfile
from collections.abc import MutableMapping
from contextlib import suppress

PR_SET_PDEATHSIG = 1
COPIED_BY_RAY = "/runtime_resources/working_dir_files/"
"""In the path of the folder that Ray makes of the working folder of a submitted job."""


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


def is_installed(package: str) -> bool:
    """Whether a package can be imported. A folder of its name alone is none: W&B leaves a folder `wandb`, and Python takes any
    folder for a package without contents."""
    found = importlib.util.find_spec(package)
    return found is not None and found.origin is not None


def is_copy(folder: str) -> bool:
    """Whether a folder is, or lies in, the copy that Ray makes of the working folder of a submitted job, and deletes with it."""
    return COPIED_BY_RAY in f"{folder}/"


def of_a_copy(folder: str | None = None) -> str:
    """Returns what to add to a message that something is not there: in a submitted job the working folder (default: that of this
    process) is a copy, from which Ray has left out what `.gitignore` names. "" elsewhere."""
    try:
        folder = os.getcwd() if folder is None else folder
    except FileNotFoundError:
        return ""
    if not is_copy(folder):
        return ""
    return (
        "; the working folder of this job is a copy, without the files that .gitignore names: set "
        "RAY_RUNTIME_ENV_IGNORE_GITIGNORE=1 where you call `ray job submit`, or give an absolute path that all hosts can read"
    )
