"""Refuses a run whose documents a newer program has written, before a machine is taken."""

from __future__ import annotations

from contextlib import suppress

from gangway.storage import documents, identity
from gangway.storage.opening import place_of
from orchestrator.run_state.lease import LEASE_KIND
from orchestrator.run_state.stored import CHECKPOINTS, GANG_KIND, OUTCOME_KIND, STATE_KIND
from orchestrator.tracking.spool import FOLDER, KINDS
from trainers.checkpoint import copied, layout, manifest


def check_versions(run_dir: str) -> None:
    """Raises NewerDocument, which names the document, and StorageError for a copy that is not complete. Whoever reads a damaged
    document handles it."""
    copied.check_whole(place_of(run_dir))
    kinds = [(kind.name, kind) for kind in (STATE_KIND, GANG_KIND, LEASE_KIND, OUTCOME_KIND, identity.KIND)]
    kinds += [(documents.join(FOLDER, name), kind) for name, kind in KINDS.items()]
    for name, kind in kinds:
        with suppress(documents.DamagedDocument, NotADirectoryError):
            kind.read(documents.join(run_dir, name))
    folder = place_of(run_dir) / CHECKPOINTS
    newest = layout.steps(folder)[-1:]
    if not folder.store.is_local:
        return
    for checkpoint in (layout.at(folder, step) for step in newest):
        try:
            manifest.read(checkpoint)
            manifest.read_meta(checkpoint)
        except manifest.NewerError as error:
            raise documents.NewerDocument(str(error)) from error
        except manifest.DamagedError:
            continue
