"""Limits of a whole run: they count over restarts and launches, and hold for a trainer that reports nothing."""

from __future__ import annotations

import json
import signal

import pytest

from tests.ray.jobs import run_job, settings
from tests.ray.machines import own_ray
from tests.strikes import Folder, Striking, checkpoint

WINGS = ("orchestrator/driver", "orchestrator/policies", "cluster/agent", "trainers/runtime")

pytestmark = pytest.mark.slow("waits for the limits of a run")

LIMIT_S = 20.0
STEP_S = 0.2


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    with own_ray(4):
        yield


def test_the_time_limit_is_the_runs_and_not_that_of_a_process(tmp_path):
    folder = Folder(tmp_path / "faults", step_s=STEP_S)
    made = settings(
        tmp_path,
        max_num_steps=100_000,
        time_limit=f"{LIMIT_S}s",
        checkpoint={"save_steps": 5},
        hosts={"count": 2, "env": folder.env},
    )
    board = Striking((checkpoint(5), lambda: folder.process(1).send_signal(signal.SIGKILL)))
    summary = run_job(made, board)
    assert [incident["kind"] for incident in summary["incidents"]] == ["process_crash"]
    assert (summary["status"], summary["stop_reason"]) == ("stopped", "time_limit")
    assert f"/{summary['steps']}-" in summary["checkpoint"]
    # From the first join on all seconds count, those of the restart too: only the last save comes after the limit.
    assert LIMIT_S <= used_s(tmp_path) < LIMIT_S + 60.0
    assert summary["steps"] < LIMIT_S / STEP_S
    again = run_job(made)
    assert (again["status"], again["stop_reason"], again["steps"]) == ("stopped", "time_limit", summary["steps"])
    assert again["launch"]["generations"] == 0
    used_before_s = used_s(tmp_path)
    further = run_job({**made, "time_limit": f"{used_before_s + 10.0}s"})
    assert further["stop_reason"] == "time_limit"
    assert summary["steps"] < further["steps"]
    assert 10.0 <= used_s(tmp_path) - used_before_s < 70.0


def used_s(tmp_path):
    return json.loads((tmp_path / "job" / "launch.json").read_text())["time_used"]["seconds"]


SILENT_S = 4.0


def quiet(tmp_path, what, **changes):
    """A job whose trainer reports nothing: it calls neither `phase` nor `progress`."""
    return settings(
        tmp_path,
        trainer="tests.programs.quiet:QuietTrainer",
        data={"dataset": "tests.programs.quiet:no_data"},
        hosts={"count": 2, "env": {"QUIET": what}},
        **changes,
    )


def test_a_trainer_that_reports_nothing_and_hangs_is_found_and_started_again(tmp_path):
    # Host 0 is done with its work: it waits at the end, where it is silent too.
    summary = run_job(quiet(tmp_path, "hangs_once", driver={"watchdog": {"silent_s": SILENT_S}}))
    assert summary["status"] == "finished"
    (incident,) = summary["incidents"]
    assert (incident["kind"], incident["host"]) == ("hang", 1)
    evidence = incident["evidence"]
    assert (evidence["phase"], evidence["limit_s"]) == ("silence", SILENT_S)
    assert "hang_for_ever" in evidence["summary"]
    assert SILENT_S <= evidence["waited_s"] < SILENT_S + 10.0


def test_one_host_that_prints_speaks_for_all(tmp_path):
    summary = run_job(quiet(tmp_path, "host_0_prints", driver={"watchdog": {"silent_s": SILENT_S}}))
    assert (summary["status"], summary["incidents"]) == ("finished", [])


def test_a_trainer_that_reports_nothing_is_asked_to_stop_at_the_time_limit(tmp_path):
    summary = run_job(quiet(tmp_path, "stops", time_limit="5s"))
    assert (summary["status"], summary["stop_reason"]) == ("stopped", "time_limit")
    assert summary["incidents"] == []


def test_a_trainer_that_does_not_stop_at_the_time_limit_is_ended(tmp_path):
    made = quiet(tmp_path, "never_stops", time_limit="5s", driver={"watchdog": {"evaluate_s": 2.0, "save_s": 2.0}})
    summary = run_job(made)
    assert (summary["status"], summary["stop_reason"]) == ("stopped", "time_limit")
    assert summary["checkpoint"] == str(tmp_path / "job" / "model")
    assert 9.0 <= used_s(tmp_path) < 20.0
