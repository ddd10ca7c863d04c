"""Loads the parameters that `init_from` names, on all hosts together, and remembers in the run's folder which they were.

A run that starts again before its first checkpoint begins with the same ones, even if the other run has newer checkpoints now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import jax

from gangway.errors import CheckpointError, CheckpointMissingError, CheckpointUnavailableError
from gangway.storage.documents import DocumentKind
from gangway.storage.opening import place_of
from trainers.checkpoint import weights
from trainers.config.weights import InitConfig, from_plain, plain
from trainers.loop.record import Record
from trainers.optim.param_groups import parameter_path
from trainers.parallel.mesh import replicated
from trainers.runtime import multihost
from trainers.runtime.multihost import first_problem, of_host0, one_line


class _Begun(TypedDict):
    begun: dict[str, Any]


RECORD = Record(
    DocumentKind("init_from.json", _Begun, "without a checkpoint, the run begins with what init_from names now"), "begun"
)
"""What the run began with: the settings, the checkpoint or file, and its digest."""
KINDS = {kind.__name__: kind for kind in (CheckpointError, CheckpointMissingError, CheckpointUnavailableError)}
"""The errors of host 0 that all hosts raise."""


@dataclass(frozen=True)
class Loaded:
    arrays: dict[str, jax.Array]
    """By the names of the parameters, with the types that they are stored with."""
    origin: dict[str, Any]
    """What was loaded, as JSON: the settings, `checkpoint` and `digest`."""
    said: str
    """One line about it."""


def load(
    config: InitConfig,
    origin: Mapping[str, Any] | None,
    run_folder: str,
    params: Any,
    adapted: weights.Adapted | None = None,
) -> Loaded:
    """Loads parameters with the shardings of `params`, shapes of the whole model. `origin` is what the run began with before,
    which must be found again; None: the record in the run's folder says it. `adapted`: of a run with LoRA, for adapters of PEFT.
    All hosts must call this.

    Raises CheckpointError if the parameters do not fit, or have changed, and CheckpointUnavailableError if they cannot be read;
    on all hosts alike.
    """
    wanted = {parameter_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    chosen = from_host0(lambda: _choose(config, origin, run_folder, adapted))
    found = together("init_from", lambda: weights.open_model(place_of(chosen["checkpoint"]), adapted))
    # The same on all hosts: each has read the same document.
    pairs = weights.match(found, {name: leaf.shape for name, leaf in wanted.items()}, config)
    arrays = together("init_from", lambda: weights.read(found, pairs, {name: leaf.sharding for name, leaf in wanted.items()}))
    weights.check(found, pairs, arrays, replicated(next(iter(arrays.values())).sharding.mesh))
    begun = {**plain(config), **chosen}
    # Before the first step: from here on each start finds the same parameters.
    together("init_from", lambda: RECORD.write(run_folder, begun) if jax.process_index() == 0 else None)
    fresh = [name for name in wanted if name not in pairs]
    about = ", ".join([*([found.about] if found.about else []), f"digest {chosen['digest'][:12]}"])
    said = f"init_from: {len(pairs)} of {len(wanted)} parameters are those of {found.path} ({about})"
    return Loaded(arrays, begun, said + (f"; as in a new run: {', '.join(fresh)}" if fresh else ""))


def found(path: str) -> str:
    """Returns the checkpoint or file that `path` stands for, as host 0 sees it. Raises CheckpointError, or
    CheckpointUnavailableError, on all hosts alike."""
    return from_host0(lambda: str(weights.find(path)))


def _choose(
    config: InitConfig, origin: Mapping[str, Any] | None, run_folder: str, adapted: weights.Adapted | None
) -> dict[str, str]:
    """Returns the checkpoint or file, and its digest, on host 0."""
    origin = origin or _recorded(run_folder, config)
    again = "; the run began with it: bring it back, or give the run another name" if origin else ""
    try:
        path = weights.find(config.path if origin is None else origin["checkpoint"])
        digest = weights.open_model(path, adapted).digest()
    except (CheckpointError, CheckpointUnavailableError) as error:
        raise type(error)(f"init_from: {error}{again}") from error
    except OSError as error:
        raise CheckpointUnavailableError(f"init_from: {config.path} cannot be read: {error.strerror or error}") from error
    if origin is not None and digest != origin["digest"]:
        raise CheckpointError(f"init_from: {path} is not what it was{again}")
    return {"checkpoint": str(path), "digest": digest}


def _recorded(run_folder: str, config: InitConfig) -> dict[str, Any] | None:
    """Returns what the run began with, if that was with these settings."""
    record = RECORD.read(run_folder)
    # With other settings it is another beginning: there is no checkpoint yet that the old one has led to.
    return record if record is not None and from_plain(record) == config else None


def from_host0(work: Callable[[], Any], what: str = "init_from") -> Any:
    """Returns what `work` returns on host 0, as JSON has it. Raises its error on all hosts: one of KINDS. All hosts must call
    this."""
    answer: dict[str, Any] | None = None
    if jax.process_index() == 0:
        try:
            answer = {"value": work()}
        except tuple(KINDS.values()) as error:
            answer = {"problem": str(error), "kind": type(error).__name__}
    answer = multihost.from_host0(f"what {what} names", answer)
    if "problem" in answer:
        raise KINDS[answer["kind"]](of_host0(answer["problem"]))
    return answer["value"]


def together(what: str, work: Callable[[], Any]) -> Any:
    """Returns what `work` returns. If it fails on one host, it has failed on all: CheckpointUnavailableError, which begins with
    the name of the setting, `what`. All hosts must call this."""
    value, problem = None, ""
    try:
        value = work()
    except Exception as error:  # Orbax raises whatever its layers raise; a host that raised alone would leave the others waiting
        problem = str(error) if isinstance(error, tuple(KINDS.values())) else one_line(error)
    if problem := first_problem(multihost.all_hosts(what, problem)):
        raise CheckpointUnavailableError(f"{what}: {problem}")
    return value
