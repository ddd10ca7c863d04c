"""`python -m orchestrator.run` on one machine: nobody else can enter the Ray that it starts, and nobody else can see it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from ipaddress import ip_address
from pathlib import Path

import psutil
import pytest
import yaml

from orchestrator.driver.ray_cluster import AGENT_TIMEOUT, authentication_of
from orchestrator.run_state.launch import read_gang
from tests import ROOT
from tests.programs.processes import PATIENCE_S, wait_until
from tests.saved import saved

WINGS = (
    "orchestrator/driver/ray_cluster.py",
    "orchestrator/commands/launching.py",
    "orchestrator/commands/sweep.py",
    "orchestrator/run.py",
)

pytestmark = pytest.mark.slow("trains under a Ray of its own")

ENTER = """
import sys, ray
ray.init(sys.argv[1], log_to_driver=False, logging_level="error")
assert ray.nodes()
"""


LATE_AGENTS = """
import pathlib, time
command = pathlib.Path("/proc/self/cmdline").read_text()
time.sleep(45 if "dashboard/agent.py" in command or "runtime_env/agent/main.py" in command else 0)
"""
SECRET = "c4n4ry-of-a-user"
STRUCK = """
import os, pathlib, psutil, signal, sys
from gangway.program import interruptible
from orchestrator.config.job import build
from orchestrator.driver import ray_cluster

def blocked(pid):
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("SigBlk")).split()[1], 16) >> (signal.SIGTERM - 1) & 1

def named_after(config, named_after=ray_cluster.named_after):
    import ray

    def struck(*given, core=ray._raylet.CoreWorker):
        worker = core(*given)
        os.kill(os.getpid(), signal.Signals[sys.argv[2]])
        return worker

    ray._raylet.CoreWorker = struck
    return named_after(config)

ray_cluster.named_after = named_after
try:
    with interruptible():
        ray_cluster.connect(build({"name": "x", "max_num_steps": 1, "storage": sys.argv[1]}))
except KeyboardInterrupt as error:
    started = psutil.Process().children(recursive=True)
    print("taken", getattr(error, "number", 2), sum(blocked(process.pid) for process in started), len(started) > 1, flush=True)
ray_cluster.disconnect()
print(psutil.wait_procs(started, timeout=20)[1])
"""
"""Sends itself a signal when Ray's core has started and taken those of failures, which is before `ray.init` is over."""


def configuration(tmp_path, **more):
    """The quick example with a secret in a variable of its processes, written to a file: command lines are for all to see."""
    made = yaml.safe_load((ROOT / "configs" / "tiny.yaml").read_text()) | {"storage": str(tmp_path), **more}
    made["hosts"] |= {"env": {"API_KEY": SECRET}}
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(made))
    return str(path)


@contextmanager
def going_on(path, folder, env):
    """A run that has a checkpoint and goes on: its process. Then it is stopped."""
    with (folder.parent / "console.log").open("w") as log:
        command = [sys.executable, "-m", "orchestrator.run", path]
        process = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, stderr=log)
    try:
        wait_until(lambda: process.poll() is not None or (saved(folder, 20)).exists())
        assert process.poll() is None, (folder.parent / "console.log").read_text()
        yield psutil.Process(process.pid)
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 3
    finally:
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_ray_starts_is_taken_afterwards_and_nothing_is_left(tmp_path, number):
    command = [sys.executable, "-c", STRUCK, str(tmp_path), number.name]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (ran.returncode, ran.stdout) == (0, f"taken {number} 0 True\n[]\n"), ran.stderr


