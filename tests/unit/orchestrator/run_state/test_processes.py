"""Which process is which: by what no clock changes."""

from __future__ import annotations

import os
import time

import psutil

from orchestrator.run_state import processes


def test_a_process_lives_as_long_as_it_is_the_same_one():
    mine = processes.started(os.getpid())
    assert mine is not None
    assert processes.lives(os.getpid(), mine)
    assert processes.lives(os.getpid(), None)
    assert not processes.lives(os.getpid(), mine + 1)
    assert not processes.lives(2**22 - 1, None)


def test_the_clock_does_not_tell_when_a_process_was_started(monkeypatch):
    """psutil computes it from the time of the boot, which moves when the clock is set."""
    before = processes.started(os.getpid())
    monkeypatch.setattr(psutil, "boot_time", lambda: 5.0)
    monkeypatch.setattr(time, "time", lambda: 5.0)
    assert processes.started(os.getpid()) == before


def test_a_zombie_is_dead(tmp_path):
    child = os.fork()
    if child == 0:
        os._exit(0)
    try:
        while processes.started(child) is not None:
            time.sleep(0.01)
    finally:
        os.waitpid(child, 0)
