"""Small JSON documents in a run's storage: always written whole, never appended to, renamed or locked.

The run's storage may be a bucket: `gangway.storage.store` says what is asked of it.
"""

from __future__ import annotations

import errno
import json
import os
import posixpath
from typing import Any

from gangway.storage import json_text, opening, ours
from gangway.storage.opening import place_of
from gangway.storage.store import Place, StorageRefused

DOCUMENT = ours.named("a document of a run", r"[\w.-]+\.json")
Where = str | os.PathLike[str] | Place
"""A path, a URL, or a place in a store."""
is_url = opening.is_url


class StorageError(Exception):
    """The run's storage cannot be used, or has a document that cannot."""


class DamagedDocument(StorageError):
    """A document is not what was written: its bits have changed, or something else lies in its place."""


class NewerDocument(StorageError):
    """A document was written by a newer program, which knows more than this one."""


def join(folder: str | os.PathLike[str], *names: str) -> str:
    return posixpath.join(os.fspath(folder), *names)


def write_json(path: Where, data: Any) -> None:
    """Replaces the document atomically: a reader finds the old one or the new one, never a part. Raises OSError."""
    write_text(path, json_text.dumps(data, indent=1) + "\n")


def write_text(path: Where, text: str) -> None:
    """Like `write_json`, for a document that is text already."""
    place_of(path).put(text.encode())


def create_json(path: Where, data: Any) -> bool:
    """Writes the document if there is none, and returns whether it did. Of several writers at most one gets True. The document
    must say whose it is: see `Store.create`.

    If the file system has no hard links, a reader may find the document empty or incomplete while it is written. `read_json`
    then raises DamagedDocument; the document belongs to its writer all the same.
    """
    return create_text(path, json_text.dumps(data, indent=1) + "\n")


def create_text(path: Where, text: str) -> bool:
    """Like `create_json`, for a document that is text already."""
    return place_of(path).create(text.encode())


def read_json(path: Where) -> Any | None:
    """Returns the document; None if there is none. Raises DamagedDocument if it is not JSON, and OSError."""
    content = read_bytes(path)
    return None if content is None else json_text.show_not_finite(parse(content, path))


def read_bytes(path: Where) -> bytes | None:
    """Returns the bytes of a document; None if there is none. Raises DamagedDocument if a folder is in its place, and OSError."""
    try:
        return place_of(path).get()
    except StorageRefused as error:
        if error.errno != errno.EISDIR:
            raise
        message = f"{path}: damaged: expected a file, found something else; delete or repair it and start again"
        raise DamagedDocument(message) from error


def parse(content: str | bytes, where: object) -> Any:
    """Returns what a text of JSON says. Raises DamagedDocument, which names it as `where`."""
    try:
        return json.loads(content)
    # RecursionError: a text of a hundred thousand brackets.
    except (ValueError, RecursionError) as error:
        message = f"{where}: damaged: expected a JSON document ({error}); delete or repair it and start again"
        raise DamagedDocument(message) from error


def exists(path: Where) -> bool:
    """Whether there is such a document, or such a folder. Raises OSError if that cannot be found out."""
    place = place_of(path)
    # In a bucket what is asked for by this is a folder, most often: one request tells that.
    return place.is_dir() or place.exists() if is_url(path) else place.exists() or place.is_dir()


def delete(path: Where) -> None:
    """Deletes one document of a run, if there is one. Raises OSError."""
    ours.delete(place_of(path) if is_url(path) else path, DOCUMENT)
