"""How many requests a run in a bucket will make: clouds take money for each.

Counted on emulators, with one and two hosts (`docs/storage.md`). Their number depends neither on the size of the arrays nor on
how many there are.
"""

from __future__ import annotations

from typing import NamedTuple


class Requests(NamedTuple):
    writes: float
    """Writes and lists, for which clouds take most."""
    reads: float

    def __add__(self, other: Requests) -> Requests:  # type: ignore[override]
        return Requests(self.writes + other.writes, self.reads + other.reads)

    def times(self, number: float) -> Requests:
        return Requests(self.writes * number, self.reads * number)


SAVE = Requests(15, 20)
"""Of one checkpoint, and of the removal of an old one, whatever the number of hosts."""
SAVE_OF_HOST = Requests(11, 14)
"""Of one checkpoint, by each host."""
HOUR = Requests(3950, 4300)
"""Of an hour without saves: lease, progress, metrics, events and logs."""


def of_save(num_hosts: int) -> Requests:
    return SAVE + SAVE_OF_HOST.times(num_hosts)


def of_run(num_hosts: int, hours: float, saves: float) -> Requests:
    return HOUR.times(hours) + of_save(num_hosts).times(saves)
