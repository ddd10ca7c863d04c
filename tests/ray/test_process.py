from __future__ import annotations

import os
import signal
import sys
import threading

from cluster.process import child_env, import_path, spawn


def test_a_process_that_somebody_else_has_just_killed_did_not_die_of_our_kill(tmp_path):
    """Its end is the failure that all the others follow from: it must not be taken for our own doing."""
    env = child_env(os.environ, {"PYTHONPATH": os.pathsep.join(import_path(sys.path))})
    for number in range(5):
        child = spawn("tests.programs.heavy_worker", env=env, first_line={}, log_path=str(tmp_path / f"{number}.log"))
        warm, exits = threading.Event(), []
        child.watch(lambda event, warm=warm: warm.set(), exits.append)
        assert warm.wait(30)
        os.kill(child.pid, signal.SIGKILL)
        child.kill()
        assert child.wait_gone(30)
        (how,) = exits
        assert how.signal == signal.SIGKILL
        assert not how.by_parent
