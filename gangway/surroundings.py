"""What a command or a process may find around it: no home folder, a parent that ends. Needs nothing but the standard library."""

from __future__ import annotations

import ctypes
import glob
import importlib.util
import os
import pwd
import re
import signal
import stat
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
KEEPS_MEMORY = "dirty_decay_ms:-1,muzzy_decay_ms:-1,oversize_threshold:0"
"""Of jemalloc's MALLOC_CONF: nothing is given back, large arrays included."""
OF_ALLOCATOR = (
    *("GLIBC_TUNABLES", "LD_PRELOAD", "MALLOC_CONF", "MALLOC_ARENA_MAX", "MALLOC_ARENA_TEST"),
    *("MALLOC_MMAP_MAX_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"),
)
"""Variables with which a user has chosen otherwise."""

CPU_THREADS_PER_DEVICE = 4
"""XLA would start one thread per core. The devices of one process wait for each other in these threads, in several collectives
at a time. With too few threads all of them wait, the one that they wait for never runs, and the process hangs."""
IN_ORDER = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
"""With XLA's default, an executable that is loaded from a cache may run its collectives in another order on each host. Over gloo
their data then mixes: a process aborts, or all hang (jaxlib 0.10.2, where a step accumulates gradients)."""


GOOGLE = "0x1ae0"
"""The vendor of TPUs on the PCI bus."""


def accelerators(root: str = "/") -> dict[str, int]:
    """Returns how many devices this machine has, by the platform of JAX that would use them: `cuda` or `tpu`. By the files of
    their drivers: JAX need not be able to use them, and is not asked."""
    tpus = glob.glob("dev/accel[0-9]*", root_dir=root) or [name for name in _of_pci(root) if _vendor(root, name) == GOOGLE]
    found = {"cuda": len(glob.glob("dev/nvidia[0-9]*", root_dir=root)), "tpu": len(tpus)}
    return {platform: count for platform, count in found.items() if count}


def _of_pci(root: str) -> list[str]:
    """The devices of the PCI bus; none where no device can be given to a process, as those of a TPU VM are."""
    return glob.glob("sys/bus/pci/devices/*", root_dir=root) if glob.glob("dev/vfio/[0-9]*", root_dir=root) else []


def _vendor(root: str, device: str) -> str:
    with suppress(OSError):
        return Path(root, device, "vendor").read_text().strip()
    return ""


def end_with_parent() -> None:
    """Lets the kernel end this process when the one that has started it is gone, however that ended. In a session of its own it
    gets no signal of its parent's group, and would work on for nobody."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)


def keep_freed_memory(environ: MutableMapping[str, str], *programs: str) -> None:
    """Lets a process that computes on CPUs keep the memory that it frees: begins its program anew, with Ray's own jemalloc in the
    place of the C library's allocator.

    A step takes the memory of its temporary arrays anew; what comes from the kernel is cleared first, page by page, which was 15
    to 25 % of a step. The process then stays as large as it was at its largest. Must be called at the top of a program, before it
    has imported or read anything. Changes nothing where the process was not started as one of `programs` (names of modules or
    scripts), with an accelerator, where a variable of `OF_ALLOCATOR` is set, or without Ray on this machine. What the program
    starts itself has the allocator that it would have had."""
    ours = {"LD_PRELOAD": jemalloc(), "MALLOC_CONF": KEEPS_MEMORY}
    words = sys.orig_argv[sys.orig_argv.index("-m") :] if "-m" in sys.orig_argv else sys.orig_argv
    started_as = {os.path.basename(word) for word in words[1:2]}
    if ours.items() <= environ.items():
        del environ["LD_PRELOAD"], environ["MALLOC_CONF"]
    elif all(ours.values()) and started_as & {*programs} and _is_for_cpus(environ) and not environ.keys() & {*OF_ALLOCATOR}:
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**environ, **ours})


def jemalloc() -> str:
    """Returns the path of the library in Ray's wheel; empty where there is none, as with another C library than glibc."""
    ray = importlib.util.find_spec("ray")
    paths = [os.path.join(folder, "core", "libjemalloc.so") for folder in (ray and ray.submodule_search_locations) or ()]
    return next(filter(os.path.isfile, paths), "")


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


def clean_up_on_sigterm() -> None:
    """Lets SIGTERM end this process by an exception: what it has started is ended, and what it has mounted is unmounted."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
