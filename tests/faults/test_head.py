"""The head of the cluster dies under a running command: told in seconds, and the same command goes on on another cluster."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

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
