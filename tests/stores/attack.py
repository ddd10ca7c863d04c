"""Drivers that take a run from each other, sleep at bad moments, and go on as if they had not."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from gangway.storage.row import KIND, Kept, OvertakenError, Row, WriterTerm
from gangway.storage.store import Place

DRIVERS = 4


def attack(folder: Callable[[], Place], rounds: int, nap: Callable[[], None], seed: int = 1) -> Counter[str]:
    """Lets the drivers append `rounds` records in all; returns how many of each kind there are, and how many were refused.
    `folder` returns the place of the row over a connection of its own; `nap` is called between look and write."""
    counts: Counter[str] = Counter()
    lock = threading.Lock()

    def add(what: str) -> int:
        with lock:
            counts[what] += 1
            return counts["rounds"]

    def drive(number: int) -> None:
        chance = random.Random(seed * 1000 + number)
        row = Row(_Sleepy(folder(), nap))
        holder = {"hostname": f"driver-{number}"}
        term = row.take_over(holder).term
        while add("rounds") <= rounds:
            try:
                if chance.random() < 0.15:
                    term = WriterTerm(term.driver_term, term.generation + 1)
                    row.claim(term)
                elif chance.random() < 0.1:
                    row.remove(term, [chance.randrange(10)])
                else:
                    row.commit(term, chance.randrange(10), Kept(f"by-{number}-{term.driver_term}", ""))
            except OvertakenError:
                add("refused")
                term = row.take_over(holder).term

    with ThreadPoolExecutor(DRIVERS) as threads:
        list(threads.map(drive, range(DRIVERS)))
    return counts


class _Sleepy(Place):
    """A place whose writer falls asleep before it creates."""

    def __init__(self, place: Place, nap: Callable[[], None]):
        super().__init__(place.store, place.key)
        object.__setattr__(self, "nap", nap)

    def __truediv__(self, name: str) -> Place:
        return _Sleepy(super().__truediv__(name), self.nap)  # type: ignore[attr-defined]

    def create(self, data: bytes) -> bool:
        self.nap()  # type: ignore[attr-defined]
        return super().create(data)


def faults(folder: Place) -> list[str]:
    """Returns what is wrong with a row: an older term after a newer one, a term of two drivers, numbers that are missing or
    that do not follow from the one before."""
    found, owners, before = [], {}, None
    for number, entry in enumerate(folder.list(), 1):
        document = KIND.read(folder / entry.name)
        assert document is not None
        term = (document["driver_term"], document["generation"])
        who = document["holder"]["hostname"]
        if document["number"] != number or entry.name != f"{number:08}.json":
            found.append(f"{entry.name} is number {document['number']}, expected {number}")
        if owners.setdefault(term[0], who) != who:
            found.append(f"{number}: term {term[0]} is of {owners[term[0]]} and of {who}")
        if before and term < before:
            found.append(f"{number}: {term} after {before}")
        folders = {kept["folder"].rpartition("-")[0] for kept in document["kept"].get("checkpoints", {}).values()}
        if document["what"] == "commit" and not folders & {f"by-{who[-1]}"}:
            found.append(f"{number}: a commit of {who} is recorded as another's")
        before = term
    return found
