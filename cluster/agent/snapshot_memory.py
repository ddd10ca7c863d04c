"""The memory for snapshots of the state: an agent makes it for each training process, and keeps it when the process dies.

It is anonymous (memfd): it has no name that another user could open, or that would be left behind. The kernel frees it when the
agent and the processes are gone, whatever ended them. It takes no room before the process writes.

    agent                              process
    makes files of size 0    ------>   writes its snapshots into them
    it dies: nobody can write any more
    the orders of the next   ------>   reads them, if they are newer than the checkpoints
    closes them              <------   the event `snapshots`: nothing older is needed
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from contextlib import suppress

MAX_TRIES = 3
"""So many processes may get what was kept and die before they say what they have made of it: then that may be the cause."""


class Slots:
    """The files of one process, and the socket by which it gets them. `theirs` is for the process."""

    def __init__(self, number: int):
        self.files = [os.memfd_create(f"snapshot-{index}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) for index in range(number)]
        for file in self.files:
            # Nobody may shrink it: a look at what is gone from a mapping ends a process.
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self._socket, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        socket.send_fds(self._socket, [b"own"], self.files)
        self.tries = 0

    def give(self, kept: list[int]) -> None:
        """Passes on the files of processes that have ended. Before the orders."""
        with suppress(OSError):  # it is gone: its exit says so
            socket.send_fds(self._socket, [b"kept"], kept)

    def end(self) -> bool:
        """The process is gone. Returns whether it has left anything, which nobody can change from here on."""
        self._socket.close()
        left = []
        for file in self.files:
            with suppress(OSError):  # something may still write into it, such as a child that has left the group
                fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW)
                if os.fstat(file).st_size:
                    left.append(file)
        for file in {*self.files} - {*left}:
            os.close(file)
        self.files = left
        return bool(left)

    def close(self) -> None:
        self._socket.close()
        for file in self.files:
            os.close(file)
        self.files = []


class Kept:
    """What processes that have ended have left, by their generation. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slots: list[tuple[int, Slots]] = []

    def add(self, slots: Slots, generation: int | None) -> None:
        """A process has ended, which belonged to this generation. None: to none, or it was done."""
        if not slots.end() or generation is None:
            slots.close()
            return
        with self._lock:
            self._slots.append((generation, slots))

    def give_to(self, slots: Slots) -> None:
        """Gives everything to a process that is about to get its orders."""
        with self._lock:
            for _, kept in self._slots:
                kept.tries += 1
            self._close([one for one in self._slots if one[1].tries > MAX_TRIES])
            slots.give([file for _, kept in self._slots for file in kept.files])

    def only_since(self, generation: int) -> None:
        """A process says that nothing of an older generation is needed any more."""
        with self._lock:
            self._close([one for one in self._slots if one[0] < generation])
            for _, kept in self._slots:
                kept.tries = 0

    def close(self) -> None:
        with self._lock:
            self._close(self._slots)

    def _close(self, some: list[tuple[int, Slots]]) -> None:
        self._slots = [one for one in self._slots if one not in some]
        for _, slots in some:
            slots.close()
