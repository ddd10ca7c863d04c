"""One of three hosts is stuck: it is found within its limit, and the message names the host and the line where it is stuck. One
that is out of step with the others is found at once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from orchestrator.driver.halt import AGENT_TIMEOUT_S
from tests.ray.jobs import run_job, settings
from tests.ray.machines import own_ray
from tests.strikes import Folder, Striking, step

WINGS = ("orchestrator/failures", "orchestrator/driver", "cluster/agent", "trainers/diagnostics")

pytestmark = pytest.mark.slow("waits for the limits of a hang")

LIMIT_S = 3.0
STUCK_AT = {
    "hang": ("hang_for_ever", "fault_injection.py"),
    "skip_collective": ("skip_collective", "fault_injection.py"),
    "stuck_save": ("write_for_ever", "fault_injection.py"),
}


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    with own_ray(5):
        yield


def job(tmp_path, folder):
    return settings(
        tmp_path,
        max_num_steps=16,
        checkpoint={"save_steps": 6},
        hosts={"count": 3, "env": folder.env},
        driver={"watchdog": {"step_floor_s": LIMIT_S, "step_factor": 1.0, "save_s": LIMIT_S}},
    )


def check(summary, host):
    assert summary["status"] == "finished"
    (incident,) = summary["incidents"]
    assert (incident["kind"], incident["host"]) == ("hang", host)
    evidence = incident["evidence"]
    assert evidence["waited_s"] <= evidence["limit_s"] + 1.0
    files = sorted(path.name for path in Path(evidence["stacks"]).iterdir())
    assert files == ["host-0000.txt", "host-0001.txt", "host-0002.txt"]
    return evidence


@pytest.mark.parametrize("kind", STUCK_AT)
@pytest.mark.parametrize("host", [1])
def test_a_stuck_host_is_found_and_named_with_its_line(tmp_path, kind, host):
    folder = Folder(tmp_path / "faults")
    folder.order(host, kind, at=8)
    evidence = check(run_job(job(tmp_path, folder)), host)
    function, file = STUCK_AT[kind]
    assert function in evidence["summary"]
    assert file in evidence["summary"]
    assert evidence["phase"] == ("save" if kind == "stuck_save" else "train")


def test_a_host_that_was_late_itself_has_its_stacks_taken_too(tmp_path):
    """When the limit of the first passes, it has not been without progress for long enough to be suspicious."""
    folder = Folder(tmp_path / "faults")
    folder.order(1, "hang", at=8)
    folder.order(2, "slow", at=8, step_s=LIMIT_S - 0.5, steps=1)
    assert "hang_for_ever" in check(run_job(job(tmp_path, folder)), 1)["summary"]


def test_a_frozen_process_is_found_and_named(tmp_path):
    folder = Folder(tmp_path / "faults", step_s=0.05)
    board = Striking((step(8), lambda: folder.process(2).send_signal(signal.SIGSTOP)))
    evidence = check(run_job(job(tmp_path, folder), board), 2)
    assert "frozen in state T" in evidence["summary"]


def test_a_machine_that_has_fallen_silent_holds_up_nobody(tmp_path):
    """As one that is cut off, of which Ray will know much later."""
    folder = Folder(tmp_path / "faults", step_s=0.05)

    def silence():
        for process in (folder.process(2), folder.agent(2)):
            process.send_signal(signal.SIGSTOP)

    summary = run_job(job(tmp_path, folder), Striking((step(8), silence)))
    assert summary["status"] == "finished"
    (incident,) = summary["incidents"]
    assert (incident["kind"], incident["host"], incident["action"]) == ("host_lost", 2, "replace")
    assert incident["recovery_s"]["halt"] < AGENT_TIMEOUT_S / 2


def test_a_host_out_of_step_is_named_whoever_lives_to_tell(tmp_path):
    folder = Folder(tmp_path / "faults")
    folder.order(2, "desync", at=8)
    summary = run_job(job(tmp_path, folder))
    assert summary["status"] == "finished"
    (incident,) = summary["incidents"]
    assert (incident["kind"], incident["host"]) == ("desync", 2)
    assert "host 0 at batch 8, host 1 at batch 8, host 2 at batch 9" in incident["evidence"]["summary"]
