from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from cluster.agent.child_process import child_env, import_path, spawn
from tests.programs.processes import PATIENCE_S, is_gone, wait_until

ENV = child_env(os.environ, {"PYTHONPATH": os.pathsep.join(import_path(sys.path))})


def test_a_process_that_somebody_else_has_just_killed_did_not_die_of_our_kill(tmp_path):
    """Its end is the failure that all the others follow from: it must not be taken for our own doing."""
    for number in range(5):
        child = spawn("tests.programs.heavy_worker", env=ENV, first_line={}, log_path=str(tmp_path / f"{number}.log"))
        warm, exits = threading.Event(), []
        child.watch(lambda event, warm=warm: warm.set(), exits.append)
        assert warm.wait(PATIENCE_S)
        os.kill(child.pid, signal.SIGKILL)
        child.kill()
        assert child.wait_gone(30)
        (how,) = exits
        assert how.signal == signal.SIGKILL
        assert not how.by_parent


@pytest.fixture
def family(tmp_path):
    """Starts a parent and its child; returns both processes, the child's guard, and what the child told last. All end after the
    test, whatever it finds."""
    started = []

    def family(until, preparation=None, orders=None):
        arguments = [json.dumps(preparation or {}), json.dumps(orders or {}), str(tmp_path / "child.log")]
        popen = subprocess.Popen(
            [sys.executable, "-m", "tests.programs.parent", *arguments], env=ENV, stdout=subprocess.PIPE, text=True
        )
        assert popen.stdout is not None
        told = next(event for event in map(json.loads, popen.stdout) if event["ev"] == until)
        child = psutil.Process(told["pid"])
        (guard,) = [each for each in child.children() if each.pid not in told.get("workers", ())]
        started.append((popen, [child.pid, guard.pid, *told.get("workers", ())]))
        return popen, child, guard, told

    yield family
    for popen, pids in started:
        popen.kill()
        popen.wait()
        for pid in pids:
            if not is_gone(pid):
                os.kill(pid, signal.SIGKILL)


def test_the_kernel_ends_a_child_with_its_parent_though_nothing_else_can(family):
    """Its guard is frozen, and it does not read its input."""
    parent, child, guard, _ = family("phase", {"hang": True})
    guard.suspend()
    assert wait_until(lambda: guard.status() == psutil.STATUS_STOPPED)
    parent.kill()
    assert wait_until(lambda: is_gone(child.pid))


def test_a_guard_that_was_asked_to_leave_stays_and_ends_the_whole_group_with_the_parent(family):
    """A terminal, or a batch system, sends SIGTERM, SIGINT and SIGHUP to all processes there are."""
    parent, child, guard, told = family("joined", orders={"workers": 1})
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        guard.send_signal(number)
    parent.kill()
    assert wait_until(lambda: is_gone(child.pid) and all(map(is_gone, told["workers"])))
