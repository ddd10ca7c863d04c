"""Reads saved models, whichever way they were saved: a checkpoint, a file of safetensors, a folder of Hugging Face or of PEFT.

`find` says which of these a path stands for, and `open_model` what is there. Its parameters are read one by one into the memory
of this process (`Weights.here`), each device's part onto the devices (`read`), or into the tree of a model (`load`).
`open_whole` checks every byte of a checkpoint first, and merges the adapters of a run with LoRA with their base.
"""

from __future__ import annotations

import dataclasses
import errno
import functools
import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from gangway.errors import CheckpointError, CheckpointMissingError, CheckpointUnavailableError, UsageError
from gangway.storage.documents import StorageError
from gangway.storage.row import CHECKPOINTS
from gangway.storage.store import Place, StorageRefused
from trainers.checkpoint import hugging_face, layout, manifest, model_files, tensor_files
from trainers.checkpoint.array_io import ArrayFiles, outages_told
from trainers.checkpoint.fingerprints import fingerprints
from trainers.checkpoint.model_only import PART, part_of
from trainers.checkpoint.tensor_files import DTYPES
from trainers.checkpoint.validate import check_files
from trainers.config import LoraConfig, ModelConfig
from trainers.config.arguments import from_dict
from trainers.config.frozen import BASE
from trainers.config.weights import InitConfig
from trainers.models import lora
from trainers.models.hf import peft_in
from trainers.models.hf.weights import flat
from trainers.optim.optimizers import SCHEDULE_FREE, parameters_to_evaluate
from trainers.optim.param_groups import parameter_path
from trainers.parallel.mesh import replicated
from trainers.runtime.multihost import one_line

META = "frozen"
"""The key in the meta of a checkpoint: which weights it was trained with that it does not have. Under the name of each: `path`
(the setting), `checkpoint` (what was read), `digest`."""
FILE_SUFFIX = ".safetensors"
OPTIMIZER = "opt_state"
"""The name of the optimizer's state, in a TrainState and in the files."""
SHOWN = 20
"""How many problems of parameters an error shows."""


@dataclass(frozen=True)
class Stored:
    """One saved parameter."""

    key: tuple[str, ...]
    """Where it is in a state: its part there, then its names; of a file: the one name."""
    shape: tuple[int, ...]
    dtype: str
    fingerprint: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Weights:
    """The parameters at `path`, by name."""

    path: Place
    parameters: Mapping[str, Stored]
    about: str
    """`step 100`, if that is known."""
    folder: hugging_face.Folder | None = None
    """Of Hugging Face."""
    memory: Mapping[str, np.ndarray] | None = None
    """The parameters themselves, where they are in memory already: of PEFT, for they are few, and those that were computed."""
    meta: Mapping[str, Any] = field(default_factory=dict)
    """Of a checkpoint: its meta. Empty for all else."""

    @property
    def is_file(self) -> bool:
        return self.path.name.endswith(FILE_SUFFIX)

    @property
    def has_adapters(self) -> bool:
        """Whether there are adapters of LoRA among them."""
        return any(name.endswith(lora.A) for name in self.parameters)

    @property
    def averages(self) -> bool:
        """Whether what is evaluated must first be computed from the optimizer's state."""
        return self.memory is None and self.meta.get("arguments", {}).get("optimizer", {}).get("name") == SCHEDULE_FREE

    def here(self, name: str) -> np.ndarray:
        """Returns a parameter as it is stored, in this process's memory. Raises whatever reading raises."""
        stored = self.parameters[name]
        if self.memory is not None:
            return self.memory[name]
        if self.folder is not None:
            return hugging_face.read_whole(self.folder, name)
        if self.is_file:
            return tensor_files.read(self.path, name)
        if 0 in stored.shape:  # the files have None there
            return np.zeros(stored.shape, jnp.dtype(stored.dtype))
        folder = self.path / manifest.STATE_FOLDER
        with outages_told(folder):
            return _array_files().read_one(folder, stored.key)

    def all_here(self) -> dict[str, np.ndarray]:
        """Returns all parameters, as `here` does each."""
        return {name: self.here(name) for name in self.parameters}

    def digest(self) -> str:
        """Returns the digest of the file, or of the checkpoint's manifest, which has those of all its files, or in a bucket their
        tags. Raises OSError."""
        if self.folder is not None:
            return self.folder.digest()
        if self.memory is not None:
            return hashlib.sha256(b"".join((self.path / name).content() for name in peft_in.FILES)).hexdigest()
        return manifest.digest(self.path if self.is_file else self.path / manifest.MANIFEST_FILE).sha256


