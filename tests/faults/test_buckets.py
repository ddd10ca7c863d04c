"""A real job in a bucket, with what goes wrong there: it ends as one on a disk does, bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack, suppress

import psutil
import pytest

from gangway.storage.opening import place_of
from gangway.storage.row import KIND, Row
from orchestrator.faultlab.chaos import command as chaos
from orchestrator.faultlab.verify import command as verify
from orchestrator.run_state.lease import holder_of
from tests import ROOT, fuzz
from tests.programs.processes import PATIENCE_S, wait_while_running
from tests.saved import saved
from tests.stores.contract import buckets
from tests.stores.fault_proxy import Fault
from trainers.checkpoint import layout, manifest

WINGS = ("gangway/storage", "trainers/checkpoint", "orchestrator/run_state")

TINY = str(ROOT / "tests" / "programs" / "table.yaml")
STEPS = 60
pytestmark = [pytest.mark.slow("trains whole jobs")]


@pytest.fixture(scope="module")
def stores():
    with buckets() as found:
        yield found


@pytest.fixture
def bucket(request, stores, monkeypatch):
    stores[request.param].set(monkeypatch)
    layout._rows.clear()
    return stores[request.param]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The fingerprints of the last state of a run on a disk."""
    folder = tmp_path_factory.mktemp("undisturbed")
    command = [sys.executable, "-m", "orchestrator.run", TINY, f"storage={folder}", "tracking.mlflow=false"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=PATIENCE_S, capture_output=True)
    return manifest.read_meta(place_of(saved(folder / "tiny", STEPS)))["fingerprints"]


@pytest.fixture
def start(tmp_path):
    """Starts a run at a URL, or goes on with it; it is ended with the test."""
    with ExitStack() as jobs:

        def begin(url, *more):
            job = Job(url, tmp_path, *more)
            jobs.callback(job.close)
            return job

        yield begin


class Job:
    def __init__(self, url, tmp_path, *more):
        self.url, self.run, self.log = url, place_of(url) / "tiny", tmp_path / "console.log"
        self.orders = tmp_path / "orders"
        self.orders.mkdir(exist_ok=True)
        settings = [f"storage={url}", "tracking.mlflow=false", f"hosts.log_dir={tmp_path}/logs", *more]
        settings += [f"hosts.env.GANGWAY_FAULTS={self.orders}"]
        command = [sys.executable, "-m", "orchestrator.run", TINY, *settings]
        # The file of an earlier launch stays: what is looked for must come anew.
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, text=True, process_group=0)

    def said(self):
        return self.log.read_text()

    def wait_until(self, condition):
        wait_while_running(condition, self.process, self.said)

    def saved(self):
        return sorted(Row(self.run / "row").newest().of("checkpoints"))

    def has_told(self, kind):
        """Whether there is an incident of this kind."""
        folder = self.run / "incidents.jsonl"
        return any(kind.encode() in (folder / entry.name).get() for entry in folder.list())

    def pace(self, step_s):
        (self.orders / "pace.json").write_text(json.dumps({"step_s": step_s}))

    def pid_of(self, host):
        """The training process that is host `host` now."""
        return json.loads((self.orders / "members" / f"host-{host:04d}.json").read_text())["pid"]

    def ended(self):
        return self.process.wait(PATIENCE_S)

    def close(self):
        """Ends what is left of it: a run whose bucket is gone would try for ever."""
        with suppress(psutil.NoSuchProcess):
            tree = psutil.Process(self.process.pid).children(recursive=True)
            self.process.kill()
            for process in tree:
                with suppress(psutil.NoSuchProcess):
                    process.kill()

    def last_meta(self):
        layout._rows.clear()
        folder = self.run / "checkpoints"
        return manifest.read_meta(layout.at(place_of(folder), layout.steps(place_of(folder))[-1]))

    def summary(self):
        return json.loads((self.run / "summary.json").get())

    def commits(self):
        """The steps of the commits in the row, in their order."""
        row, before, steps = self.run / "row", {}, []
        for entry in row.list():
            document = KIND.read(row / entry.name)
            kept = document["kept"].get("checkpoints", {})
            if document["what"] == "commit":
                steps += [int(step) for step in kept if kept[step] != before.get(step)]
            before = kept
        return steps


def check_whole(job, undisturbed, *kinds):
    """It has ended as the undisturbed one did; each step was committed once; these incidents are told, and none of them twice."""
    summary = job.summary()
    assert (summary["status"], [incident["kind"] for incident in summary["incidents"]]) == ("finished", [*kinds])
    assert job.last_meta()["fingerprints"] == undisturbed
    assert job.saved()[-1] == STEPS
    assert max(Counter(job.commits()).values()) == 1, job.commits()
    # The state of the last save at least: its hosts have sent it, and told so at their end.
    assert summary["requests"]["bytes_out"] > manifest.read(layout.at(place_of(job.run / "checkpoints"), STEPS)).num_bytes
    assert [segment.name for segment in (job.run / "tracking" / "segments").list()]
    return summary


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_a_process_the_agent_and_the_driver_are_killed_one_after_the_other(bucket, start, undisturbed):
    """A driver in a process of its own (`driver.supervise`) is followed by another one, which takes over the gang."""
    job = start(bucket.url(), "driver.supervise=true")
    job.pace(0.2)
    job.wait_until(lambda: 20 in job.saved())
    first = job.pid_of(1)
    os.kill(first, signal.SIGKILL)
    job.wait_until(lambda: job.pid_of(1) != first and "training again" in job.said())
    holder = holder_of(job.run.url)
    assert holder.pid != job.process.pid
    job.pace(3.0)  # else it would be over before another driver is there
    os.kill(holder.pid, signal.SIGKILL)
    job.wait_until(lambda: job.has_told("driver_lost"))
    psutil.Process(job.pid_of(0)).parent().kill()
    (job.orders / "pace.json").unlink()
    assert job.ended() == 0, job.said()
    summary = check_whole(job, undisturbed, "process_crash", "driver_lost", "host_lost")
    assert [incident["action"] for incident in summary["incidents"]] == ["restart", "adopt", "replace"]
    assert summary["incidents"][0]["resumed_step"] == 20
    assert summary["drivers"] == 2


