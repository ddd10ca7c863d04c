"""What a recorder is: where the numbers of a run go, once a publish. Free of JAX."""

from __future__ import annotations

import difflib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from trainers.config.section import PATH


class Distribution(NamedTuple):
    """Of one array: `counts` are those of equal bins from `min` to `max`."""

    mean: float
    std: float
    min: float
    max: float
    counts: tuple[int, ...]


class About(NamedTuple):
    """The run whose numbers are recorded."""

    name: str
    folder: str
    """Of the run, absolute: a recorder writes below it."""
    settings: Mapping[str, Any]
    """The configuration, section by section."""


class Recorder(Protocol):
    """Built as `Class(about: About)`. One thread of its own calls it, so it may wait; what it raises is told, and costs the
    numbers of that publish only.

    After a restart of the run, steps may come again that were recorded before it: with the same numbers, but for those that tell
    times. A recorder that keeps a file of its own should keep each number once.
    """

    def record(self, step: int, metrics: Mapping[str, float], distributions: Mapping[str, Distribution]) -> None:
        """The numbers of one publish by name; an evaluation's (`eval_...`) come apart from those of training."""

    def close(self) -> None:
        """Nothing more comes; what was recorded is to be complete when this returns."""


BUILT_IN = {
    "jsonl": "trainers.recorders.jsonl:JsonLines",
    "tensorboard": "trainers.recorders.tensorboard:TensorBoard",
    "wandb": "trainers.recorders.wandb:WeightsAndBiases",
}
NEEDS = {"tensorboard": ("tensorboardX", "tensorboardX"), "wandb": ("wandb", "gangway[wandb]")}
"""(module, what to install)."""


def problems(names: Sequence[str], storage: str) -> Iterator[str]:
    """What is wrong with the recorders that a configuration names."""
    if "://" in storage and (appending := [name for name in names if name in ("jsonl", "tensorboard")]):
        yield (
            f"recorders: {', '.join(appending)} append to files, which {storage} cannot do: set storage to a local or mounted "
            "folder, or leave them out"
        )
    for name in names:
        if name not in BUILT_IN and not PATH.fullmatch(name):
            allowed = ", ".join([*BUILT_IN, "package.module:Class"])
            near = difflib.get_close_matches(name, BUILT_IN, n=1)
            yield f"recorders: {name!r}: expected one of {allowed}" + (f"; did you mean {near[0]!r}?" if near else "")
        module, install = NEEDS.get(name, (None, None))
        if module is not None and importlib.util.find_spec(module) is None:
            how = f"pip install '{install}', or leave it out"
            yield f"recorders: {name!r} needs the package {module}, which is not installed: {how}"
    if len(set(names)) < len(names):
        yield f"recorders = {list(names)}: expected each once"
