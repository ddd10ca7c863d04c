"""What is asked of the checkpoint manager, and what a checkpoint has beside the state."""

from __future__ import annotations

import collections
from types import SimpleNamespace

import pytest

from gangway.errors import CheckpointError, SaveFailedError, kind_of
from tests.unit.training import arguments, of, trainer
from trainers.callbacks import CallbackList, RunInfo
from trainers.checkpoint import trial
from trainers.config.arguments import recorded_arguments
from trainers.loop import saver as saver_module
from trainers.loop.evaluator import Evaluator
from trainers.loop.lineage import Lineage
from trainers.loop.saver import Saver, TimeUsed
from trainers.runtime import Runtime, install

FULL = "no room in /data: 9.0 MiB needed, 2.0 MiB free"


class Manager:
    """Writes down what it is asked for."""

    problem = unsavable = gone = ""
    works = False

    def __init__(self):
        self.asked, self.last_saved_step, self.rooms = [], 3, []

    def overtaken(self):
        return self.gone

    def no_room(self, state):
        return self.rooms.pop(0) if self.rooms else ""

    def __getattr__(self, name):
        return lambda *given, **named: self.asked.append((name, given, named))


@pytest.fixture
def saver(tmp_path, events):
    info = RunInfo()
    info.global_step = 5
    data_state = SimpleNamespace(
        meta=lambda step: {"data_state": step}, restore=lambda meta: events.append({"ev": "data", **meta})
    )
    score = SimpleNamespace(meta=lambda: {"best": 1.0}, go_back=lambda scores: None, scores=SimpleNamespace(best=None))
    evaluator = Evaluator(None, (), None, score)
    reporter = SimpleNamespace(latest={"loss": 2.0})
    return Saver(
        Manager(),
        9,
        recorded_arguments(arguments(tmp_path, seed=9)),
        info,
        Lineage(),
        reporter,
        evaluator,
        CallbackList(),
        collections.deque(),
        TimeUsed(7.0),
        data_state,
    )


class Clock:
    """A clock that only a sleep moves; `at` is what happens at which second."""

    def __init__(self):
        self.now_s, self.at = 0.0, {}

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds
        for at_s in [at_s for at_s in self.at if at_s <= self.now_s]:
            self.at.pop(at_s)()


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(saver_module, "time", made)
    return made


@pytest.fixture
def saves(clock, monkeypatch):
    """When saves were tried, in seconds; they succeed where `works`."""
    found = []

    def save(manager, step, *given, **named):
        found.append(round(clock.now_s))
        manager.last_saved_step = step if manager.works else manager.last_saved_step

    monkeypatch.setattr(Manager, "save", save, raising=False)
    return found


@pytest.fixture
def host(events):
    made = Runtime(events.append, retry_for_s=300.0)
    install(made)
    return made


@pytest.mark.parametrize("patient", [True, False])
def test_a_save_waits_for_the_one_before_and_hands_on_state_meta_and_patience(saver, events, patient):
    saver.save("state", patient=patient)
    (waited, _, _), (name, (step, state, meta), named) = saver.manager.asked
    assert (waited, name, step, state, named) == ("wait_for_save", "save", 5, "state", {"patient": patient})
    assert (meta["batch_index"], meta["seed"], meta["metrics"], meta["data_state"]) == (5, 9, {"loss": 2.0}, 5)
    assert meta["arguments"]["seed"] == 9
    assert [event["step"] for event in of(events, "saving")] == [5]


def test_what_is_saved_already_is_not_saved_again_nor_reported(saver, events):
    saver.manager.last_saved_step = 5
    saver.save("state")
    assert [name for name, _, _ in saver.manager.asked] == ["wait_for_save"]
    assert not of(events, "saving")


@pytest.mark.parametrize("patient", [True, False])
def test_a_save_of_the_model_alone_has_the_same_meta_and_patience(saver, patient):
    saver.save_model("state", patient=patient)
    [(name, (step, state, meta), named)] = saver.manager.asked
    assert (name, step, state, named) == ("save_model", 5, "state", {"patient": patient})
    assert (meta["batch_index"], meta["seed"]) == (5, 9)


def test_a_checkpoint_that_became_complete_is_reported_to_the_callbacks_once(saver):
    told = []
    saver.callbacks = SimpleNamespace(report_saved=lambda info, complete: told.append((info, complete)))
    saver.report_saved()
    assert told == [(saver.info, saver.complete)]


def test_at_the_end_the_last_step_must_have_been_saved(saver, host, saves):
    assert saver.finish() == 3
    saver.manager.problem = "the disk fails"
    with pytest.raises(SaveFailedError) as caught:
        saver.finish("state")
    assert str(caught.value) == (
        "training is over, but the checkpoint of its last step, 5, could not be saved: the disk fails; tried for 300 s "
        "(driver.restart.retry_for_s); saved is step 3, and 2 steps are lost; make room, and run the same command again"
    )
    # Nothing would be gained by training the steps again.
    assert kind_of(caught.value) == {"kind": "storage", "deterministic": True}
    assert saves == [1, 3, 7, 15, 31, 63, 123, 183, 243]
    saver.manager.last_saved_step = 5
    assert saver.finish("state") == 5


