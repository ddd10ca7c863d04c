"""A real job in a bucket, with what goes wrong there: it ends as one on a disk does, bit for bit."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests import ROOT
from tests.stores.contract import buckets
from tests.stores.fault_proxy import Fault
from trainers.checkpoint import layout, manifest, standing
from trainers.storage.opening import place_of
from trainers.storage.row import Row

TINY = str(ROOT / "configs" / "tiny.yaml")
STEPS = 60
pytestmark = [pytest.mark.slow("trains whole jobs"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def stores():
    with buckets() as found:
        yield found


@pytest.fixture(params=["gs", "s3"])
def bucket(request, stores, monkeypatch):
    stores[request.param].set(monkeypatch)
    standing._rows.clear()
    return stores[request.param]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The fingerprints of the last state of a run on a disk."""
    folder = tmp_path_factory.mktemp("undisturbed")
    command = [sys.executable, "-m", "orchestrator.run", TINY, f"storage={folder}", "tracking.mlflow=false"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=240, capture_output=True)
    return manifest.read_meta(folder / "tiny" / "checkpoints" / str(STEPS))["fingerprints"]


class Job:
    def __init__(self, url, tmp_path, *more):
        self.run, self.log = place_of(url) / "tiny", tmp_path / "console.log"
        settings = [f"storage={url}", "tracking.mlflow=false", f"hosts.log_dir={tmp_path}/logs", *more]
        command = [sys.executable, "-m", "orchestrator.run", TINY, *settings]
        # The file of an earlier launch stays: what is looked for must come anew.
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, text=True, process_group=0)

    def said(self):
        return self.log.read_text()

    def wait_until(self, condition, timeout_s=150):
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline_s, self.said()
            time.sleep(0.1)

    def saved(self):
        return sorted(Row(self.run / "row").newest().of("checkpoints"))

    def ended(self, timeout_s=240):
        try:
            return self.process.wait(timeout_s)
        finally:
            self.process.kill()

    def last_meta(self):
        standing._rows.clear()
        folder = self.run / "checkpoints"
        return manifest.read_meta(layout.at(folder, layout.steps(folder)[-1]))

    def summary(self):
        return json.loads((self.run / "summary.json").get())


def test_a_killed_process_costs_nothing_but_time(bucket, tmp_path, undisturbed):
    job = Job(bucket.url(), tmp_path)
    job.wait_until(lambda: 20 in job.saved())
    pids = re.findall(r"training processes (\d+) \(host 0\), (\d+)", job.said())
    os.kill(int(pids[-1][1]), signal.SIGKILL)
    assert job.ended() == 0, job.said()
    assert job.last_meta()["fingerprints"] == undisturbed
    summary = job.summary()
    assert (summary["status"], len(summary["incidents"])) == ("finished", 1)
    assert len((job.run / "incidents.jsonl").list()) >= 1
    assert [segment.name for segment in (job.run / "tracking" / "segments").list()]


def test_a_run_that_was_stopped_goes_on_by_the_same_command(bucket, tmp_path, undisturbed):
    url = bucket.url()
    job = Job(url, tmp_path)
    job.wait_until(lambda: 20 in job.saved())
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.ended() == 3, job.said()
    stopped = job.summary()
    assert stopped["checkpoint"].startswith(f"{url}/tiny/checkpoints/{stopped['steps']}-1_0_")
    again = Job(url, tmp_path)
    assert again.ended() == 0, again.said()
    assert again.last_meta()["fingerprints"] == undisturbed
    assert Row(again.run / "row").newest().term.driver_term == 2


def test_an_outage_while_it_trains_loses_nothing(bucket, tmp_path, undisturbed):
    job = Job(bucket.url(), tmp_path)
    job.wait_until(lambda: 20 in job.saved())
    bucket.proxy.faults[:] = [Fault(".", "503")]
    time.sleep(10)
    bucket.proxy.faults[:] = [Fault(".", "403", times=3), Fault("^(GET|LIST)", "cut", times=5), Fault(".", "delay", times=20)]
    assert job.ended() == 0, job.said()
    bucket.proxy.faults.clear()
    assert job.last_meta()["fingerprints"] == undisturbed
    assert job.saved()[-1] == STEPS
    assert not job.summary()["incidents"]


def test_a_second_launch_of_a_live_run_is_refused(bucket, tmp_path):
    url = bucket.url()
    job = Job(url, tmp_path, "max_num_steps=100000")
    try:
        job.wait_until(lambda: 20 in job.saved())
        command = [sys.executable, "-m", "orchestrator.run", TINY, f"storage={url}"]
        second = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=60)
        assert second.returncode == 2
        assert "is in use" in second.stderr
    finally:
        os.killpg(job.process.pid, signal.SIGINT)
        job.ended()
