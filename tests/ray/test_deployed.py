"""The script for SLURM with a real Ray: two machines of an allocation, which are both this one. Only SLURM itself is faked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from orchestrator.deploy import refusals
from tests import ROOT
from tests.programs.processes import PATIENCE_S, wait_while_running
from tests.unit.orchestrator.deploy.of_configs import deploy
from tests.unit.orchestrator.deploy.test_scripts import SCONTROL, SRUN, TINY, programs

WINGS = ("orchestrator/deploy", "orchestrator/commands/launching.py")

pytestmark = [pytest.mark.slow("starts a Ray of two nodes, twice")]


@pytest.fixture
def launch(tmp_path, monkeypatch):
    """Starts the script that `gangway deploy` has written, as SLURM would on the first machine of an allocation."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(refusals, "OF_ONE_MACHINE", ())  # here both machines share /tmp
    storage = f"storage={tmp_path / 'runs'}"
    deploy("slurm", TINY, storage, "hosts.count=2", "tracking.mlflow=false", f"hosts.log_dir={tmp_path / 'logs'}")
    gangway = f'cd {ROOT}\nexec {sys.executable} -m orchestrator.gangway "$@"\n'
    venv = programs(tmp_path / "venv" / "bin", gangway=gangway, ray=f'exec {Path(sys.executable).parent / "ray"} "$@"\n').parent
    fake = programs(tmp_path / "fake", srun=SRUN, scontrol=SCONTROL)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))} | {
        "PATH": f"{fake}:{os.environ['PATH']}",
        "VENV": str(venv),
        "HEAD_IP": "127.0.0.1",
        "CALLS": str(tmp_path / "calls"),
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
        "RAY_worker_niceness": os.environ["RAY_worker_niceness"],  # noqa: SIM112  at Ray's own, 15, they starve beside other tests
    }
    started = []

    def begin(**more):
        console = (tmp_path / f"console-{len(started)}.log").open("w+")
        command = ["bash", str(tmp_path / "deploy/slurm/run.sh")]
        process = subprocess.Popen(command, env=env | more, stdout=console, stderr=subprocess.STDOUT, process_group=0)
        started.append(process)
        return process, Path(console.name)

    yield begin
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def test_a_job_of_slurm_saves_before_its_limit_and_goes_on_in_the_next(launch, tmp_path):
    orders = tmp_path / "orders"
    orders.mkdir()
    (orders / "pace.json").write_text('{"step_s": 0.2}')
    first, console = launch(GANGWAY_FAULTS=str(orders))
    run = tmp_path / "runs" / "tiny"
    wait_for(lambda: any((run / "checkpoints").glob("[0-9]*/meta.json")), first, console)
    first.send_signal(signal.SIGUSR1)  # so SLURM says that the time limit is near
    assert first.wait(PATIENCE_S) == 0, console.read_text()
    stopped = json.loads((run / "summary.json").read_text())
    assert (stopped["status"], stopped["hosts"]) == ("stopped", 2)
    assert f"scontrol requeue {os.getpid()}" in (tmp_path / "calls").read_text().splitlines()
    second, console = launch()
    assert second.wait(PATIENCE_S) == 0, console.read_text()
    ended = json.loads((run / "summary.json").read_text())
    assert (ended["status"], ended["hosts"], ended["launches"]) == ("finished", 2, 2)
    assert ended["steps"] > stopped["steps"] > 0
    assert "did not finish draining" not in console.read_text()  # Ray's head would wait for 30 s
    assert processes_of(f"/tmp/gangway-{os.getpid()}") == []


def wait_for(condition, process, console):
    wait_while_running(condition, process, console.read_text)


def processes_of(folder):
    """The command lines that name the folder of this Ray."""
    found = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return [line for line in found if folder in line]