def test_a_state_is_held_until_there_is_room_and_saved_at_once_then(saver, host, events, clock, saves):
    saver.manager.rooms, saver.manager.problem = [FULL] * 65, f"host 0: {FULL}"
    saver.manager.works = True
    assert saver.finish("state") == 5
    assert saves == [130]
    assert [event["phase"] for event in of(events, "phase")] == ["hold", "save"]
    what = f"training is over, but the checkpoint of its last step, 5, could not be saved yet: {FULL}; tried again for"
    notes = [event["message"] for event in of(events, "note")]
    assert notes == [f"{what} {left} s (driver.restart.retry_for_s), and goes on by itself" for left in (300, 240, 180)]


def test_what_was_recorded_comes_back_and_at_the_beginning_there_is_nothing(saver, events):
    saver.restore({"metrics": {"loss": 1.0}, "evaluation": {"step": 4, "metrics": {"eval_loss": 3.0}}})
    assert (saver.reporter.latest, saver.evaluator.evaluated_step) == ({"loss": 1.0}, 4)
    assert "metrics" in of(events, "data")[0]
    saver.restore({})
    assert (saver.reporter.latest, saver.evaluator.evaluated_step) == ({}, None)


def test_a_save_that_can_never_work_ends_the_run_at_once_and_for_good(saver):
    saver.manager.unsavable = ".params['x'] is of no type that can be written"
    with pytest.raises(CheckpointError, match=r"on any storage: \.params\['x'\] is of no type") as caught:
        saver.report_saved()
    assert kind_of(caught.value)["deterministic"]


@pytest.mark.parametrize(
    ("earlier", "reason", "ended_s"),
    [
        (None, "terminated", 30),
        (None, "requested", 30),
        ("terminated", "terminated", 300),  # for this reason it is to be saved
        (None, "preempted", 300),  # as long as there is a machine
    ],
)
def test_a_person_who_asks_for_a_stop_ends_the_wait(saver, host, clock, saves, earlier, reason, ended_s):
    saver.manager.rooms = [FULL] * 999
    if earlier:
        host.request_stop(earlier)
    clock.at[30] = lambda: host.request_stop(reason)
    with pytest.raises(SaveFailedError, match=rf"stopped on request \({reason}\)" if ended_s == 30 else "tried for 300 s"):
        saver.finish("state")
    assert (clock.now_s, saves) == (ended_s, [])


def test_a_person_who_asks_for_a_stop_as_there_is_room_again_gets_a_checkpoint(saver, host, clock, saves):
    saver.manager.rooms, saver.manager.works = [FULL] * 15, True
    clock.at[30] = lambda: host.request_stop("terminated")
    assert saver.finish("state") == 5
    assert saves == [30]


@pytest.mark.parametrize(
    ("other", "why", "tries"),
    [(["requested", False, True], "requested", 0), (["", True, True], "300 s", 0), (["", False, False], "300 s", 0)],
)
def test_what_one_host_knows_counts_for_all(saver, host, saves, monkeypatch, other, why, tries):
    monkeypatch.setattr(
        "trainers.runtime.multihost.all_hosts", lambda topic, mine, *_: [mine, other if topic == "held state" else mine]
    )
    with pytest.raises(SaveFailedError, match=why):
        saver.finish("state")
    assert len(saves) == tries


def test_a_host_whose_run_another_driver_has_holds_nothing(saver, host, clock, saves):
    saver.manager.gone = "the run belongs to driver term 2"
    with pytest.raises(SaveFailedError, match=r"could not be saved: the run belongs to driver term 2; saved is step 3"):
        saver.finish("state")
    assert (clock.now_s, saves) == (0, [])


@pytest.mark.parametrize("stopped", [False, True])
def test_the_first_step_waits_for_room_for_its_checkpoint(saver, host, events, clock, stopped):
    saver.wait_for_room("state")
    assert (clock.now_s, events) == (0, [])
    saver.manager.rooms = [FULL] * (999 if stopped else 6)
    if stopped:
        host.request_stop("terminated")
        with pytest.raises(SaveFailedError, match=r"step 6 is not trained.*: no room in /data.*\(terminated\); nothing is lost"):
            saver.wait_for_room("state")
    else:
        saver.wait_for_room("state")
    assert clock.now_s == (0 if stopped else 10)


def test_whether_a_state_can_be_saved_is_known_before_the_second_step_of_a_new_run(tmp_path, events, monkeypatch):
    trainer(tmp_path / "before", max_num_steps=4).train()
    before = of(events, "metrics")
    monkeypatch.setattr(trial, "problem", lambda abstract: ".params['embed']: nobody can write this")
    with pytest.raises(CheckpointError, match=r"\.params\['embed'\]: nobody can write this"):
        trainer(tmp_path).train()
    assert [event["step"] for event in of(events, "first_step")] == [1, 1]
    assert of(events, "metrics") == before
    # One that goes on has been saved before: nothing is tried again in a recovery.
    trainer(tmp_path / "before", max_num_steps=5).train()
    assert of(events, "first_step")[-1]["step"] == 5
