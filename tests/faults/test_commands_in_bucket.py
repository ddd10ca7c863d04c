"""All commands about a run, on a real run in a bucket: while it trains, and after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress

import psutil
import pytest

from gangway.storage.opening import place_of
from orchestrator import gangway
from tests import ROOT
from tests.programs.processes import PATIENCE_S, wait_while_running
from tests.stores.contract import buckets
from trainers.checkpoint import layout

WINGS = ("orchestrator/runs", "orchestrator/report", "gangway/storage", "trainers/commands")

TINY = str(ROOT / "configs" / "tiny.yaml")
pytestmark = [pytest.mark.slow("trains two jobs")]


@pytest.fixture
def bucket(monkeypatch):
    with buckets() as found:
        found["gs"].set(monkeypatch)
        layout._rows.clear()
        yield found["gs"]


@pytest.fixture
def call(bucket, tmp_path, monkeypatch, capsys):
    """Calls `gangway` in a folder of its own, and returns what it has printed."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "argv", list(sys.argv))

    def call(*words):
        """Asks again for a while: what a run tells reaches its bucket now and then."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            capsys.readouterr()
            layout._rows.clear()  # as in a process of its own
            status, printed = gangway.main(words), capsys.readouterr()
            if status == 0:
                return printed.out
            assert time.monotonic() < deadline_s, f"{words}: {status}\n{printed.out}{printed.err}"
            time.sleep(0.5)

    return call


@pytest.fixture
def job(tmp_path):
    """Starts `gangway run`, and returns its process and its log."""
    started = []

    def start(*settings):
        log = tmp_path / f"console-{len(started)}.log"
        command = [sys.executable, "-m", "orchestrator.run", TINY, *settings]
        with log.open("w") as to:
            started.append(subprocess.Popen(command, cwd=ROOT, stdout=to, stderr=subprocess.STDOUT))
        return started[-1], log

    yield start
    for process in started:
        with suppress(psutil.NoSuchProcess):
            tree = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            for child in tree:
                with suppress(psutil.NoSuchProcess):
                    child.kill()


def test_each_command_reads_and_steers_a_run_in_a_bucket(bucket, call, job, tmp_path):
    url, orders = bucket.url(), tmp_path / "orders"
    run = f"{url}/tiny"
    orders.mkdir()
    settings = [f"storage={url}", "tracking.mlflow=false", f"hosts.log_dir={tmp_path}/logs", "publish_every_steps=1"]
    (orders / "pace.json").write_text(json.dumps({"step_s": 0.2}))
    process, log = job(*settings, f"hosts.env.GANGWAY_FAULTS={orders}", "max_num_steps=5000")
    # What `status` reads is written now and then.
    wait_until(lambda: "tokens/s" in log.read_text() and '"state": "training"' in call("status", url, "--json"), process, log)
    while_it_trains(call, run, url)
    # A run is named by its file and its settings, too.
    assert "tiny: stopped; saved at step " in call("stop", TINY, f"storage={url}")
    assert process.wait(PATIENCE_S) == 3, log.read_text()
    process, log = job(*settings, "name=other", "max_num_steps=12", "seed=2")
    assert process.wait(PATIENCE_S) == 0, log.read_text()
    when_it_is_over(call, run, url)


def while_it_trains(call, run, url):
    (one,) = json.loads(call("status", url, "--json"))
    assert (one["name"], one["kind"], one["folder"]) == ("tiny", "live", run)
    assert "training" in call("status", run)
    assert "tiny: saved at step " in call("save", run)
    assert call("incidents", run) == "no incident\n"
    assert "==> host 1: " in call("logs", run, "--host", "1")
    assert "loss" in call("history", run)
    assert json.loads(call("checkpoints", run, "--json"))
    assert call("report", run) == f"{run}/report.html\n"


def when_it_is_over(call, run, url):
    runs = {one["name"]: one for one in json.loads(call("status", url, "--json"))}
    assert {name: one["state"] for name, one in runs.items()} == {"tiny": "stopped", "other": "finished"}
    steps = runs["tiny"]["step"]
    assert call("incidents", TINY, f"storage={url}") == "no incident\n"
    assert "==> host 0: " in call("logs", run)
    assert len(json.loads(call("history", run, "--json"))["loss"]) == steps
    assert f'"step": {steps}' in call("checkpoints", run, "--verify", "--json")
    found = json.loads(call("compare", run, f"{url}/other", "--json"))
    assert found["settings"]["seed"] == ["0", "2"]
    assert [one["step"] for one in found["results"]] == [steps, 12]
    assert call("report", run) == f"{run}/report.html\n"
    page = place_of(f"{run}/report.html").get().decode()
    assert f"<b>{steps} of 5,000</b>" in page
    assert ">stopped<" in page
    assert call("report", run, f"{url}/other") == "report.html\n"
    assert os.listdir() == ["report.html"], "a URL was taken for a path"


def wait_until(condition, process, log):
    wait_while_running(condition, process, log.read_text)
