"""The lineage of a state: on how many machines each segment of batches was trained, and which batches were left out.

The bits of a floating-point sum depend on the number of devices that share it. A run that changed its number of hosts is
therefore compared with one that changes at the same batches, which the lineage lists. `python -m orchestrator.verify` does
that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypedDict

import jax

from gangway.errors import UsageError
from gangway.storage import documents
from gangway.storage.documents import DamagedDocument, DocumentKind, NewerDocument
from trainers import runtime
from trainers.loop.anomalies import shown
from trainers.runtime import multihost

SKIPPED_FILE = "skipped_batches.json"
"""The file in the run's folder that lists the batches left out by rollbacks. It is apart from the checkpoints: a rollback
restores an older checkpoint, which does not list them, and the process may end before the next one is saved."""


class _Skipped(TypedDict):
    skipped_batches: list[int]


SKIPPED_KIND = DocumentKind(
    SKIPPED_FILE,
    _Skipped,
    "batches that rollbacks have left out since the newest checkpoint are trained on again; to leave them out, write them there "
    'as {"skipped_batches": [17, 18]}',
)


@dataclass
class Lineage:
    """The lineage of the present state. It is the same on all hosts."""

    segments: list[dict[str, Any]] = field(default_factory=list)
    """One entry for each change of machines: batch_index (the first of the segment), num_hosts, num_devices, mesh."""
    skipped: set[int] = field(default_factory=set)
    """Batches whose update was not applied, or will not be when they come."""

    init_from: dict[str, Any] | None = None
    """What the run's first parameters were loaded from: settings, checkpoint, digest. None: they were not."""

    def start(self, batch_index: int, topology: Mapping[str, Any], restored: Mapping[str, Any] | None = None) -> None:
        """Records that the state at `batch_index` is trained on `topology` from here on. `restored` is the meta of its
        checkpoint."""
        meta = restored or {}
        self.skipped |= set(meta.get("skipped_batches", ()))
        self.init_from = meta.get("init_from")
        # A segment that begins at `batch_index` has no batch yet: the one that starts now takes its place.
        earlier = [segment for segment in meta.get("lineage", ()) if segment["batch_index"] < batch_index]
        segment = {"batch_index": batch_index, **topology}
        # A restart on the same machines begins no segment: the bits of a sum are those of an undisturbed run.
        same_machines = earlier and {**earlier[-1], "batch_index": batch_index} == segment
        self.segments = earlier if same_machines else [*earlier, segment]

    def meta(self, batch_index: int) -> dict[str, Any]:
        """Returns the lineage as a checkpoint at `batch_index`, or a result, records it."""
        begun = {} if self.init_from is None else {"init_from": self.init_from}
        skipped = sorted(batch for batch in self.skipped if batch < batch_index)
        return {"lineage": list(self.segments), "skipped_batches": skipped, **begun}

    def refuse(self, meta: Mapping[str, Any]) -> str:
        """Returns why the checkpoint with this meta must not be restored: it was trained on batches that have been skipped
        since. Returns "" if it may be."""
        # Only batches that the checkpoint's state has seen can speak against it.
        applied = {b for b in self.skipped if b < meta["batch_index"]} - set(meta["skipped_batches"])
        if not applied:
            return ""
        return f"it belongs to an abandoned trajectory: it was trained on batches that are skipped now ({shown(sorted(applied))})"


def read_skipped(run_folder: str) -> list[int]:
    """Returns the batches that the run's rollbacks have left out. A damaged file is set aside, and a note says so. One host must
    call this. Raises UsageError if a newer program wrote it."""
    path = documents.join(run_folder, SKIPPED_FILE)
    try:
        found = SKIPPED_KIND.read(path)
    except DamagedDocument as error:
        runtime.current().note(SKIPPED_KIND.set_aside(path, error))
        return []
    except NewerDocument as error:
        raise UsageError(str(error)) from error
    return [] if found is None else found["skipped_batches"]


def write_skipped(run_folder: str, batches: Iterable[int]) -> None:
    """Replaces the file atomically: a reader finds the old one or the new one. One host must call this."""
    SKIPPED_KIND.write(documents.join(run_folder, SKIPPED_FILE), {"skipped_batches": sorted(batches)})


def initial(run_folder: str, ordered: Iterable[int]) -> Lineage:
    """Returns the lineage to start with: the batches that earlier rollbacks have left out, and those that the run was `ordered`
    to skip. All hosts must call this."""
    # Host 0 alone reads the file: the hosts must not see two versions of it.
    left_out = multihost.from_host0("batches left out", read_skipped(run_folder) if jax.process_index() == 0 else None)
    return Lineage(skipped={*left_out, *ordered})
