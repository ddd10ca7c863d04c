"""The script for SLURM on a real SLURM and a real Ray: two machines, which are both this one. Skipped where its programs are not
(`apt install slurmctld slurmd slurm-client munge`)."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from orchestrator.deploy import refusals
from tests import ROOT
from tests.programs.processes import PATIENCE_S, wait_until
from tests.ray.test_deployed import processes_of
from tests.unit.orchestrator.deploy.of_configs import deploy
from tests.unit.orchestrator.deploy.test_scripts import GANGWAY, RAY, TINY, programs

WINGS = ("orchestrator/deploy", "orchestrator/commands/launching.py")

pytestmark = [pytest.mark.slow("starts a SLURM and a Ray of two nodes")]
GANGWAY_HERE = f'cd {ROOT}\nexec {sys.executable} -m orchestrator.gangway "$@"\n'
RAY_HERE = f'exec {Path(sys.executable).parent / "ray"} "$@"\n'
CPUS = 8
"""Of each machine, as SLURM is told."""
SLURM_CONF = """
ClusterName=here
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
SlurmdParameters=config_overrides
FirstJobId={number}
GresTypes=gpu
NodeName=node[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]},{ports[2]} CPUs={cpus} RealMemory=4000 Gres=gpu:2
PartitionName=all Nodes=ALL Default=YES State=UP
"""


def without_rays() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "SLURM_"))}
    niceness = "RAY_worker_niceness"  # at Ray's own, 15, they starve beside other tests
    return env | {"HEAD_IP": "127.0.0.1", niceness: os.environ[niceness]}


@pytest.fixture
def slurm(monkeypatch):
    """The environment of commands of a real SLURM, both of whose machines are this one."""
    paths = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    found = {name: shutil.which(name, path=paths) for name in ("munged", "slurmctld", "slurmd", "sbatch")}
    if absent := [name for name, path in found.items() if path is None]:
        pytest.skip(f"no {', '.join(absent)} here")
    folder = Path(tempfile.mkdtemp(prefix="gw-slurm-"))  # a socket's path is short
    for name in ("munge", "state"):
        (folder / name).mkdir(0o700)
    key = folder / "munge/key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [listener.getsockname()[1] for listener in sockets]
    host, user = socket.gethostname().partition(".")[0], getpass.getuser()
    conf = SLURM_CONF.format(folder=folder, host=host, user=user, ports=ports, cpus=CPUS, number=os.getpid())
    (folder / "slurm.conf").write_text(conf)
    (folder / "gres.conf").write_text("NodeName=node[1-2] Name=gpu File=/dev/null,/dev/zero\n")
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
    monkeypatch.setattr(refusals, "OF_ONE_MACHINE", ())  # here both machines share /tmp
    env = without_rays() | {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": paths}
    munge = [f"--{name}-file={folder}/munge/{name}" for name in ("key", "log", "pid", "seed")]
    for listener in sockets:
        listener.close()
    daemons = [
        subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        for command in (
            [found["munged"], "--foreground", "--force", f"--socket={folder}/munge/socket", *munge],
            *([found["slurmctld"], "-D"], [found["slurmd"], "-D", "-N", "node1"], [found["slurmd"], "-D", "-N", "node2"]),
        )
    ]
    yield env
    for daemon in reversed(daemons):
        daemon.terminate()
        daemon.wait(PATIENCE_S)
    shutil.rmtree(folder)


def submitted(slurm: dict[str, str], tmp_path: Path, **programs_of_venv: str) -> tuple[int, str]:
    """Returns the exit status of the job, and its log. Queues it as soon as SLURM answers."""
    venv = programs(tmp_path / "venv" / "bin", **programs_of_venv).parent
    env = slurm | {"VENV": str(venv), "CALLS": str(tmp_path / "calls")}
    command = ["sbatch", "--wait", "--cpus-per-task=2", f"--output={tmp_path}/job.log", str(tmp_path / "deploy/slurm/run.sh")]

    def done() -> subprocess.CompletedProcess[str] | None:
        job = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
        return job if job.stdout.startswith("Submitted") else None

    job = wait_until(done, every_s=0.5)
    return job.returncode, (tmp_path / "job.log").read_text()


def test_a_job_of_a_real_slurm_leaves_nothing_and_its_log_ends_as_the_run_did(slurm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("hosts.count=2", "tracking.mlflow=false", f"hosts.log_dir={tmp_path / 'logs'}", "max_num_steps=20")
    deploy("slurm", TINY, f"storage={tmp_path / 'runs'}", *words)
    status, log = submitted(slurm, tmp_path, gangway=GANGWAY_HERE, ray=RAY_HERE)
    assert status == 0, log
    summary = json.loads((tmp_path / "runs/tiny/summary.json").read_text())
    assert (summary["status"], summary["hosts"]) == ("finished", 2)
    assert f"/tmp/gangway-{os.getpid()}/session" in log
    assert not Path(f"/tmp/gangway-{os.getpid()}").exists()
    assert processes_of(f"/tmp/gangway-{os.getpid()}") == []
    end = log[log.index("tiny finished") :]
    assert not [line for line in end.splitlines() if "error" in line or "Killed" in line or "Terminated" in line], end


def test_hosts_with_gpus_have_all_cores_of_a_real_slurms_machines(slurm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gpu = ("hosts={kind: gpu, count: 2, devices_per_host: 2}", "global_batch_size=32", "storage=gs://my-bucket/runs")
    deploy("slurm", TINY, *gpu)
    status, log = submitted(slurm, tmp_path, gangway=GANGWAY, ray=RAY)
    assert status == 0, log
    noted = (tmp_path / "calls").read_text().splitlines()
    assert [line for line in noted if line.startswith("cpus")] == [f"cpus all of {CPUS}"] * 2
