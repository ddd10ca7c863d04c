"""The end of a launch tells the truth: its status comes from what is trained and what is saved."""

import dataclasses
import errno
import threading
from types import SimpleNamespace

import pytest

from gangway import waits
from orchestrator.commands.launching import exit_status, outcome_of
from orchestrator.config.job import build
from orchestrator.driver import main
from orchestrator.driver.ending import Ending, Progress, StoppedOnRequest, TrainingFailed, ending
from orchestrator.driver.main import conclude, drive
from orchestrator.driver.ray_train import JobFailed
from orchestrator.reporting.board import Board
from orchestrator.run_state import summary
from orchestrator.run_state.goodput import CATEGORIES
from orchestrator.run_state.launch import open_launch
from orchestrator.run_state.outcome import EXIT_STOPPED, read_outcome
from orchestrator.tracking.config import TrackingConfig
from tests.unit.driving import Launched
from tests.unit.fake_gang import World

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("reason", "failure", "progress", "status", "line"),
    [
        ("max_steps", None, Progress(15, 15), "finished", None),
        ("max_steps", None, Progress(15, None), "finished", None),  # `checkpoint.save_at_end: false`
        ("interrupted", None, Progress(15, 15), "stopped", "stopped at 15; saved at 15; run the same command again to go on"),
        (
            "interrupted",
            None,
            Progress(15, 6, "the checkpoint of step 15 failed: no room"),
            "failed",
            "stopped at 15; saved at 6; 9 steps lost, because the checkpoint of step 15 failed: no room",
        ),
        (
            "interrupted",
            None,
            Progress(1, None),
            "failed",
            "stopped at 1; nothing is saved; 1 step lost, because the trainer has reported no checkpoint of its last step",
        ),
        (
            None,
            StoppedOnRequest("while it waited"),
            Progress(6, 6),
            "stopped",
            "stopped at 6; saved at 6; run the same command again to go on",
        ),
        (
            None,
            StoppedOnRequest("at once"),
            Progress(0, None),
            "stopped",
            "stopped before the first step; run the same command again to go on",
        ),
        (
            None,
            StoppedOnRequest("stopped while it was failing"),
            Progress(15, 6),
            "failed",
            "stopped at 15; saved at 6; 9 steps lost, because stopped while it was failing",
        ),
        (
            None,
            TrainingFailed("a mistake"),
            Progress(15, 6),
            "failed",
            "stopped at 15; saved at 6; 9 steps lost, because of the error above",
        ),
        (None, TrainingFailed("a mistake"), Progress(6, 6), "failed", "stopped at 6; saved at 6"),
        (
            "time_limit",
            None,
            Progress(15, 6),
            "stopped",
            "stopped at 15; saved at 6; 9 steps lost, because the hosts did not stop in time; "
            "its time_limit is used up: raise it to go on",
        ),
        # Launches that end before they have trained.
        (
            "time_limit",
            None,
            Progress(0, 10),
            "stopped",
            "stopped at 10; saved at 10; its time_limit is used up: raise it to go on",
        ),
        (
            None,
            StoppedOnRequest("x"),
            Progress(0, 10),
            "stopped",
            "stopped at 10; saved at 10; run the same command again to go on",
        ),
    ],
)
def test_a_run_is_stopped_only_if_what_it_has_trained_is_saved(reason, failure, progress, status, line):
    result = {"stop_reason": reason} if reason else {}
    end = ending(result, failure, "interrupted", progress)
    assert (end.status, end.line) == (status, line)


def test_a_failure_that_nobody_has_asked_for_is_reported_by_its_error_alone():
    assert ending({}, TrainingFailed("a mistake"), None, Progress(15, 6)) == Ending("failed", "a mistake", None)
    # Also where a save has failed, unless steps are lost by it.
    assert ending({}, TrainingFailed("a mistake"), None, Progress(6, 6, "no room")).line is None
    full = ending({}, TrainingFailed("not saved"), None, Progress(15, 6, "no room"))
    assert full == Ending("failed", "not saved", "stopped at 15; saved at 6; 9 steps lost, because no room")


