"""What a command or a process may find around it: no home folder, a parent that ends. Needs nothing but the standard library."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pwd
import re
import signal
import stat
import tempfile
from collections.abc import Mapping, MutableMapping
from contextlib import suppress

PR_SET_PDEATHSIG = 1
MALLOPT = {"M_ARENA_MAX": (-8, 1), "M_MMAP_MAX": (-4, 0), "M_TRIM_THRESHOLD": (-1, -1), "M_TOP_PAD": (-2, 64 << 20)}
"""Of glibc's `mallopt`: the number of a setting, and our value. One arena, for no other can grow past 64 MiB; no mapping for a
single array; nothing is given back."""
OF_ALLOCATOR = ("GLIBC_TUNABLES", "LD_PRELOAD", *(f"MALLOC_{name}" for name in ("ARENA_MAX", "ARENA_TEST", "MMAP_MAX_")))
OF_ALLOCATOR += ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_")
"""Variables with which a user has chosen otherwise."""

CPU_THREADS_PER_DEVICE = 4
"""The devices of one process wait for each other in XLA's threads, in several collectives at a time. XLA starts one per core.
This and the next are also in `cluster.hosts.process_env`, for neither of the two packages imports the other; a test compares."""
IN_ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
"""With XLA's default, a step that accumulates gradients may hang: its devices run their collectives in different orders."""


def end_with_parent() -> None:
    """Lets the kernel end this process when the one that has started it is gone, however that ended. In a session of its own it
    gets no signal of its parent's group, and would work on for nobody."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Lets a process that computes on CPUs keep the memory that it frees. A step takes the memory of its temporary arrays anew;
    what comes from the kernel is cleared first, page by page, which was 15 to 25 % of a step. The process then stays as large as
    it was at its largest. Must be called before there are other threads. Returns False where nothing was changed: with an
    accelerator, with another C library, or where a variable of `OF_ALLOCATOR` is set."""
    if not _is_for_cpus(environ) or any(name in environ for name in OF_ALLOCATOR):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return min(mallopt(number, value) for number, value in MALLOPT.values()) == 1


def allow_for_forced_devices(environ: MutableMapping[str, str]) -> None:
    """Gives a process with several CPU devices, by XLA_FLAGS or JAX_NUM_CPU_DEVICES, what a host of a gang gets: threads enough,
    and collectives in one order. On few cores it hangs without. What the environment says itself comes first. Must be called
    before JAX computes."""
    flags = environ.get("XLA_FLAGS", "")
    forced = re.findall(r"--xla_force_host_platform_device_count=(\d+)", flags) or [environ.get("JAX_NUM_CPU_DEVICES", "")]
    if not forced[-1].isdecimal() or int(forced[-1]) < 2 or not _is_for_cpus(environ):
        return
    environ.setdefault("NPROC", str(CPU_THREADS_PER_DEVICE * int(forced[-1])))
    if IN_ORDER.partition("=")[0] not in flags:
        environ["XLA_FLAGS"] = f"{IN_ORDER} {flags}".strip()


def _is_for_cpus(environ: Mapping[str, str]) -> bool:
    """Whether JAX will compute on CPUs. JAX itself is not asked: that would import it, and start its threads."""
    if named := environ.get("JAX_PLATFORMS"):
        return named == "cpu"
    return all(importlib.util.find_spec(package) is None for package in ("jax_plugins", "libtpu"))


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