def test_a_run_on_one_machine_is_closed_to_others(tmp_path):
    # Of a user who has said nothing of authentication:
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    env["HOME"] = str(tmp_path / "home")
    os.mkdir(env["HOME"])
    tracking = {"uri": f"http://me:{SECRET}@127.0.0.1:9"}  # nobody listens there
    path = configuration(tmp_path, tracking=tracking, max_num_steps=1_000_000, recorders=["jsonl", "tensorboard"])
    folder = tmp_path / "tiny"
    with going_on(path, folder, env) as process:
        address = read_gang(folder)["address"]
        listening = sockets_of(process)
        assert ("127.0.0.1", int(address.rpartition(":")[2])) in listening["gcs_server"], "Ray's processes were looked at"
        assert open_to_others(listening) == {}

        (raylet,) = [child for child in process.children(recursive=True) if child.name() == "raylet"]
        token = raylet.environ()["RAY_AUTH_TOKEN"]
        assert len(token) == 64
        assert who_enters(address, env, [None, "wrong", token]) == [token]
        assert authentication_of(address) == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        of_training = training_environments(process)
        assert {environ["API_KEY"] for environ in of_training} == {SECRET}
        assert [environ for environ in of_training if token in environ.values()] == []

        # Another process of the same user, whom nobody has given the token:
        command = [sys.executable, "-m", "orchestrator.commands.profile", str(folder), "--steps", "1"]
        profiled = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
        assert profiled.returncode == 0, profiled.stdout + profiled.stderr
        (rays_folder,) = {Path(part.partition("=")[2]) for part in raylet.cmdline() if part.startswith("--session_dir=")}
    assert any(parent.stat().st_mode & 0o077 == 0 for parent in rays_folder.parents), "others cannot come to Ray's files"
    assert holding(token, tmp_path) == holding(token, rays_folder) == []
    assert "not in MLflow yet" in (tmp_path / "console.log").read_text()
    assert holding(SECRET, tmp_path) == [tmp_path / "tiny.yaml"]
    assert holding(SECRET, rays_folder) == []
    assert open_to_other_users(folder) == []


def test_ray_starts_where_its_agents_need_longer_than_it_waits_for_them(tmp_path):
    """Its limits of 15 s for what they write, and of 30 s for their answer, cannot be set: on a busy machine no run began."""
    (tmp_path / "sitecustomize.py").write_text(LATE_AGENTS)
    path = configuration(tmp_path, max_num_steps=20)
    command = [sys.executable, "-m", "orchestrator.run", path]
    env = {name: value for name, value in os.environ.items() if name != AGENT_TIMEOUT} | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr


def holding(secret, folder):
    return [path for path in folder.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]


def open_to_other_users(folder):
    return [path for path in [folder, *folder.rglob("*")] if path.exists() and path.stat().st_mode & 0o077]


def who_enters(address, env, tokens):
    """With which of these tokens a process comes in; all try at once. Those that are refused may go on trying for a minute."""
    local = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}  # else Ray makes another address of 127.0.0.1
    with ExitStack() as ended:
        tries = []
        for token in tokens:
            said = {} if token is None else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
            command = [sys.executable, "-c", ENTER, address]
            tries.append(subprocess.Popen(command, env=env | local | said, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
            ended.callback(tries[-1].communicate)
            ended.callback(tries[-1].kill)
        assert tries[-1].wait(PATIENCE_S) == 0
        wait_until(lambda: all(one.poll() is not None for one in tries), 5)
        return [token for token, one in zip(tokens, tries, strict=True) if one.poll() == 0]


def training_environments(process):
    found = []
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "trainers.worker" in child.cmdline():
                found.append(child.environ())
    return found


def sockets_of(process):
    """(address, port) that its processes listen on, by name."""
    found = {}
    for one in [process, *process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            for socket in one.net_connections("inet"):
                if socket.status == psutil.CONN_LISTEN:
                    found.setdefault(one.name(), set()).add((socket.laddr.ip.removeprefix("::ffff:"), socket.laddr.port))
    return found


def open_to_others(listening):
    found = {name: {at for at in sockets if not ip_address(at[0]).is_loopback} for name, sockets in listening.items()}
    return {name: sockets for name, sockets in found.items() if sockets}


def test_a_sweep_trains_each_run_and_compares_them_and_knows_those_that_have_finished(tmp_path):
    small = ["hosts.count=1", "max_num_steps=4", "optimizer.schedule={name: constant}", "tracking={mlflow: false, report: false}"]
    given = [str(ROOT / "tests" / "programs" / "table.yaml"), "optimizer.learning_rate=1e-3,1e-1", f"storage={tmp_path}", *small]
    command = [sys.executable, "-m", "orchestrator.gangway", "sweep", *given]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = [line.split() for line in ran.stdout.splitlines()]
    assert ["optimizer.learning_rate", "0.001", "0.1"] in rows
    assert [len(row) for row in rows if row[:1] == ["eval_loss"]] == [4], "one of the two has the star"
    listed = subprocess.run([*command, "--dry-run"], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    folders = [f"{tmp_path}/tiny-learning_rate-{value}" for value in ("1e-3", "1e-1")]
    assert [line.split()[0] for line in listed.stdout.splitlines()] == folders
    assert listed.stdout.count("# finished at step 4\n") == 2
