"""`python -m orchestrator.commands.profile` on a run that goes on, and on one that does not."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from orchestrator.reporting.board import Board
from tests.programs.processes import PATIENCE_S
from tests.ray.jobs import LANGUAGE_MODEL, run_job, settings
from tests.ray.machines import own_ray
from trainers.recorders.jsonl import read

WINGS = ("orchestrator/commands/profile.py", "trainers/diagnostics")

pytestmark = [pytest.mark.slow("traces a running job")]
OF_HOST_1 = "system/host-1/host_cpu_percent"


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    with own_ray(4):
        yield


def command(run_dir, *options):
    done = subprocess.run(
        [sys.executable, "-m", "orchestrator.commands.profile", str(run_dir), *options],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    return done.returncode, done.stdout + done.stderr


def wait_for_steps(board, timeout_s=PATIENCE_S):
    cursor, deadline_s = 0, time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        cursor, events = board.read(cursor, 1.0)
        if any(event["ev"] == "metrics" for event in events):
            return
    raise AssertionError("no step was published")


def wait_for_use_of_host_1(spool, timeout_s=PATIENCE_S):
    """Its heartbeat comes by itself, and is published with a later step."""
    deadline_s = time.monotonic() + timeout_s
    while OF_HOST_1 not in spool.read_text():
        assert time.monotonic() < deadline_s, f"{OF_HOST_1} was not published"
        time.sleep(0.5)


def test_hosts_are_profiled_while_they_train_and_recorders_hear_each_publish_once(tmp_path):
    board, summaries = Board(), []
    endless = {"max_num_steps": 1_000_000, "checkpoint": {"save_steps": None}}
    made = settings(tmp_path, **LANGUAGE_MODEL, **endless, recorders=["jsonl", "tensorboard"])
    job = threading.Thread(target=lambda: summaries.append(run_job(made, board)))
    job.start()
    try:
        wait_for_steps(board)
        status, told = command(tmp_path / "job", "--steps", "2", "--hosts", "0", "1")
        assert status == 0, told
        assert "to look at them: xprof --logdir" in told
        for line in told.splitlines()[:2]:
            _, _, path = line.partition(": ")
            assert list(Path(path).rglob("plugins/profile/*/*.xplane.pb")), line
        wait_for_use_of_host_1(tmp_path / "job" / "tracking" / "metrics.jsonl")
        status, told = command(tmp_path / "job", "--hosts", "7")
        assert (status, told.splitlines()[0]) == (1, "host 7: no training process of this host answers")
    finally:
        board.request_stop("requested")
        job.join(PATIENCE_S)
    assert summaries[0]["stop_reason"] == "requested"
    notes = [event["message"] for event in board.read(0, 0)[1] if event["ev"] == "note"]
    assert sum("a profile of steps" in note for note in notes) == 2
    assert [note for note in notes if "recorder" in note] == []
    spooled = [json.loads(line) for line in (tmp_path / "job" / "tracking" / "metrics.jsonl").read_text().splitlines()]
    published = {line["step"] for line in spooled if "loss" in line.get("metrics", ())}
    lines = list(read(tmp_path / "job" / "metrics.jsonl"))
    assert [line["step"] for line in lines if "loss" in line["metrics"]] == sorted(published)
    tracked = {name for line in spooled for name in line.get("metrics", ())}
    assert {name for line in lines for name in line["metrics"]} == tracked, "recorders have what MLflow has"
    assert {"goodput/share", "incidents/count", OF_HOST_1} <= tracked
    assert list((tmp_path / "job" / "tensorboard").iterdir())
    status, told = command(tmp_path / "job")
    assert status == 2
    assert "does not go on now" in told
    assert command(tmp_path / "nothing")[0] == 2
