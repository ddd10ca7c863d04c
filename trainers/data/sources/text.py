"""Text from files and folders, as bytes or tokens, cut into windows."""

from __future__ import annotations

import fnmatch
import hashlib
import os
import sysconfig
from collections.abc import Iterator, Mapping

import numpy as np

from trainers import tokenizers
from trainers.config import DataConfig
from trainers.config.arguments import TrainingArguments
from trainers.config.hf_files import BYTES
from trainers.data.epoch_order import EpochOrder
from trainers.data.sources.tokenized import tokens_of
from trainers.errors import DataError, DataMissingError, DataUnavailableError

PYTHON_STDLIB = "python-stdlib"
LEFT_OUT = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3", "turtledemo", "ensurepip"}
)
"""Folders of the standard library to leave out: they are large, generated, or differ between distributions."""
RECORDS = frozenset({".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".arrow", ".arrayrecord", ".tfrecord", ".npy", ".npz"})
"""The endings of files of records: as plain bytes, a model would learn their quotes and commas."""
ADVICE = "name a function of your own in data.dataset that returns its examples (docs/extending.md, 'A task and its data')"


class Windows:
    """Cuts the text into examples. Example i is {"tokens": int32[T + 1], "sample_id": int32}: T + 1 tokens from token i * T."""

    def __init__(self, text: np.ndarray, sequence_length: int, first_sample_id: int = 0):
        self.text, self.sequence_length, self.first_sample_id = text, sequence_length, first_sample_id

    def __len__(self) -> int:
        # One token less: the last window needs a target after its last input, too.
        return max(0, (len(self.text) - 1) // self.sequence_length)

    def __getitem__(self, index: int) -> Mapping[str, np.ndarray]:
        start = index * self.sequence_length
        # Windows overlap by one token: the last target of one is the first input of the next.
        tokens = self.text[start : start + self.sequence_length + 1].astype(np.int32)
        return {"tokens": tokens, "sample_id": np.asarray(self.first_sample_id + index, np.int32)}


def text_windows(arguments: TrainingArguments) -> tuple[EpochOrder, Windows]:
    """Returns (training examples, held-out examples) of `arguments.data`. Raises DataUnavailableError, or DataMissingError if
    there is no text, or too little."""
    config, tokenizer = arguments.data, tokenizers.of(arguments)
    if tokenizer.source == BYTES:
        tokenizers.check(tokenizer, arguments)
        text, unit = read(config), "bytes"
    else:
        (text, num_ids), unit = tokens_of(documents(config), tokenizer), "tokens"
        tokenizers.check(tokenizer, arguments, num_ids)
    held_out = int(len(text) * config.eval_fraction)
    train = Windows(text[: len(text) - held_out], config.sequence_length)
    # The held-out samples have ids of their own: in a digest of samples they cannot be taken for training samples.
    held = Windows(text[len(text) - held_out :], config.sequence_length, first_sample_id=len(train))
    for name, windows in (("training", train), ("held-out", held)):
        if len(windows) == 0 and (name == "training" or config.eval_fraction > 0):
            raise DataMissingError(
                f"data.paths {', '.join(config.paths)}: the {name} text has {len(windows.text):,} {unit}; expected at least "
                f"{config.sequence_length + 1}: data.sequence_length = {config.sequence_length} and one {unit[:-1]} more to "
                f"predict; give more text, a smaller sequence_length, or another data.eval_fraction (now {config.eval_fraction})"
            )
    return EpochOrder(train, arguments.seed, shuffle=config.shuffle), held


def read(config: DataConfig) -> np.ndarray:
    """Returns all files as uint8, with one newline between them."""
    # A view of the bytes, one for each token: only windows become int32.
    return np.frombuffer(b"\n".join(documents(config)), np.uint8)


def documents(config: DataConfig) -> list[bytes]:
    """Returns the contents of all files.

    The files are in the order of a digest of their relative paths. So the held-out tail is a random choice of files, and the
    same on every machine.
    """
    files = [file for path in config.paths for file in _files(path, config.pattern)]
    files.sort(key=lambda file: hashlib.sha256(file[0].encode()).digest())
    return [_read_file(path) for _, path in files]


def _files(path: str, pattern: str) -> list[tuple[str, str]]:
    """Returns (path relative to the given folder, path to open) of every file that `path` names."""
    location = sysconfig.get_paths()["stdlib"] if path == PYTHON_STDLIB else os.path.expanduser(path)
    if os.path.isfile(location):
        return [(os.path.basename(location), location)]
    if not os.path.isdir(location):
        raise DataMissingError(
            f"data.paths: {path!r} does not exist (looked for {os.path.abspath(location)}); expected a file or a folder"
        )
    names = list(_matching(location, pattern, LEFT_OUT if path == PYTHON_STDLIB else frozenset()))
    if not names:
        raise DataMissingError(
            f"data.paths: no file in {path!r} matches data.pattern {pattern!r}; files are matched by name, as in '*.txt'"
        )
    return [(name, os.path.join(location, name)) for name in names]


def _matching(folder: str, pattern: str, left_out: frozenset[str]) -> Iterator[str]:
    for parent, folders, files in os.walk(folder, onerror=_raise_unreadable):
        # In place: `os.walk` goes only into the folders that are left in this list.
        folders[:] = [name for name in folders if name not in left_out]
        yield from (os.path.relpath(os.path.join(parent, name), folder) for name in files if fnmatch.fnmatch(name, pattern))


def _read_file(path: str) -> bytes:
    if os.path.splitext(path)[1].lower() in RECORDS:
        raise DataError(f"data.paths: {path} is a file of records, and would be read as plain bytes; {ADVICE}")
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise _unreadable(path, error) from error


def _raise_unreadable(error: OSError) -> None:
    """Raises for a folder that cannot be listed: leaving it out would train on other data."""
    raise _unreadable(error.filename, error) from error


def _unreadable(path: str, error: OSError) -> DataUnavailableError:
    kind = DataMissingError if isinstance(error, FileNotFoundError | PermissionError) else DataUnavailableError
    return kind(f"data.paths: {path} cannot be read: {error.strerror}; is it there, and yours to read?")
