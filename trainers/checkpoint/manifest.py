"""The manifest of a checkpoint: names, sizes and digests of its files when it was committed. Without JAX: commands read it too.

The manifest is written last: a checkpoint without one was not completely committed. The manifest and the meta document carry
their own digest, so that a changed byte in them is noticed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from trainers.storage import durable
from trainers.storage.document_kind import DocumentKind
from trainers.storage.documents import NewerDocument, StorageError

FORMAT = 2
MANIFEST_FILE = "manifest.json"
META_FILE = "meta.json"
STATE_FOLDER = "state"
NOT_COMMITTED = "it was not completely committed: there is no manifest"
SMALL_BYTES = 1 << 20
"""The digest of files up to this size is checked before they are loaded; the descriptions of the arrays are among them."""


class DamagedError(Exception):
    """Something is wrong with a checkpoint's files; one line says what."""


class UnfinishedError(DamagedError):
    """The checkpoint has no manifest."""


class NewerError(DamagedError):
    """A newer program has written the checkpoint."""


class _Manifest(TypedDict):
    step: int | None
    committed_s: float
    files: dict[str, tuple[int, str]]


class _Meta(TypedDict):
    """What every program reads. What else there is belongs to the trainer that saved it."""

    shapes: NotRequired[dict[str, str]]
    fingerprints: NotRequired[dict[str, Any]]
    step: NotRequired[int | None]
    batch_index: NotRequired[int]
    arguments: NotRequired[dict[str, Any]]
    lineage: NotRequired[list[dict[str, Any]]]
    skipped_batches: NotRequired[list[int]]


COST = "the checkpoint is not used"
MANIFEST_KIND = DocumentKind(MANIFEST_FILE, _Manifest, COST, format=FORMAT)
META_KIND = DocumentKind(META_FILE, _Meta, COST, format=FORMAT, without_format=False)


@dataclass(frozen=True)
class Entry:
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    step: int | None
    """None for a state that was saved by itself, not as a run's checkpoint."""
    committed_s: float
    """Unix time."""
    files: dict[str, Entry]
    """All files but the manifest, by their path inside the checkpoint."""

    @property
    def num_bytes(self) -> int:
        return sum(entry.size for entry in self.files.values())

    def problems(self, folder: Path, names: Iterable[str], *, digest_up_to: int | None) -> Iterator[str]:
        """Yields what is wrong with these files of the checkpoint in `folder`. Sizes are always compared; digests only of files
        of at most `digest_up_to` bytes (None: of all)."""
        for name in names:
            entry = self.files[name]
            try:
                size = (folder / name).stat().st_size
                # The size first: that costs no reading.
                if size != entry.size:
                    yield f"{name} has {size} bytes, {entry.size} were saved"
                elif (digest_up_to is None or size <= digest_up_to) and digest(folder / name).sha256 != entry.sha256:
                    yield f"the contents of {name} are not those that were saved (digests differ)"
            except FileNotFoundError:
                yield f"{name} is missing"
            except OSError as error:
                yield f"{name} cannot be read: {error.strerror or error}"


def names_below(folder: Path) -> list[str]:
    """Returns the names of the files of the checkpoint in `folder`, sorted, without the manifest."""
    names = []
    for parent, _, files in os.walk(folder):
        names += [os.path.relpath(os.path.join(parent, file), folder) for file in files]
    # With `/` on every system: the manifest may be read on another one.
    return sorted(name.replace(os.sep, "/") for name in names if name != MANIFEST_FILE)


def digest(path: Path) -> Entry:
    """Returns size and digest of the file as it is on disk now. Raises OSError."""
    with open(path, "rb") as file:
        return Entry(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest())


def write(folder: Path, manifest: Manifest) -> None:
    """Writes the manifest atomically and reads it back. Raises OSError, or DamagedError if it reads differently."""
    document = {
        "step": manifest.step,
        "committed_s": manifest.committed_s,
        "files": {name: [entry.size, entry.sha256] for name, entry in manifest.files.items()},
    }
    durable.write(folder / MANIFEST_FILE, MANIFEST_KIND.text(document))
    # Read back before the commit: afterwards a torn manifest would look like a damaged checkpoint.
    if read(folder) != manifest:
        raise DamagedError(f"{folder / MANIFEST_FILE} does not read as it was written")


def read(folder: Path) -> Manifest:
    """Returns the manifest. Raises UnfinishedError if there is none, DamagedError if it is damaged, NewerError."""
    document = _read(MANIFEST_KIND, folder / MANIFEST_FILE)
    if document is None:
        raise UnfinishedError(NOT_COMMITTED)
    files = {name: Entry(int(size), str(sha256)) for name, (size, sha256) in document["files"].items()}
    return Manifest(document["step"], float(document["committed_s"]), files)


def read_meta(folder: Path) -> dict[str, Any]:
    """Returns the meta document of the checkpoint in `folder`. Raises DamagedError, or NewerError."""
    meta = _read(META_KIND, folder / META_FILE)
    if meta is None:
        raise DamagedError(f"{META_FILE} is missing")
    return {**meta, "format": FORMAT}


def _read(kind: DocumentKind, path: Path) -> dict[str, Any] | None:
    try:
        return kind.read(path)
    except NewerDocument as error:
        raise NewerError(str(error)) from error
    except (OSError, StorageError) as error:
        raise DamagedError(f"{path.name} is damaged: {_line(error)}") from error


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
