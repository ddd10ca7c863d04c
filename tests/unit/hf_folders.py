"""Models of Hugging Face as the product reads and writes them, in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gangway.storage.opening import place_of
from trainers.checkpoint import hugging_face, hugging_face_out
from trainers.models.hf.vision_config import Config
from trainers.models.hf.weights import flat


def parameters_of(folder: Path) -> dict[str, np.ndarray]:
    """Returns the parameters that are read from a folder, by our names, such as `layers.query`."""
    found = hugging_face.look(place_of(folder))
    return {name: hugging_face.read_whole(found, name) for name in found.leaves}


def nested(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters as a model has them."""
    tree: dict[str, Any] = {}
    for name, value in parameters.items():
        *path, last = name.split(".")
        at = tree
        for part in path:
            at = at.setdefault(part, {})
        at[last] = value
    return tree


def tensors_of(config: Config, params: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Returns what is written for the parameters of a model, by the names of Hugging Face."""
    parameters = flat(params)
    planned = hugging_face_out.plan(config, {name: (value.shape, str(value.dtype)) for name, value in parameters.items()})
    return {
        tensor.name: np.ascontiguousarray(tensor.value([parameters[name] for name in tensor.parameters])) for tensor in planned
    }
