"""The silence of a process that reports nothing: what breaks it, and what does not."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from cluster.agent import hang_monitor, log_growth
from cluster.agent.hang_monitor import HangMonitor
from cluster.agent.limits import WatchdogConfig

PROCESS = SimpleNamespace(position=lambda: {"step": None, "batch_index": None})
JOINED = {"t": 0.0, "ev": "joined"}


@pytest.fixture
def now_s(monkeypatch):
    now_s = [1000.0]
    clock = SimpleNamespace(monotonic=lambda: now_s[0], time=lambda: 5e9 + now_s[0])
    monkeypatch.setattr(hang_monitor, "time", clock)
    return now_s


def monitor(**limits):
    made = HangMonitor(WatchdogConfig(**limits), threading.Condition(), lambda event: None)
    made.observe(JOINED)
    return made


def test_a_process_is_silent_after_its_limit(now_s):
    watched = monitor(silent_s=60.0)
    now_s[0] += 59.0
    assert watched.silence(PROCESS) is None
    now_s[0] += 2.0
    silence = watched.silence(PROCESS)
    assert (silence["ev"], silence["phase"], silence["limit_s"], silence["waited_s"]) == ("overdue", "silence", 60.0, 61.0)


@pytest.mark.parametrize("sign", [lambda watched: watched.hear(), lambda watched: watched.observe({"t": 0.0, "ev": "metrics"})])
def test_a_printed_line_or_an_event_breaks_the_silence(now_s, sign):
    watched = monitor(silent_s=60.0)
    now_s[0] += 61.0
    sign(watched)
    assert watched.silence(PROCESS) is None
    now_s[0] += 60.0
    assert watched.silence(PROCESS) is not None


def test_who_has_other_limits_or_none_or_has_ended_is_not_silent(now_s):
    reporting, free, ended = monitor(silent_s=60.0), monitor(silent_s=None), monitor(silent_s=60.0)
    reporting.observe({"t": 0.0, "ev": "phase", "phase": "evaluate"})
    ended.end()
    now_s[0] += 1e6
    assert [watched.silence(PROCESS) for watched in (reporting, free, ended)] == [None, None, None]


def test_only_a_log_that_grows_is_a_sign(tmp_path):
    first, second = tmp_path / "first.log", tmp_path / "second.log"
    first.write_text("a line\n")
    second.write_text("another line\n")
    heard, looks = [], iter([str(first), str(first), str(first), str(second), str(second), None])

    class Closed:
        looked = 0

        def wait(self, timeout_s):
            self.looked += 1
            if self.looked == 3:
                first.write_text("a line\nand one more\n")
            return self.looked > 6

    closed = Closed()
    log_growth.follow(lambda: next(looks), lambda: heard.append(closed.looked), closed)
    assert heard == [3]
