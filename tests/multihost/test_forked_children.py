"""What the user's code starts: it never speaks for the host, and has of it what a program has of its shell."""

from __future__ import annotations

import dataclasses
import json
import os

import pytest

from cluster.agent import machine
from cluster.agent.child_process import child_env, spawn
from cluster.hosts.config import HostsConfig
from cluster.hosts.process_env import process_env
from tests import ROOT
from tests.multihost import harness
from trainers.config.arguments import TrainingArguments

WINGS = ("trainers/worker.py", "cluster/agent/child_process.py")


def test_of_a_host_and_its_forks_the_host_alone_reports(tmp_path):
    arguments = TrainingArguments(
        name="forking", storage=str(tmp_path), max_num_steps=5, trainer="tests.programs.forking:Trainer", global_batch_size=2
    )
    (host,) = harness.run(arguments, tmp_path, hosts=1, devices_per_host=1)
    assert [event["step"] for event in host.of("metrics")] == [1, 2, 3, 4, 5]
    assert len(host.of("done")) == 1
    assert not host.of("exception")
    ended = [line for line in host.child.log_tail() if line.endswith(tuple("0123456789"))]
    assert ended[-5:] == ["raises 256", "exits 768", "reports 0", "returns 0", "is terminated 15"]


@pytest.mark.slow("a whole training process, by the launcher of the agent")
def test_a_child_has_of_its_host_what_a_program_has_of_its_shell(tmp_path):
    """By a fork, a spawn and a subprocess: open files, signals, environment, folder, session, input, locks."""
    arguments = TrainingArguments(
        name="a", storage=str(tmp_path), max_num_steps=1, trainer="tests.programs.inheriting:Trainer", global_batch_size=2
    )
    preparation = {
        "cmd": "prepare",
        "arguments_class": "trainers.config.arguments:TrainingArguments",
        "arguments": dataclasses.asdict(arguments),
    }
    programs = {"GANGWAY_PROGRAMS": str(tmp_path / "programs"), "PYTHONPATH": str(ROOT)}
    env = child_env(os.environ, {**process_env(HostsConfig(count=1), 0, str(tmp_path / "cache")), **programs})
    host = harness.Host(spawn("trainers.worker", env=env, first_line=preparation, log_path=str(tmp_path / "log")))
    host.wait_for("warm")
    coordinator = f"127.0.0.1:{machine.free_port()}"
    host.child.send({"cmd": "start", "generation": 0, "host": 0, "num_hosts": 1, "coordinator": coordinator})
    assert host.wait_for("done")["step"] == 1
    own, fork, spawned, program = (
        json.loads((tmp_path / f"{way}.json").read_text()) for way in ("own", "fork", "spawn", "subprocess")
    )
    for child in (fork, spawned, program):
        for name in ("folder", "session", "group", "umask", "nice", "ignored"):
            assert child[name] == own[name], name
        assert (child["blocked"], child["input"], child["starts_threads"]) == (0, "", True)
        assert child["environment"] == ["GANGWAY_PROGRAMS"]  # nothing that only the agent's child may have
        assert child["dies_with_its_parent"] == 0
        assert [child["descriptors"][fd] for fd in ("0", "1", "2")] == ["/dev/null", str(tmp_path / "log"), str(tmp_path / "log")]
    # Those to the agent. A fork has all that is open; what it says there is dropped.
    pipes = {what for what in own["descriptors"].values() if what.startswith("pipe:")}
    assert pipes
    assert {*program["descriptors"]} == {"0", "1", "2"}
    assert not pipes & {*spawned["descriptors"].values()}
    assert pipes <= {*fork["descriptors"].values()}
