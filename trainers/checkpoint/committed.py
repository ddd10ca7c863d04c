"""What a run has ever committed, on record: an empty folder is told from storage that is not there by it. Without JAX.

The record lies in the folder of the checkpoints, where it ties folder and run together, and in the run's folder, where it
outlives them. The driver keeps the same in what it knows of the run, and sends it with its orders.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from trainers.checkpoint import layout
from trainers.errors import CheckpointUnavailableError
from trainers.storage import durable, sealed

FILE = "committed.json"


@dataclass(frozen=True)
class Committed:
    run: str | None = None
    """Names the run, whichever launch trains it; None: it has no name yet."""
    step: int | None = None
    """The highest step that was ever committed; None: none yet."""

    def and_(self, other: Committed) -> Committed:
        """What both know. Where they name different runs, the name of this one."""
        return Committed(self.run or other.run, max((s for s in (self.step, other.step) if s is not None), default=None))


NOTHING = Committed()


def read(folder: Path) -> Committed | None:
    """None where there is no record, or no folder. Raises OSError, or ValueError where the record cannot be believed."""
    try:
        text = (folder / FILE).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    document = sealed.unseal(text)
    return Committed(document.get("run"), document.get("step"))


def is_there(folder: Path) -> bool:
    """Whether `folder` has a record, whatever it says. Raises OSError where nobody can tell."""
    try:
        return read(folder) is not None
    except ValueError:
        return True


def write(folder: Path, record: Committed) -> None:
    """Raises OSError."""
    durable.write(folder / FILE, sealed.seal(asdict(record)))


def ensure(folder: Path, record: Committed) -> None:
    """Writes the record if another one is there, or none. Raises OSError."""
    with suppress(ValueError):  # damaged: written anew
        if read(folder) == record:
            return
    write(folder, record)


def of_run(run_folder: Path, checkpoints: Path) -> Committed:
    """What the records say of the run in this folder; nothing where there are none. What cannot be read says nothing here:
    the hosts read it again, and stop."""
    known = NOTHING
    for folder in (run_folder, checkpoints):
        try:
            known = known.and_(read(folder) or NOTHING)
        except (OSError, ValueError):
            continue
    return known


def check(folder: Path, steps: Iterable[int], ordered: Committed) -> Committed:
    """What is known of the run whose checkpoints are in `folder`, where `steps` were found, if that can be all of them.

    Raises CheckpointUnavailableError if there must be more: the storage is not mounted, is another one, or lags.
    """
    steps, records = {*steps, *layout.replaced(folder)}, []
    for place in (folder.parent, folder):
        try:
            records.append(read(place))
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) or not steps:  # a damaged record, too, says that there was something
                raise CheckpointUnavailableError(f"{place / FILE} cannot be read ({error}); {_advice(folder)}") from error
            records.append(None)
    outer, inner = records
    known = ordered.and_(outer or NOTHING)
    if inner and inner.run and known.run and inner.run != known.run and known.step is not None:
        whose = f"{folder} belongs to another run ({inner.run} in {FILE}, expected {known.run})"
        raise CheckpointUnavailableError(f"{whose}, and this one has committed step {known.step}; {_advice(folder)}")
    known = known.and_(inner or NOTHING)
    newest = max(steps, default=None)
    if known.step is not None and (newest is None or newest < known.step):
        found = "there is no such folder" if not folder.is_dir() else f"the newest there is {newest}" if steps else "it is empty"
        raise CheckpointUnavailableError(
            f"checkpoint {known.step} of this run was committed, and is not in {folder}: {found}; {_advice(folder)}"
        )
    return known


def _advice(folder: Path) -> str:
    return (
        "bring the storage back (is it mounted on this host, and the right one?); to go on with what is there after all, or to "
        f"start again from step 0: python -m orchestrator.checkpoints {folder.parent} --accept-loss"
    )
