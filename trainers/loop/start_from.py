"""The whole state of another run's checkpoint, which a run begins with: `checkpoint.start_from`.

A run that starts again before its own first checkpoint begins with the same one, even if the other run has newer ones by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

import jax

from gangway.errors import CheckpointError, CheckpointUnavailableError
from gangway.storage.documents import DocumentKind
from gangway.storage.opening import place_of
from gangway.storage.row import CHECKPOINTS
from gangway.storage.store import Place
from trainers import runtime
from trainers.checkpoint import going_on, layout, manifest, weights
from trainers.checkpoint.standalone import load_from
from trainers.config.arguments import TrainingArguments
from trainers.loop.init_from import from_host0, together
from trainers.loop.record import Record
from trainers.loop.saver import TIME_USED
from trainers.step.state import TrainState

KEY = "checkpoint.start_from"


class _Begun(TypedDict):
    begun: dict[str, str]


RECORD = Record(
    DocumentKind("start_from.json", _Begun, f"without a checkpoint, the run begins with what {KEY} names now"), "begun"
)
"""What the run began with: the setting, the checkpoint, and its digest."""
NOT_TAKEN = (TIME_USED, "init_from")
"""What the other run's checkpoint records of that run alone."""


class FromCheckpoint:
    """The beginning of a run with `checkpoint.start_from`."""

    origin: dict[str, Any] | None = None

    def __init__(self, arguments: TrainingArguments, run_folder: str, abstract: TrainState):
        """`abstract` are the shapes of a state, with shardings."""
        self._arguments, self._run_folder, self._abstract = arguments, run_folder, abstract
        self.meta: dict[str, Any] = {}

    def make(self) -> TrainState:
        """Returns the state. All hosts must call this. Raises CheckpointError if it is damaged or of another model, and
        CheckpointUnavailableError if it cannot be read."""
        source = str(self._arguments.checkpoint.start_from)
        chosen = from_host0(lambda: _choose(source, self._run_folder), KEY)
        state, meta = load_from(chosen["checkpoint"], self._abstract)
        together(KEY, lambda: RECORD.write(self._run_folder, chosen) if jax.process_index() == 0 else None)
        if jax.process_index() == 0 and not self.meta:
            runtime.current().note(described(chosen["checkpoint"], meta, self._arguments))
        self.meta = {name: value for name, value in meta.items() if name not in NOT_TAKEN}
        return state

    def continues(self, meta: Mapping[str, Any]) -> str:
        begun = from_host0(lambda: RECORD.read(self._run_folder), KEY)
        return "" if begun is not None and begun["source"] == self._arguments.checkpoint.start_from else KEY


def found(source: str) -> tuple[Place, dict[str, Any]]:
    """Returns the checkpoint that RUN, RUN/STEP or the path of a checkpoint stands for, and its meta. Raises CheckpointError, or
    CheckpointUnavailableError if it cannot be read."""
    with weights.reading(source):
        path = weights.find(_with_step(place_of(source)).url)
        if not (path / manifest.MANIFEST_FILE).exists() or path.parent.name == layout.MODELS_FOLDER:
            raise CheckpointError(f"{path} has parameters alone, and no whole state: begin with them by init_from={path}")
        try:
            return path, manifest.read_meta(path)
        except manifest.DamagedError as error:
            raise CheckpointError(f"{path} is not whole: {error}") from error


def _with_step(path: Place) -> Place:
    """Returns where the checkpoint is that RUN/STEP stands for; another path as it is. Raises OSError."""
    is_step = path.name.isdecimal() and path.parent.name not in (CHECKPOINTS, layout.MODELS_FOLDER)
    return path.parent / CHECKPOINTS / path.name if is_step and not path.is_dir() else path


def described(path: Any, meta: Mapping[str, Any], arguments: TrainingArguments) -> str:
    """Returns the line about a beginning, with the settings that make it another experiment than the one before."""
    changes = [change for change in going_on.changes(meta, arguments) if change.effect == going_on.ANOTHER]
    others = f"; these settings were others there: {'; '.join(map(str, changes[: going_on.SHOWN]))}" if changes else ""
    return f"{KEY}: the run begins with the whole state of {path}, at step {meta['batch_index']}{others}"


def _choose(source: str, run_folder: str) -> dict[str, str]:
    """Returns the checkpoint and its digest, on host 0."""
    begun = RECORD.read(run_folder)
    again = begun if begun is not None and begun["source"] == source else None
    hint = "; the run began with it: bring it back, or give the run another name" if again else ""
    try:
        path, _ = found(source if again is None else again["checkpoint"])
        digest = weights.open_model(path).digest()
    except (CheckpointError, CheckpointUnavailableError) as error:
        raise type(error)(f"{KEY}: {error}{hint}") from error
    if again is not None and digest != again["digest"]:
        raise CheckpointError(f"{KEY}: {path} is not what it was{hint}")
    return {"source": source, "checkpoint": str(path), "digest": digest}
