"""kill -9 of parts of a real job: it ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from orchestrator.faultlab.testbed.screen import heard
from tests import ROOT
from tests.programs.processes import PATIENCE_S, wait_while_running
from tests.saved import saved
from tests.strikes import Folder

WINGS = (
    "orchestrator/driver",
    "orchestrator/run_state",
    "orchestrator/commands/launching.py",
    "cluster/agent",
    "trainers/checkpoint/slots.py",
    "trainers/loop",
    "trainers/worker.py",
)
AS_USERS_COMPILE = True

TINY = str(ROOT / "configs" / "tiny.yaml")
TABLE = str(ROOT / "tests" / "programs" / "table.yaml")


@pytest.fixture(autouse=True)
def in_the_project(monkeypatch):
    monkeypatch.chdir(ROOT)


def start(tmp_path, *more, config=TINY):
    tmp_path.mkdir(exist_ok=True)
    log = (tmp_path / "console.log").open("w")
    command = [sys.executable, "-m", "orchestrator.run", config, f"storage={tmp_path}", "tracking.mlflow=false", *more]
    with heard(signal.SIGHUP):  # also where the tests run under `nohup`
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, text=True, process_group=0)


def wait_until(condition, process, tmp_path):
    wait_while_running(condition, process, (tmp_path / "console.log").read_text)


def has_saved(tmp_path, step):
    return lambda: saved(tmp_path / "tiny", step).exists()


@pytest.mark.slow("trains a whole job")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_stops_and_the_next_launch_goes_on(tmp_path, number):
    """To the process group, as from a terminal that is closed, `timeout` and batch systems: the Ray of the command goes on."""
    process = start(tmp_path, "max_num_steps=100000")
    try:
        wait_until(has_saved(tmp_path, 20), process, tmp_path)
        os.killpg(process.pid, number)
        assert process.wait(PATIENCE_S) == 3
    finally:
        process.kill()
    summary = json.loads((tmp_path / "tiny" / "summary.json").read_text())
    assert summary["status"] == "stopped"
    assert summary["stop_reason"] == "terminated" if number == signal.SIGTERM else "interrupted"
    assert f"/{summary['steps']}-" in summary["checkpoint"]
    last = (tmp_path / "console.log").read_text().splitlines()[-1]
    assert last == f"stopped at {summary['steps']}; saved at {summary['steps']}; run the same command again to go on"
    again = start(tmp_path, f"max_num_steps={summary['steps'] + 5}")
    assert again.wait(PATIENCE_S) == 0
    summary_of_second = json.loads((tmp_path / "tiny" / "summary.json").read_text())
    assert summary_of_second["steps"] == summary["steps"] + 5
    assert summary_of_second["samples"] == 8 * summary_of_second["steps"]


@pytest.mark.slow("trains a whole job")
def test_a_second_launch_of_a_live_run_is_refused(tmp_path):
    process = start(tmp_path, "max_num_steps=100000")
    try:
        wait_until(has_saved(tmp_path, 20), process, tmp_path)
        command = [sys.executable, "-m", "orchestrator.run", TINY, f"storage={tmp_path}"]
        second = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False, timeout=PATIENCE_S)
        assert second.returncode == 2
        assert "is in use" in second.stderr
        assert str(process.pid) in second.stderr
        assert process.poll() is None
    finally:
        process.send_signal(signal.SIGINT)
        status = process.wait(PATIENCE_S)
    summary = json.loads((tmp_path / "tiny" / "summary.json").read_text())
    assert (status, summary["status"], summary["stop_reason"]) == (3, "stopped", "interrupted")
    assert f"/{summary['steps']}-" in summary["checkpoint"]


@pytest.mark.slow("a whole job, killed twice; tests/ray/test_jobs.py has one that is killed")
def test_killed_whole_and_launched_again_it_goes_on(tmp_path):
    slow = Folder(tmp_path / "faults", step_s=0.1)  # else a busy machine is past step 80 when it is killed
    process = start(tmp_path, "max_num_steps=100000", "hosts.count=1", f"hosts.env.GANGWAY_FAULTS={slow.path}")
    wait_until(has_saved(tmp_path, 20), process, tmp_path)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    again = start(tmp_path, "max_num_steps=80", "hosts.count=1", "checkpoint.save_steps=1000")
    assert again.wait(PATIENCE_S) == 0, (tmp_path / "console.log").read_text()
    summary = json.loads((tmp_path / "tiny" / "summary.json").read_text())
    assert summary["samples"] == 8 * 80
    assert summary["samples_digest"] == undisturbed_digest(80)


SNAPSHOTS_EVERY = 5
SHARDED = (
    "task=tests.multihost.test_checkpoints:ShardedTableTask",
    "mesh.fsdp=2",
    "max_num_steps=300",
    "checkpoint.save_steps=1000",
)


def console(tmp_path):
    return (tmp_path / "console.log").read_text()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The summary of a job of two hosts, each with half of the state, without snapshots."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert start(folder, *SHARDED, config=TABLE).wait(PATIENCE_S) == 0, console(folder)
    return json.loads((folder / "tiny" / "summary.json").read_text())


@pytest.mark.slow("kills processes of whole jobs")
def test_killed_processes_go_on_from_memory_as_if_nothing_had_happened(tmp_path, undisturbed):
    """One of the two or both, at any moment, and again before there is another snapshot. At last an agent, and with it what its
    process had: then all is trained again, for there is no checkpoint."""
    dice, faults = random.Random(1), Folder(tmp_path / "faults", step_s=0.03)
    more = (
        f"snapshot.every_steps={SNAPSHOTS_EVERY}",
        f"hosts.env.GANGWAY_FAULTS={faults.path}",
        "driver.restart.max_failures=50",
    )
    process = start(tmp_path, *SHARDED, *more, config=TABLE)

    def again(number):
        return lambda: console(tmp_path).count("training again") == number

    wait_until(lambda: "the first is whole on every host" in console(tmp_path), process, tmp_path)
    num_incidents = 0
    for hosts in ([0], [1], [0, 1], [dice.randrange(2)]):
        time.sleep(dice.uniform(0, 1))
        for at_once in (False, True):
            for host in hosts if not at_once else [dice.randrange(2)]:
                faults.process(host).kill()
            num_incidents += 1
            wait_until(again(num_incidents), process, tmp_path)
    faults.agent(dice.randrange(2)).kill()
    wait_until(again(num_incidents + 1), process, tmp_path)
    faults.full_speed()
    assert process.wait(PATIENCE_S) == 0, console(tmp_path)
    summary = json.loads((tmp_path / "tiny" / "summary.json").read_text())
    *incidents, of_agent = summary["incidents"]
    assert [incident["source"] for incident in incidents] == ["memory"] * num_incidents
    assert all(0 <= incident["replayed_steps"] <= 2 * SNAPSHOTS_EVERY < incident["step"] for incident in incidents), incidents
    assert (of_agent["source"], of_agent["resumed_step"]) == ("", 0)
    assert "again, from memory" in console(tmp_path)
    assert [summary[name] for name in SAME] == [undisturbed[name] for name in SAME]


SAME = ("params_digest", "samples_digest", "steps", "samples", "eval_loss")


def undisturbed_digest(steps):
    """Which samples an undisturbed run trains on, worked out without training."""
    from orchestrator.config.job import load
    from trainers.data.sources.text import text_windows
    from trainers.step.sample_digest import sample_hash

    arguments = load(TINY).training
    train, _ = text_windows(arguments)
    size, total = arguments.global_batch_size, [0, 0]
    for k in range(steps):
        import numpy as np

        ids = np.array([train[k * size + row]["sample_id"] for row in range(size)])
        for lane, hashes in enumerate(np.asarray(sample_hash(np.int32(k), np.arange(size, dtype=np.uint32), ids))):
            total[lane] = (total[lane] + int(hashes.astype(np.uint64).sum())) % 2**32
    return f"{(total[0] << 32) | total[1]:016x}"
