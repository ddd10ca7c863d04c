"""The head of a cluster that is dead, silent, or something else: told in seconds, with who named it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from orchestrator.driver import head
from orchestrator.driver.head import ClusterError, HeadWatch
from tests import ROOT
from tests.programs.processes import PATIENCE_S

SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@contextmanager
def listener(answer: bytes | None, port: int = 0):
    """A server that gives every caller the same answer (None: never one); its address."""
    server = socket.create_server(("127.0.0.1", port))
    calls = []

    def serve():
        while True:
            try:
                call, _ = server.accept()
            except OSError:
                return
            calls.append(call)
            if answer is not None:
                call.recv(1024)
                call.sendall(answer)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.getsockname()[1]}"
    finally:
        server.shutdown(socket.SHUT_RDWR)
        for opened in (server, *calls):
            opened.close()


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_who_names_the_cluster():
    assert head.named({}, None) is None
    assert head.named({"RAY_ADDRESS": "a:1"}, "b:2") == ("a:1", "RAY_ADDRESS")
    assert head.named({}, "b:2") == ("b:2", "driver.address of the configuration")


def test_a_dead_port_is_reported_with_who_named_it():
    address = free_address()
    with pytest.raises(
        ClusterError, match=rf"no Ray cluster answers at {address} \(from RAY_ADDRESS\): connection refused"
    ) as told:
        head.check(address, "RAY_ADDRESS")
    assert f"ray start --head --port={address.rpartition(':')[2]}" in str(told.value)


def test_a_head_that_accepts_and_never_answers():
    with listener(None) as address, pytest.raises(ClusterError, match=r"no answer within 0\.3 s"):
        head.check(address, "RAY_ADDRESS", timeout_s=0.3)


def test_something_else_listens_there():
    with listener(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address, pytest.raises(ClusterError, match="something else listens"):
        head.check(address, "driver.address of the configuration")


def test_a_head_that_answers():
    with listener(SETTINGS) as address:
        head.check(address, "RAY_ADDRESS")
        head.check(f"ray://{address}", "RAY_ADDRESS")


@pytest.mark.parametrize("address", ["head", "head:", ":6379", "head:port"])
def test_what_is_no_address(address):
    with pytest.raises(ClusterError, match="expected HOST:PORT, such as"):
        head.check(address, "RAY_ADDRESS")


def test_the_address_of_a_dashboard():
    with pytest.raises(ClusterError, match="address of a dashboard, for `ray job submit --address`"):
        head.check("http://127.0.0.1:8265", "RAY_ADDRESS")


def test_auto_is_the_last_cluster_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(head, "NEWEST_CLUSTER", tmp_path / "ray_current_cluster")
    head.check("auto", "RAY_ADDRESS")
    (tmp_path / "ray_current_cluster").write_text(address := free_address())
    with pytest.raises(ClusterError, match=rf"{address} \(from RAY_ADDRESS, auto: the last `ray start` on this machine\)"):
        head.check("auto", "RAY_ADDRESS")


def test_a_head_that_dies_and_comes_back_is_reported_once_each():
    now_s, told = [0.0], []
    with listener(SETTINGS) as address:
        watch = HeadWatch(
            address, "/runs/tiny", lambda event: told.append(event["message"]), silent_s=3.0, clock=lambda: now_s[0]
        )
        watch.look()
    for now_s[0] in (1.0, 2.0):
        watch.look()
    assert told == [], "a moment is not told"
    for now_s[0] in (3.0, 4.0):
        watch.look()
    assert len(told) == 1
    assert f"the head of the Ray cluster at {address} does not answer: connection refused" in told[0]
    assert "the same command, with its address, goes on from the newest checkpoint in /runs/tiny/checkpoints" in told[0]
    with listener(SETTINGS, int(address.rpartition(":")[2])):
        watch.look()
        assert watch.why_lost() is None
    assert told[1:] == [f"the head of the Ray cluster at {address} answers again"]
    assert not watch.over


def test_a_dead_head_of_its_own_ray_lets_the_hosts_save_and_one_that_is_only_slow_does_not():
    now_s, told, died = [0.0], [], []
    with listener(None) as address:
        watch = HeadWatch(
            address,
            "/runs/tiny",
            lambda event: told.append(event["message"]),
            lambda: died.append(now_s[0]),
            silent_s=0.2,
            clock=lambda: now_s[0],
        )
        now_s[0] = 1.0
        watch.look()
    assert "(gcs_server) does not answer: no answer within 0.2 s; unless it comes back within 55 s, this command ends" in told[0]
    assert died == []
    for now_s[0] in (2.0, 3.0):
        watch.look()
    assert died == [2.0]
    assert "(gcs_server) does not answer: connection refused; it does not come back: the hosts save and stop. The same" in told[1]
    assert len(told) == 2


def test_a_head_that_stays_away_ends_the_command():
    now_s = [0.0]
    watch = HeadWatch(free_address(), "/runs/tiny", lambda event: None, give_up_s=10.0, clock=lambda: now_s[0])
    now_s[0] = 9.0
    watch.look()
    assert not watch.over
    now_s[0] = 10.0
    watch.look()
    assert watch.over


def test_a_driver_that_ends_first_is_explained_by_its_head():
    watch = HeadWatch(free_address(), "/runs/tiny", lambda event: None)
    assert "does not answer: connection refused. When there is a cluster again" in watch.why_lost()


def test_the_command_refuses_a_dead_address_at_once(tmp_path):
    address = free_address()
    command = [sys.executable, "-m", "orchestrator.run", "configs/tiny.yaml", f"storage={tmp_path}"]
    began_s = time.monotonic()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "RAY_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 2
    assert f"no Ray cluster answers at {address} (from RAY_ADDRESS)" in done.stderr
    assert "Traceback" not in done.stderr
    assert time.monotonic() - began_s < 100, "half of what Ray takes"
    assert not (tmp_path / "tiny" / "launch.json").exists()
