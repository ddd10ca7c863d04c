"""Which process is which: by what no clock changes."""

from __future__ import annotations

import os
import time

import psutil
import pytest

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


@pytest.mark.parametrize(("state", "tick"), [("S", 4711), ("R", 4711), ("Z", None), ("X", None)])
@pytest.mark.parametrize("name", ["python", "a b", "a) Z (b"])
def test_a_zombie_is_dead_and_a_name_is_no_state(name, state, tick):
    stat = f"12 ({name}) {state} {' '.join(map(str, range(100, 118)))} 4711 5 6\n"
    assert processes.tick_in(stat.encode()) == tick
