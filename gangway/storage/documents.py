"""Small JSON documents in a run's storage: always written whole, never appended to, renamed or locked.

The run's storage may be a bucket: `gangway.storage.store` says what is asked of it.

A *kind* of documents has a format, a shape, and a digest of its contents. A document that was changed by anything but its program
is damaged. One that a newer program wrote is not, and is refused by name. A document of a program before there were formats has
no format, and perhaps no digest: it passes if it has the shape.
"""

from __future__ import annotations

import errno
import json
import os
import posixpath
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gangway.storage import json_text, opening, ours, shapes
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
    opening.place_of(path).put(text.encode())


def create_text(path: Where, text: str) -> bool:
    """Writes the document if there is none, and returns whether it did. Of several writers at most one gets True. The document
    must say whose it is: see `Store.create`.

    If the file system has no hard links, a reader may find the document empty or incomplete while it is written. `read_json`
    then raises DamagedDocument; the document belongs to its writer all the same.
    """
    return opening.place_of(path).create(text.encode())


def read_json(path: Where) -> Any | None:
    """Returns the document; None if there is none. Raises DamagedDocument if it is not JSON, and OSError."""
    content = read_bytes(path)
    return None if content is None else json_text.show_not_finite(parse(content, path))


def read_bytes(path: Where) -> bytes | None:
    """Returns the bytes of a document; None if there is none. Raises DamagedDocument if a folder is in its place, and OSError."""
    try:
        return opening.place_of(path).get()
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
    place = opening.place_of(path)
    # In a bucket what is asked for by this is a folder, most often: one request tells that.
    return place.is_dir() or place.exists() if is_url(path) else place.exists() or place.is_dir()


def delete(path: Where) -> None:
    """Deletes one document of a run, if there is one. Raises OSError."""
    ours.delete(opening.place_of(path) if is_url(path) else path, DOCUMENT)


FORMAT, DIGEST = "format", "digest"
PAUSES_S = (0.05, 0.1)
"""Before a damaged document is read again."""