@pytest.mark.parametrize("bucket", ["weed"], indirect=True)
def test_a_run_that_was_stopped_goes_on_by_the_same_command(bucket, start, undisturbed):
    """A command beside it is refused. The one after it is killed as a whole (SIGKILL), and the last takes the run from the dead
    one by the row."""
    url = bucket.url()
    job = start(url)
    job.pace(3.0)  # steps are left for each launch
    job.wait_until(lambda: 20 in job.saved())
    command = [sys.executable, "-m", "orchestrator.run", TINY, f"storage={url}"]
    beside = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=PATIENCE_S)
    assert (beside.returncode, "is in use" in beside.stderr) == (2, True), beside.stderr
    job.pace(0.3)
    os.killpg(job.process.pid, signal.SIGINT)
    assert job.ended() == 3, job.said()
    stopped = job.summary()
    assert stopped["checkpoint"].startswith(f"{url}/tiny/checkpoints/{stopped['steps']}-1_0_")
    again = start(url)
    again.wait_until(lambda: Row(again.run / "row").newest().term.driver_term == 2 and 40 in again.saved())
    again.process.kill()
    again.process.wait()
    (job.orders / "pace.json").unlink()
    last = start(url)
    assert last.ended() == 0, last.said()
    check_whole(last, undisturbed)
    assert Row(last.run / "row").newest().term.driver_term == 3


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_what_a_network_and_a_cloud_do_on_bad_days_loses_nothing_and_is_told(bucket, start, undisturbed):
    """Each of these comes while it trains and saves: no answers, 503, refused credentials, listings that lag, delays and cuts."""
    job = start(bucket.url())
    job.pace(0.5)
    job.wait_until(lambda: 20 in job.saved())
    job.pace(1.0)  # 40 steps are left, which must last longer than the bad days
    begun_s = time.monotonic()
    for faults, seconds in (
        ([Fault(".", "503")], 5),
        ([Fault(".", "hang", seconds=20)], 20),
        ([Fault(".", "403")], 5),
        ([Fault("^LIST", "hide", names="(row|checkpoints)/")], 5),
        ([Fault(".", "delay", times=10, seconds=2), Fault("^GET", "cut", times=5)], 0),
    ):
        bucket.proxy.faults[:] = faults
        time.sleep(seconds)
    assert job.process.poll() is None, job.said()
    (job.orders / "pace.json").unlink()
    assert job.ended() == 0, job.said()
    bucket.proxy.faults.clear()
    summary = check_whole(job, undisturbed)
    assert time.monotonic() - begun_s > 35
    assert summary["failed_requests"] > 10
    said = job.said()
    assert said.count("requests to the storage fail (the first of ") == 1, said
    assert f"{summary['failed_requests']} requests to it failed and were made again" in said


@pytest.mark.parametrize("bucket", ["s3"], indirect=True)
def test_a_program_is_verified_in_a_bucket(bucket, tmp_path, monkeypatch, capsys):
    """Undisturbed twice, killed after a checkpoint, gone on with on fewer hosts, and along that lineage: bit for bit."""
    monkeypatch.chdir(ROOT)
    url = bucket.url()
    status = verify.main([TINY, f"storage={url}", f"hosts.log_dir={tmp_path}", "--steps", "16"])
    said = capsys.readouterr().out
    report = json.loads((place_of(url) / "tiny-verify" / "verify.json").get())
    assert (status, report["passed"]) == (0, True), said
    assert [finding["good"] for finding in report["findings"]] == [True] * 4
    assert [entry.name for entry in place_of(f"{url}/tiny-verify").list() if "/" in entry.name] == []  # the runs are gone


@pytest.mark.parametrize("bucket", ["gs"], indirect=True)
def test_a_chaos_run_in_a_bucket_equals_its_replay(bucket, tmp_path, monkeypatch, capsys):
    """A flipped byte in an object of the newest checkpoint, the driver and an agent."""
    monkeypatch.chdir(ROOT)
    url, seed = bucket.url(), str(fuzz.seed(1))
    overrides = [f"storage={url}", f"hosts.log_dir={tmp_path}", "tracking.mlflow=false", "checkpoint.save_steps=20"]
    status = chaos.main([TINY, *overrides, "--faults", "flip,driver,agent,disk_full", "--seed", seed])
    said = capsys.readouterr().out
    score = json.loads((place_of(url) / "tiny-chaos" / "chaos.json").get())
    # Text: of anything else pytest shows only the beginning and the end.
    assert status == 0, f"seed {seed}\n{said}"
    assert sorted(outcome["injection"]["kind"] for outcome in score["outcomes"]) == ["agent", "driver", "flip"]
    assert "the storage is a bucket" in score["skipped_kinds"]["disk_full"]
