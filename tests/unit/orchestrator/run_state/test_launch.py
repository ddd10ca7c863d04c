from __future__ import annotations

import json
import shutil
import threading

import pytest

from gangway.storage import documents, durable
from gangway.storage.row import Kept, WriterTerm
from orchestrator.failures.classify import FailureKind
from orchestrator.failures.history import PastFailure
from orchestrator.run_state import incident_log
from orchestrator.run_state import launch as launches
from orchestrator.run_state.incidents import Action, Incident
from orchestrator.run_state.launch import open_launch
from orchestrator.tracking.config import TrackingConfig
from tests.programs.processes import PATIENCE_S, wait_until


class Clock:
    def __init__(self, now_s):
        self.now_s = now_s

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock(1000.0)


@pytest.fixture
def take_up(tmp_path, clock):
    """Another driver's view of the launch; all are closed in the end."""
    made = []

    def take_up(launch_id="launch"):
        if made:
            assert made[-1]._writer.flush(30)
        made.append(open_launch(str(tmp_path), launch_id, 1000.0, TrackingConfig(mlflow=False), {}, clock, monotonic=clock))
        return made[-1]

    yield take_up
    for launch in made:
        launch.close("FINISHED", 30.0)


def test_a_driver_that_adopts_the_gang_lost_nothing_but_the_time_without_a_watcher(take_up, clock):
    first = take_up()
    first.progress.goodput.switch("step", 1010.0)
    clock.now_s = 1020.0
    first.formed({"generation": 0})
    clock.now_s = 1027.0
    second = take_up()
    assert second.progress.drivers == 2
    assert second.progress.gang == {"generation": 0}
    second.progress.goodput.switch("step", 1026.0)  # what the agents told of the time since then was taken in
    incident = second.adopted(1027.0, step=70)
    assert (incident.action, incident.resumed_step, incident.failed_at_s) == (Action.ADOPT, 70, 1020.0)
    assert incident.recovery_s == {"detect": 7.0}
    assert second.progress.open_incident() is None
    assert second.progress.goodput.totals(1030.0)["step"] == 20.0


def test_the_next_driver_finds_an_agent_that_came_while_the_gang_trained(take_up, clock):
    first = take_up()
    first.formed({"generation": 0, "gang": {"slots": ["a"]}})
    clock.now_s = 1001.0
    first.slots_changed({"slots": ["b"]})
    assert take_up().progress.gang == {"generation": 0, "gang": {"slots": ["b"]}}


def test_with_the_gang_lost_the_time_without_a_driver_was_detection(take_up, clock):
    first = take_up()
    first.progress.goodput.switch("step", 1010.0)
    clock.now_s = 1020.0
    first.formed({"generation": 0})
    clock.now_s = 1027.0
    second = take_up()
    incident = second.gang_lost(1027.0, "an agent is gone")
    second.progress.goodput.switch("schedule", 1027.0)
    assert second.progress.open_incident() is incident
    assert incident.recovery_s == {"detect": 7.0}
    assert second.progress.goodput.totals(1027.0)["detection"] == 7.0
    assert second.progress.goodput.totals(1027.0)["step"] == 10.0


def test_another_launch_keeps_the_progress_and_starts_ledgers_of_its_own(take_up, clock):
    first = take_up()
    first.saved(40, "/checkpoints/40")
    first.close("KILLED", 30.0)
    second = take_up("another")
    found = second.progress
    assert (found.checkpoint_step, found.saved_path, found.drivers, found.gang) == (40, "/checkpoints/40", 1, None)
    assert second.progress.incidents == []


def test_a_storage_that_cannot_be_written_is_reported_and_does_not_raise(take_up, tmp_path, clock):
    launch = take_up()
    state = tmp_path / "launch.json"
    launch._writer.flush(30)
    state.unlink(missing_ok=True)
    state.mkdir()
    launch.store()
    assert wait_until(lambda: launch.storage_problem is not None)
    assert "launch.json could not be written" in launch.storage_problem
    state.rmdir()
    launch.store()
    assert wait_until(lambda: launch.storage_problem is None)


