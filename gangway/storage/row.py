"""One numbered row of records says who has a run and what it has committed: each record is only ever created. Without JAX.

    row/00000001.json   a driver takes the run over: term 1
    row/00000002.json   its generation 0 claims the run
    row/00000003.json   that generation commits step 10

To change anything, a writer looks at the newest record, N, and creates record N+1. Of several writers one succeeds, and the
others look again. So nothing of an older driver can come after a newer one has taken over: there is no moment between look and
commit, and no clock, lock or rename is needed. A record is never deleted or replaced: a writer that slept could create its number
again. Each record repeats all that holds, so the newest one is enough.

If the newest record is damaged, nobody knows whose the run is: nothing is committed any more, until a driver takes it over with a
term that is higher than the damaged record can have had.
"""

from __future__ import annotations

import errno
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple, TypedDict

from gangway.storage.documents import DamagedDocument, DocumentKind
from gangway.storage.store import Place, StorageUnavailable

FOLDER = "row"
CHECKPOINTS = "checkpoints"
BEST = "best"
"""`RUN/best` stands for the checkpoint with the best score."""
PATIENCE_S = 60.0
"""How long a record is waited for that must be there."""
PAUSE_S = 0.1
READS = 5
"""How often a record that cannot be read is read, with pauses: without hard links it may be seen while it is written."""


class WriterTerm(NamedTuple):
    """The generation of the gang and the term of its driver. The later one is the greater one."""

    # The order of the fields is that of the comparison: any generation of a later driver is the later one.
    driver_term: int = 0
    generation: int = 0

    def __str__(self) -> str:
        return f"driver term {self.driver_term}, generation {self.generation}"


NO_DRIVER = WriterTerm()


@dataclass(frozen=True)
class Kept:
    """A committed checkpoint."""

    folder: str
    """The name of its folder beside the others."""
    digest: str
    """The SHA-256 of its manifest."""


class _Document(TypedDict):
    number: int
    what: str
    driver_term: int
    generation: int
    holder: dict[str, Any]
    step: int | None
    kept: dict[str, dict[str, Kept]]
    writer: str


KIND = DocumentKind(
    "row/N.json", _Document, "if it says who has the run, or what is committed, that is not known", without_format=False
)


@dataclass(frozen=True, kw_only=True)
class Record:
    """All that holds as of one record. The one with number 0 stands for a row without records."""

    number: int = 0
    what: str = ""
    """What has changed with it: take-over, claim, commit, removal or loss."""
    term: WriterTerm = NO_DRIVER
    holder: Mapping[str, Any] = field(default_factory=dict)
    """Who the driver of that term is, for people."""
    step: int | None = None
    """The highest step whose checkpoint was ever committed."""
    kept: Mapping[str, Mapping[int, Kept]] = field(default_factory=dict)
    """What is committed and not removed: by the folder, such as `checkpoints`, and by step."""
    damaged: str = ""
    """What is wrong with the record of this number, if it cannot be read. All else is then of the newest one that can be."""
    unreadable: int = 0
    """How many records there are since that one."""

    def of(self, folder: str) -> Mapping[int, Kept]:
        """Returns what is committed in a folder of the run, by step."""
        return self.kept.get(folder, {})


class OvertakenError(Exception):
    """A newer driver, or a later generation, has the run: nothing of this one is recorded any more."""

    def __init__(self, mine: WriterTerm, newest: Record):
        who = f" on {newest.holder['hostname']}" if "hostname" in newest.holder else ""
        super().__init__(f"the run belongs to {newest.term}{who} since record {newest.number}; this is {mine}")
        self.newest = newest


