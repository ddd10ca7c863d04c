"""A job as users submit it: `ray job submit --working-dir . -- python -m orchestrator.run CONFIG`, seen by the dashboard."""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import ray
from ray.job_submission import JobStatus, JobSubmissionClient
from ray.util.state import list_actors

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 240
COMMAND = f"{sys.executable} -m orchestrator.run configs/tiny.yaml tracking.mlflow=false"


@pytest.fixture(scope="module")
def dashboard():
    context = ray.init(num_cpus=4, include_dashboard=True, dashboard_port=0, log_to_driver=False)
    yield f"http://{context.dashboard_url}"
    ray.shutdown()


@pytest.fixture
def submit(dashboard):
    client = JobSubmissionClient(dashboard)

    def submit(*overrides):
        environment = {"working_dir": str(ROOT), "excludes": ["/.git", "/.venv", "/runs", "/build", "/tests"]}
        job = client.submit_job(entrypoint=" ".join([COMMAND, *overrides]), runtime_env=environment)
        deadline_s = time.monotonic() + TIMEOUT_S
        while not client.get_job_status(job).is_terminal():
            assert time.monotonic() < deadline_s, client.get_job_logs(job)
            time.sleep(0.5)
        return client.get_job_status(job), client.get_job_logs(job)

    return submit


def test_a_submitted_job_trains_and_is_seen(dashboard, submit, tmp_path):
    status, log = submit(f"storage={tmp_path}")
    assert status == JobStatus.SUCCEEDED, log
    summary = json.loads((tmp_path / "tiny" / "summary.json").read_text())
    assert summary["status"] == "finished"
    with urllib.request.urlopen(f"{dashboard}/api/train/v2/runs/v1") as answer:
        runs = {run["name"]: run["status"] for run in json.load(answer)["train_runs"]}
    assert runs["tiny"] == "FINISHED"
    actors = list_actors(filters=[("class_name", "=", "HostAgent")], detail=True, limit=100)
    assert len(actors) >= 2


def test_a_job_that_fails_is_failed_everywhere(dashboard, submit, tmp_path):
    status, log = submit(f"storage={tmp_path}", "name=bad", "trainer=tests_that_are_not_there:Trainer")
    assert status == JobStatus.FAILED
    assert "tests_that_are_not_there" in log
    status, log = submit(f"storage={tmp_path}", "name=worse", "hosts.count=9", "global_batch_size=9", "hosts.start_timeout_s=2")
    assert status == JobStatus.FAILED
    assert "could not be had within 2 s" in log
    with urllib.request.urlopen(f"{dashboard}/api/train/v2/runs/v1") as answer:
        runs = {run["name"]: run["status"] for run in json.load(answer)["train_runs"]}
    assert runs["worse"] == "ERRORED"
