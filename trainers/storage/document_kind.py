"""Kinds of JSON documents: each has a format, a shape, and a digest of its contents. Without JAX.

A document that was changed by anything but its program is damaged, and is told from one that a newer program wrote. A document of
a program before there were formats has no format, and perhaps no digest: it passes if it has the shape.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trainers.storage import documents, sealed, shapes
from trainers.storage.documents import DamagedDocument, NewerDocument
from trainers.storage.not_finite import shown

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
        return sealed.seal({FORMAT: self.format, **contents})

    def line(self, contents: Mapping[str, Any]) -> str:
        """Returns the document as one line of JSON."""
        return sealed.seal({FORMAT: self.format, **contents}, indent=None)

    def parse(self, text: str | bytes, where: object) -> dict[str, Any]:
        """Returns the contents of a document. Raises DamagedDocument or NewerDocument, which name it as `where`."""
        return self.checked(documents.parse(text, where), where)

    def checked(self, document: Any, where: object) -> dict[str, Any]:
        """Like `parse`, for a document that was read already."""
        if not isinstance(document, dict):
            raise DamagedDocument(f"{where}: damaged: expected a JSON object, found {type(document).__name__}")
        contents = shown({key: value for key, value in document.items() if key not in (FORMAT, DIGEST)})
        # A document of a program before there were formats may have a digest.
        written_as = document.get(FORMAT, self.format if self.without_format else None)
        unmarked = self.without_format and FORMAT not in document and DIGEST not in document
        # First: a flipped bit in the format must not look like a newer program.
        if not unmarked and not sealed.is_whole(document):
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

    def read(self, path: str | os.PathLike[str]) -> dict[str, Any] | None:
        """Returns the contents; None if there is no such document. Raises DamagedDocument, NewerDocument or OSError."""
        content = documents.read_bytes(path)
        return None if content is None else self.parse(content, os.fspath(path))

    def write(self, path: str | os.PathLike[str], contents: Mapping[str, Any]) -> None:
        """Replaces the document atomically. Raises OSError."""
        documents.write_text(path, self.text(contents))

    def create(self, path: str | os.PathLike[str], contents: Mapping[str, Any]) -> bool:
        """Writes the document if there is none; see `documents.create_text`."""
        return documents.create_text(path, self.text(contents))

    def set_aside(self, path: str | os.PathLike[str], why: Exception) -> str:
        """Gives a damaged document another name, so that the next one can be written. Returns a sentence: what was wrong, where
        it is now, and what is lost with it."""
        moved = f"set aside as {aside}" if (aside := set_aside(path)) else "left where it is"
        return f"{str(why).partition(';')[0]}; {moved}: {self.cost}"


def set_aside(path: str | os.PathLike[str]) -> str | None:
    """Renames a document, or what lies in its place, to `NAME.damaged`, or `NAME.damaged-2` and so on; returns the new path. None
    if that is not possible."""
    path = os.fspath(path)
    if documents.is_url(path):
        return None
    for number in range(1, 1000):
        aside = f"{path}.damaged" if number == 1 else f"{path}.damaged-{number}"
        if not os.path.lexists(aside):
            with suppress(OSError):
                os.rename(path, aside)
                return aside
            return None
    return None
