"""The manifest of a checkpoint: names, sizes and digests of its files when it was committed. Without JAX: commands read it too.

The manifest is written last: a checkpoint without one was not completely committed. The manifest and the meta document carry
their own digest, so that a changed byte in them is noticed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

from gangway.storage.documents import DocumentKind, NewerDocument, StorageError
from gangway.storage.store import Place, StorageProblem

FORMAT = 2
MANIFEST_FILE = "manifest.json"
META_FILE = "meta.json"
STATE_FOLDER = "state"
NOT_COMMITTED = "it was not completely committed: there is no manifest"
SMALL_BYTES = 1 << 20
"""The digest of files up to this size is checked before they are loaded; the descriptions of the arrays are among them."""
TAG = "tag:"
"""In place of a digest: what a bucket says of an object, and says again while it is the same."""
READ_BYTES = 16 << 20


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
    at: NotRequired[str]


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
    """Or TAG and the tag."""


@dataclass(frozen=True)
class Manifest:
    step: int | None
    """None for a state that was saved by itself, not as a run's checkpoint."""
    committed_s: float
    """Unix time."""
    files: dict[str, Entry]
    """All files but the manifest, by their path inside the checkpoint."""
    at: str = ""
    """The URL that the tags are of: a copy elsewhere has others."""

    @property
    def num_bytes(self) -> int:
        return sum(entry.size for entry in self.files.values())

    @property
    def has_tags(self) -> bool:
        """Whether it has tags in place of digests: it was saved to a bucket."""
        return any(entry.sha256.startswith(TAG) for entry in self.files.values())

    def problems(self, folder: Place, names: Iterable[str], *, digest_up_to: int | None) -> Iterator[str]:
        """Yields what is wrong with these files of the checkpoint in `folder`. Sizes are always compared, and tags where they are
        those of this place; digests only of files of at most `digest_up_to` bytes (None: of all). Raises StorageProblem of a
        bucket that does not answer."""
        found = {entry.name: entry for entry in folder.list()}  # one request for up to a thousand files
        for name in names:
            entry, there = self.files[name], found.get(name)
            if there is None:
                yield f"{name} is missing"
            elif there.size != entry.size:  # first: that costs no reading
                yield f"{name} has {there.size} bytes, {entry.size} were saved"
            elif entry.sha256.startswith(TAG):  # it says nothing of the contents of a copy
                if self.at == folder.url and entry.sha256 != TAG + there.tag:
                    yield f"{name} is not the object that was saved (its tag is another one)"
            elif digest_up_to is None or entry.size <= digest_up_to:
                try:
                    if digest(folder / name).sha256 != entry.sha256:
                        yield f"the contents of {name} are not those that were saved (digests differ)"
                except StorageProblem as error:
                    if not folder.store.is_local:
                        raise
                    yield f"{name} cannot be read: {error.strerror}"  # a disk that is damaged there


def of_files(folder: Place, step: int | None, committed_s: float, files: dict[str, Entry]) -> Manifest:
    """Returns the manifest of what was written to a folder: of `files`, of which digests were taken, or of a bucket of what it
    lists, with tags. Raises StorageProblem."""
    if not folder.store.tags_last:
        return Manifest(step, committed_s, files)
    listed = {entry.name: Entry(entry.size, TAG + entry.tag) for entry in folder.list() if entry.name != MANIFEST_FILE}
    return Manifest(step, committed_s, listed, folder.url)


def names_below(folder: Place) -> list[str]:
    """Returns the names of the files of the checkpoint in `folder`, sorted, without the manifest."""
    return [entry.name for entry in folder.list() if entry.name != MANIFEST_FILE]


def digest(place: Place) -> Entry:
    """Returns size and digest of a file as it is in the storage now. Raises FileNotFoundError, or StorageProblem."""
    sha256, size = hashlib.sha256(), 0
    while part := place.part(size, size + READ_BYTES):
        sha256.update(part)
        size += len(part)
    return Entry(size, sha256.hexdigest())


def write(folder: Place, manifest: Manifest) -> str:
    """Writes the manifest atomically and reads it back; returns its digest. Raises OSError, or DamagedError if it reads
    differently."""
    document = {
        "step": manifest.step,
        "committed_s": manifest.committed_s,
        "files": {name: [entry.size, entry.sha256] for name, entry in manifest.files.items()},
        **({"at": manifest.at} if manifest.at else {}),
    }
    text = MANIFEST_KIND.text(document)
    (folder / MANIFEST_FILE).put(text.encode(), makes_folder=False)
    # Read back before the commit: afterwards a torn manifest would look like a damaged checkpoint. A bucket tears nothing.
    if not folder.store.tags_last and read(folder) != manifest:
        raise DamagedError(f"{folder / MANIFEST_FILE} does not read as it was written")
    return hashlib.sha256(text.encode()).hexdigest()


def digest_of(folder: Place) -> str | None:
    """Returns the digest of the manifest, as `write` has returned it; None if there is none. Raises OSError."""
    content = (folder / MANIFEST_FILE).get()
    return None if content is None else hashlib.sha256(content).hexdigest()


def read(folder: Place) -> Manifest:
    """Returns the manifest. Raises UnfinishedError if there is none, DamagedError if it is damaged, NewerError; and
    StorageProblem of a bucket that does not answer."""
    document = _read(MANIFEST_KIND, folder / MANIFEST_FILE)
    if document is None:
        raise UnfinishedError(NOT_COMMITTED)
    files = {name: Entry(int(size), str(sha256)) for name, (size, sha256) in document["files"].items()}
    return Manifest(document["step"], float(document["committed_s"]), files, document.get("at", ""))


def read_meta(folder: Place) -> dict[str, Any]:
    """Returns the meta document of the checkpoint in `folder`. Raises DamagedError, or NewerError; and StorageProblem of a bucket
    that does not answer."""
    meta = _read(META_KIND, folder / META_FILE)
    if meta is None:
        raise DamagedError(f"{META_FILE} is missing")
    return {**meta, "format": FORMAT}


def _read(kind: DocumentKind, path: Place) -> dict[str, Any] | None:
    try:
        return kind.read(path)
    except NewerDocument as error:
        raise NewerError(str(error)) from error
    except (OSError, StorageError) as error:
        if isinstance(error, StorageProblem) and not path.store.is_local:
            raise  # nothing is known of the checkpoint: another one must not take its place
        raise DamagedError(f"{path.name} is damaged: {_line(error)}") from error


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
