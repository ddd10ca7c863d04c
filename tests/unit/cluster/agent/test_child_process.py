import os
import queue
import random
import socket
import sys
import sysconfig
from types import SimpleNamespace

import pytest

import cluster
from cluster.agent import child_process, machine
from cluster.agent.child_process import child_env, import_path, log_tail
from cluster.agent.spawner import Spawner
from tests import ROOT
from tests.programs.processes import PATIENCE_S


def test_a_process_that_cannot_be_started_for_whatever_reason_is_reported_each_time():
    news = queue.Queue()
    logs = SimpleNamespace(new=lambda name: (os.devnull, None), copy_of=lambda path: None)
    spawner = Spawner("json", {"A": "a\0b"}, logs, lambda *about: None, news.put, lambda *about: None)
    for _ in range(2):  # the thread has not ended with the first one
        spawner.request({})
        assert "null byte" in str(news.get(timeout=PATIENCE_S).error)
    spawner.close()


def test_own_variables_win():
    assert child_env({"A": "1", "B": "1"}, {"B": "2"}) == {"A": "1", "B": "2"}


def test_xla_flags_are_joined_and_ours_come_last():
    env = child_env({"XLA_FLAGS": "--devices=8"}, {"XLA_FLAGS": "--devices=2"})
    assert env["XLA_FLAGS"] == "--devices=8 --devices=2"
    assert child_env({"XLA_FLAGS": "--devices=8"}, {})["XLA_FLAGS"] == "--devices=8"
    assert "XLA_FLAGS" not in child_env({}, {})


def test_what_the_parent_says_of_slices_is_dropped():
    env = child_env({"MEGASCALE_SLICE_ID": "7", "MEGASCALE_NUM_SLICES": "9"}, {"MEGASCALE_SLICE_ID": "0"})
    assert env == {"MEGASCALE_SLICE_ID": "0"}


def test_a_child_does_not_get_the_token_of_the_cluster_unless_it_is_given_it():
    assert child_env({"RAY_AUTH_TOKEN": "secret", "RAY_AUTH_MODE": "token"}, {}) == {"RAY_AUTH_MODE": "token"}
    assert child_env({"RAY_AUTH_TOKEN": "secret"}, {"RAY_AUTH_TOKEN": "given"}) == {"RAY_AUTH_TOKEN": "given"}


def test_a_child_finds_the_project_and_the_users_code(tmp_path):
    root = str(ROOT)
    paths = [str(tmp_path), sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), "", str(tmp_path / "absent"), *sys.path]
    found = import_path(paths)
    assert found[:2] == [root, str(tmp_path)]
    assert not {sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), str(tmp_path / "absent")} & set(found)


def test_a_project_that_is_installed_does_not_put_all_packages_before_the_users_code(tmp_path, monkeypatch):
    packages = sysconfig.get_path("purelib")
    monkeypatch.setattr(cluster, "__file__", f"{packages}/cluster/__init__.py")
    assert import_path([str(tmp_path), packages]) == [str(tmp_path)]


def test_the_last_lines_of_a_log(tmp_path):
    log = tmp_path / "log"
    assert log_tail(str(log)) == []
    log.write_bytes(b"\n".join(b"line %d \xff" % n for n in range(5000)))
    assert log_tail(str(log), 2) == ["line 4998 �", "line 4999 �"]


def test_ports_keep_clear_of_those_of_connections():
    port = machine.free_port(random.Random(0))
    assert machine.FIRST_PORT <= port <= machine.LAST_PORT


def test_a_port_in_use_is_passed_over(monkeypatch):
    port = machine.free_port(random.Random(1))
    with socket.socket() as taken:
        taken.bind(("", port))
        taken.listen()
        assert machine.free_port(random.Random(1)) != port
        monkeypatch.setattr(machine, "FIRST_PORT", port)
        monkeypatch.setattr(machine, "LAST_PORT", port)
        with pytest.raises(OSError, match=f"no free port found between {port} and {port}"):
            machine.free_port()


def test_a_port_that_is_held_is_free_for_nobody_but_a_server():
    with machine.held_port(random.Random(2)) as held:
        port = held.getsockname()[1]
        assert machine.free_port(random.Random(2)) != port
        with (
            socket.create_server(("127.0.0.1", port)),
            pytest.raises(OSError, match="in use"),
        ):  # as servers do, it sets SO_REUSEADDR
            socket.create_server(("127.0.0.1", port))
    assert machine.free_port(random.Random(2)) == port


def test_an_agent_without_a_home_folder_gets_one(monkeypatch, tmp_path):
    monkeypatch.setattr(machine.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
    machine.ensure_home(environ := {"HOME": "/home/me"})
    assert environ == {"HOME": "/home/me"}
    for nothing in ({"HOME": ""}, {}):
        monkeypatch.setattr(machine.os.path, "expanduser", lambda path: path)
        machine.ensure_home(nothing)
        assert nothing == {"HOME": str(tmp_path)}


@pytest.mark.parametrize(
    "line",
    [
        b"nothing\n",
        b"[" * 100_000 + b"\n",
        b"[1]\n",
        b'{"ev": 3}\n',
        b"\xff\xfe\n",
        b'{"ev": "heartbeat", "step": "3", "batch_index": 3}\n',
        b'{"ev": "heartbeat", "step": 3}\n',
        b'{"ev": "phase", "phase": ["train"]}\n',
        b'{"ev": "exception"}\n',
    ],
    ids=lambda line: line[:40].decode(errors="replace"),
)
def test_a_line_that_is_no_event_is_a_note(line):
    event = child_process._parse(line)
    assert event["ev"] == "note"
    assert event["message"].startswith("not an event (")
    assert type(event["t"]) is float


@pytest.mark.parametrize("at", ['"now"', "NaN", "1e999", "null", "true", "[]"])
def test_a_time_that_is_none_is_that_of_the_agent(at):
    assert child_process._parse(b'{"ev": "warm", "t": ' + at.encode() + b"}")["t"] > 1e9
