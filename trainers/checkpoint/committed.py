"""The record of what a run has committed: it distinguishes an empty folder from storage that is not mounted. Without JAX.

The record lies in the folder of the checkpoints, where it ties folder and run together, and in the run's folder, where it
outlives them. The driver keeps the same in what it knows of the run, and sends it with its orders.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass

from gangway.errors import CheckpointUnavailableError
from gangway.storage.documents import DamagedDocument, DocumentKind, NewerDocument
from gangway.storage.row import CHECKPOINTS
from gangway.storage.store import Place
from trainers.checkpoint import layout
from trainers.checkpoint.standing import Folder, row_of

FILE = "committed.json"
COST = "the newest checkpoint that is there counts as the newest one"


@dataclass(frozen=True)
class Committed:
    run: str | None = None
    """The name of the run, the same for all its launches; None: it has no name yet."""
    step: int | None = None
    """The highest step that was ever committed; None: none yet."""

    def and_(self, other: Committed) -> Committed:
        """Returns both records as one. If they name different runs, the name of this one stays."""
        # The greater step: a record that lags must not hide that a checkpoint is missing.
        return Committed(self.run or other.run, max((s for s in (self.step, other.step) if s is not None), default=None))


NOTHING = Committed()
KIND = DocumentKind(FILE, Committed, COST)


def read(folder: Folder) -> Committed | None:
    """Returns the record; None if there is none, or no folder. Raises OSError, NewerDocument, or ValueError if the record is
    damaged. Of a bucket it is what the row of the run says, and the folder of the run has none."""
    try:
        if isinstance(folder, Place):
            return None if folder.name != CHECKPOINTS else Committed(step=row_of(folder).newest().step)
        document = KIND.read(folder / FILE)
    except DamagedDocument as error:
        raise ValueError(str(error)) from error
    return None if document is None else Committed(document.get("run"), document.get("step"))


def is_there(folder: Folder) -> bool:
    """Whether `folder` has a record, damaged or not. Raises OSError if that cannot be found out."""
    try:
        return read(folder) is not None
    except (ValueError, NewerDocument):
        return True


def write(folder: Folder, record: Committed) -> None:
    """Writes the record. Raises OSError. In a bucket the row has it already."""
    if isinstance(folder, Place):
        return
    KIND.write_over(folder / FILE, asdict(record))


def ensure(folder: Folder, record: Committed) -> None:
    """Writes the record, unless the same one is there. Raises OSError."""
    with suppress(ValueError):  # a damaged record is written again
        # Not written again without need: every write is a moment in which a power cut may come.
        if read(folder) == record:
            return
    write(folder, record)


def of_run(run_folder: Folder, checkpoints: Folder) -> Committed:
    """Returns what the records say of the run in this folder. A record that cannot be read counts as none here: the hosts read
    it again, and stop."""
    recorded = NOTHING
    for folder in (run_folder, checkpoints):
        try:
            recorded = recorded.and_(read(folder) or NOTHING)
        except (OSError, ValueError):
            continue
    return recorded


def check(folder: Folder, steps: Iterable[int], ordered: Committed) -> Committed:
    """Returns what is recorded of the run whose checkpoints are in `folder`, in which `steps` were found. `ordered` is what the
    driver knows of it.

    Raises CheckpointUnavailableError if there must be more checkpoints: the storage is not mounted, is another one, or lags.
    """
    # A step whose checkpoint was being replaced when a process died was committed, though its folder has another name now.
    steps, records = {*steps, *layout.replaced(folder)}, []
    # In this order: they are unpacked as `outer, inner` below.
    for location in (folder.parent, folder):
        try:
            records.append(read(location))
        except (OSError, ValueError, NewerDocument) as error:
            # A damaged record proves that something was committed; it may be ignored only if there are checkpoints.
            if not isinstance(error, ValueError) or not steps:
                raise CheckpointUnavailableError(f"{location / FILE} cannot be read ({error}); {_advice(folder)}") from error
            records.append(None)
    outer, inner = records
    # Without the inner record at first: it may be that of another run.
    recorded = ordered.and_(outer or NOTHING)
    if inner and inner.run and recorded.run and inner.run != recorded.run and recorded.step is not None:
        mismatch = f"{folder} belongs to another run ({inner.run} in {FILE}, expected {recorded.run})"
        raise CheckpointUnavailableError(f"{mismatch}, and this one has committed step {recorded.step}; {_advice(folder)}")
    recorded = recorded.and_(inner or NOTHING)
    newest = max(steps, default=None)
    # Only the newest counts: older ones may have been deleted by the retention rules.
    if recorded.step is not None and (newest is None or newest < recorded.step):
        content = f"the newest there is {newest}" if steps else "it is empty"
        content = content if folder.is_dir() else "there is no such folder"
        raise CheckpointUnavailableError(
            f"checkpoint {recorded.step} of this run was committed, and is not in {folder}: {content}; {_advice(folder)}"
        )
    return recorded


def _advice(folder: Folder) -> str:
    return (
        "bring the storage back (is it mounted on this host, and the right one?); to go on with what is there after all, or to "
        f"start again from step 0: python -m orchestrator.commands.checkpoints {folder.parent} --accept-loss"
    )
