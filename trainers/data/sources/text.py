"""Text as bytes: files and folders, cut into windows, in an order that depends on nothing but the seed."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from trainers.config import DataConfig
from trainers.config.arguments import TrainingArguments
from trainers.errors import DataMissingError, DataUnavailableError, UsageError

NUM_BYTES = 256
PYTHON_STDLIB = "python-stdlib"
LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3", "turtledemo", "ensurepip"}
)
"""Folders of the standard library that are large, generated, or differ from one distribution to another."""


class Windows:
    """Example i: {"tokens": int32[T + 1], "sample_id": int32}, T + 1 bytes from every T-th place of the text."""

    def __init__(self, text: np.ndarray, sequence_length: int, first_sample_id: int = 0):
        self.text, self.sequence_length, self.first_sample_id = text, sequence_length, first_sample_id

    def __len__(self) -> int:
        return max(0, (len(self.text) - 1) // self.sequence_length)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        start = index * self.sequence_length
        tokens = self.text[start : start + self.sequence_length + 1].astype(np.int32)
        return {"tokens": tokens, "sample_id": np.asarray(self.first_sample_id + index, np.int32)}


class Epochs:
    """Examples of one epoch after the other, each epoch in an order of its own: any index, `len` of one epoch."""

    def __init__(self, items: Any, epoch_length: int):
        self.items, self.epoch_length = items, epoch_length

    def __len__(self) -> int:
        return self.epoch_length

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        return self.items[index]


def byte_text(arguments: TrainingArguments) -> tuple[Epochs, Windows]:
    """(training examples, held-out examples) of `arguments.data`. Raises DataUnavailableError, or DataMissingError where there
    is none, or too little."""
    import grain

    config = arguments.data
    if arguments.model.vocab_size < NUM_BYTES:
        raise UsageError(
            f"model.vocab_size = {arguments.model.vocab_size}: expected at least {NUM_BYTES}, for the data are bytes"
        )
    text = read(config)
    held_out = int(len(text) * config.eval_fraction)
    train = Windows(text[: len(text) - held_out], config.sequence_length)
    held = Windows(text[len(text) - held_out :], config.sequence_length, first_sample_id=len(train))
    for name, windows in (("training", train), ("held-out", held)):
        if len(windows) == 0 and (name == "training" or config.eval_fraction > 0):
            raise DataMissingError(
                f"data.paths {', '.join(config.paths)}: the {name} text has {len(windows.text):,} bytes; expected at least "
                f"{config.sequence_length + 1}: data.sequence_length = {config.sequence_length} and one byte more to predict; "
                f"give more text, a smaller sequence_length, or another data.eval_fraction (now {config.eval_fraction})"
            )
    items = grain.MapDataset.source(train)
    if config.shuffle:
        items = items.seed(arguments.seed).shuffle()
    return Epochs(items.repeat(None), len(train)), held


def read(config: DataConfig) -> np.ndarray:
    """uint8: all files, one separator byte (newline) between them.

    In the order of a digest of their relative paths: the held-out tail is a random choice of files, the same on every machine.
    """
    files = [file for path in config.paths for file in _files(path, config.pattern)]
    files.sort(key=lambda file: hashlib.sha256(file[0].encode()).digest())
    return np.frombuffer(b"\n".join(_read_file(path) for _, path in files), np.uint8)


def _files(path: str, pattern: str) -> list[tuple[str, str]]:
    """(path relative to the folder given, path to open) of every file that `path` stands for."""
    place = sysconfig.get_paths()["stdlib"] if path == PYTHON_STDLIB else os.path.expanduser(path)
    if os.path.isfile(place):
        return [(os.path.basename(place), place)]
    if not os.path.isdir(place):
        raise DataMissingError(
            f"data.paths: {path!r} does not exist (looked for {os.path.abspath(place)}); expected a file or a folder"
        )
    names = list(_matching(place, pattern, LEFT_OUT if path == PYTHON_STDLIB else frozenset()))
    if not names:
        raise DataMissingError(
            f"data.paths: no file in {path!r} matches data.pattern {pattern!r}; files are matched by name, as in '*.txt'"
        )
    return [(name, os.path.join(place, name)) for name in names]


def _matching(folder: str, pattern: str, left_out: frozenset[str]) -> Iterator[str]:
    for parent, folders, files in os.walk(folder, onerror=_raise_unreadable):
        folders[:] = [name for name in folders if name not in left_out]
        yield from (os.path.relpath(os.path.join(parent, name), folder) for name in files if fnmatch.fnmatch(name, pattern))


def _read_file(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise _unreadable(path, error) from error


def _raise_unreadable(error: OSError) -> None:
    """A folder that cannot be listed is not left out: the run would train on other data."""
    raise _unreadable(error.filename, error) from error


def _unreadable(path: str, error: OSError) -> DataUnavailableError:
    kind = DataMissingError if isinstance(error, FileNotFoundError | PermissionError) else DataUnavailableError
    return kind(f"data.paths: {path} cannot be read: {error.strerror}; is it there, and yours to read?")
