"""Kinds of JSON documents: each has a format, a shape, and a digest of its contents. Without JAX.

A document that was changed by anything but its program is damaged. One that a newer program wrote is not, and is refused by name.
A document of a program before there were formats has no format, and perhaps no digest: it passes if it has the shape.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gangway.storage import documents, json_text, ours, shapes
from gangway.storage.documents import DamagedDocument, NewerDocument, Where
from gangway.storage.json_text import SUFFIX, show_not_finite
from gangway.storage.opening import place_of
from gangway.storage.store import Place, StorageRefused

FORMAT, DIGEST = "format", "digest"


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
        marked = (SUFFIX.encode() if isinstance(text, bytes) else SUFFIX) in text  # type: ignore[operator]
        return self.checked(documents.parse(text, where), where, marked=marked)

    def checked(self, document: Any, where: object, *, marked: bool = True) -> dict[str, Any]:
        """Like `parse`, for a document that was read already. `marked`: whether it may have numbers that JSON does not have."""
        if not isinstance(document, dict):
            raise DamagedDocument(f"{where}: damaged: expected a JSON object, found {type(document).__name__}")
        contents = {key: value for key, value in document.items() if key not in (FORMAT, DIGEST)}
        if marked:
            contents = show_not_finite(contents)
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
        """Returns the contents; None if there is no such document. Raises DamagedDocument, NewerDocument or OSError."""
        content = documents.read_bytes(path)
        return None if content is None else self.parse(content, path if isinstance(path, Place) else os.fspath(path))

    def write(self, path: Where, contents: Mapping[str, Any]) -> None:
        """Replaces the document atomically. Raises OSError."""
        documents.write_text(path, self.text(contents))

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
        return documents.create_text(path, self.text(contents))

    def set_aside(self, path: Where, why: Exception) -> str:
        """Gives a damaged document another name, so that the next one can be written. Returns a sentence: what was wrong, where
        it is now, and what is lost with it."""
        moved = f"set aside as {aside}" if (aside := set_aside(path)) else "left where it is"
        return f"{str(why).partition(';')[0]}; {moved}: {self.cost}"


def set_aside(path: Where) -> str | None:
    """Renames a document, or what lies in its place, to `NAME.damaged`, or `NAME.damaged-2` and so on; returns the new path. None
    if that is not possible."""
    if documents.is_url(path):
        with suppress(OSError):
            return _set_object_aside(place_of(path))
        return None
    where = path.url if isinstance(path, Place) else os.fspath(path)
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