def find(source: str) -> Place:
    """Returns the checkpoint or file that `source` stands for: of a run's folder, its newest whole checkpoint, or else its newest
    checkpoint of the parameters alone. Raises CheckpointError, CheckpointMissingError if there is nothing, and
    CheckpointUnavailableError if the storage does not answer."""
    with reading(source):
        return _found(layout.named(source))


@contextmanager
def reading(what: object) -> Iterator[None]:
    """Raises what the storage raises within as CheckpointMissingError, CheckpointUnavailableError or CheckpointError."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointMissingError(f"there is no {what}") from error
    except StorageRefused as error:
        if error.errno == errno.EINVAL:  # no URL that could ever work
            raise CheckpointError(f"{what}: {error.strerror}") from error
        raise CheckpointUnavailableError(f"{what} cannot be read: {error.strerror}") from error
    except OSError as error:
        raise CheckpointUnavailableError(f"{what} cannot be read: {error.strerror or error}") from error
    except StorageError as error:
        raise CheckpointError(f"{what} cannot be read: {error}") from error


def _found(path: Place) -> Place:
    if path.exists():
        if not path.name.endswith(FILE_SUFFIX):
            raise CheckpointError(f"{path} is a file: expected a folder, or a file {FILE_SUFFIX}")
        return path
    if not path.is_dir():
        raise CheckpointMissingError(f"there is no {path}")
    # What has a manifest is a checkpoint itself, even if it has such a folder.
    if (path / manifest.MANIFEST_FILE).exists() or hugging_face.is_folder(path) or _is_adapter(path):
        return path
    folders = [path / CHECKPOINTS, path / layout.MODELS_FOLDER]
    if not any(folder.is_dir() for folder in folders):
        raise CheckpointError(
            f"{path} is no checkpoint: it has no {manifest.MANIFEST_FILE}, no folder checkpoints of a run, and no "
            f"{hugging_face.CONFIG_FILE} beside files {FILE_SUFFIX}"
        )
    for folder in folders:
        there = (layout.at(folder, step) for step in reversed(layout.steps(folder)))
        if (newest := next(filter(layout.is_whole, there), None)) is not None:
            return newest
    raise CheckpointError(f"{path} has no complete checkpoint yet")


def _is_adapter(path: Place) -> bool:
    return all((path / name).exists() for name in peft_in.FILES)


class Adapted(NamedTuple):
    """What says how an adapter of PEFT is read: the model, and the settings of the run's own adapters."""

    model: ModelConfig
    lora: LoraConfig


def open_model(path: Place, adapted: Adapted | None = None) -> Weights:
    """Returns what is at `path`, one of `find`, without reading its parameters. Raises CheckpointError,
    CheckpointMissingError or CheckpointUnavailableError.
    An adapter of PEFT is read for a run with LoRA alone (`adapted`)."""
    with reading(path):
        if path.name.endswith(FILE_SUFFIX):
            return _look_at_file(path)
        if _is_adapter(path):
            return _look_at_adapter(path, adapted)
        return _look_at_folder(path) if hugging_face.is_folder(path) else _look_at_checkpoint(path)


