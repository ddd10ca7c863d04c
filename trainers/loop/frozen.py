"""Reads the frozen weights of a run at each start of a process, on all hosts together, and remembers which they are.

A run that goes on does so with the same weights: their digest is in each checkpoint. A folder of a run stands for its newest
checkpoint at the first start; later starts take that one again, even if there are newer ones by then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypedDict

import jax

from gangway.errors import CheckpointError, CheckpointUnavailableError
from gangway.storage.documents import DocumentKind
from gangway.storage.opening import place_of
from trainers.checkpoint import weights
from trainers.checkpoint.fingerprints import fingerprints
from trainers.checkpoint.weights import META
from trainers.config import InitConfig
from trainers.loop.init_from import from_host0, together
from trainers.loop.record import Record
from trainers.optim.param_groups import parameter_path
from trainers.parallel.mesh import replicated
from trainers.parallel.platform import wait_for_device
from trainers.runtime.executables import Program, ProgramStore

Origins = dict[str, dict[str, str]]


class _Frozen(TypedDict):
    frozen: Origins


RECORD = Record(
    DocumentKind("frozen.json", _Frozen, "without a checkpoint, the run begins with the frozen weights that are named now"), META
)
"""Which weights a start before the first checkpoint takes again."""


@dataclass(frozen=True)
class Source:
    path: str
    asked_by: str
    """The setting that names the path, for errors."""
    shapes: Any
    """The shapes of the weights, with types and shardings."""

    @property
    def named(self) -> dict[str, Any]:
        return {parameter_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(self.shapes)}


@dataclass(frozen=True)
class _Found:
    source: Source
    weights: weights.Weights
    pairs: dict[str, str]
    program: Program | None
    """Checks and casts what was read; None: there are no fingerprints to check, and it was cast on the way."""


class FrozenWeights:
    """Arguments of the compiled steps (`trainers.runtime.executables.Bound`). All hosts must call its methods alike."""

    def __init__(self, sources: Mapping[str, Source], run_folder: str, programs: ProgramStore, note: Callable[[str], None]):
        self._sources, self._run_folder, self._programs, self._note = dict(sources), run_folder, programs, note
        self._origins: Origins = {}
        self._expected: Origins = {}
        self._found: dict[str, _Found] = {}
        self._reading: Future[dict[str, dict[str, jax.Array]]] | None = None
        self._arrays: dict[str, Any] | None = None

    @property
    def origins(self) -> Origins:
        """What was read, by name: see META. It is read now, if it was not."""
        _ = self.arrays
        return self._origins

    @property
    def shapes(self) -> tuple[Any, ...]:
        return ({name: source.shapes for name, source in self._sources.items()},)

    @property
    def arrays(self) -> tuple[dict[str, Any]]:
        """The weights by name. They are read now, if they were not."""
        if self._arrays is None:
            self.finish()
        assert self._arrays is not None
        return (self._arrays,)

    def begin(self) -> None:
        """Finds the weights, and begins to read them on a thread. Raises CheckpointError if they do not fit, and
        CheckpointUnavailableError if they cannot be read; on all hosts alike."""
        self._origins = from_host0(lambda: {name: self._choose(name) for name in self._sources}, "frozen")
        self._found = {name: self._look(name, source) for name, source in self._sources.items()}
        self._reading = Future()
        # A daemon: a process that fails meanwhile does not wait for gigabytes.
        threading.Thread(target=self._read, args=(self._reading,), name="frozen weights", daemon=True).start()

    def check(self, meta: Mapping[str, Any]) -> None:
        """Raises CheckpointError if the checkpoint with this meta was trained with other weights. Before `begin`: what was
        recorded there is what will be read."""
        self._expected = meta.get(META) or {}
        for name, origin in self._origins.items():
            check_same(self._sources[name].asked_by, self._expected.get(name), origin)

    def finish(self, *, record: bool = False) -> None:
        """Waits until the weights are on the devices. With `record` the run's folder says from now on which they are. Raises
        like `begin`."""
        if self._reading is None and self._arrays is None:
            self.begin()
        if (reading := self._reading) is not None:
            read = together("frozen", reading.result)
            self._reading = None
            self._arrays = {name: self._placed(found, read.pop(name)) for name, found in self._found.items()}
        if record:
            together("frozen", lambda: self._record() if jax.process_index() == 0 else None)

    def said(self) -> list[str]:
        """Returns one line about the weights of each name."""
        return [
            f"{self._sources[name].asked_by}: {len(self._found[name].pairs)} frozen weights are those of {origin['checkpoint']} "
            f"(digest {origin['digest'][:12]})"
            for name, origin in self._origins.items()
        ]

    def _choose(self, name: str) -> dict[str, str]:
        """Returns the origin of the weights of a name, on host 0."""
        source, asked_by = self._sources[name], self._sources[name].asked_by
        expected = self._expected.get(name)
        before = expected or self._recorded().get(name)
        again = before if before is not None and before["path"] == source.path else None
        bring = "; the run has been trained with it: bring it back, or give the run another name" if again else ""
        try:
            path = weights.find(source.path if again is None else again["checkpoint"])
            origin = {"path": source.path, "checkpoint": str(path), "digest": weights.open_model(path).digest()}
        except (CheckpointError, CheckpointUnavailableError) as error:
            raise type(error)(f"{asked_by}: {error}{bring}") from error
        except OSError as error:
            raise CheckpointUnavailableError(f"{asked_by}: {source.path} cannot be read: {error.strerror or error}") from error
        # The record counts for the same path alone: without a checkpoint, other settings are another beginning.
        check_same(asked_by, expected or again, origin)
        return origin

    def _look(self, name: str, source: Source) -> _Found:
        found = together(source.asked_by, lambda: weights.open_model(place_of(self._origins[name]["checkpoint"])))
        wanted = source.named
        # The same on all hosts: each has read the same document.
        shapes = {name: leaf.shape for name, leaf in wanted.items()}
        pairs = weights.match(found, shapes, InitConfig(path=source.path), source.asked_by)
        if not weights.has_fingerprints(found, pairs):
            return _Found(source, found, pairs, None)

        def checked(arrays: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
            return {key: array.astype(wanted[key].dtype) for key, array in arrays.items()}, fingerprints(arrays)

        shardings = {key: leaf.sharding for key, leaf in wanted.items()}
        mesh = next(iter(shardings.values())).mesh
        jitted = jax.jit(checked, out_shardings=(shardings, replicated(mesh)), donate_argnums=0)
        program = Program(f"frozen_{name}", jitted, self._programs, self._note)
        program.load_ahead(weights.shapes_there(found, pairs, shardings))
        return _Found(source, found, pairs, program)

    def _read(self, reading: Future[dict[str, dict[str, jax.Array]]]) -> None:
        try:
            reading.set_result({name: self._read_one(found) for name, found in self._found.items()})
        except BaseException as error:  # a thread's boundary: `finish` raises it, on all hosts
            reading.set_exception(error)

    def _read_one(self, found: _Found) -> dict[str, jax.Array]:
        # Only reads, and puts on this host's own devices: no program runs beside those of the other thread.
        wanted = found.source.named
        shardings = {name: leaf.sharding for name, leaf in wanted.items()}
        return weights.read(found.weights, found.pairs, shardings, {name: leaf.dtype for name, leaf in wanted.items()})

    def _placed(self, found: _Found, arrays: dict[str, jax.Array]) -> Any:
        if found.program is not None:
            arrays, rows = found.program(arrays)
            weights.compare(found.weights, found.pairs, wait_for_device(rows).tolist())
        return jax.tree_util.tree_map_with_path(lambda path, leaf: arrays[parameter_path(path)], found.source.shapes)

    def _recorded(self) -> Origins:
        return RECORD.read(self._run_folder) or {}

    def _record(self) -> None:
        if self._recorded() != self._origins:
            RECORD.write(self._run_folder, self._origins)


def check_same(asked_by: str, before: Mapping[str, str] | None, now: Mapping[str, str]) -> None:
    """Raises CheckpointError, which names both, if the weights are not those of before."""
    if before is None or before["digest"] == now["digest"]:
        return
    was, digest = before["checkpoint"], before["digest"][:12]
    if was == now["checkpoint"]:
        differs = f"{was} is not what it was: its digest is {now['digest'][:12]}"
    else:
        differs = f"{now['checkpoint']} (digest {now['digest'][:12]}) is another one"
    raise CheckpointError(
        f"{asked_by}: the run has been trained with {was} (digest {digest}), and {differs}; bring the first one back, or give "
        "the run another name"
    )
