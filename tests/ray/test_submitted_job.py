"""A job as users submit it: `ray job submit --working-dir . -- python -m orchestrator.run CONFIG`, seen by the dashboard."""

from __future__ import annotations

import json
import os
import re
import sys
import time
import urllib.request

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.job_submission import JobStatus, JobSubmissionClient
from ray.util.state import list_actors

from cluster.agent import machine
from orchestrator.runs.stop import main as stop_command
from orchestrator.tracking import prometheus
from tests import ROOT
from tests.programs.processes import PATIENCE_S

WINGS = (
    "orchestrator/run.py",
    "orchestrator/commands/launching.py",
    "orchestrator/driver/ray_train.py",
    "orchestrator/driver/ray_cluster.py",
)

pytestmark = pytest.mark.slow("submits a job to a Ray with its dashboard")

EXPORT_OFTEN = {"metrics_report_interval_ms": 1000}
"""Ray's own default is 10 s: a job would have to train as long."""
WITHOUT_DEVICE_NUMBERS = {"gangway_mfu_ratio", "gangway_device_memory_bytes", "gangway_device_memory_peak_bytes"}
"""A processor has no peak here, and does not count its memory."""
WITHOUT_FAILURE = {"gangway_incidents_total"}
EXPORTED = {metric.name for metric in prometheus.METRICS} - WITHOUT_DEVICE_NUMBERS - WITHOUT_FAILURE
COMMAND = f"{sys.executable} -m orchestrator.run configs/tiny.yaml tracking.mlflow=false"


@pytest.fixture(scope="module")
def dashboard():
    # Jobs go to the dashboard's agent, which `ray.init` would have listen on a port that is the same for every Ray of a machine.
    names = ("dashboard_port", "dashboard_agent_listen_port", "metrics_export_port")
    ports = {name: machine.free_port() for name in names}
    cluster = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": True, "_system_config": EXPORT_OFTEN, **ports}
    )
    try:
        context = ray.init(cluster.address, log_to_driver=False)
        yield f"http://{context.dashboard_url}"
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture
def gauges():
    """The last value of each of our gauges that Prometheus would have scraped, by name and run."""
    return {}


def gauges_of_the_node():
    (node,) = ray.nodes()
    url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    text = urllib.request.urlopen(url).read().decode()
    rows = re.findall(r'^ray_((?:gangway|workload)_\w+)\{.*(?:run|workload_id)="(\w+)".*\} (\S+)$', text, re.M)
    return {(name, run): float(value) for name, run, value in rows}


@pytest.fixture
def submit(dashboard, gauges):
    client = JobSubmissionClient(dashboard)

    def submit(*overrides, meanwhile=lambda log: None):
        environment = {"working_dir": str(ROOT), "excludes": ["/.git", "/.venv", "/runs", "/build", "/tests"]}
        job = client.submit_job(entrypoint=" ".join([COMMAND, *overrides]), runtime_env=environment)
        deadline_s = time.monotonic() + PATIENCE_S
        while not client.get_job_status(job).is_terminal():
            assert time.monotonic() < deadline_s, client.get_job_logs(job)
            meanwhile(client.get_job_logs(job))
            gauges.update(gauges_of_the_node())
            time.sleep(0.5)
        return client.get_job_status(job), client.get_job_logs(job)

    return submit


def test_a_submitted_job_trains_and_is_seen(dashboard, submit, gauges, tmp_path):
    status, log = submit(f"storage={tmp_path}", "max_num_steps=400")  # long enough for Ray to export its metrics
    assert status == JobStatus.SUCCEEDED, log
    summary = json.loads((tmp_path / "tiny" / "summary.json").read_text())
    assert summary["status"] == "finished"
    with runs_in(dashboard) as answer:
        runs = {run["name"]: run["status"] for run in json.load(answer)["train_runs"]}
    assert runs["tiny"] == "FINISHED"
    actors = list_actors(address=dashboard, filters=[("class_name", "=", "HostAgent")], detail=True, limit=100)
    names = [re.fullmatch(r"tiny-\w+, host-(\d+)", actor.repr_name) for actor in actors]
    assert {int(name.group(1)) for name in names} == {0, 1}
    assert {name for name, run in gauges if run == "tiny"} == EXPORTED
    assert 0 < gauges["gangway_step", "tiny"] <= summary["steps"]
    assert 0 < gauges["gangway_goodput_ratio", "tiny"] < 1


def test_a_run_that_is_stopped_is_a_stopped_job_and_none_that_has_failed(submit, tmp_path):
    asked = []

    def stop(log):
        if not asked and "step 10/1000000" in log:
            asked.append(stop_command([str(tmp_path / "tiny")]))

    # Only the request ends it. KubeRay would begin a job that has failed again.
    status, log = submit(f"storage={tmp_path}", "max_num_steps=1000000", meanwhile=stop)
    assert asked == [0], log
    assert status == JobStatus.STOPPED, log
    assert json.loads((tmp_path / "tiny" / "summary.json").read_text())["status"] == "stopped"
    assert re.search(r"stopped at \d+; saved at \d+; run the same command again to go on\n$", log)


def test_a_job_that_fails_is_failed_everywhere(dashboard, submit, tmp_path):
    status, log = submit(f"storage={tmp_path}", "name=bad", "trainer=tests_that_are_not_there:Trainer")
    assert status == JobStatus.FAILED
    assert "tests_that_are_not_there" in log
    status, log = submit(f"storage={tmp_path}", "name=worse", "hosts.count=9", "global_batch_size=9", "hosts.start_timeout_s=2")
    assert status == JobStatus.FAILED
    assert "could not be had within 2 s" in log
    with runs_in(dashboard) as answer:
        runs = {run["name"]: run["status"] for run in json.load(answer)["train_runs"]}
    assert runs["worse"] == "ERRORED"


def runs_in(dashboard):
    """The dashboard's answer about Ray Train's runs, to who has the token."""
    headers = {"Authorization": f"Bearer {os.environ['RAY_AUTH_TOKEN']}"}
    return urllib.request.urlopen(urllib.request.Request(f"{dashboard}/api/train/v2/runs/v1", headers=headers))