def match(
    weights: Weights, shapes: Mapping[str, tuple[int, ...]], config: InitConfig, asked_by: str = "init_from"
) -> dict[str, str]:
    """Returns the name there of each parameter to load, by its name here. `shapes` are those of the model's parameters. Raises
    CheckpointError that names every parameter that does not fit. `asked_by` is the setting that names the weights."""
    if weights.averages:
        raise CheckpointError(
            f"{asked_by}: {weights.path} is of {SCHEDULE_FREE}, whose averages are in the optimizer's state: give the file that "
            "`python -m trainers.export` makes of it"
        )
    theirs: dict[str, str] = {}
    problems = []
    for name in weights.parameters:
        here = config.renamed(name)
        if here in theirs and config.selects(here):
            problems.append(f"{theirs[here]} and {name} are both {here} here")
        theirs.setdefault(here, name)
    selected = [name for name in shapes if config.selects(name)]
    if not selected:
        problems.append("include and exclude leave no parameter of the model")
    pairs = {name: theirs[name] for name in selected if name in theirs}
    if config.strict:
        problems += [f"{name} is missing there" for name in selected if name not in theirs]
        problems += [f"{name} is not in the model" for name in theirs if name not in shapes and config.selects(name)]
    elif not pairs:
        problems.append("none of its parameters is in the model")
    for name, there in pairs.items():
        if (shape := weights.parameters[there].shape) != shapes[name]:
            problems.append(f"{name} is {list(shape)} there and {list(shapes[name])} here")
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        choose = "; choose with init_from.include, exclude and rename" if asked_by == "init_from" else ""
        if any(name.endswith(lora.A) for name in theirs) and not any(name.endswith(lora.A) for name in shapes):
            choose = "; it has the adapters of a run with lora: `python -m trainers.export` merges them with their base"
        raise CheckpointError(f"{asked_by}: {weights.path} does not fit the model: {'; '.join(problems[:SHOWN] + more)}{choose}")
    return pairs


def read(
    weights: Weights, pairs: Mapping[str, str], shardings: Mapping[str, Any], dtypes: Mapping[str, Any] | None = None
) -> dict[str, jax.Array]:
    """Returns the parameters `pairs` (here -> there) with these shardings, by their names here. Each process reads what its
    devices need. Files and folders of Hugging Face are cast to `dtypes` while they are read; all else is as it is stored. Raises
    whatever reading raises."""
    cast = dtypes or {}
    if weights.memory is not None:
        return {here: _from_memory(weights.memory[there], shardings[here]) for here, there in pairs.items()}
    if weights.folder is not None:
        return {here: hugging_face.read(weights.folder, there, shardings[here], cast.get(here)) for here, there in pairs.items()}
    if weights.is_file:
        return {here: _from_file(weights, there, shardings[here], cast.get(here)) for here, there in pairs.items()}
    folder = weights.path / manifest.STATE_FOLDER
    found = _array_files().read(folder, _in_state(weights, pairs, shapes_there(weights, pairs, shardings)))
    return {here: _at(found, weights.parameters[there].key) for here, there in pairs.items()}


def load(weights: Weights, wanted: Any) -> Any:
    """Returns the parameters in the tree of a model, as arrays with the shardings and the types of `wanted`, in one process.
    Their contents are checked where they have fingerprints. Raises CheckpointError if they are not those of the model, or cannot
    be read, and CheckpointUnavailableError if a bucket does not answer, or they are not what was saved."""
    leaves = {parameter_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(wanted)}
    pairs = match(weights, {name: leaf.shape for name, leaf in leaves.items()}, InitConfig(path=str(weights.path)))
    shardings = {name: leaf.sharding for name, leaf in leaves.items()}
    try:
        with outages_told(weights.path):
            arrays = read(weights, pairs, shardings)
    except (CheckpointUnavailableError, OSError):
        raise
    except Exception as error:  # Orbax raises whatever its layers raise
        raise CheckpointError(f"{weights.path} is not whole: {one_line(error)}") from error
    one: Any = next(iter(shardings.values()))
    check(weights, pairs, arrays, replicated(one.mesh) if hasattr(one, "mesh") else one)
    for name in arrays:  # one after the other: both kinds of all parameters need not fit
        arrays[name] = arrays[name].astype(leaves[name].dtype)
    return jax.tree_util.tree_map_with_path(lambda path, _: arrays[parameter_path(path)], wanted)


@functools.cache
def _array_files() -> ArrayFiles:
    return ArrayFiles()


def _from_memory(array: np.ndarray, sharding: Any) -> jax.Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: np.ascontiguousarray(array[index]))


