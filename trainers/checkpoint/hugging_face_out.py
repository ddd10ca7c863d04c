"""Writes the weights of a model to a folder of Hugging Face as a stream: one parameter is in memory at a time.

The files have the tensors in the order of the parameters, all layers of one after the other, so that no parameter is read twice
for a file. Several hosts write a folder together without waiting for each other: each writes its files to one folder on the way,
and the one that finds all of them there gives it its name.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from gangway.errors import UsageError
from gangway.storage import durable
from gangway.storage.ours import MADE_BY
from trainers.checkpoint.hugging_face import INDEX_FILE, ONE_FILE
from trainers.checkpoint.tensor_files import DTYPES
from trainers.models.hf.tensors import sources
from trainers.models.hf.vision_config import Config

CODES = {name: code for code, name in DTYPES.items()}
BLOCK_BYTES = 32 << 20
"""How much of a parameter is turned at a time."""

Shape = tuple[int, ...]
Read = Callable[[str], np.ndarray]
"""Returns a parameter by our name, such as `layers.query`."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file, and where it comes from."""

    name: str
    shape: Shape
    dtype: str
    parameters: tuple[str, ...]
    """Their slices are joined along the last dimension: GPT-2 has three parameters in one tensor, Phi-3 two or three."""
    number: int | None
    """Which of the tensors that are stacked in the parameters; None: they are not stacked."""
    turned: bool

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def value(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the tensor from its parameters; a view where that is possible."""
        depth = arrays[0].ndim - len(self.shape)
        parts = [array if self.number is None else array.reshape(-1, *array.shape[depth:])[self.number] for array in arrays]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts, -1)
        return whole.T if self.turned else whole


File = tuple[str, Sequence[Tensor]]


def plan(config: Config, parameters: Mapping[str, tuple[Shape, str]]) -> list[Tensor]:
    """Returns the tensors of a model with these parameters: (shape, type) by our name. Raises UsageError if they are not those
    of the `Decoder`, `Encoder` or `ImageTextModel` (`trainers.models`) of this configuration. The rotary convention is the same:
    channel i rotates with channel i + C / 2."""
    expected = sources(config)
    if set(parameters) != {source.name for source in expected}:
        raise UsageError(
            f"the model has the parameters {', '.join(sorted(parameters))}: expected those of a model of the family "
            f"{config.family}: {', '.join(sorted(source.name for source in expected))}"
        )
    tensors: dict[str, Tensor] = {}
    for ours, place, names, stacked in expected:
        shape, dtype = parameters[ours]
        if dtype not in CODES:
            raise UsageError(f"{ours} is {dtype}: files of Hugging Face have {', '.join(CODES)}")
        own = shape[len(stacked) :]
        for number, name in enumerate(names):
            before = tensors.get(name)
            joined = own if place.part is None else (*own[:-1], place.part.whole)
            parts = (ours,) if before is None else (*before.parameters, ours)
            tensors[name] = Tensor(
                name, joined[::-1] if place.turned else joined, dtype, parts, number if stacked else None, place.turned
            )
    return list(tensors.values())


def files_of(tensors: Sequence[Tensor], max_bytes: int) -> list[File]:
    """Returns the files by name, of at most `max_bytes` each; a larger tensor is a file by itself."""
    files: list[list[Tensor]] = [[]]
    for tensor in tensors:
        if files[-1] and sum(other.num_bytes for other in files[-1]) + tensor.num_bytes > max_bytes:
            files.append([])
        files[-1].append(tensor)
    if len(files) == 1:
        return [(ONE_FILE, files[0])]
    return [(f"model-{number:05}-of-{len(files):05}.safetensors", file) for number, file in enumerate(files, 1)]


def write(folder: Path, files: Sequence[File], read: Read, mine: Callable[[int], bool] = lambda number: True) -> None:
    """Writes the files whose number `mine` says. Each gets its name when it is whole; one that has it is not written again.
    Raises OSError."""
    last: tuple[tuple[str, ...], list[np.ndarray]] = ((), [])
    for number, (name, tensors) in enumerate(files):
        if not mine(number) or is_whole(folder, (name, tensors)):
            continue
        work = folder / f"{name}.part"
        with open(work, "wb", opener=durable.no_link) as file:
            file.write(_header(tensors))
            for names, group in itertools.groupby(tensors, key=lambda tensor: tensor.parameters):
                if last[0] != names:
                    # Let go first: the next one is read into the same room.
                    last = ((), [])
                    last = (names, [read(parameter) for parameter in names])
                _write_values(file, group, last[1])
            file.flush()
            durable.sync(file.fileno())
        os.replace(work, folder / name)


def _write_values(file: BinaryIO, tensors: Iterable[Tensor], arrays: Sequence[np.ndarray]) -> None:
    # A function of its own: a variable that outlives the loop would keep a view of the parameter, and with it all of it.
    for tensor in tensors:
        for block in _blocks(tensor.value(arrays)):
            file.write(block)


def write_index(folder: Path, files: Sequence[File]) -> None:
    """Writes the index, if there are several files. A folder without it is not whole."""
    if len(files) > 1:
        total = sum(tensor.num_bytes for _, tensors in files for tensor in tensors)
        file_of = {tensor.name: name for name, tensors in files for tensor in tensors}
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")


def is_whole(folder: Path, file: File) -> bool:
    name, tensors = file
    size = len(_header(tensors)) + sum(tensor.num_bytes for tensor in tensors)
    path = folder / name
    return path.is_file() and path.stat().st_size == size


def _header(tensors: Sequence[Tensor]) -> bytes:
    """Returns the head of a file of safetensors: the length of the JSON that follows, and what is where."""
    about: dict[str, object] = {"__metadata__": {"format": "pt", **MADE_BY}}
    start = 0
    for tensor in tensors:
        end = start + tensor.num_bytes
        about[tensor.name] = {"dtype": CODES[tensor.dtype], "shape": tensor.shape, "data_offsets": [start, end]}
        start = end
    text = json.dumps(about, separators=(",", ":")).encode()
    # Padded, so that the arrays begin at a multiple of 8.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _blocks(array: np.ndarray) -> Iterator[memoryview]:
    """Yields the bytes of an array in the order of its last dimension, without a copy of all of it."""
    rows = max(1, BLOCK_BYTES // max(1, array[:1].nbytes)) if array.ndim else 1
    array = array if array.ndim else array[None]
    for start in range(0, len(array), rows):
        # As bytes: files cannot be given numbers of types that Python does not know.
        yield np.ascontiguousarray(array[start : start + rows]).view(np.uint8).data
