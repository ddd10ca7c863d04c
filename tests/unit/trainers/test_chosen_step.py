"""`model.remat: auto`: what is chosen, why, and that a restart keeps it."""

from __future__ import annotations

import json
import types

import jax
import psutil
import pytest

from gangway.errors import OutOfMemoryError
from gangway.stop_reason import StopReason
from tests.unit.trainers.test_context import SIZES, settings, texts
from tests.unit.training import StopAt, arguments, assert_equal, of
from trainers import runtime
from trainers.base import BaseTrainer
from trainers.checkpoint import going_on
from trainers.config.model import CHOICES
from trainers.diagnostics import memory
from trainers.diagnostics import memory as rooms
from trainers.diagnostics.memory import Room
from trainers.parallel.mesh import make_mesh
from trainers.planning.estimate import load_datasets
from trainers.runtime import executables
from trainers.trainer import chosen_step, training_run
from trainers.trainer.chosen_step import Choices

__all__ = ["texts"]


@pytest.fixture
def run(tmp_path, monkeypatch, events, texts):
    """(What trains with a policy and a room, the bytes that each policy needed, the programs that were compiled)."""
    needs, compiled = [], []
    afresh, of_program = executables.compile_afresh, rooms.of_program

    def measured(*args):
        needs.append(of_program(*args)["peak"])
        return of_program(*args)

    def train(remat, num_bytes, *callbacks, storage=tmp_path, **changes):
        for found in (events, needs, compiled):
            found.clear()
        runtime.install(runtime.Runtime(events.append, program_key="launch"))
        monkeypatch.setattr(chosen_step, "room", lambda: Room(num_bytes, "of a test"))
        about = {"checkpoint": {"save_steps": 4}, "accumulation_steps": 1, "max_num_steps": 6}
        made = arguments(storage, **settings(**{**about, "model": {**SIZES, "remat": remat}, **changes}))
        train.trainer = BaseTrainer(made, *load_datasets(made), callbacks=callbacks)
        return train.trainer.train()

    monkeypatch.setenv("GANGWAY_PROGRAMS", str(tmp_path / "programs"))
    monkeypatch.setattr(chosen_step, "of_program", measured)
    monkeypatch.setattr(executables, "compile_afresh", lambda lowered: compiled.append(1) or afresh(lowered))
    return train, needs, compiled


def chosen(events):
    return [note["message"] for note in of(events, "note") if note["message"].startswith("model.remat auto")]


@pytest.mark.slow("compiles steps of several policies")
def test_the_first_policy_with_room_is_chosen_and_a_restart_keeps_it_and_compiles_nothing(run, events, tmp_path, monkeypatch):
    train, needs, compiled = run
    with pytest.raises(OutOfMemoryError, match=r"the error was: model.remat = 'auto': no policy has room: full: .* \(of 1 B"):
        train("auto", 1)
    of_policy = dict(zip(CHOICES, dict.fromkeys(needs), strict=True))
    second = CHOICES[1]
    assert of_policy["none"] > of_policy[second]
    train("auto", of_policy[second], StopAt(5, StopReason.PREEMPTED))
    size, larger = memory.shown(of_policy[second]), memory.shown(of_policy["none"])
    assert chosen(events) == [f"model.remat auto: {second}: {size} (of {size} of a device, of a test); none: {larger}"]
    assert compiled
    resumed = train("auto", 1)
    assert of(events, "restored")
    assert (needs, compiled, chosen(events)) == ([], [], [])
    # Where a loss stops being finite is looked for with this policy, too: another may have no room.
    monkeypatch.setattr(training_run, "choosing", lambda function, policy: policy)
    monkeypatch.setattr(training_run.nonfinite, "find", lambda policy, *others: policy)
    assert train.trainer.training._diagnose(resumed, {}, 6) == f"{second}, with the parameters of step 6"
    assert_equal(resumed, train(second, 1, storage=tmp_path / "whole"))


def test_a_choice_is_for_what_the_step_is_made_from(tmp_path):
    mesh = make_mesh(arguments(tmp_path).mesh, jax.devices()[:2])

    def key(mesh=mesh, **changes):
        made = arguments(tmp_path, **changes)
        return Choices.of(made.run_folder, going_on.of_the_step(made), mesh).key

    assert key() == key(max_num_steps=50) == key(publish_every_steps=3) == key(storage=f"{tmp_path}/other", name="other")
    others = [key(accumulation_steps=2), key(dtype="bfloat16"), key(make_mesh(arguments(tmp_path).mesh, jax.devices()[:4]))]
    assert len({key(), *others}) == 4


def test_another_choice_than_before_is_told(tmp_path, events):
    of_mesh = {size: Choices(str(tmp_path), {"data": size}, "cpu", str(size)) for size in (1, 2)}
    assert of_mesh[1].known() is None
    of_mesh[1].keep("full", "full: 1 B")
    assert (of_mesh[1].known(), of_mesh[2].known()) == ("full", None)
    of_mesh[2].keep("none", "none: 2 B")
    assert chosen(events) == [
        "model.remat auto: full: 1 B",
        "model.remat auto: none: 2 B; before it was full (mesh data 1, cpu): the same up to rounding",
    ]
    assert (of_mesh[1].known(), of_mesh[2].known()) == ("full", "none")


def test_a_damaged_record_is_set_aside(tmp_path, events):
    choices = Choices(str(tmp_path), {"data": 1}, "cpu", "a")
    choices.keep("full", "full: 1 B")
    path = tmp_path / chosen_step.FILE
    document = json.loads(path.read_text())
    path.write_text(path.read_text().replace("full", "none"))
    assert choices.known() is None
    assert "the policy of model.remat is chosen anew" in of(events, "note")[-1]["message"]
    assert document["choices"]["a"]["policy"] == "full"


def test_the_room_of_a_device_is_its_own_memory_or_its_share_of_the_machine(monkeypatch):
    found = rooms.room()
    assert found.num_bytes == psutil.virtual_memory().total // jax.device_count()
    assert found.source == f"the memory of this machine, which {jax.device_count()} share"
    devices = [types.SimpleNamespace(memory_stats=lambda size=size: {"bytes_limit": size}) for size in (2000, 1000)]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert rooms.room() == Room(950, "95% of its memory")
