"""Records of JSON, strictly read: what JSON does not have, or what Python would drop, makes a record malformed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

from gangway.config.section import repeated
from gangway.errors import DataError
from trainers.config.data import SourceConfig
from trainers.data.documents import Record
from trainers.data.sources.access import SURROGATE, ranges_of, read_text, reading, text_of
from trainers.data.sources.bounds import BOM
from trainers.data.sources.files import SourceFile
from trainers.data.sources.lines import LEAVE_OUT, LinesFile

BLANK = " \t\r\n"


def record_of(content: bytes, first: int = 0) -> Record:
    """Returns the record that the bytes are. `first`: their place in the file, for errors. Raises ValueError."""
    decoder = _Decoder()
    return decoder.checked(decoder.whole(text_of(content, first=first)))


def value_of(text: str) -> Any:
    """Returns the value of JSON that a text is. Raises ValueError."""
    decoder = _Decoder()
    found = decoder.whole(text)
    if decoder.problems:
        raise ValueError(decoder.problems[0])
    return found


class JsonLines(LinesFile):
    """A record in each line."""

    def parse(self, line: bytes, first: int = 0) -> Record:
        return record_of(line, first)


class JsonList:
    """The records of a file that is one list of them, or one record. It is read whole."""

    def __init__(self, file: SourceFile, source: SourceConfig):
        self.path = file.path
        try:
            found = list(_items(read_text(file.path, source.encoding)))
        except ValueError as error:
            raise DataError(
                f"{file.path} is malformed: {error}; expected one list of records, [{{...}}, ...], or a record in each line "
                "(data.format=text takes it as one text)"
            ) from error
        skip = source.on_malformed == "skip"
        self.records = [(number, each) for number, each in enumerate(found) if not (skip and isinstance(each, ValueError))]
        self.num_malformed = len(found) - len(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Record:
        _, record = self.records[index]
        if isinstance(record, ValueError):
            raise DataError(f"{self.where(index)} is malformed: {record}; {LEAVE_OUT}") from record
        return record

    def where(self, index: int) -> str:
        return f"{self.path}, record {self.records[index][0] + 1}"


def json_file(file: SourceFile, source: SourceConfig) -> JsonList | JsonLines:
    """Returns the records of a file that ends in `.json`: one list, one record, or a record in each line."""
    with reading(file.path), ranges_of(file.path, source.encoding).open() as opened:
        lines = (line.removeprefix(BOM).strip() for line in opened)
        line = next(filter(None, lines), b"")
    is_list = line.startswith(b"[")
    return JsonLines(file, source) if not is_list and (not line or _is_whole(line)) else JsonList(file, source)


def _is_whole(line: bytes) -> bool:
    try:
        record_of(line)
    except ValueError as error:
        # Whole, and malformed otherwise, is a line too.
        return not isinstance(error, json.JSONDecodeError)
    return True


def _items(text: str) -> Iterator[Record | ValueError]:
    """Yields the items of a list, or one record. Raises ValueError where the text is no JSON."""
    place, decoder = _past_blank(text, 0), _Decoder()
    is_list = text.startswith("[", place)
    place = _past_blank(text, place + is_list)
    while not (is_list and text.startswith("]", place)):
        decoder.problems.clear()
        found, place = decoder.value(text, place)
        try:
            yield decoder.checked(found)
        except ValueError as error:
            yield error
        place = _past_blank(text, place)
        if not is_list:
            break
        if text.startswith(",", place):
            place = _past_blank(text, place + 1)
            if text.startswith("]", place):
                raise json.JSONDecodeError("a comma before the end of the list", text, place)
        elif not text.startswith("]", place):
            raise json.JSONDecodeError("expected a comma, or the end of the list", text, place)
    if (rest := _past_blank(text, place + is_list)) < len(text):
        raise json.JSONDecodeError("Extra data: something follows", text, rest)


def _past_blank(text: str, place: int) -> int:
    while place < len(text) and text[place] in BLANK:
        place += 1
    return place


class _Decoder(json.JSONDecoder):
    """Reads on past what is wrong and yet of the form of JSON, and keeps it in `problems`."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        super().__init__(object_pairs_hook=self._object, parse_constant=self._constant, parse_float=self._float)

    def value(self, text: str, place: int) -> tuple[Any, int]:
        """Returns (the value at this place, the place behind it). Raises ValueError."""
        if place >= len(text):
            raise json.JSONDecodeError("Expecting value", text, place)
        try:
            found, stop = self.raw_decode(text, place)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        if text.find("\\ud", place, stop) >= 0 or text.find("\\uD", place, stop) >= 0:
            self.problems += _surrogates(found, "")
        return found, stop

    def whole(self, text: str) -> Any:
        """Returns the value that a text is. Raises ValueError."""
        found, stop = self.value(text, _past_blank(text, 0))
        if (rest := _past_blank(text, stop)) < len(text):
            raise ValueError(f"Extra data: something follows it, from character {rest + 1} on: {text[rest : rest + 20]!r}")
        return found

    def checked(self, found: Any) -> Record:
        """Returns it if it is a record without a problem. Raises ValueError."""
        if self.problems:
            raise ValueError(self.problems[0])
        if not isinstance(found, dict):
            raise ValueError(f"expected an object, {{...}}, and found {type(found).__name__}")
        return found

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            self.problems.append(f"the key {repeated(name for name, _ in pairs)[0]!r} is there twice")
        return found

    def _constant(self, name: str) -> float:
        self.problems.append(f"{name} is no JSON: expected a number, or null")
        return float(name)

    def _float(self, text: str) -> float:
        if not math.isfinite(number := float(text)):
            self.problems.append(f"{text} is more than a number can be here: expected one up to 1.8e308, or a text")
        return number


def _surrogates(value: Any, where: str) -> Iterator[str]:
    if isinstance(value, str) and (lone := SURROGATE.search(value)):
        yield f"{where or 'the text'} has half of a sign of UTF-16 ({lone[0]!r}), which is no text"
    elif isinstance(value, dict):
        for name, each in value.items():
            yield from _surrogates(name, f"a key of {where}" if where else "a key")
            yield from _surrogates(each, f"{where}.{name}" if where else repr(name))
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _surrogates(each, f"{where}[{number}]")