def test_a_newest_checkpoint_that_somebody_deletes_is_reported_once(take_up, tmp_path):
    launch, folder = take_up(), tmp_path / "checkpoints" / "40"
    folder.mkdir(parents=True)
    launch.saved(40, str(folder))
    launch._writer.flush(30)
    assert not launch.checkpoint_is_gone()
    shutil.rmtree(folder.parent)
    launch.store()
    launch._writer.flush(30)
    assert [launch.checkpoint_is_gone() for _ in range(3)] == [True, False, False]
    assert launch.saved_there() == (None, f"the checkpoint of step 40 is gone from {folder}")
    (tmp_path / "checkpoints" / "60").mkdir(parents=True)
    launch.saved(60, str(tmp_path / "checkpoints" / "60"))
    launch._writer.flush(30)
    assert not launch.checkpoint_is_gone()
    assert launch.saved_there() == (60, None)


def test_a_storage_that_hangs_holds_up_nobody(take_up, tmp_path, monkeypatch):
    """Every method returns while a write hangs: the driver has a gang to watch."""
    launch, free = take_up(), threading.Event()
    assert launch._writer.flush(30)
    monkeypatch.setattr(documents, "write_json", lambda path, document: free.wait(PATIENCE_S))
    try:
        launch.formed({"generation": 0})
        launch.saved(3, "/checkpoints/3")
        launch.publish(3, {"loss": 1.0})
        launch.preview({"step": 3, "previews": []}, lambda problem: None)
        launch.record(incident(1))
        launch.tick()
        assert not launch._writer.flush(0.0)
    finally:
        free.set()


def incident(number, **more):
    return Incident(kind="hang", host=0, generation=number, step=number, failed_at_s=1000.0 + number, **more)


def test_incidents_and_failures_are_known_to_the_next_driver_and_written_once_each(take_up, tmp_path):
    first = take_up()
    for number in range(3):
        first.failed(PastFailure(kind=FailureKind.HANG, step=number, at_s=1000.0 + number), incident(number))
    last = first.progress.incidents[-1]
    last.action = Action.RESTART
    first.update(last)
    lines = len((first._writer.flush(30), (tmp_path / "incidents.jsonl").read_text().splitlines())[1])
    assert 3 <= lines <= 4
    first.store()
    second = take_up()
    assert [known.step for known in second.progress.incidents] == [0, 1, 2]
    assert [past.step for past in second.progress.history] == [0, 1, 2]
    assert second.progress.open_incident() is second.progress.incidents[-1]
    second.record(incident(3))
    assert second.progress.num_incidents == 4
    second.close("KILLED", 30.0)
    assert take_up("another").progress.incidents == []


def test_what_is_stored_each_second_does_not_grow_with_the_failures(take_up, tmp_path):
    launch, sizes = take_up(), []
    for number in range(300):
        launch.failed(PastFailure(kind=FailureKind.HANG, step=number), incident(number, evidence={"log_tail": ["x" * 100] * 30}))
        if number in (9, 299):
            launch.store()
            assert launch._writer.flush(30)
            sizes.append((tmp_path / "launch.json").stat().st_size)
    assert sizes[1] <= sizes[0] + 100
    assert len(launch.progress.incidents) == incident_log.KEPT_INCIDENTS < launch.progress.num_incidents == 300


def test_cursors_begin_anew_with_each_generation(take_up):
    """Events are counted by host, and another agent may be that host now."""
    first = take_up()
    first.formed({"generation": 0})
    first.progress.seen = {0: 7, 1: 9}
    first.store()
    assert take_up().progress.seen == {0: 7, 1: 9}
    second = take_up()
    second.formed({"generation": 1})
    assert second.progress.seen == {}
    assert take_up().progress.seen == {}


