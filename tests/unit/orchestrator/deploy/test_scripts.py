"""The scripts for SLURM and for TPU VMs run, with programs on the path that stand for `srun`, `ray`, `gangway` and `gcloud`.

What they start, in which order, and how they end.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.deploy import refusals
from tests import ROOT
from tests.programs.processes import PATIENCE_S
from tests.unit.orchestrator.deploy.of_configs import TPU, deploy

TINY = ROOT / "configs" / "tiny.yaml"
NOTED = """echo "$(basename "$0") ${*//$'\\n'/; }" >> "$CALLS"\n"""
SRUN = NOTED + 'while [[ $1 == --* ]]; do shift; done\nexec "$@"\n'
"""Runs what it was given here, once."""
RAY = f"""echo "cpus ${{SRUN_CPUS_PER_TASK:-all}} of ${{SLURM_CPUS_ON_NODE:-}}" >> "$CALLS"
{NOTED}
for word in "$@"; do [[ $word == --temp-dir=* ]] && mkdir -p "${{word#--temp-dir=}}/session"; done
[[ -z ${{NO_RAY:-}} ]] || exit 7
[[ "$*" == *--head* ]] || exec sleep 60
for word in "$@"; do [[ $word == --port=* ]] && port=${{word#--port=}}; done
echo "token ${{#RAY_AUTH_TOKEN}} $RAY_AUTH_MODE" >> "$CALLS"
exec {sys.executable} -S -c "import socket, sys, time
listener = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(60)" "$port"
"""
GANGWAY = f"""for ((i = 0; i < 500; i++)); do grep -q -e "^ray start .*--address=" "$CALLS" && break; sleep 0.01; done
{NOTED}
echo "at $RAY_ADDRESS" >> "$CALLS"
trap 'echo saved >> "$CALLS"; exit 3' TERM
[[ -z ${{HOLD:-}} ]] || for ((i = 0; i < 300; i++)); do sleep 0.02; done
exit "${{STATUS:-0}}"
"""
"""Waits, as a run does, until the other machine has joined."""
SCONTROL = f'{NOTED}[[ $1 == show ]] && printf "node1\\nnode2\\n" || true\n'


def programs(folder: Path, **texts: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}")
        (folder / name).chmod(0o755)
    return folder


class Slurm:
    """One allocation of two machines, which are this one."""

    def __init__(self, tmp_path: Path):
        self.calls, self.number = tmp_path / "calls", os.getpid()
        venv = programs(tmp_path / "venv" / "bin", ray=RAY, gangway=GANGWAY).parent
        fake = programs(tmp_path / "fake", srun=SRUN, scontrol=SCONTROL)
        self.env = {
            "PATH": f"{fake}:/usr/bin:/bin",
            "HOME": str(tmp_path),
            "VENV": str(venv),
            "HEAD_IP": "127.0.0.1",
            "CALLS": str(self.calls),
            "SLURM_JOB_ID": str(self.number),
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
        }

    def start(self, script: Path = Path("deploy/slurm/run.sh"), **more: str) -> subprocess.Popen[str]:
        return subprocess.Popen(["bash", script], env=self.env | more, stderr=subprocess.PIPE, text=True)

    def run(self, script: Path = Path("deploy/slurm/run.sh"), **more: str) -> tuple[int, str]:
        process = self.start(script, **more)
        _, said = process.communicate(timeout=PATIENCE_S)
        return process.returncode, said

    def noted(self) -> list[str]:
        return self.calls.read_text().splitlines() if self.calls.exists() else []

    def wait_for(self, text: str) -> None:
        until_s = time.monotonic() + 20
        while not any(text in line for line in self.noted()):
            assert time.monotonic() < until_s, self.noted()
            time.sleep(0.01)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(refusals, "OF_ONE_MACHINE", ())  # all machines of these allocations are this one


@pytest.fixture
def slurm(tmp_path):
    deploy("slurm", TINY, "storage=gs://my-bucket/runs")
    return Slurm(tmp_path)


def test_ray_starts_on_the_allocation_and_the_run_on_ray(slurm):
    status, said = slurm.run()
    assert (status, said) == (0, "")
    port = 20000 + slurm.number % 5000
    noted = "\n".join(slurm.noted())
    head, worker = (line for line in slurm.noted() if line.startswith("srun") and "ray start" in line)
    assert "--nodelist=node1" in head
    assert f"--head --node-ip-address=127.0.0.1 --port={port} --dashboard-host=127.0.0.1" in head
    assert "--exclude=node1" in worker
    assert "--nodes=1 --ntasks=1 --exclude=node1 --kill-on-bad-exit=0 --no-kill bash -c" in worker
    assert noted.count("\ncpus 2 of \n") == 2
    assert worker.endswith(f"--address=127.0.0.1:{port}")
    assert "token 64 token" in noted  # 32 bytes
    assert f"at 127.0.0.1:{port}" in noted
    assert noted.index("--head") < noted.index(f"--address=127.0.0.1:{port}") < noted.index("gangway run")
    assert "requeue" not in noted


def test_before_the_time_limit_the_run_saves_and_the_job_is_queued_again(slurm):
    process = slurm.start(HOLD="1")
    slurm.wait_for("at 127")
    process.send_signal(signal.SIGUSR1)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert [line for line in slurm.noted() if line == "saved" or "requeue" in line] == [
        "saved",
        f"scontrol requeue {slurm.number}",
    ]


def test_a_job_that_is_asked_to_end_saves_and_is_not_queued_again(slurm):
    process = slurm.start(HOLD="1")
    slurm.wait_for("at 127")
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert "saved" in slurm.noted()
    assert not any("requeue" in line for line in slurm.noted())


def test_the_status_of_the_run_is_that_of_the_job(slurm):
    assert slurm.run(STATUS="1")[0] == 1


@pytest.mark.parametrize(("status", "more"), [(0, {}), (1, {"STATUS": "1"}), (2, {"NO_RAY": "1"})])
def test_nothing_of_ray_is_left(slurm, status, more):
    assert slurm.run(**more)[0] == status
    assert f"--temp-dir=/tmp/gangway-{slurm.number}" in "\n".join(slurm.noted())
    assert not Path(f"/tmp/gangway-{slurm.number}").exists()
    left = subprocess.run(["pgrep", "-f", f"create_server.* {20000 + slurm.number % 5000}"], check=False)
    assert left.returncode == 1


def test_an_environment_that_is_not_there_is_named(slurm, tmp_path):
    status, said = slurm.run(VENV=str(tmp_path / "none"))
    assert status == 2
    assert "error: there is no" in said
    assert not any("ray start" in line for line in slurm.noted())


def test_a_configuration_that_is_not_there_is_named(slurm, tmp_path):
    (tmp_path / "deploy/slurm/config.yaml").unlink()
    status, said = slurm.run()
    assert status == 2
    assert re.match(r"error: there is no \S+/config.yaml on .*: call gangway deploy in a folder that all machines share$", said)


def test_the_environment_must_be_seen_by_every_machine(slurm, tmp_path):
    programs(tmp_path / "fake", srun=f"{NOTED}[[ $* != *'test -x'* ]]\n")
    status, said = slurm.run()
    assert status == 2
    assert f"VENV = {tmp_path}/venv: not every machine of the allocation sees it" in said


def test_the_storage_must_be_seen_by_every_machine(tmp_path):
    deploy("slurm", TINY, f"storage={tmp_path}/runs")
    slurm = Slurm(tmp_path)
    assert slurm.run()[0] == 0
    slurm.calls.unlink()
    programs(tmp_path / "fake", srun=f"{NOTED}[[ $* != *'test -e'* ]]\n")
    status, said = slurm.run()
    assert status == 2
    assert "not every machine of the allocation sees this folder" in said
    assert not any("ray start" in line for line in slurm.noted())
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_variable_that_is_not_exported_is_named(tmp_path):
    deploy("slurm", TINY, "storage=gs://my-bucket/runs", 'hosts.env={"API_KEY": "abc"}')
    slurm = Slurm(tmp_path)
    status, said = slurm.run()
    assert (status, said) == (2, "error: export API_KEY before sbatch\n")
    assert slurm.run(API_KEY="abc")[0] == 0


def test_no_secret_has_the_name_of_a_variable_that_bash_or_the_script_sets():
    lines = (ROOT / "configs/deploy/slurm.sh.jinja").read_text().splitlines()
    script = "\n".join(line for line in lines if not line.startswith("#"))
    ours = {
        *re.findall(r"(?:^|[\s(;])([A-Za-z_]\w*)\+?=", script),
        *re.findall(r"\b(?:for |for \(\(|mapfile -t )([A-Za-z_]\w*)", script),
    }
    assert {"VENV", "head", "machines", "tries", "variable", "port", "steps", "asked", "status"} <= ours
    bashs = subprocess.run(["bash", "-c", "compgen -v"], check=True, capture_output=True, text=True, env={}).stdout.split()
    # The token has a refusal of its own.
    found = {name for name in (*ours, *bashs) if not refusals.is_among(name, refusals.OF_SHELLS)}
    assert found == {"RAY_AUTH_TOKEN"}


def test_the_allocation_is_what_the_configuration_asks_for(tmp_path):
    gpu = ("hosts={kind: gpu, min: 2, max: 4, devices_per_host: 8}", "global_batch_size=32", "storage=gs://my-bucket/runs")
    text = (deploy("slurm", TINY, *gpu) / "run.sh").read_text()
    asked = re.findall(r"^#SBATCH --([\w-]+)(?:=(.*))?$", text, re.M)
    assert dict(asked) == {
        "job-name": "tiny",
        "nodes": "2-4",
        "ntasks-per-node": "1",
        "gpus-per-node": "8",
        "exclusive": "",
        "mem": "0",
        "no-kill": "",
        "requeue": "",
        "open-mode": "append",
        "output": "%x-%j.log",
        "signal": "B:USR1@300",
    }
    assert "--num-gpus=8" in text
    # As after `sbatch --cpus-per-task=3`: all the same, the hosts have all CPUs of their machines.
    slurm = Slurm(tmp_path)
    assert slurm.run(SLURM_CPUS_PER_TASK="3", SRUN_CPUS_PER_TASK="3")[0] == 0
    assert [line for line in slurm.noted() if line.startswith("cpus")] == ["cpus all of "] * 2


GCLOUD = f"""{NOTED}
case "$*" in
    *"queued-resources describe"*) echo "${{STATE:-ACTIVE}}" ;;
    *networkEndpoints*) echo 10.0.0.5 ;;
