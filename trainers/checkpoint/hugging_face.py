"""The weights in a folder of Hugging Face, as parameters of a model: each host reads what its devices need."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from gangway.config.section import repeated
from gangway.errors import CheckpointError, UsageError
from gangway.storage.store import Place as Where
from trainers.checkpoint import tensor_files
from trainers.checkpoint.tensor_files import DTYPES, Header
from trainers.config.hf_files import CONFIG_FILE
from trainers.models.hf import text_part
from trainers.models.hf import vision_config as hf_config
from trainers.models.hf.tensors import is_besides, is_tied_head, sources
from trainers.models.hf.vision_config import Config
from trainers.models.hf.weights import Place

INDEX_FILE = "model.safetensors.index.json"
ONE_FILE = "model.safetensors"
SAMPLED_BYTES = 1 << 20
"""The digest has so many bytes of the beginning and of the end of each file: all of a large model would take minutes."""
COMPARED_BYTES = 16 << 20
SHOWN = 8


@dataclass(frozen=True)
class Leaf:
    """A parameter: the tensor of each layer, or of each layer's experts, or one tensor."""

    place: Place
    tensors: tuple[str, ...]
    stacked: tuple[int, ...]
    """How many are stacked in it: (), [layers], or [layers, experts]."""
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Folder:
    path: Where
    config: Config
    file_of: Mapping[str, Where]
    leaves: Mapping[str, Leaf]
    """By our name, such as `layers.query`."""
    left_out: tuple[str, ...] = ()
    """The beginnings of the names of tensors of a part that is not read: of an encoder of images, beside a decoder."""

    def digest(self) -> str:
        """Returns the digest of the configuration, and of the beginning and the end of each file. Raises OSError."""
        digest = hashlib.sha256((self.path / CONFIG_FILE).content())
        for path in sorted(set(self.file_of.values()), key=str):
            size = path.size()
            digest.update(f"{path.name} {size}".encode())
            digest.update(path.part(0, SAMPLED_BYTES))
            digest.update(path.part(max(0, size - SAMPLED_BYTES), size))
        return digest.hexdigest()


def is_folder(path: Where) -> bool:
    """Whether there is such a folder. Raises StorageProblem of a bucket that does not answer."""
    names = (path / name for name in (ONE_FILE, INDEX_FILE))
    return (path / CONFIG_FILE).exists() and any(name.exists() for name in names)


def read_config(path: Where) -> Config:
    """Returns the configuration of the model in a folder. Raises CheckpointError that names what is not understood, and
    OSError."""
    try:
        return hf_config.read(json.loads((path / CONFIG_FILE).content()))
    except (UsageError, ValueError) as error:
        raise CheckpointError(f"{path / CONFIG_FILE}: {error}") from error


def look(path: Where) -> Folder:
    """Returns what is in a folder. Raises CheckpointError that names every tensor that is missing, left over, or of another shape
    than those of its kind; and OSError."""
    config, left_out = read_config(path), text_part.left_out(json.loads((path / CONFIG_FILE).content()))
    file_of, headers = _tensors(path)
    problems: list[str] = []
    leaves, expected = {}, sources(config, headers)
    for name, place, tensors, stacked in expected:
        if missing := [tensor for tensor in tensors if tensor not in headers]:
            problems += [f"{tensor} is missing" for tensor in missing]
            continue
        kinds = {tensor: headers[tensor] for tensor in tensors}
        first = kinds[tensors[0]]
        problems += [f"{tensor} is {_shown(kind)}: expected {_shown(first)}" for tensor, kind in kinds.items() if kind != first]
        dtype, shape = first
        if dtype not in DTYPES:
            problems.append(f"{tensors[0]} is {dtype}: expected one of {', '.join(DTYPES)}")
            continue
        shape = shape[::-1] if place.turned else shape
        if place.part is not None:
            if shape[-1:] != (place.part.whole,):
                problems.append(f"{tensors[0]} is {_shown(first)}: expected {place.part.whole} for all that lies in it")
                continue
            shape = (*shape[:-1], place.part.size)
        leaves[name] = Leaf(place, tensors, stacked, (*stacked, *shape), DTYPES[dtype])
    used = {tensor for source in expected for tensor in source.tensors}
    read_or_besides = (name for name in headers if name in used or is_besides(config, name) or name.startswith(left_out))
    problems += [f"{name} is left over" for name in sorted({*headers} - {*read_or_besides})]
    if not problems:
        _check_tied(path, config, file_of, headers, leaves)
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise CheckpointError(
            f"{path} is not a model of the family {config.family}, which its {CONFIG_FILE} says: "
            f"{'; '.join(problems[:SHOWN] + more)}"
        )
    return Folder(path, config, file_of, leaves, left_out)


