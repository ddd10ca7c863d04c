"""The head of the cluster dies under a running command: told in seconds, and the same command goes on on another cluster. Of a
Ray that the command has started: the hosts save first."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import psutil
import pytest

from gangway.storage.opening import place_of
from orchestrator.faultlab.testbed.local_cluster import local_cluster
from tests import ROOT
from tests.programs.processes import PATIENCE_S, wait_until
from trainers.checkpoint import layout

WINGS = ("orchestrator/driver", "orchestrator/run_state", "orchestrator/commands/launching.py")

pytestmark = pytest.mark.slow("starts two clusters")

SETTINGS = ("hosts.count=1", "publish_every_steps=5", "checkpoint.save_steps=10", "previews=null", "tracking.mlflow=false")


def start(tmp_path, cluster, log, max_num_steps):
    command = [sys.executable, "-m", "orchestrator.run", "configs/tiny.yaml", f"storage={tmp_path}", *SETTINGS]
    env = {**os.environ, "RAY_ADDRESS": cluster.address, **cluster.authentication}
    return subprocess.Popen([*command, f"max_num_steps={max_num_steps}"], cwd=ROOT, env=env, stdout=log, stderr=log)


def is_behind(run_dir):
    """Whether the list that Ray Train keeps in the run's folder names a checkpoint that newer ones have replaced."""
    listed = run_dir / "checkpoint_manager_snapshot.json"
    named = set(re.findall(r"checkpoints/([\w-]+)", listed.read_text())) if listed.exists() else set()
    return any(not (run_dir / "checkpoints" / name).exists() for name in named)


def test_a_head_that_dies_is_reported_and_another_cluster_goes_on(tmp_path):
    console = tmp_path / "console.log"
    with local_cluster(None) as cluster, console.open("w") as log:
        cluster.add_machines()
        process = start(tmp_path, cluster, log, 1_000_000)
        try:
            assert wait_until(lambda: process.poll() is not None or is_behind(tmp_path / "tiny"))
            assert process.poll() is None, console.read_text()
            cluster.head().kill()
            assert wait_until(lambda: "does not answer: connection refused" in console.read_text())
            assert process.wait(PATIENCE_S) == 1
        finally:
            process.kill()
    last = console.read_text().splitlines()[-1]
    assert "error: the head of the Ray cluster at" in last
    assert f"goes on from the newest checkpoint in {tmp_path}/tiny/checkpoints" in last

    # Whoever believed the list of the dead cluster would look for a checkpoint that is gone.
    assert is_behind(tmp_path / "tiny")
    newest = max(layout.steps(place_of(tmp_path / "tiny") / "checkpoints"))
    with local_cluster(None) as cluster, console.open("w") as log:
        cluster.add_machines()
        assert start(tmp_path, cluster, log, newest + 10).wait(PATIENCE_S) == 0, console.read_text()
    assert f"goes on from step {newest}" in console.read_text()
    assert json.loads((tmp_path / "tiny" / "summary.json").read_text())["steps"] == newest + 10


def test_a_head_of_its_own_ray_that_dies_lets_the_hosts_save_first(tmp_path):
    command = [
        sys.executable,
        "-m",
        "orchestrator.run",
        "configs/tiny.yaml",
        f"storage={tmp_path}",
        *SETTINGS,
        "max_num_steps=100000",
    ]
    console, run = tmp_path / "console.log", tmp_path / "tiny"
    with console.open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        assert wait_until(lambda: process.poll() is not None or layout.steps(place_of(run) / "checkpoints"))
        (head,) = [each for each in psutil.Process(process.pid).children(recursive=True) if each.name() == "gcs_server"]
        head.kill()
        assert process.wait(PATIENCE_S) == 1, console.read_text()
    finally:
        process.kill()
    *_, error, end = [line for line in console.read_text().splitlines() if line]
    assert error.startswith("error: the head of the Ray that this command has started (gcs_server) does not answer")
    newest = max(layout.steps(place_of(run) / "checkpoints"))
    assert end == f"stopped at {newest}; saved at {newest}; run the same command again to go on"
    assert json.loads((run / "outcome.json").read_text())["stop_reason"] == "head_lost"