def test_cursors_are_those_of_the_generation_that_the_agents_are_in(take_up):
    first = take_up()
    first.formed({"generation": 0})
    first.progress.seen = {0: 7}
    first.store()
    second = take_up()
    second.adopt_generation(1)
    assert (second.progress.seen, second.progress.gang, second.next_generation()) == ({}, {"generation": 1}, 2)


@pytest.mark.parametrize("name", ["launch.json", "gang.json"])
def test_a_damaged_document_is_set_aside_and_reported(take_up, tmp_path, name):
    """A driver that cannot start uses up a restart of Ray Train's each time."""
    take_up().formed({"generation": 0})
    take_up()._writer.flush(30)
    (tmp_path / name).write_text('{"launch_id": ')
    launch = take_up()
    (problem,) = launch.problems
    assert f"{name}: damaged" in problem
    assert (tmp_path / f"{name}.damaged").exists()
    assert launch.progress.gang is None


def test_a_driver_whose_run_another_has_taken_writes_nothing_more(take_up, tmp_path):
    first = take_up()
    second = take_up()  # of the same launch: it succeeds at once
    second.formed({"generation": 5})
    assert second._writer.flush(30)
    first.formed({"generation": 4})
    assert first._writer.flush(30)
    assert launches.read_gang(tmp_path) == {"generation": 5}


@pytest.mark.parametrize("knows", [True, False], ids=["it knows", "it was asleep"])
def test_a_superseded_driver_writes_nothing_any_more(take_up, tmp_path, knows):
    first = take_up()
    second = take_up()
    if knows:
        first.lease_lost.set()
    first.publish(20, {"loss": 1.0})
    first.leave_course(10)
    first.preview({"step": 20, "previews": []}, pytest.fail)
    first.mark("generation")
    first.record(Incident(kind="crash", host=0, generation=0, step=1, failed_at_s=1000.0))
    first.write_beside("console.log", lambda: pytest.fail("it was written"))
    first.saved(20, "/checkpoints/20")
    before = sorted(path for path in tmp_path.rglob("*"))
    assert first._writer.flush(30)
    assert sorted(path for path in tmp_path.rglob("*")) == before
    assert '"step": 20' not in (tmp_path / "tracking" / "metrics.jsonl").read_text()
    second.publish(20, {"loss": 2.0})
    assert second._writer.flush(30)
    assert '"loss": 2.0' in (tmp_path / "tracking" / "metrics.jsonl").read_text()


def test_previews_are_kept_in_the_folder_and_shown_to_the_tracker(take_up, tmp_path):
    about = {"step": 20, "previews": [{"prompt": "def ", "text": "f():"}]}
    launch = take_up()
    launch.preview(about, pytest.fail)
    assert launch._writer.flush(30)
    path = tmp_path / "previews" / "20.json"
    assert about.items() <= json.loads(path.read_text()).items()
    records = [json.loads(line) for line in (tmp_path / "tracking" / "metrics.jsonl").read_text().splitlines()]
    assert {"artifact": "previews/20.json", "folder": "previews"}.items() <= records[-1].items()


def test_what_was_committed_is_known_to_every_launch_also_from_the_row(take_up, tmp_path):
    first = take_up("one")
    assert first.progress.committed_step is None
    for step in (4, 8, 6):  # the last one after a rollback
        first.saved(step, f"/checkpoints/{step}")
    assert first.progress.committed_step == 8
    first.close("FINISHED", 30.0)
    second = take_up("two")
    assert second.progress.committed_step == 8
    second.lease._row.commit(WriterTerm(second.lease.driver_term), 7, Kept("7-2_0_00000000", ""))
    second.close("FINISHED", 30.0)
    (tmp_path / "launch.json").unlink()
    third = take_up("three")
    assert third.progress.committed_step == 7
    third.lease._row.commit(WriterTerm(third.lease.driver_term), 9, Kept("9-3_0_00000000", ""))
    third.close("FINISHED", 30.0)
    assert take_up("four").progress.committed_step == 9