# ---------------------------------------------------------------------- what the driver knows of it


@pytest.fixture
def world():
    world = World()
    yield world
    assert world.violations == []


def progress_of(launched):
    launch = launched.launch
    return Progress(launch.progress.trained_step, launch.progress.checkpoint_step, launch.progress.save_problem)


def test_of_a_run_that_stops_as_it_should_all_is_saved(world):
    launched = Launched(world)
    world.at(4.0, lambda: launched.board.request_stop("interrupted"))
    assert launched.run()["stop_reason"] == "interrupted"
    assert progress_of(launched).trained > 0
    assert progress_of(launched).lost == 0


def test_the_steps_of_a_gang_that_has_failed_are_lost_if_it_is_stopped_before_it_trains_again(world):
    launched = Launched(world)

    def fail():
        next(iter(world.jobs.values())).processes[1].agent.end_process(told=True)
        launched.board.request_stop("interrupted")

    world.at(4.0, fail)
    with pytest.raises(StoppedOnRequest, match=r"^stopped on request while it was failing: host 1: "):
        launched.run()
    job = next(iter(world.jobs.values()))
    assert progress_of(launched).trained == job.step
    assert progress_of(launched).lost == job.step - world.commits[-1][1] > 0


def test_a_mistake_of_the_program_during_a_stop_is_a_failure(world):
    launched = Launched(world)

    def fail():
        launched.board.request_stop("interrupted")
        agent = next(iter(world.jobs.values())).processes[1].agent
        raised = {"type": "UsageError", "message": "a mistake", "traceback": "", "user_frame": None, "user_traceback": ""}
        agent.tell({"ev": "exception", **raised, "kind": "user_error", "deterministic": True, "step": 3})
        agent.end_process(told=True)

    world.at(4.0, fail)
    with pytest.raises(TrainingFailed, match="a mistake") as error:
        launched.run()
    end = ending({}, error.value, launched.board.stop_requested(), progress_of(launched))
    assert end.status == "failed"
    assert end.line.endswith("lost, because of the error above")


def test_why_the_last_save_failed_is_known_until_a_later_one_succeeds(world):
    launched = Launched(world)
    problems = []

    def fail():
        for process in next(iter(world.jobs.values())).processes.values():
            process.agent.tell({"ev": "save_failed", "step": 3, "error": "no room"})

    world.at(4.0, fail)
    for number in range(20):
        world.at(4.0 + number / 20, lambda: problems.append(launched.launch.progress.save_problem))
    launched.run()
    assert "the checkpoint of step 3 failed: no room" in problems
    # One line, however many hosts there are.
    shown = [event["message"] for event in launched.told() if "step 3 failed" in event.get("message", "")]
    assert shown == ["the checkpoint of step 3 failed, and is tried again: no room"]
    assert launched.launch.progress.save_problem is None


def test_the_next_driver_knows_how_far_the_launch_has_trained(world):
    launched = Launched(world)
    world.at(4.0, lambda: launched.board.request_stop("interrupted"))
    launched.run()
    trained = launched.launch.progress.trained_step
    launched.start_driver()
    assert launched.launch.progress.trained_step == trained > 0
    later = Launched(world, launch_id="another")
    later.start_driver()
    assert later.launch.progress.trained_step == 0  # it has trained nothing itself


# ---------------------------------------------------------------------- what can be written of it


@pytest.fixture
def job(tmp_path):
    return build({"name": "x", "max_num_steps": 8, "storage": str(tmp_path), "tracking": {"mlflow": False, "report": False}})


@pytest.fixture
def launch(job):
    launch = open_launch(job.run_dir, "here", 0.0, TrackingConfig(mlflow=False), {}, lambda: 9.0, lambda message: None)
    yield launch
    launch.close("FAILED", 1.0)


def fail(*args, **named):
    raise FULL


def texts(board):
    return [event.get("message") for event in board.read(0, 0.0)[1]]


