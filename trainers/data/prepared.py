"""Documents as tokens on a disk: a folder that is written once, and read by any number of processes.

`tokens.bin` has the tokens of all documents, `offsets.npy` where each begins, `weights.bin` the weights of the tokens if any
document has some, and `prepared.json` what they were made of, and the checksums of the others.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from gangway.errors import DataError, DataMissingError, DataUnavailableError
from gangway.storage import durable, json_text
from trainers.config.data import SourceConfig
from trainers.data import kept
from trainers.data.documents import Document
from trainers.data.sources.files import PREPARED

FORMAT = 3
TOKENS, OFFSETS, WEIGHTS = "tokens.bin", "offsets.npy", "weights.bin"
AGAIN = "run `python -m trainers.prepare` again, into a new folder"


class PreparedDocuments:
    """The documents in a folder, which stay on the disk until they are used: `trainers.data.documents.Documents`."""

    def __init__(self, folder: Path):
        """Raises DataMissingError, DataUnavailableError, or DataError for a folder that is damaged."""
        self.folder, self.about = folder, read_about(folder)
        try:
            self.tokens = mapped(folder / TOKENS, self.about["dtype"])
            self.offsets = np.load(folder / OFFSETS, mmap_mode="r", allow_pickle=False)
            weights = self.about["weights"]
            self.weights = None if weights is None else mapped(folder / WEIGHTS, weights)
        except FileNotFoundError as error:
            raise DataError(f"{folder} is not whole: {error.filename} is missing; {AGAIN}") from error
        except OSError as error:
            raise DataUnavailableError(f"{folder} cannot be read: {error}") from error
        except ValueError as error:
            raise DataError(f"{folder} is damaged: {error}; {AGAIN}") from error
        self._check_sizes()

    def _check_sizes(self) -> None:
        expected = (self.about["num_documents"] + 1, self.about["num_tokens"])
        found = (len(self.offsets), len(self.tokens))
        if found != expected or (self.weights is not None and len(self.weights) != len(self.tokens)):
            raise DataError(
                f"{self.folder} is damaged: {PREPARED} says {expected[0] - 1} documents of {expected[1]} tokens, and its files "
                f"have {found[0] - 1} and {found[1]}; {AGAIN}"
            )

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.diff(self.offsets).astype(np.int32)

    @property
    def num_ids(self) -> int:
        """One more than the largest id of the tokenizer."""
        return self.about["num_ids"]

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the records that it was made of."""
        return tuple(self.about["columns"])

    def __len__(self) -> int:
        return self.about["num_documents"]

    def __getitem__(self, index: int) -> Document:
        if not 0 <= index < len(self):
            raise IndexError(f"document {index} of {len(self)}")
        start, stop = int(self.offsets[index]), int(self.offsets[index + 1])
        weights = None if self.weights is None else self.weights[start:stop].astype(np.float32)
        return Document(self.tokens[start:stop].astype(np.int32), weights)

    def has_target(self, index: int, start: int, stop: int) -> bool:
        """Returns whether a token of a document, from `start` up to `stop`, counts as a target. Reads nothing but that."""
        first = int(self.offsets[index])
        return self.weights is None or bool(self.weights[first + start : first + stop].any())

    def check(self) -> None:
        """Reads all of it. Raises DataError if a byte has changed."""
        wrong = [name for name, digest in self.about["checksums"].items() if checksum(self.folder / name) != digest]
        if wrong:
            raise DataError(f"{self.folder} is damaged: {', '.join(wrong)} do not have the checksums in {PREPARED}; {AGAIN}")


def read_about(folder: Path) -> dict[str, Any]:
    """Returns `prepared.json`. Raises DataMissingError, DataUnavailableError or DataError."""
    path = folder / PREPARED
    try:
        about = json_text.unseal(path.read_text())
    except FileNotFoundError as error:
        raise DataMissingError(f"{folder} has no {PREPARED}: expected a folder of `python -m trainers.prepare`") from error
    except OSError as error:
        raise DataUnavailableError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}; {AGAIN}") from error
    if about.get("format") != FORMAT:
        raise DataError(f"{path} has format {about.get('format')}, and this version reads format {FORMAT}: {AGAIN}")
    return about


def dtype_of(num_ids: int) -> np.dtype:
    """Returns the smallest type for so many tokens."""
    return np.dtype(next(kind for kind in (np.uint8, np.uint16, np.uint32) if num_ids - 1 <= np.iinfo(kind).max))


def checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def settings_of(source: SourceConfig) -> dict[str, Any]:
    """Returns the settings of a source that its documents depend on, as JSON has them."""
    names = ("paths", "pattern", "format", "encoding", "columns", "examples", "on_malformed")
    return {name: list(value) if isinstance(value := getattr(source, name), tuple) else value for name in names}


def check_files(about: Mapping[str, Any], now: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Raises DataError that says which files are not those that `about` was made of. `now`: the files of today (`stamps`)."""
    before = {file["name"]: file for file in about["files"]}
    after = {file["name"]: file for file in now}
    changes = [f"{after[name]['path']} is new" for name in after.keys() - before.keys()]
    changes += [f"{before[name]['path']} is gone" for name in before.keys() - after.keys()]
    for name in before.keys() & after.keys():
        changes += _change(before[name], after[name])
    if changes:
        more = f", and {len(changes) - 5} more" if len(changes) > 5 else ""
        raise DataError(f"{folder} was prepared from other data: {'; '.join(sorted(changes)[:5])}{more}; {AGAIN}")


def _change(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    if before["num_bytes"] != now["num_bytes"]:
        return [f"{now['path']} had {before['num_bytes']:,} bytes, and has {now['num_bytes']:,}"]
    if before["changed"] == now["changed"]:
        return []
    # A copy has another time, and the same contents.
    if before["sha256"] is None or kept_checksum(now) != before["sha256"]:
        return [f"{now['path']} has as many bytes as before, and others"]
    return []


def kept_checksum(file: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of a file as it was found (`stamps`). It is read once on a machine."""
    key = hashlib.sha256(f"{file['path']} {file['num_bytes']} {file['changed']}".encode()).hexdigest()
    path = kept.folder(kept.CHECKED) / key
    try:
        return path.read_text()
    except OSError:  # the first time
        found = checksum(Path(file["path"]))
    with suppress(OSError):  # no room: it is read again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        durable.write_shared(path, found.encode(), 0o600)
    return found


def mapped(path: Path, dtype: str) -> np.ndarray:
    """Returns what is in a file, which stays on the disk until it is used."""
    if os.path.getsize(path) == 0:  # which cannot be mapped
        return np.zeros(0, dtype)
    return np.memmap(path, dtype, mode="r")