def test_no_driver_has_the_epoch_of_one_before_it_whatever_was_deleted(take_up, tmp_path):
    take_up("one").close("FINISHED", 30.0)
    take_up("two").close("FINISHED", 30.0)
    shutil.rmtree(tmp_path / "row")
    (tmp_path / "lease.json").unlink()
    assert take_up("three").lease.driver_term == 3


@pytest.mark.parametrize("how", ["moved", "copied", "linked"])
def test_what_a_trainer_of_ones_own_saved_is_found_where_the_run_is_now(tmp_path, clock, how):
    def take_up(folder):
        return open_launch(str(folder), "launch", 1000.0, TrackingConfig(mlflow=False), {}, clock, monotonic=clock)

    storage = tmp_path / "storage"
    for path in ("run/mine/8", "beside/8"):
        (storage / path).mkdir(parents=True)
    for path in ("run/mine/8", "beside/8"):
        first = take_up(storage / "run")
        first.saved(8, str(storage / path))
        first.close("FINISHED", 30.0)
        now = tmp_path / f"now-{path[0]}"
        if how == "linked":
            now.symlink_to(storage)
        else:
            shutil.copytree(storage, now)
        if how == "moved":
            storage.rename(tmp_path / "away")
        second = take_up(now / "run")
        assert second.progress.saved_path == str(now / path)
        second.close("FINISHED", 30.0)
        if how == "moved":
            (tmp_path / "away").rename(storage)


def test_a_clock_that_was_set_between_two_drivers_uses_up_no_time(tmp_path):
    wall, passed = Clock(1000.0), Clock(50.0)

    def take_up():
        return open_launch(str(tmp_path), "launch", 1000.0, TrackingConfig(mlflow=False), {}, wall, monotonic=passed)

    first = take_up()
    first.progress.time_used.begin(1000.0)
    first.progress.goodput.switch("step", 1000.0)
    wall.now_s, passed.now_s = 1010.0, 60.0
    first.store()
    assert first._writer.flush(30)
    wall.now_s, passed.now_s = 1_000_013.0, 63.0  # eleven days, in three seconds
    second = take_up()
    assert second.progress.time_used.seconds(wall.now_s) == pytest.approx(13.0)
    assert second.progress.goodput.wall_s(wall.now_s) == pytest.approx(13.0)
    assert second.progress.goodput.totals(wall.now_s)["step"] == pytest.approx(13.0)
    for launch in (first, second):
        launch.close("FINISHED", 30.0)


def test_a_message_of_megabytes_does_not_push_the_failures_before_it_out(take_up):
    first = take_up()
    for number, message in enumerate(["short", "x" * (8 << 20), "last"]):
        past = PastFailure(kind=FailureKind.USER_ERROR, step=number, exception=("ValueError", message))
        incident = Incident(kind=past.kind, host=0, generation=number, step=number, failed_at_s=1000.0)
        incident.evidence = {"exception": {"message": message, "traceback": [message]}}
        first.failed(past, incident)
    history = take_up().progress.history
    assert [past.step for past in history] == [0, 1, 2]
    assert len(history[1].exception[1]) < 30_000
    assert "letters left out" in history[1].exception[1]


def test_what_a_killed_process_left_half_written_is_gone_after_the_next_start_and_after_the_end(tmp_path, clock, take_up):
    """A chaos run found one, of a host that was killed while it recorded a checkpoint: it stayed for ever."""
    folders = (tmp_path, tmp_path / "row", tmp_path / "checkpoints", tmp_path / "tracking")

    def leave():
        for folder in folders:
            folder.mkdir(exist_ok=True)
            durable.beside(folder / "00000007.json").write_text("{")

    def left():
        return [path for folder in folders for path in folder.glob("*.tmp")]

    leave()
    launch = take_up()
    assert left() == []
    leave()
    launch.close("FINISHED", 30.0)
    assert left() == []