class Kept:
    """A recorder's numbers, in the place of all recorders."""

    def __init__(self):
        self.numbers, self.is_closed = [], False

    def record(self, step, metrics):
        assert not self.is_closed
        self.numbers.append((step, metrics))

    def close(self, timeout_s):
        self.is_closed = True


def concluded(launch, job, board, status="finished", recorders=None):
    end, result = Ending(status, None, None), {"stop_reason": "max_steps", "steps": 8}
    return conclude(launch, board, job, recorders or Kept(), end, result, lambda: 10.0)


def test_the_outcome_is_written_last_and_names_nothing_that_could_not_be_written(launch, job):
    outcome = concluded(launch, job, board := Board())
    assert read_outcome(job.run_dir, "here") == outcome == board.outcome()
    assert outcome["unwritten"] == []


def test_the_numbers_of_the_end_reach_mlflow_and_the_recorders_by_the_same_names(launch, job, monkeypatch):
    tracked, recorders = [], Kept()
    monkeypatch.setattr(launch.tracker, "log_metrics", lambda step, metrics: tracked.append((step, metrics)))
    concluded(launch, job, Board(), recorders=recorders)
    assert recorders.is_closed
    assert recorders.numbers == tracked
    ((step, numbers),) = tracked
    assert step == 8
    assert {*numbers} == {f"goodput/{category}_s" for category in CATEGORIES} | {
        *("goodput/share", "launch/wall_s", "launch/goodput_share", "incidents/count", "incidents/recovery_s")
    }


@pytest.mark.parametrize(
    ("module", "name", "what"),
    [
        (summary, "track", "the metrics of the end"),
        (summary, "write", "the metrics of the end (No space left on device), summary.json"),
        (main, "write_outcome", "outcome.json"),
    ],
)
def test_a_full_disk_at_the_end_makes_no_failure_of_a_run_that_is_finished(launch, job, monkeypatch, capsys, module, name, what):
    monkeypatch.setattr(module, name, fail)
    outcome = concluded(launch, job, board := Board())
    expected = [f"{part} (No space left on device)" for part in what.replace(" (No space left on device)", "").split(", ")]
    assert outcome["unwritten"] == expected
    assert outcome["status"] == "finished"
    found = outcome_of(board, job.run_dir, "here")
    assert found == outcome
    assert [text for text in texts(board) if text] == [f"not written: {text}" for text in expected]
    assert board.read(0, 0.0)[1][-1]["ev"] == "summary"
    assert exit_status(found, None, None) == 0
    assert capsys.readouterr().err == f"finished; could not be written: {'; '.join(expected)}\n"


@pytest.mark.parametrize(
    ("wanted", "stopped", "written"), [(True, None, True), (True, "terminated", False), (False, None, False)]
)
def test_the_end_writes_a_report_if_it_is_wanted_and_there_is_time(launch, job, monkeypatch, wanted, stopped, written):
    asked, tracked, board = [], [], Board()
    if stopped:
        board.request_stop(stopped)
    monkeypatch.setattr(main, "write_report", lambda run_dir, figures: asked.append((run_dir, figures)) or ["report.html"])
    monkeypatch.setattr(launch.tracker, "log_artifact", lambda *about: tracked.append(about))
    job = dataclasses.replace(job, tracking=dataclasses.replace(job.tracking, report=wanted))
    concluded(launch, job, board)
    assert asked == ([(job.run_dir, False)] if written else [])
    assert (("report.html", "report") in tracked) is written


def test_a_report_that_cannot_be_written_changes_nothing_of_the_end(launch, job, monkeypatch):
    monkeypatch.setattr(main, "write_report", fail)
    job = dataclasses.replace(job, tracking=dataclasses.replace(job.tracking, report=True))
    outcome = concluded(launch, job, Board())
    assert (outcome["status"], outcome["unwritten"]) == ("finished", ["the report (No space left on device)"])


def test_everything_fails_and_the_end_is_known_all_the_same(launch, job, monkeypatch):
    for module, name in ((summary, "track"), (summary, "write"), (main, "write_outcome"), (launch, "close")):
        monkeypatch.setattr(module, name, fail)
    assert len(concluded(launch, job, Board())["unwritten"]) == 4