def _check_tied(
    path: Where, config: Config, file_of: Mapping[str, Where], headers: Mapping[str, Header], leaves: Mapping[str, Leaf]
) -> None:
    """Raises CheckpointError if the files have a table of the logits that is not the one that the configuration ties it to:
    transformers takes both then. Both are read whole, a few rows at a time: most folders have no such table."""
    head = next((name for name in headers if name not in leaves and is_tied_head(config, name)), None)
    if head is None:
        return
    (embed,) = next(leaf.tensors for name, leaf in leaves.items() if name.rpartition(".")[2] == "embed")
    rows, width = headers[head][1]
    step = max(1, COMPARED_BYTES // (4 * width))
    spans = [(slice(start, min(rows, start + step)),) for start in range(0, rows, step)]
    if headers[head] == headers[embed] and all(
        np.array_equal(tensor_files.read(file_of[head], head, span), tensor_files.read(file_of[embed], embed, span))
        for span in spans
    ):
        return
    raise CheckpointError(
        f"{path}: {head} is not {embed}, and {CONFIG_FILE} says that they are one (tie_word_embeddings): expected the same "
        f"values; set tie_word_embeddings to false there if the model has two tables, or leave {head} out of the files"
    )


def read(folder: Folder, name: str, sharding: Any, dtype: Any = None) -> jax.Array:
    """Returns a parameter with a sharding, and a type (None: as it is stored). This process reads only what its
    devices need, and holds no more than that. Raises whatever reading raises."""
    leaf = folder.leaves[name]
    read_before: dict[Any, np.ndarray] = {}

    def part(index: Any) -> np.ndarray:
        # Once for all devices of this host that have the same part.
        key = tuple((place.start, place.stop) for place in index)
        if key not in read_before:
            read_before[key] = _part(folder, leaf, index).astype(dtype or leaf.dtype, copy=False)
        return read_before[key]

    return jax.make_array_from_callback(leaf.shape, sharding, part)


def read_whole(folder: Folder, name: str) -> np.ndarray:
    """Returns a parameter as it is stored, in this process's memory. Raises whatever reading raises."""
    leaf = folder.leaves[name]
    return np.ascontiguousarray(_part(folder, leaf, (slice(None),) * len(leaf.shape)))


def _part(folder: Folder, leaf: Leaf, index: tuple[slice, ...]) -> np.ndarray:
    depth = len(leaf.stacked)
    tensors = np.array(leaf.tensors, object).reshape(leaf.stacked)[index[:depth]]
    within, sizes = index[depth:], leaf.shape[depth:]
    spans = [range(*place.indices(size)) for place, size in zip(within, sizes, strict=True)]
    if leaf.place.part is not None:
        start = leaf.place.part.start
        spans[-1] = range(spans[-1].start + start, spans[-1].stop + start)
    wanted = tuple(slice(span.start, span.stop) for span in (spans[::-1] if leaf.place.turned else spans))

    def part_of(tensor: str) -> np.ndarray:
        part = tensor_files.read(folder.file_of[tensor], tensor, wanted)
        return part.T if leaf.place.turned else part

    if not leaf.stacked:
        return part_of(leaf.tensors[0])
    # One tensor after the other: a list of all of them would be the parameter once more.
    whole = np.empty((tensors.size, *map(len, spans)), np.dtype(leaf.dtype))
    for number, tensor in enumerate(np.ravel(tensors)):
        whole[number] = part_of(tensor)
    return whole.reshape(*tensors.shape, *whole.shape[1:])


def _tensors(path: Where) -> tuple[dict[str, Where], dict[str, Header]]:
    """Returns the file of each tensor, and its header. As transformers does, it reads `model.safetensors` where that is, and the
    index else. Raises CheckpointError."""
    if (path / ONE_FILE).exists():
        headers = dict(tensor_files.head(path / ONE_FILE).headers)
        return dict.fromkeys(headers, path / ONE_FILE), headers
    indexed = _weight_map(path / INDEX_FILE)
    if missing := sorted(name for name in set(indexed.values()) if not (path / name).exists()):
        raise CheckpointError(f"{path / INDEX_FILE} names {', '.join(missing)}, which {path} has not: copy the whole folder")
    file_of: dict[str, Where] = {}
    headers = {}
    problems = []
    for name in sorted(set(indexed.values())):
        for tensor, header in tensor_files.head(path / name).headers.items():
            if tensor not in indexed and tensor in file_of:
                problems.append(f"{tensor} is in {file_of[tensor].name} and in {name}, and the index does not say which counts")
            if indexed.get(tensor, name) == name:
                file_of[tensor], headers[tensor] = path / name, header
    problems += [f"{tensor} is not in {name}" for tensor, name in indexed.items() if tensor not in file_of]
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise CheckpointError(f"{path / INDEX_FILE} does not fit its files: {'; '.join(problems[:SHOWN] + more)}")
    return file_of, headers


def _weight_map(index: Where) -> dict[str, str]:
    """Returns the file of each tensor by an index. Raises CheckpointError."""
    try:
        found = json.loads(index.content(), object_pairs_hook=_once)["weight_map"]
        if not found or not all(isinstance(name, str) for name in found.values()):
            raise ValueError("expected a weight_map with the file of each tensor")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is no index of safetensors: {error!r}") from error
    return found


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    if twice := repeated(name for name, _ in pairs):
        raise ValueError(f"{twice[0]} is there twice")
    return dict(pairs)


def _shown(kind: Header) -> str:
    return f"{kind[0]}{list(kind[1])}"
