"""What made a state, beside its arguments: on which machines each stretch of batches was trained, and which were left out.

Floating-point sums depend on how many devices share them. A run that changed its number of hosts is therefore compared with one
that changes at the same batches: the lineage says which. `python -m orchestrator.verify` does that.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from etils import epath

from trainers.errors import UsageError
from trainers.loop.anomalies import shown

SKIPPED_FILE = "skipped_batches.json"
"""In the run's folder: the batches that rollbacks have left out. Kept apart from the checkpoints, for a rollback goes to one
that knows nothing of it, and the process may be gone before the next."""


@dataclass
class Lineage:
    """Of the present state. All hosts have the same."""

    stretches: list[dict[str, Any]] = field(default_factory=list)
    """For each stretch on other machines than the one before: batch_index (its first), num_hosts, num_devices, mesh."""
    skipped: set[int] = field(default_factory=set)
    """Batches whose update was not applied, or will not be when they come."""

    def start(self, batch_index: int, topology: Mapping[str, Any], restored: Mapping[str, Any] | None = None) -> None:
        """The state at `batch_index` goes on from here on `topology`; `restored`: the meta of the checkpoint it came from."""
        meta = restored or {}
        self.skipped |= set(meta.get("skipped_batches", ()))
        before = [stretch for stretch in meta.get("lineage", ()) if stretch["batch_index"] < batch_index]
        own = {"batch_index": batch_index, **topology}
        same = before and {**before[-1], "batch_index": batch_index} == own
        self.stretches = before if same else [*before, own]

    def meta(self, batch_index: int) -> dict[str, Any]:
        """What a checkpoint at `batch_index`, or a result, says of it."""
        return {"lineage": list(self.stretches), "skipped_batches": sorted(b for b in self.skipped if b < batch_index)}

    def refuse(self, meta: Mapping[str, Any]) -> str:
        """Why the checkpoint with this meta is of no use: it was trained on batches that have been skipped since. "" if not."""
        applied = {b for b in self.skipped if b < meta["batch_index"]} - set(meta["skipped_batches"])
        if not applied:
            return ""
        return f"it belongs to an abandoned trajectory: it was trained on batches that are skipped now ({shown(sorted(applied))})"


def read_skipped(run_folder: str) -> list[int]:
    """The batches that the run's rollbacks have left out. Raises UsageError if the file is there and makes no sense."""
    path = epath.Path(run_folder) / SKIPPED_FILE
    try:
        return [int(batch) for batch in json.loads(path.read_text())["skipped_batches"]]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} cannot be read ({type(error).__name__}: {error}): expected the batches that rollbacks have left out, as in "
            '{"skipped_batches": [17, 18]}; put it right, or give the run another name'
        ) from error


def write_skipped(run_folder: str, batches: Iterable[int]) -> None:
    """Replaces the file at once, so that whoever reads it finds the old one or the new one. For one host to call."""
    folder = epath.Path(run_folder)
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f"{SKIPPED_FILE}.new"
    temporary.write_text(json.dumps({"skipped_batches": sorted(batches)}))
    temporary.replace(folder / SKIPPED_FILE)