esac
"""


@pytest.fixture
def tpu_vm(tmp_path):
    deploy("tpu-vm", TPU, "hosts.slices=2", "--spot", 'hosts.env={"API_KEY": "abc"}')
    fake = programs(tmp_path / "fake", gcloud=GCLOUD, ray=NOTED)
    env = {"PATH": f"{fake}:/usr/bin:/bin", "HOME": str(tmp_path), "CALLS": str(tmp_path / "calls"), "POLL_S": "0"}

    def step(name: str, **more: str) -> tuple[int, str]:
        (tmp_path / "calls").write_text("")
        done = subprocess.run(["deploy/tpu-vm/tpu_vm.sh", name], check=False, env=env | more, capture_output=True, text=True)
        return done.returncode, (tmp_path / "calls").read_text() + done.stderr

    return step


def test_slices_are_asked_for_in_the_queue(capsys, tpu_vm):
    said = capsys.readouterr().out
    steps = re.findall("^  bash deploy/tpu-vm/tpu_vm.sh (.+)$", said, re.MULTILINE)
    assert steps == ["create", "setup", "start", "submit"]
    status, noted = tpu_vm("create")
    assert status == 0
    assert "queued-resources create llama3-70b --accelerator-type=v5p-1024 --runtime-version=v2-alpha-tpuv5" in noted
    assert "--node-count=2 --node-prefix=llama3-70b --spot --project=my-project --zone=us-east5-b" in noted
    status, noted = tpu_vm("create", STATE="FAILED")
    assert status == 1
    assert "error: the request is FAILED" in noted


def test_every_machine_gets_the_token_and_the_code(tpu_vm, tmp_path):
    status, noted = tpu_vm("setup")
    assert status == 0, noted
    for node in ("llama3-70b-0", "llama3-70b-1"):
        for file in (".ray/auth_token", ".gangway.env", "app.tgz"):
            assert re.search(rf"scp \S+ {node}:{re.escape(file)} --worker=all", noted), (node, file)
    assert "chmod 600 ~/.ray/auth_token ~/.gangway.env" in noted
    assert "jax[tpu]==" in noted
    assert "abc" not in noted


def test_ray_starts_on_worker_0_and_the_others_join_it(tpu_vm):
    status, noted = tpu_vm("start")
    assert status == 0, noted
    head = noted.index("ray start --head --node-ip-address=10.0.0.5 --port=6379 --dashboard-host=127.0.0.1")
    joins = [match.start() for match in re.finditer(r"ray start --address=10\.0\.0\.5:6379", noted)]
    assert len(joins) == 2
    assert noted.rindex("ray stop") < head < joins[0]
    assert noted.count("RAY_AUTH_MODE=token") == 3


@pytest.mark.parametrize(
    ("step", "called"),
    [
        ("submit", "ray job submit --no-wait --submission-id=llama3-70b --address=http://127.0.0.1:8265"),
        ("stop", "ray job stop --address=http://127.0.0.1:8265 llama3-70b"),
        ("dashboard", "-N -L 8265:127.0.0.1:8265"),
        ("delete", "queued-resources delete llama3-70b --force"),
    ],
)
def test_each_step_calls_what_it_is_named_after(tpu_vm, step, called):
    status, noted = tpu_vm(step)
    assert status == 0
    assert called in noted


def test_another_step_is_refused(tpu_vm):
    status, noted = tpu_vm("creat")
    assert status == 2
    assert "usage:" in noted