def shapes_there(weights: Weights, pairs: Mapping[str, str], shardings: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and the types of the parameters as they are stored, with shardings, by their names here."""
    stored = {here: weights.parameters[there] for here, there in pairs.items()}
    return {
        here: jax.ShapeDtypeStruct(each.shape, jnp.dtype(each.dtype), sharding=shardings[here]) for here, each in stored.items()
    }


def _in_state(weights: Weights, pairs: Mapping[str, str], leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the leaves as the state there has them, in nested dicts."""
    tree: dict[str, Any] = {}
    for here, there in pairs.items():
        *folders, last = weights.parameters[there].key
        within = tree
        for name in folders:
            within = within.setdefault(name, {})
        within[last] = leaves[here]
    return tree


def has_fingerprints(weights: Weights, pairs: Mapping[str, str]) -> bool:
    """Whether the contents of the parameters can be checked: a file has no fingerprints."""
    return all(weights.parameters[there].fingerprint is not None for there in pairs.values())


def check(weights: Weights, pairs: Mapping[str, str], arrays: Mapping[str, jax.Array], replicated: Any) -> None:
    """Raises CheckpointUnavailableError, on all hosts, if the arrays are not what was saved. All hosts must call this."""
    if has_fingerprints(weights, pairs):
        compare(weights, pairs, jax.jit(fingerprints, out_shardings=replicated)(dict(arrays)).tolist())


def compare(weights: Weights, pairs: Mapping[str, str], rows: list[list[int]]) -> None:
    """Raises CheckpointUnavailableError if fingerprints of the arrays that were read, in the order of their sorted names, as JAX
    flattens a dict, are not those that were saved."""
    found = zip(sorted(pairs), rows, strict=True)
    if wrong := [name for name, row in found if tuple(row) != weights.parameters[pairs[name]].fingerprint]:
        raise CheckpointUnavailableError(
            f"{weights.path}: the contents of {', '.join(wrong[:3])} are not those that were saved (fingerprints differ)"
        )


def _look_at_checkpoint(path: Place) -> Weights:
    try:
        meta = check_files(path)
        if meta.get("fingerprints") is None:  # what `save_pretrained` wrote: here the digests of the arrays' files must do
            check_files(path, digest_up_to=None)
    except manifest.UnfinishedError as error:
        if not path.is_dir():
            raise CheckpointMissingError(f"there is no {path}") from error
        raise CheckpointError(f"{path}: {error}") from error
    except manifest.DamagedError as error:
        raise CheckpointUnavailableError(f"{path} is not whole: {error}") from error
    return _of_checkpoint(path, meta)


def _of_checkpoint(path: Place, meta: Mapping[str, Any]) -> Weights:
    step = meta.get("batch_index")
    return Weights(path, stored(meta), "" if step is None else f"step {step}", meta=meta)


def stored(meta: Mapping[str, Any]) -> dict[str, Stored]:
    """Returns the parameters of a checkpoint with this meta, by name."""
    fingerprints_there, parameters = meta.get("fingerprints"), {}
    for name, shown in meta["shapes"].items():
        if not (part := part_of(name)):
            continue
        names = re.findall(r"\['?(.*?)'?\]", name)
        dtype, _, numbers = shown.rstrip("]").partition("[")
        shape = tuple(int(number) for number in numbers.split(",") if number.strip())
        fingerprint = tuple(fingerprints_there[name]) if fingerprints_there else None
        parameters[".".join(names)] = Stored((part, *names), shape, dtype, fingerprint)
    return parameters


def _look_at_folder(path: Place) -> Weights:
    folder = hugging_face.look(path)
    parameters = {name: Stored((name,), leaf.shape, leaf.dtype) for name, leaf in folder.leaves.items()}
    without = "; its encoder of images is left out" if folder.left_out else ""
    return Weights(path, parameters, f"{folder.config.family} of Hugging Face{without}", folder)


def _look_at_adapter(path: Place, adapted: Adapted | None) -> Weights:
    if adapted is None:
        raise CheckpointError(
            f"{path} is an adapter of PEFT: a run with the section lora begins with it, by init_from; for all else merge it with "
            "its base first (PEFT's merge_and_unload)"
        )
    try:
        arrays = peft_in.read(model_files.here(path, lambda name: name in peft_in.FILES), *adapted)
    except (UsageError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    return _in_memory(Weights(path, {}, "an adapter of PEFT"), arrays)


def _in_memory(weights: Weights, arrays: Mapping[str, np.ndarray]) -> Weights:
    parameters = {name: Stored((name,), array.shape, array.dtype.name) for name, array in arrays.items()}
    return dataclasses.replace(weights, parameters=parameters, memory=arrays)


def _look_at_file(path: Place) -> Weights:
    head = tensor_files.head(path)
    about, parameters = head.metadata, {}
    for name, (dtype, shape) in head.headers.items():
        if dtype not in DTYPES:
            raise CheckpointError(f"{path}: {name} is {dtype}: expected one of {', '.join(DTYPES)}")
        parameters[name] = Stored((name,), shape, DTYPES[dtype])
    return Weights(path, parameters, f"step {about['batch_index']}" if "batch_index" in about else "")


def _from_file(weights: Weights, name: str, sharding: Any, dtype: Any = None) -> jax.Array:
    read_before: dict[Any, np.ndarray] = {}

    def part(index: Any) -> np.ndarray:
        # Once for all devices of this host that have the same part.
        key = tuple((place.start, place.stop) for place in index)
        if key not in read_before:
            value = tensor_files.read(weights.path, name, index)
            read_before[key] = value if dtype is None else value.astype(dtype, copy=False)
        return read_before[key]

    return jax.make_array_from_callback(weights.parameters[name].shape, sharding, part)


def _at(tree: Any, key: tuple[str, ...]) -> Any:
    for name in key:
        tree = tree[name]
    return tree


# ---------------------------------------------------------------------- a whole model, in one process


def open_whole(checkpoint: Place, base: str | None = None, *, alone: bool = False, host: int = 0, num_hosts: int = 1) -> Weights:
    """Returns the parameters of a checkpoint that are evaluated, with the model's other state. Every byte is checked first, by
    the hosts together, and `Weights.here` reads one array at a time. In memory are the averages of a schedule-free optimizer, and
    of a run with LoRA its base with the adapters merged, each weight in the type that it is stored with there (`base`: where that
    is now); `alone` gives the adapters as they are. Raises CheckpointError that names the damage, and what `base_of` raises."""
    found = _of_checkpoint(checkpoint, _checked(checkpoint, host, num_hosts))
    if found.averages:
        found = _in_memory(found, _averages(found))
    config = adapters_of(found.meta)
    return found if config is None or alone else _in_memory(found, _with_base(found, config, base_of(found.meta, base)))


def _checked(checkpoint: Place, host: int, num_hosts: int) -> dict[str, Any]:
    """Returns the meta. The files are checked, of several hosts each its share."""
    try:
        with reading(checkpoint):
            content = manifest.read(checkpoint)
            if problem := next(content.problems(checkpoint, sorted(content.files)[host::num_hosts], digest_up_to=None), ""):
                raise manifest.DamagedError(problem)
            return manifest.read_meta(checkpoint)
    except manifest.DamagedError as error:
        raise CheckpointError(f"{checkpoint} cannot be exported: {error}") from error


def _averages(found: Weights) -> dict[str, np.ndarray]:
    with outages_told(found.path):
        parts = _array_files().read_parts(found.path / manifest.STATE_FOLDER, [PART, OPTIMIZER])
    averaged = flat(parameters_to_evaluate(parts[OPTIMIZER], parts[PART]))
    return {
        name: averaged[name] if name in averaged and 0 not in stored.shape else found.here(name)
        for name, stored in found.parameters.items()
    }


def adapters_of(meta: Mapping[str, Any]) -> LoraConfig | None:
    """Returns the settings of the adapters that a checkpoint has in place of a model; None if it has the model itself."""
    lora = meta["arguments"].get("lora")
    return None if lora is None else from_dict(LoraConfig, lora)


def base_of(meta: Mapping[str, Any], instead: str | None = None) -> Weights:
    """Returns the base of adapters; `instead` says where it has gone. Raises CheckpointError if it is not what the adapters were
    trained on, and CheckpointUnavailableError if it cannot be read."""
    origin = meta[META][BASE]
    found = open_model(find(instead or origin["checkpoint"]))
    if (digest := found.digest()) != origin["digest"]:
        raise CheckpointError(
            f"the adapters were trained on {origin['checkpoint']} (digest {origin['digest'][:12]}), and {found.path} is not that "
            f"(digest {digest[:12]}): give what they were trained on, with --base PATH"
        )
    return found


def _with_base(adapters: Weights, config: LoraConfig, base: Weights) -> dict[str, np.ndarray]:
    base, named = open_whole(base.path, alone=True) if base.meta else base, adapters.all_here()
    # The adapted weights, and those that were trained whole.
    targets = {name.removesuffix(lora.A) for name in named if not name.endswith(lora.B)}
    if missing := sorted(targets - base.parameters.keys()):
        raise CheckpointError(f"{base.path} has no {', '.join(missing[:5])}, which have adapters or were trained whole")
    return {name: lora.merged(name, base.here(name), named, config) for name in base.parameters}