@dataclass(frozen=True)
class DocumentKind:
    """A kind of document. `contents` are always without the format and the digest."""

    name: str
    """Its file, or what it is: for error messages."""
    shape: Any
    """A TypedDict, a dataclass, or another type that `shapes` can check."""
    cost: str
    """What is lost with a damaged one, as the end of a sentence."""
    format: int = 1
    without_format: bool = True
    """Whether a document without a format and a digest may pass."""

    def text(self, contents: Mapping[str, Any]) -> str:
        """Returns the document as JSON text."""
        return json_text.seal({FORMAT: self.format, **contents})

    def line(self, contents: Mapping[str, Any]) -> str:
        """Returns the document as one line of JSON."""
        return json_text.seal({FORMAT: self.format, **contents}, indent=None)

    def parse(self, text: str | bytes, where: object) -> dict[str, Any]:
        """Returns the contents of a document. Raises DamagedDocument or NewerDocument, which name it as `where`."""
        # Most documents have no such numbers, and a restart reads several.
        marked = (json_text.SUFFIX.encode() if isinstance(text, bytes) else json_text.SUFFIX) in text  # type: ignore[operator]
        return self.checked(parse(text, where), where, marked=marked)

    def checked(self, document: Any, where: object, *, marked: bool = True) -> dict[str, Any]:
        """Like `parse`, for a document that was read already. `marked`: whether it may have numbers that JSON does not have."""
        if not isinstance(document, dict):
            raise DamagedDocument(f"{where}: damaged: expected a JSON object, found {type(document).__name__}")
        contents = {key: value for key, value in document.items() if key not in (FORMAT, DIGEST)}
        if marked:
            contents = json_text.show_not_finite(contents)
        # A document of a program before there were formats may have a digest.
        written_as = document.get(FORMAT, self.format if self.without_format else None)
        unmarked = self.without_format and FORMAT not in document and DIGEST not in document
        if unmarked and not contents:
            raise DamagedDocument(f"{where}: damaged: nothing is in it")  # no program has ever written that
        # First: a flipped bit in the format must not look like a newer program.
        if not unmarked and not json_text.is_whole(document):
            raise DamagedDocument(f"{where}: damaged: its contents do not have the digest that it says")
        if isinstance(written_as, int) and written_as > self.format:
            raise NewerDocument(
                f"{where} was written by a newer gangway: it has format {written_as}, and this one reads formats up to "
                f"{self.format}; go on with the newer gangway, or give the run another name"
            )
        if written_as != self.format or isinstance(written_as, bool):
            raise DamagedDocument(f"{where}: damaged: format {written_as!r}, expected {self.format}")
        if problem := shapes.problem(self.shape, contents):
            raise DamagedDocument(f"{where}: damaged: {problem}")
        return contents

    def read(self, path: Where) -> dict[str, Any] | None:
        """Returns the contents; None if there is no such document. Raises DamagedDocument, NewerDocument or OSError. One that is
        damaged is read again first: a file server may show a part of what is just being written."""
        for pause_s in (*PAUSES_S, None):
            content = read_bytes(path)
            try:
                return None if content is None else self.parse(content, str(path))
            except DamagedDocument:
                if pause_s is None:
                    raise
                time.sleep(pause_s)
        raise AssertionError

    def write(self, path: Where, contents: Mapping[str, Any]) -> None:
        """Replaces the document atomically. Raises OSError."""
        write_text(path, self.text(contents))

    def write_over(self, path: Where, contents: Mapping[str, Any]) -> None:
        """Like `write`; a folder that lies in its place is set aside. Raises OSError."""
        try:
            self.write(path, contents)
        except StorageRefused as error:
            if error.errno != errno.EISDIR:
                raise
            set_aside(path)
            self.write(path, contents)

    def create(self, path: Where, contents: Mapping[str, Any]) -> bool:
        """Writes the document if there is none; see `documents.create_text`."""
        return create_text(path, self.text(contents))

    def if_whole(self, path: Where) -> dict[str, Any] | None:
        """Like `read`; None for a damaged document too, which stays where it is."""
        with suppress(DamagedDocument):
            return self.read(path)
        return None

    def salvaged(self, path: Where) -> tuple[dict[str, Any] | None, tuple[str, ...]]:
        """Like `read`, and a damaged document is set aside: then there is a sentence about it (`set_aside`)."""
        try:
            return self.read(path), ()
        except DamagedDocument as error:
            return None, (self.set_aside(path, error),)

    def set_aside(self, path: Where, why: Exception) -> str:
        """Gives a damaged document another name, so that the next one can be written. Returns a sentence: what was wrong, where
        it is now, and what is lost with it."""
        moved = f"set aside as {aside}" if (aside := set_aside(path)) else "left where it is"
        return f"{str(why).partition(';')[0]}; {moved}: {self.cost}"


def set_aside(path: Where) -> str | None:
    """Renames a document, or what lies in its place, to `NAME.damaged`, or `NAME.damaged-2` and so on; returns the new path. None
    if that is not possible."""
    if is_url(path):
        with suppress(OSError):
            return _set_object_aside(opening.place_of(path))
        return None
    where = str(path)
    for number in range(1, 1000):
        aside = _aside(where, number)
        if not os.path.lexists(aside):
            with suppress(OSError):
                os.rename(where, aside)
                return aside
            return None
    return None


def _set_object_aside(place: Place) -> str | None:
    """Copies an object to the first such name that is free, and deletes it."""
    if (data := place.get()) is None:
        return None
    for number in range(1, 1000):
        aside = Place(place.store, _aside(place.key, number))
        # Equal bytes are those of a try that was cut off.
        if aside.create(data) or aside.get() == data:
            ours.delete(place, ours.among("what was just copied", [place]))
            return aside.url
    return None


def _aside(name: str, number: int) -> str:
    return f"{name}.damaged" if number == 1 else f"{name}.damaged-{number}"
