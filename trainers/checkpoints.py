"""Checkpoints by Orbax: asynchronous, atomic, fingerprinted, and restored from the newest one that is whole.

A checkpoint of step S is the folder `checkpoints/S` with two items: `state` (the arrays of the TrainState) and `meta` (one
readable JSON: where the data stands, the seed, the fingerprint of every leaf, and what produced it).
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from etils import epath
from jax.sharding import Mesh
from orbax.checkpoint import v1 as ocp

from trainers import agree
from trainers.arguments import CheckpointConfig
from trainers.compile import Program, ProgramStore
from trainers.errors import CheckpointError
from trainers.fingerprint import fingerprints, leaf_names
from trainers.mesh import replicated
from trainers.state import TrainState

FORMAT = 1
META_FILE = "data.json"
ASYNC_TIMEOUT_S = 60
"""How long a save waits for the other hosts before it is given up as failed."""


@dataclass(frozen=True)
class Restored:
    state: TrainState
    meta: dict[str, Any]
    skipped: list[dict[str, Any]] = field(default_factory=list)
    """Newer checkpoints that were not whole: `step` and `why`."""


class CheckpointManager:
    """Saves and restores the state of one run. All hosts must call `save`, `restore`, `wait` and `close` alike.

    on_saved(step, path) and on_failed(step, error) are called from a background thread when a save has ended.
    """

    def __init__(
        self,
        folder: str,
        config: CheckpointConfig,
        mesh: Mesh,
        store: ProgramStore,
        *,
        on_saved: Callable[[int, str], None],
        on_failed: Callable[[int, str], None],
        note: Callable[[str], None],
    ):
        # What Orbax's threads log at length they raise as well, and what is raised is reported.
        logging.getLogger("absl").setLevel(logging.CRITICAL)
        self.folder = epath.Path(folder if "://" in folder else os.path.abspath(folder))
        self.on_saved, self.on_failed = on_saved, on_failed
        self.damaged: set[int] = set()
        self.last_saved_step: int | None = None
        jitted = jax.jit(fingerprints, out_shardings=replicated(mesh))
        self._fingerprints = Program("fingerprints", jitted, store, note)
        self._context = _context()
        self._orbax: ocp.training.Checkpointer | None = None
        self._keep_last = config.save_total_limit
        self._watcher: threading.Thread | None = None

    def save(self, step: int, state: TrainState, meta: dict[str, Any]) -> None:
        """Starts a save; returns when the arrays were copied, so that `state` may be donated at once.

        Waits for the save before it, if that is still under way. A save that fails is reported, and does not stop training.
        """
        self.wait()
        if step == self.last_saved_step:
            return
        values = np.asarray(self.fingerprint(state)).tolist()
        meta = {**meta, "format": FORMAT, "step": step, "fingerprints": dict(zip(leaf_names(state), values, strict=True))}
        meta["shapes"] = _shapes(state)
        try:
            response = self._open().save_checkpointables_async(
                step, {"state": state, "meta": meta}, force=True, overwrite=step in self.damaged
            )
        except Exception as error:  # Orbax raises whatever its layers raise: reported, and the next save tries again
            self._failed(step, error)
            return
        self._watcher = threading.Thread(target=self._watch, args=(step, response), name="checkpoint-watcher", daemon=True)
        self._watcher.start()

    def restore(self, abstract: TrainState) -> Restored | None:
        """The newest checkpoint that is whole, on all hosts the same; None if there is none at all.

        `abstract` gives shapes and shardings: any mesh will do. Raises CheckpointError if the checkpoints are of another model,
        or if there are checkpoints and none of them is whole: starting again from nothing is never done silently.
        """
        steps = agree.from_host0("checkpoints to restore", self.steps())
        skipped: list[dict[str, Any]] = []
        for step in sorted(steps, reverse=True):
            state, meta, problem = self._try(step, abstract)
            if state is not None:
                self.last_saved_step = step
                self.damaged = {bad["step"] for bad in skipped}
                return Restored(state, meta, skipped)
            skipped.append({"step": step, "why": problem})
        if skipped:
            shown = "; ".join(f"step {bad['step']}: {bad['why']}" for bad in skipped)
            raise CheckpointError(
                f"no checkpoint in {self.folder} can be restored ({shown}); to start again from step 0, give the run another name"
            )
        return None

    def steps(self) -> list[int]:
        """Steps with a committed checkpoint, oldest first."""
        if not self.folder.exists():
            return []
        return sorted(int(path.name) for path in self.folder.iterdir() if path.name.isdigit())

    def path(self, step: int) -> str:
        return str(self.folder / str(step))

    def fingerprint(self, state: TrainState) -> jax.Array:
        """uint32[num_leaves, 2], on the device, the same on all hosts. All hosts must call this."""
        return self._fingerprints(state)

    def prepare(self, state: TrainState) -> None:
        """Compiles what saving needs, if restoring has not done it. `state` may be shapes with shardings."""
        if self._fingerprints.compiled is None:
            self._fingerprints.prepare(state)

    def wait(self) -> None:
        """Returns when no save is under way."""
        if self._watcher is not None:
            self._watcher.join()
            self._watcher = None

    def close(self) -> None:
        self.wait()
        if self._orbax is not None:
            self._orbax.close()
            self._orbax = None

    def _try(self, step: int, abstract: TrainState) -> tuple[TrainState | None, dict[str, Any], str]:
        """(state, meta, "") if checkpoint `step` is whole on all hosts, else (None, {}, why not)."""
        meta, problem = self._read_meta(step)
        if problem := _first(agree.all_hosts("checkpoint meta", problem)):
            return None, {}, problem
        check_same_model(meta, abstract, self.path(step))
        state: Any = None
        try:
            state = self._open().load_checkpointables(step, {"state": abstract})["state"]
            state = jax.block_until_ready(state)
        except Exception as error:  # Orbax raises whatever its layers raise: anything means that the checkpoint cannot be read
            problem = f"{type(error).__name__}: {error.__cause__ or error}".splitlines()[0][:300]
        if problem := _first(agree.all_hosts("checkpoint arrays", problem)):
            return None, {}, problem
        values = np.asarray(self.fingerprint(state)).tolist()
        names = leaf_names(state)
        wrong = [n for n, value in zip(names, values, strict=True) if meta["fingerprints"].get(n) != value]
        if wrong:
            return None, {}, f"the contents of {', '.join(wrong[:3])} are not those that were saved (fingerprints differ)"
        return state, meta, ""

    def _read_meta(self, step: int) -> tuple[dict[str, Any], str]:
        try:
            # Read as the file it is: through Orbax it takes ten times as long.
            meta = json.loads((self.folder / str(step) / "meta" / META_FILE).read_text())
            if meta["format"] != FORMAT or meta["step"] != step:
                return {}, f"meta says format {meta['format']}, step {meta['step']}: expected {FORMAT}, {step}"
            return meta, ""
        except (OSError, ValueError, KeyError, TypeError) as error:
            return {}, f"meta cannot be read: {type(error).__name__}: {error.__cause__ or error}".splitlines()[0][:300]

    def _open(self) -> ocp.training.Checkpointer:
        if self._orbax is None:
            training = ocp.training
            self._orbax = training.Checkpointer(
                self.folder,
                context=self._context,
                cleanup_tmp_directories=True,
                # When to save is decided in the loop: asking Orbax costs 3 ms a step.
                save_decision_policy=training.save_decision_policies.FixedIntervalPolicy(1),
                preservation_policy=training.preservation_policies.LatestN(self._keep_last),
            )
        return self._orbax

    def _watch(self, step: int, response: Any) -> None:
        try:
            response.result()
        except Exception as error:  # a thread's boundary: recorded and reported, training goes on
            self._failed(step, error)
            return
        self.last_saved_step = step
        self.damaged.discard(step)
        self.on_saved(step, self.path(step))

    def _failed(self, step: int, error: Exception) -> None:
        # After a failed save Orbax keeps the error and raises it again: start afresh.
        self._orbax = None
        self.on_failed(step, f"{type(error).__name__}: {error.__cause__ or error}"[:500])


def check_same_model(meta: dict[str, Any], abstract: TrainState, path: str) -> None:
    """Raises CheckpointError if the checkpoint's arrays are not those of `abstract`."""
    saved, wanted = meta["shapes"], _shapes(abstract)
    different = [name for name in {**saved, **wanted} if saved.get(name) != wanted.get(name)]
    if different:
        shown = "; ".join(f"{n}: {saved.get(n, 'absent')} there, {wanted.get(n, 'absent')} here" for n in different[:3])
        raise CheckpointError(
            f"{path} is a checkpoint of another model or optimizer ({len(different)} arrays differ: {shown}); "
            "restore the settings it was made with, or give the run another name"
        )


def _shapes(state: TrainState) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def _first(problems: list[str]) -> str:
    return next((f"host {host}: {problem}" for host, problem in enumerate(problems) if problem), "")


def _context() -> ocp.Context:
    context = ocp.Context()
    context.async_options.timeout_secs = ASYNC_TIMEOUT_S
    context.array_options.saving.use_compression = False
    context.array_options.saving.use_replica_parallel = False
    registry = ocp.handlers.local_registry()
    registry.add(ocp.handlers.JsonHandler, checkpointable_name="meta")
    context.checkpointables.registry = registry
    return context


def save_to(path: str, state: TrainState, meta: dict[str, Any]) -> None:
    """Writes `state` and `meta` to the new folder `path` and waits. All hosts must call this. Raises if `path` exists."""
    with _context():
        ocp.save_checkpointables(path, {"state": state, "meta": {**meta, "format": FORMAT}})


def load_from(path: str, abstract: TrainState) -> tuple[TrainState, dict[str, Any]]:
    """What `save_to` or a run's checkpoint wrote, with the shapes and shardings of `abstract`."""
    with _context():
        items = ocp.load_checkpointables(path, {"state": abstract, "meta": None})
    return items["state"], items["meta"]
