"""The records in a run's folder of what it began with: a start before the first checkpoint begins with the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gangway.errors import CheckpointError, CheckpointUnavailableError
from gangway.storage.documents import DamagedDocument, DocumentKind, NewerDocument
from gangway.storage.opening import place_of
from trainers import runtime


@dataclass(frozen=True)
class Record:
    """One such record: a document with one key. Host 0 alone reads and writes it."""

    kind: DocumentKind
    key: str

    def read(self, run_folder: str) -> Any | None:
        """Returns what was recorded; None if nothing was. A damaged record is set aside, and a note says so. Raises
        CheckpointUnavailableError if it cannot be read, and CheckpointError if a newer program wrote it."""
        path = place_of(run_folder) / self.kind.name
        try:
            found = self.kind.read(path)
        except DamagedDocument as error:
            runtime.current().note(self.kind.set_aside(path, error))
            return None
        except NewerDocument as error:
            raise CheckpointError(str(error)) from error
        except OSError as error:
            raise CheckpointUnavailableError(f"{path} cannot be read: {error}") from error
        return None if found is None else found[self.key]

    def write(self, run_folder: str, recorded: Mapping[str, Any]) -> None:
        """Raises OSError."""
        self.kind.write(place_of(run_folder) / self.kind.name, {self.key: recorded})