class Row:
    """The row of a run, of one writer. Its threads may share one. Every method raises OSError if the storage fails, and
    StorageError if a record is damaged or of a newer program."""

    def __init__(self, folder: Place, *, sleep: Callable[[float], None] = time.sleep):
        self._folder, self._sleep = folder, sleep
        self._newest: Record | None = None
        self._one_at_a_time = threading.RLock()

    def newest(self) -> Record:
        """Returns the newest record. In a bucket only the first look lists the row; later ones ask for the next numbers, for a
        listing may lag. A folder is always listed: clients of a file server remember for longer that a name was absent than what
        a folder contains. Raises StorageUnavailable if the newest one that is known is gone: a record is never deleted, so this
        is another disk."""
        with self._one_at_a_time:
            newest = self._newest or self._listed(Record())
            if newest.damaged:  # it may have been brought back since
                newest = self._listed(Record())
            if self._folder.store.is_local and newest.number:
                if self.is_gone():
                    where = (self._folder / _name(newest.number)).url
                    raise StorageUnavailable(errno.ENOENT, "it is gone: bring the storage back (is it mounted here?)", where)
                newest = self._listed(newest)
            while (following := self._after(newest)) is not None:
                newest = following
            self._newest = newest
            return newest

    def is_gone(self) -> bool:
        """Whether the newest record that is known is no longer in its folder: somebody has deleted the run, or the storage is not
        there. A bucket is not asked."""
        if self._newest is None or not self._newest.number or not self._folder.store.is_local:
            return False
        record = self._folder / _name(self._newest.number)
        return not (record.exists() or record.is_dir())  # a folder in its place is damage

    def take_over(
        self,
        holder: Mapping[str, Any],
        above_term: int = 0,
        *,
        seen: Record | None = None,
        found: Callable[[], Mapping[str, Mapping[int, Kept]]] = dict,
    ) -> Record:
        """Takes the run for a new driver; returns the record, which has its term. That is higher than all before, and than
        `above_term`. If it is the first record, what is `found` counts as committed. Raises OvertakenError if another driver has
        come since the record that was `seen`."""

        def change(before: Record) -> Record:
            if seen is not None and before.term.driver_term != seen.term.driver_term:
                raise OvertakenError(seen.term, before)
            # Each record that cannot be read may have been that of another driver.
            term = WriterTerm(max(before.term.driver_term + before.unreadable, above_term) + 1)
            record = replace(before, what="take-over", term=term, holder=dict(holder))
            if before.number:
                return record
            kept = found()
            return replace(record, kept=kept, step=max(kept.get(CHECKPOINTS, ()), default=None))

        return self._append(change)

    def claim(self, term: WriterTerm) -> Record:
        """Records that this generation works on the run. Raises OvertakenError if a later one does."""
        newest = self.newest()
        if newest.term == term and not newest.damaged:
            return newest
        return self._append(lambda before: replace(_if_not_overtaken(term, before), what="claim", term=term))

    def commit(self, term: WriterTerm, step: int, kept: Kept, folder: str = CHECKPOINTS) -> Kept | None:
        """Records that what is in `folder` is committed, in place of what was of the same step: returns that, which no longer
        counts. Raises OvertakenError."""
        replaced: Kept | None = None

        def change(before: Record) -> Record:
            nonlocal replaced
            committed = _if_not_overtaken(term, before).of(folder)
            replaced, there = committed.get(step), {**committed, step: kept}
            highest = before.step if folder != CHECKPOINTS else step if before.step is None else max(step, before.step)
            return replace(before, what="commit", term=term, step=highest, kept={**before.kept, folder: there})

        self._append(change)
        return replaced

    def remove(self, term: WriterTerm, steps: Iterable[int], folder: str = CHECKPOINTS) -> Record:
        """Records that what is in `folder` of these steps no longer counts: after that it may be deleted. Raises
        OvertakenError."""
        gone = set(steps)

        def change(before: Record) -> Record:
            there = {step: kept for step, kept in _if_not_overtaken(term, before).of(folder).items() if step not in gone}
            return replace(before, what="removal", term=term, kept={**before.kept, folder: there})

        return self._append(change)

    def accept_loss(self, holder: Mapping[str, Any], gone: Iterable[int], folder: str = CHECKPOINTS) -> Record:
        """Records that what was in `folder` of the steps `gone` is lost, and that the highest step that is left is the newest one
        that counts. It takes the run over for that: nothing of an older driver comes after it."""
        lost = set(gone)

        def change(before: Record) -> Record:
            there = {step: kept for step, kept in before.of(folder).items() if step not in lost}
            term = WriterTerm(before.term.driver_term + before.unreadable + 1)
            kept, highest = {**before.kept, folder: there}, max(there, default=None)
            return replace(before, what="loss", term=term, holder=dict(holder), step=highest, kept=kept)

        return self._append(change)

    def copied(
        self, source: Record, holder: Mapping[str, Any], step: int | None, kept: Mapping[str, Mapping[int, Kept]]
    ) -> Record:
        """Records, as the first of a new run, what was copied of another one whose newest record is `source`. Raises
        OvertakenError if there are records already."""

        def change(before: Record) -> Record:
            if before.number:
                raise OvertakenError(source.term, before)
            term = WriterTerm(source.term.driver_term + source.unreadable, source.term.generation)
            return Record(what="copy", term=term, holder=dict(holder), step=step, kept=kept)

        return self._append(change)

    def _append(self, change: Callable[[Record], Record]) -> Record:
        with self._one_at_a_time:
            while True:
                newest = self.newest()
                record = replace(change(newest), number=newest.number + 1, damaged="", unreadable=0)
                text = KIND.text(_document(record))
                if (self._folder / _name(record.number)).create(text.encode()):
                    self._newest = record
                    return record
                # Another writer was first. Until its record can be read nothing is known: the next number is not to be tried.
                self._newest = self._awaited(newest)

    def _awaited(self, before: Record) -> Record:
        """Returns the record after `before`, which another writer has created."""
        waited_s = 0.0
        while (record := self._after(before)) is None:
            if waited_s > PATIENCE_S:
                where = (self._folder / _name(before.number + 1)).url
                raise StorageUnavailable(errno.EIO, "it was created by another writer, and cannot be read", where)
            self._sleep(PAUSE_S)
            waited_s += PAUSE_S
        return record

    def _after(self, before: Record) -> Record | None:
        """Returns the record after `before`; None if there is none."""
        try:
            return self._read(before.number + 1)
        except DamagedDocument as error:
            return replace(before, number=before.number + 1, damaged=str(error), unreadable=before.unreadable + 1)

    def _listed(self, known: Record) -> Record:
        """Returns the newest record of a listing, or `known` if there is no newer one."""
        after = _name(known.number) if known.number else ""
        numbers = sorted((int(entry.name[:-5]) for entry in self._folder.list(after) if _is_name(entry.name)), reverse=True)
        damaged = ""
        for unreadable, number in enumerate(numbers):
            try:
                record = self._read(number)
            except DamagedDocument as error:
                damaged = damaged or str(error)
                continue
            if record is not None:
                return replace(record, number=numbers[0], damaged=damaged, unreadable=unreadable)
        return replace(known, number=numbers[0], damaged=damaged, unreadable=len(numbers)) if damaged else known

    def _read(self, number: int) -> Record | None:
        place = self._folder / _name(number)
        for is_last in (*[False] * READS, True):
            try:
                document = KIND.read(place)
                return None if document is None else _record(document)
            except DamagedDocument:
                if is_last:
                    raise
                self._sleep(PAUSE_S)
        raise AssertionError


def _if_not_overtaken(mine: WriterTerm, newest: Record) -> Record:
    if newest.damaged:
        raise DamagedDocument(newest.damaged)
    if newest.term > mine:
        raise OvertakenError(mine, newest)
    return newest


def _name(number: int) -> str:
    return f"{number:08}.json"


def _is_name(name: str) -> bool:
    return name.endswith(".json") and name[:-5].isdecimal() and len(name) >= 13


def _document(record: Record) -> dict[str, Any]:
    return {
        **{"number": record.number, "what": record.what, **record.term._asdict(), "holder": dict(record.holder)},
        "step": record.step,
        "kept": {name: {str(step): asdict(kept) for step, kept in there.items()} for name, there in record.kept.items()},
        # Of this record alone: so a writer that got no answer knows its own.
        "writer": uuid.uuid4().hex,
    }


def _record(document: Mapping[str, Any]) -> Record:
    return Record(
        number=document["number"],
        what=document["what"],
        term=WriterTerm(document["driver_term"], document["generation"]),
        holder=document["holder"],
        step=document["step"],
        kept={name: {int(step): Kept(**kept) for step, kept in there.items()} for name, there in document["kept"].items()},
    )
