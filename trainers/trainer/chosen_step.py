"""`model.remat: auto`: the first of the policies whose train step has room on the devices.

It is chosen when the step is compiled for the first time, and kept in the folder of the run, for these settings on this mesh. So
a restart has the same bits and compiles nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

import jax
from jax.sharding import Mesh

from gangway.errors import UsageError
from gangway.storage import documents
from gangway.storage.documents import DamagedDocument, DocumentKind, NewerDocument
from trainers import runtime
from trainers.config.model import CHOICES
from trainers.diagnostics import memory
from trainers.diagnostics.memory import DoesNotFit, Room, of_program, room
from trainers.runtime import multihost
from trainers.runtime.executables import Bound, ProgramStore
from trainers.step.by_hand import StepProgram

FILE = "remat.json"


class _Choice(TypedDict):
    policy: str
    mesh: dict[str, int]
    device: str


class _Document(TypedDict):
    choices: dict[str, _Choice]
    """By `Choices.key`; the newest is the last."""


KIND = DocumentKind(FILE, _Document, "the policy of model.remat is chosen anew, and the results may be others by rounding")


@dataclass(frozen=True)
class Choices:
    """What a run has chosen. All hosts must call its methods alike."""

    run_folder: str
    mesh: dict[str, int]
    device: str
    key: str
    """Stands for all that the step is made from, but the policy."""

    @classmethod
    def of(cls, run_folder: str, settings: Mapping[str, Any], mesh: Mesh) -> Choices:
        """`settings`: all that the step is made from (`going_on.of_the_step`)."""
        sizes, device = dict(mesh.shape), mesh.devices.flat[0].device_kind
        made_from = [settings, sizes, device, jax.process_count()]
        key = hashlib.sha256(json.dumps(made_from, sort_keys=True).encode()).hexdigest()[:16]
        return cls(run_folder, sizes, device, key)

    def known(self) -> str | None:
        """Returns what was chosen for these settings and this mesh; None if nothing was."""
        # Host 0 alone reads the file: the hosts must not see two versions of it.
        found = self._read().get(self.key) if jax.process_index() == 0 else None
        policy = multihost.from_host0("model.remat", None if found is None else found["policy"])
        return policy if policy in CHOICES else None

    def keep(self, policy: str, why: str) -> None:
        """Writes the choice down, and tells it with the reason."""
        if jax.process_index() > 0:
            return
        others = self._read()
        *_, last = [None, *others.values()]
        if last is not None and last["policy"] != policy:
            mesh = " x ".join(f"{axis} {size}" for axis, size in last["mesh"].items())
            why += f"; before it was {last['policy']} (mesh {mesh}, {last['device']}): the same up to rounding"
        runtime.current().note(f"model.remat auto: {why}")
        choice = {"policy": policy, "mesh": self.mesh, "device": self.device}
        KIND.write(documents.join(self.run_folder, FILE), {"choices": {**others, self.key: choice}})

    def _read(self) -> Mapping[str, _Choice]:
        path = documents.join(self.run_folder, FILE)
        try:
            found = KIND.read(path)
        except DamagedDocument as error:
            runtime.current().note(KIND.set_aside(path, error))
            return {}
        except NewerDocument as error:
            raise UsageError(str(error)) from error
        return {} if found is None else found["choices"]


class ChosenStep(StepProgram):
    """The train step with the policy that was chosen. All hosts must call its methods alike."""

    def __init__(
        self,
        jit: Callable[[str], Any],
        choices: Choices,
        store: ProgramStore,
        note: Callable[[str], None],
        bound: Bound | None = None,
    ):
        """`jit` returns the jitted step with a policy."""
        super().__init__("train_step", None, store, note, bound)
        self._jit, self._choices = jit, choices
        self.policy = CHOICES[0]
        """What was chosen, once the step is prepared."""

    def load_ahead(self, *args: Any) -> None:
        if self._is_known():
            super().load_ahead(*args)

    def prepare(self, *args: Any) -> None:
        if self._is_known():
            super().prepare(*args)
        else:
            self._choose(args)

    def _is_known(self) -> bool:
        if self.jitted is None and (policy := self._choices.known()) is not None:
            self._use(policy)
        return self.jitted is not None

    def _use(self, policy: str) -> None:
        # In the name, for it is part of no setting that a kept program is found by.
        self.name, self.policy, self.jitted = f"train_step_{policy}", policy, self._jit(policy)

    def _choose(self, args: tuple[Any, ...]) -> None:
        of_device, needs = room(), dict[str, int | None]()
        for policy in CHOICES:
            self._use(policy)
            with runtime.current().within("compile"):  # each has the time of a compilation
                needs[policy] = need = self._need(args, of_device)
            if multihost.every_host(f"model.remat {policy}", need is not None and need <= of_device.num_bytes):
                self._choices.keep(policy, told(needs, of_device))
                return
        self.compiled = self.jitted = None
        raise DoesNotFit(f"model.remat = 'auto': no policy has room: {told(needs, of_device)}")

    def _need(self, args: tuple[Any, ...], of_device: Room) -> int | None:
        """Compiles the step. Returns the bytes of a device that it needs; None if the compiler knows that they are not there."""

        def need(compiled: jax.stages.Compiled) -> int:
            return of_program(compiled, jax.default_backend())["peak"]

        try:
            self.compile(args, keep=lambda compiled: need(compiled) <= of_device.num_bytes)
        except jax.errors.JaxRuntimeError as error:
            if not memory.out_of_memory(error):
                raise
            return None
        assert self.compiled is not None
        return need(self.compiled)


def told(needs: Mapping[str, int | None], of_device: Room) -> str:
    """Returns what the policies that were tried need, the last of them first."""
    *others, last = [f"{policy}: {'more' if need is None else memory.shown(need)}" for policy, need in needs.items()]
    of = f"of {memory.shown(of_device.num_bytes)} of a device, {of_device.source}"
    return f"{last} ({of}){''.join(f'; {other}' for other in others)}"