@pytest.mark.parametrize("stopped", [None, "interrupted"])
def test_a_storage_that_hangs_ends_the_end_in_its_time_and_sooner_if_a_stop_is_asked_for(launch, job, monkeypatch, stopped):
    hang, board = threading.Event(), Board()
    if stopped:
        board.request_stop(stopped)
    for module, name in ((launch, "close"), (summary, "write"), (main, "write_outcome")):
        monkeypatch.setattr(module, name, lambda *args: hang.wait())
    monkeypatch.setattr(main, "LAST_TRY_S", 0.1)
    monkeypatch.setattr(main, "END_TIMEOUT_OF_A_STOP_S" if stopped else "END_TIMEOUT_S", 0.2)
    outcome = concluded(launch, job, board)
    hang.set()
    assert outcome["status"] == "finished"
    hung = ("the metrics of the end", "the state of the run", "summary.json", "outcome.json")
    assert outcome["unwritten"] == [f"{what} (no answer within 0 s)" for what in hung]
    assert board.outcome() == outcome


def test_a_driver_that_ray_train_starts_again_finds_the_end_where_the_storage_could_not_take_it(job, monkeypatch):
    monkeypatch.setattr(main, "open_launch", lambda *args: pytest.fail("the launch is over"))
    message = {"config": job, "run_dir": job.run_dir, "launch_id": "here", "board": Board(), "started_at_s": 0.0}
    message["board"].conclude({"status": "finished"})
    drive(message, SimpleNamespace())
    message["board"].conclude({"status": "failed", "error": "a mistake"})
    with pytest.raises(JobFailed, match="a mistake"):
        drive(message, SimpleNamespace())


@pytest.mark.parametrize("unread", ["read_outcome", "open_launch"])
def test_a_stop_is_heeded_while_the_storage_cannot_be_read(job, monkeypatch, unread):
    board, slept = Board(), []

    def gone(*args):
        raise OSError(errno.EIO, "the server is away")

    def sleep(seconds):
        slept.append(seconds)
        if sum(slept) >= 20:
            board.request_stop("interrupted")

    monkeypatch.setattr(main, unread, gone)
    monkeypatch.setattr(waits, "time", SimpleNamespace(monotonic=lambda: sum(slept), sleep=sleep))
    drive({"config": job, "run_dir": job.run_dir, "launch_id": "here", "board": board, "started_at_s": 0.0}, SimpleNamespace())
    assert sum(slept) <= 20 + waits.CHECK_STOP_INTERVAL_S  # of ten minutes
    assert exit_status(board.outcome(), None, None) == EXIT_STOPPED
    assert "stopped on request before the run went on: the run's storage could not be read: " in board.outcome()["line"]
    assert [event["message"] for event in board.read(0, 0)[1] if "trying again for 10 minutes" in event.get("message", "")]


def test_a_storage_that_cannot_be_read_hides_no_end(job, monkeypatch, tmp_path):
    (board := Board()).conclude({"status": "finished"})
    (tmp_path / "file").touch()
    assert outcome_of(board, str(tmp_path / "file"), "here") == {"status": "finished"}
    assert outcome_of(Board(), job.run_dir, "here") is None


@pytest.mark.parametrize(
    ("outcome", "status", "told"),
    [
        ({"status": "stopped", "error": None, "line": "stopped at 15; saved at 15"}, 3, "stopped at 15; saved at 15\n"),
        (
            {"status": "failed", "error": "a mistake", "line": "stopped at 6; saved at 6"},
            1,
            "\nerror: a mistake\nstopped at 6; saved at 6\n",
        ),
        ({"status": "finished", "error": None, "line": None}, 0, ""),
    ],
)
def test_the_last_line_and_the_exit_status_are_those_of_the_outcome(outcome, status, told, capsys):
    assert exit_status(outcome, None, None) == status
    assert capsys.readouterr().err == told
