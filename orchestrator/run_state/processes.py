"""The identity of a process and of a machine, which no change of the wall clock changes.

A process is known by its number, by the tick of its start since the machine was booted, and by the boot. The time at which it was
started would not do: it is computed from the wall clock, and moves when the clock is set.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress

import psutil


def this_machine() -> str:
    """Returns an id of this boot of this machine, and of the namespaces of this process in which process ids and the monotonic
    clock count."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            names = [file.read().strip(), os.readlink("/proc/self/ns/pid")]
    except OSError:  # Not Linux.
        return socket.gethostname()
    with suppress(OSError):  # an older kernel has one clock for all
        names.append(os.readlink("/proc/self/ns/time"))
    return "/".join(names)


def started(pid: int) -> int | None:
    """Returns the tick since the boot at which a process of this machine was started; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return tick_in(file.read())
    except (FileNotFoundError, ProcessLookupError):
        return None if os.path.exists("/proc/self/stat") else _started_elsewhere(pid)


def tick_in(stat: bytes) -> int | None:
    """Returns the tick of the start in what the kernel says of a process; None if it is dead."""
    # After the last `)`: the name of a process, in parentheses, may hold spaces and parentheses itself.
    fields = stat.rpartition(b")")[2].split()
    # A zombie is dead, and has not been waited for yet.
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def lives(pid: int, tick: int | None) -> bool:
    """Returns whether the process of this machine that was started at this tick lives. None: any process with this number."""
    found = started(pid)
    return found is not None and tick in (None, found)


def _started_elsewhere(pid: int) -> int | None:
    # Without /proc: hundredths of a second, by the wall clock.
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else round(process.create_time() * 100)
    except psutil.NoSuchProcess:
        return None
