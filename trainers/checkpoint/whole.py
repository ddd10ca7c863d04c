"""The whole model of a checkpoint as NumPy arrays in this process: of a run with LoRA, its base with the adapters."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from gangway.errors import CheckpointError
from gangway.storage.store import Place
from trainers.checkpoint import hugging_face, manifest, tensor_files, weights
from trainers.checkpoint.array_io import ArrayFiles, outages_told
from trainers.checkpoint.model_only import PART, STATE, parts_in
from trainers.config import LoraConfig
from trainers.config.arguments import from_dict
from trainers.config.frozen import BASE
from trainers.models.hf.weights import flat
from trainers.models.lora import A, B, merged
from trainers.optim.optimizers import SCHEDULE_FREE, parameters_to_evaluate
from trainers.step.state import arrays_of_model

META = "frozen"
"""The key in the meta of a checkpoint: which weights it was trained with that it does not have. Under the name of each: `path`
(the setting), `checkpoint` (what was read), `digest`."""
Shape = tuple[int, ...]
OPTIMIZER = "opt_state"
"""The name of the optimizer's state, in a TrainState and in the files."""


def read(checkpoint: Place) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (the parameters to evaluate, with the model's other state; meta); of a run with LoRA the adapters alone. Every
    byte is checked first. Raises CheckpointError that names the damage."""
    meta = _checked(checkpoint)
    return _arrays(checkpoint, meta), meta


def open_parameters(
    checkpoint: Place, base: str | None = None, host: int = 0, num_hosts: int = 1
) -> tuple[dict[str, tuple[Shape, str]], Callable[[str], np.ndarray], dict[str, Any]]:
    """Returns (shape and type of each array that `read_merged` returns, by name; a function that reads one; meta). One array is
    in memory at a time, but for a run with LoRA or with averages that are computed from two trees. Every byte is checked first,
    by the hosts together. Raises like `read_merged`."""
    meta = _checked(checkpoint, host, num_hosts)
    config = adapters_of(meta)
    if config is not None or meta["arguments"]["optimizer"]["name"] == SCHEDULE_FREE:
        params = _arrays(checkpoint, meta)
        arrays = flat(params if config is None else _with_base(params, config, base_path(meta, base)))
        return {name: (array.shape, array.dtype.name) for name, array in arrays.items()}, arrays.__getitem__, meta
    found = weights.stored(meta)
    files, folder = ArrayFiles(), checkpoint / manifest.STATE_FOLDER
    shapes = {name: (stored.shape, stored.dtype) for name, stored in found.items()}

    def read_one(name: str) -> np.ndarray:
        stored = found[name]
        with outages_told(folder):
            return files.read_one(folder, stored.key) if 0 not in stored.shape else _empty(stored)

    return shapes, read_one, meta


def _checked(checkpoint: Place, host: int = 0, num_hosts: int = 1) -> dict[str, Any]:
    """Returns the meta. The files are checked, of several hosts each its share."""
    try:
        with weights.reading(checkpoint):
            content = manifest.read(checkpoint)
            if problem := next(content.problems(checkpoint, sorted(content.files)[host::num_hosts], digest_up_to=None), ""):
                raise manifest.DamagedError(problem)
            return manifest.read_meta(checkpoint)
    except manifest.DamagedError as error:
        raise CheckpointError(f"{checkpoint} cannot be exported: {error}") from error


def _arrays(checkpoint: Place, meta: Mapping[str, Any]) -> dict[str, Any]:
    with outages_told(checkpoint):
        return _arrays_of(checkpoint, meta)


def _arrays_of(checkpoint: Place, meta: Mapping[str, Any]) -> dict[str, Any]:
    arrays, folder = ArrayFiles(), checkpoint / manifest.STATE_FOLDER
    parts = arrays.read_parts(folder, parts_in(meta["shapes"]))
    params = parts[PART]
    # Only then: for other optimizers reading their state would be wasted time and memory.
    if meta["arguments"]["optimizer"]["name"] == SCHEDULE_FREE:
        params = parameters_to_evaluate(arrays.read_parts(folder, [OPTIMIZER])[OPTIMIZER], params)
    parts = {**parts, PART: params}
    for stored in weights.stored(meta).values():
        if 0 in stored.shape:  # the files have None there
            *folders, last = stored.key
            functools.reduce(operator.getitem, folders, parts)[last] = _empty(stored)
    return arrays_of_model(parts[PART], parts.get(STATE, {}))


def _empty(stored: weights.Stored) -> np.ndarray:
    return np.zeros(stored.shape, jnp.dtype(stored.dtype))


def read_merged(checkpoint: Place, base: str | None = None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns what `read` returns, with the adapters of a run with LoRA merged with its base, each weight in the type that it is
    stored with there. `base` says where the base is now. Raises like `read` and `base_path`."""
    params, meta = read(checkpoint)
    config = adapters_of(meta)
    return (params if config is None else _with_base(params, config, base_path(meta, base))), meta


def adapters_of(meta: Mapping[str, Any]) -> LoraConfig | None:
    """Returns the settings of the adapters that a checkpoint has in place of a model; None if it has the model itself."""
    lora = meta["arguments"].get("lora")
    return None if lora is None else from_dict(LoraConfig, lora)


def base_path(meta: Mapping[str, Any], instead: str | None = None) -> Place:
    """Returns where the base is; `instead` says where it has gone. Raises CheckpointError if it is not what the adapters were
    trained on, and CheckpointUnavailableError if it cannot be read."""
    origin = meta[META][BASE]
    path = weights.find(instead or origin["checkpoint"])
    digest = weights.look(path).digest()
    if digest != origin["digest"]:
        raise CheckpointError(
            f"the adapters were trained on {origin['checkpoint']} (digest {origin['digest'][:12]}), and {path} is not that "
            f"(digest {digest[:12]}): give what they were trained on, with --base PATH"
        )
    return path


def _with_base(adapters: Any, config: LoraConfig, base: Place) -> dict[str, Any]:
    named, params = flat(adapters), dict[str, Any]()
    # The adapted weights, and those that were trained whole.
    targets = {name.removesuffix(A) for name in named if not name.endswith(B)}
    for name, weight in _weights(base):
        targets.discard(name)
        *folders, last = name.split(".")
        within = params
        for folder in folders:
            within = within.setdefault(folder, {})
        within[last] = merged(name, weight, named, config)
    if targets:
        raise CheckpointError(f"{base} has no {', '.join(sorted(targets)[:5])}, which have adapters or were trained whole")
    return params


def _weights(path: Place) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the weights at `path`, one of `weights.find`, by name."""
    found = weights.look(path)
    if found.folder is not None:
        for name in found.parameters:
            yield name, hugging_face.read_whole(found.folder, name)
    elif found.is_file:
        for name in found.parameters:
            yield name, tensor_files.read(path, name)
    else:
        yield from flat(read(path)[0]).items()
